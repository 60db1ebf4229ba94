"""The processes that run one program together: what they exchange besides it, and what they must agree on.

With a cluster (`python -m shardc run`) it gathers their texts, without waiting where that is possible. A process that
makes another call than the others raises before it launches it, if it knows; else the thread of the signs of life finds
it, which looks at gatherings that are not finished. Without a cluster, if the user has called
`jax.distributed.initialize`, only what has to be waited for is gathered, by a collective of JAX.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import jax
import jaxlib
import numpy as np
from jax.experimental import multihost_utils

from shardc import compat
from shardc.arrays.placed import is_placed
from shardc.errors import ClusterError, DisagreementError
from shardc.machine.devices import is_remote
from shardc.machine.launch_order import all_ordered_devices, in_launch_order
from shardc.passes.trace.trace import is_number, settings
from shardc.runtime import cluster as clusters
from shardc.runtime.calls import call_text, calls_of, refuse_other_calls, refuse_unlike
from shardc.runtime.cluster import Cluster
from shardc.runtime.gathering import Gathering, Repeats
from shardc.sbp.signature import is_extended
from shardc.versions import VERSION

_AHEAD: Final = 16
"""The most calls without facts that a process is ahead of the others."""


class ProcessGroup:
    """The processes of a mesh, this one among them; `group_of_mesh` gives them.

    Args:
      members: their numbers in JAX, rising; with a cluster those in the run.
      cluster: the run, if there is one.

    Attributes:
      is_over: whether processes of the run were started again since: these gather nothing any more.
    """

    def __init__(self, members: Sequence[int], cluster: Cluster | None) -> None:
        self.members = tuple(members)
        self._cluster, self._epoch = cluster, 0 if cluster is None else cluster.epoch
        self._open: deque[_Comparison] = deque()
        self._last: tuple[str, str] | None = None
        """Name and plan of the executable that was launched last; None if values were compared with it."""
        self._repeats: Repeats = Repeats("", -1, partial(self._again, "", "", 0))
        self._name = calls_of(members)
        """The name by which the cluster counts these calls: a process whose script has ended makes no further ones."""

    @property
    def is_over(self) -> bool:
        return self._cluster is not None and self._cluster.epoch != self._epoch

    def gather(self, what: str, facts: Mapping[str, str]) -> list[dict[str, str]]:
        """The facts of all members, in order. Waits for them.

        Args:
          what: the call that they all make.
          facts: of this process, by name.

        Raises:
          DisagreementError: in all of them, if they make different calls.
          PeerLostError, ClusterError: as `Cluster.gather`.
        """
        self.settle()
        text = call_text(what, facts)
        if self._cluster is not None:
            texts = self._cluster.finish_gather(self._begin(self._cluster, what, text))
        elif len(self.members) == jax.process_count():
            texts = gather_by_jax(text)
        else:
            texts = [text] * len(self.members)
        said = dict(zip(self.members, texts, strict=True))
        refuse_other_calls(what, said)
        return [json.loads(text)["facts"] for text in texts]

    def agree(self, what: str, facts: Mapping[str, str], where_known: bool = False) -> None:
        """Make sure that all members make the same call with the same facts. Waits for them.

        Args:
          where_known: whether a fact may be missing in some of them.

        Raises:
          DisagreementError: in all of them, with all facts that differ.
        """
        refuse_unlike(what, self.members, self.gather(what, facts), where_known)

    def compare_launch(self, what: str, number: int, plan: str, facts: Mapping[str, str]) -> None:
        """Do `compare` for the call of an executable. If it repeats the one before it, without facts, nothing is sent.

        Args:
          what, number: the executable's name, and how often it was called.
          plan: the digest of its plan.
          facts: of this process, by name.
        """
        like = None if facts else (what, plan)
        if self._cluster is None:
            return
        if like and like == self._last and self._cluster.repeat(self._repeats):
            self._cluster.recorder.note(f"at {what}, call {number}")
            return
        self._last = None  # in case that it is not made
        call = self.compare(f"{what}, call {number}", facts, plan)
        if call is not None:
            self._last, at = like, call.key[1]
            self._repeats = Repeats(self._name, at, partial(self._again, what, plan, at - number))

    def _again(self, what: str, plan: str, ahead: int, number: int) -> Gathering:
        """The gathering of a repeated call, whose number among all calls is so much ahead of that of the executable."""
        what = f"{what}, call {number - ahead}"
        assert self._cluster is not None
        refuse = partial(self._refuse_unlike, what)
        text = call_text(what, {}, plan)
        return Gathering((self._name, number), self.members, self._cluster.me, text, f"at {what}", refuse)

    def compare(self, what: str, facts: Mapping[str, str], plan: str = "") -> Gathering | None:
        """Do `agree` for a call that is launched next, without waiting: if facts differ, a later call of a method
        raises, the next one of `compare` at the latest.

        Args:
          what: the call.
          facts: of this process, by name.
          plan: the digest of the plan that it launches.

        Returns:
          What was begun; None without a cluster.

        Raises:
          DisagreementError: a process that came first makes another call; or the facts of an earlier one differed.
        """
        while self._open and (self._open[0].has_facts or self._open[0].call.is_complete or len(self._open) == _AHEAD):
            self._settle_first()
        if self._cluster is None:
            return None
        call = self._begin(self._cluster, what, call_text(what, facts, plan), compared=True)
        self._open.append(_Comparison(what, call, bool(facts)))
        if call.differs:
            try:
                refuse_other_calls(what, call.texts)
            except DisagreementError:
                self._open.rotate(1)
                self._settle_first()  # says it again, of all processes if it can
                raise
        return call

    def settle(self) -> None:
        """Finish all comparisons: wait for the facts of the others.

        Raises:
          DisagreementError: they differed.
        """
        while self._open:
            self._settle_first()

    def look(self) -> None:
        """Finish comparisons, as far as that needs no wait.

        Raises:
          DisagreementError: they differed; or a process makes another call, or its script has ended without the call.
        """
        while self._open and self._open[0].call.is_complete:
            self._settle_first()
        error = None if self._cluster is None else self._cluster.error_within(0.0)
        if error is not None:
            self._drop_open()
            raise error

    def _settle_first(self) -> None:
        what, call, _ = self._open.popleft()
        assert self._cluster is not None
        try:
            texts = self._cluster.finish_gather(call)
            if call.differs:
                self._refuse_unlike(what, dict(zip(self.members, texts, strict=True)))
        except ClusterError:
            self._drop_open()
            raise

    def _drop_open(self) -> None:
        while self._open and self._cluster is not None:
            self._cluster.drop_gather(self._open.popleft().call)

    def _begin(self, cluster: Cluster, what: str, text: str, compared: bool = False) -> Gathering:
        refuse = self._refuse_unlike if compared else refuse_other_calls
        return cluster.begin_gather(self._name, text, self.members, f"at {what}", partial(refuse, what))

    def _refuse_unlike(self, what: str, texts: Mapping[int, str]) -> None:
        """Do `refuse_other_calls`; of the texts of all members compare the facts too."""
        refuse_other_calls(what, texts)
        if len(texts) == len(self.members):
            refuse_unlike(what, self.members, [json.loads(text)["facts"] for text in texts.values()])


class _Comparison(NamedTuple):
    """A comparison that is not finished.

    Attributes:
      what, call: the call, and the gathering of its facts.
      has_facts: whether it has some: the next call waits for it.
    """

    what: str
    call: Gathering
    has_facts: bool


def gather_by_jax(text: str) -> list[str]:
    """The text of each process of a JAX runtime that no cluster knows, by collectives."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered_by_jax(np.asarray([data.size], np.int32)).reshape(-1)
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: data.size] = data
    rows = _gathered_by_jax(padded).reshape(len(sizes), -1)
    return [row[:n].tobytes().decode() for row, n in zip(rows, sizes, strict=True)]


def _gathered_by_jax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return in_launch_order(all_ordered_devices(), lambda: np.asarray(multihost_utils.process_allgather(x)))


@lru_cache(maxsize=64)
def _made(members: tuple[int, ...], cluster: Cluster | None, epoch: int) -> ProcessGroup:
    del epoch
    made = ProcessGroup(members, cluster)
    _every.add(made)
    return made


_every: WeakSet[ProcessGroup] = WeakSet()


@lru_cache(maxsize=1024)
def _members(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    return tuple(sorted({d.process_index for d in mesh.devices.flat}))


def group_of_mesh(mesh: jax.sharding.Mesh) -> ProcessGroup | None:
    """The processes of a mesh of several; None for a mesh of one process, and in a process that is none of them."""
    if is_remote(mesh.devices.flat):
        return None
    members = _members(mesh)
    if len(members) == 1 or jax.process_index() not in members:
        return None
    cluster = clusters.current()
    if cluster is None or cluster.config.per_island != jax.process_count():
        return _made(members, None, 0)
    first = cluster.config.island(cluster.me)[0]
    return _made(tuple(first + p for p in members), cluster, cluster.epoch)


def group_of_run() -> ProcessGroup | None:
    """All processes of the run; None for a process that runs alone."""
    cluster = clusters.current()
    if cluster is None or cluster.processes == 1:
        return None
    return _made(tuple(range(cluster.processes)), cluster, cluster.epoch)


def look_at_run() -> None:
    """Raise if another process has made another call than this one, which waits for it."""
    group = group_of_run()
    if group is not None:
        group.look()


def settle_all() -> None:
    """Finish the comparison of the last call of each group, as `ProcessGroup.settle`."""
    for group in _every:
        if not group.is_over:
            group.settle()


# --- facts -----------------------------------------------------------------------------------------------------------


def type_text(x: Any) -> str:
    """The type of an argument as text: `float32[8,16]`, and whether it is weakly typed."""
    aval = compat.aval_of(x) if not is_placed(x) else x.aval
    weak = ", weakly typed" if aval.weak_type else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}"


def given_whole(x: Any) -> bool:
    """Whether each process gives the whole value of an array: it lies on the host, or on devices of this process."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def value_text(x: Any) -> str:
    """A checksum of a whole value."""
    if is_number(x):
        return repr(x)
    if isinstance(x, jax.Array) and is_extended(x.dtype):
        x = jax.random.key_data(x)
    host = np.ascontiguousarray(np.asarray(x)).reshape(-1)
    return f"{zlib.crc32(host.view(np.uint8)):08x}"


def value_facts(paths: Iterable[str], arrays: Iterable[Any]) -> dict[str, str]:
    """A checksum of each array that is given whole, by path."""
    return {f"the value of {p}": value_text(x) for p, x in zip(paths, arrays, strict=False) if given_whole(x)}


def environment() -> dict[str, str]:
    """The releases and settings that all processes of a program have to share."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "shardc": VERSION,
        "JAX's settings (x64, matmul precision, random numbers)": ", ".join(map(str, settings())),
    }
