"""The processes that run one program together: what they exchange besides it, and what they must agree on.

With a cluster (`python -m shardc run`) it gathers their texts, without waiting where that is possible. Without one, if
the user has called `jax.distributed.initialize`, only what has to be waited for is gathered, by a collective of JAX.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import jax
import jaxlib
import numpy as np
from jax.experimental import multihost_utils

from shardc import compat
from shardc.arrays.placed import is_placed
from shardc.machine.devices import is_far
from shardc.passes.trace.trace import is_number, settings
from shardc.runtime import cluster as clusters
from shardc.runtime.cluster import Cluster, Gathering, refuse_unlike
from shardc.versions import VERSION


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
        self._open: tuple[Gathering, str] | None = None
        self._name = f"calls of {','.join(map(str, members))}"
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
        text = _call_text(what, facts)
        if self._cluster is not None:
            texts = self._cluster.finish_gather(self._begin(self._cluster, what, text))
        elif len(self.members) == jax.process_count():
            texts = gather_by_jax(text)
        else:
            texts = [text] * len(self.members)
        return self._facts(what, texts)

    def agree(self, what: str, facts: Mapping[str, str], where_known: bool = False) -> None:
        """Make sure that all members make the same call with the same facts. Waits for them.

        Args:
          where_known: whether a fact may be missing in some of them.

        Raises:
          DisagreementError: in all of them, with all facts that differ.
        """
        said = self.gather(what, facts)
        if where_known:
            known = set[str].intersection(*map(set, said))
            said = [{fact: text for fact, text in each.items() if fact in known} for each in said]
        refuse_unlike(what, self.members, said)

    def compare(self, what: str, facts: Mapping[str, str]) -> None:
        """Do `agree` without waiting: if the facts differ, the next call of any method raises."""
        self.settle()
        if self._cluster is not None:
            self._open = self._begin(self._cluster, what, _call_text(what, facts)), what

    def settle(self) -> None:
        """Finish the last `compare`: wait for the facts of the others.

        Raises:
          DisagreementError: they differed.
        """
        if self._open is not None and self._cluster is not None:
            (call, what), self._open = self._open, None
            texts = self._cluster.finish_gather(call)
            if len(set(texts)) > 1:
                refuse_unlike(what, self.members, self._facts(what, texts))

    def look(self) -> None:
        """Do `settle`, if that needs no wait.

        Raises:
          ClusterError: the script of a member has ended, so that it will never make the last call.
        """
        if self._open is not None and self._cluster is not None:
            if self._cluster.is_gathered(self._open[0]):
                self.settle()
            else:
                self.refuse_ended(self._open[1])

    def refuse_ended(self, what: str) -> None:
        """Raise ClusterError if the scripts of members have ended that have made fewer calls than this process."""
        if self._cluster is not None:
            self._cluster.refuse_ended(self.members, self._name, f"at {what}")

    def _begin(self, cluster: Cluster, what: str, text: str) -> Gathering:
        return cluster.begin_gather(self._name, text, self.members, f"at {what}")

    def _facts(self, what: str, texts: Sequence[str]) -> list[dict[str, str]]:
        said: list[dict[str, Any]] = [json.loads(t) for t in texts]
        refuse_unlike(what, self.members, [{"the call": each["call"]} for each in said])
        return [each["facts"] for each in said]


def _call_text(what: str, facts: Mapping[str, str]) -> str:
    return json.dumps({"call": what, "facts": facts})


def gather_by_jax(text: str) -> list[str]:
    """The text of each process of a JAX runtime that no cluster knows, by collectives."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray([data.size], np.int32))).reshape(-1)
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:n].tobytes().decode() for row, n in zip(rows, sizes, strict=True)]


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
    if is_far(mesh.devices.flat):
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
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
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
