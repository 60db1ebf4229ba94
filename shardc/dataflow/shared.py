"""`shardc.shared`: a state that is changed as changes come, at one place: a parameter server.

Every call of `change` is an actor of its own, so that no worker waits for another one's change. A change takes the
state, under a lock; a read waits until nobody is further behind than the bound on staleness allows, then takes a copy.
What each waits for are channels without values, so the deadlock check and the simulator know them; only the order of
changes that may overtake each other is left to time.

With stale=0 a round has one read for all, and the changes of the next round wait for it: all see the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import monotonic
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardc import compat
from shardc.arrays.place import Place
from shardc.arrays.placed import is_placed
from shardc.dataflow.moves import copied, entered
from shardc.dataflow.network import FlowNetwork
from shardc.dataflow.round import FlowNode, Round, aval_of, outside, traced_round
from shardc.dataflow.value import RoundValue
from shardc.dataflow.work import Callee, FunctionWork
from shardc.errors import ArgumentError, ClusterError, FlowError, number_text
from shardc.machine.devices import me, processes_of
from shardc.machine.mesh import AnyMesh
from shardc.passes.trace.trace import where_of

_POLL: Final = 0.05
"""Seconds between two looks of a change that waits for others: whether they can still come."""

_ALONE: Final = 20
"""Looks in a row that found all other actors waiting, after which nobody will come."""


class Shared:
    """A state that flows change as changes come; made by `shardc.shared`.

    Attributes:
      mesh: where it lives.
      changes: the number of changes that were applied.
    """

    def __init__(self, state: Any, mesh: AnyMesh, wrap: Callable[..., Callee]) -> None:
        """`wrap` makes a `shardc.function` on the mesh of a plain function, which may overwrite its first argument if
        `changes`."""
        self.mesh, self._wrap, self._wrap_reader = mesh, partial(wrap, changes=True), partial(wrap, changes=False)
        leaves, self.tree = jax.tree.flatten(state)
        self.avals = [_canonical(aval_of(x)) for x in leaves]
        self.leaves = [_own(x, a) for x, a in zip(leaves, self.avals, strict=True)]
        self.changes = 0
        self.places: Sequence[Place] | None = None
        """Where the last change left the leaves."""
        self.lock = threading.RLock()
        self.in_use = threading.Lock()
        self._wrapped: dict[Any, Callee] = {}
        self._traced: Round | None = None

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.shape.items())
        return f"Shared({number_text(len(self.leaves), 'array')} on {mesh}, {number_text(self.changes, 'change')})"

    def take(self, where: str) -> None:
        """Keep other flows from changing it, until it is given back by `in_use.release()`.

        Raises:
          FlowError: another flow changes it now, or it is known by its shapes alone.
        """
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in self.leaves):
            raise FlowError(f"{where}: its shared state has shapes alone, which is enough for plans; give it arrays.")
        if not self.in_use.acquire(blocking=False):
            raise FlowError(f"{where}: another flow that is running changes its shared state.")

    @property
    def value(self) -> Any:
        """The state as it is now: a copy, which later changes do not touch.

        Raises:
          ClusterError: it lives in another process.
        """
        owners = processes_of(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else []
        if owners and me() not in owners:
            raise ClusterError(
                f"this shared state lives in process {', '.join(map(str, owners))}: read .value there, or let a round "
                "give it, as what .read() is in the round."
            )
        with self.lock:
            return self.tree.unflatten([copied(x) for x in self.leaves])

    @compat.api_boundary
    def change(
        self, fn: Callable[..., Any], *args: Any, stale: int | None = 0, quorum: tuple[int, int] | None = None,
        grace: float = 0.0,
    ) -> Any:  # fmt: skip
        """A change, in a flow's round: `state = fn(state, *args)`, once for each round of this call.

        Args:
          fn: gives the new state: a `shardc.function` on this mesh, or a plain function, which is made one.
          *args: values of the round, and arrays.
          stale: the rounds by which other changes of this state may be behind when the result is read. 0: the result
            has the changes of all others of the same round, and is the same for all (bulk synchronous); s: nobody is
            more than s rounds ahead of the slowest (stale synchronous); None: nobody waits (asynchronous).
          quorum: (fewest, most): changes are collected, and applied together as one when the most have come, or `grace`
            seconds after the fewest have. Who comes later is in the next one. `fn` gets the sums of their arguments,
            divided by the number of calls in a round: their mean if all have come; each counts the same, whenever it
            comes. Nobody waits for `stale` then. Calls whose rounds are over are not waited for.
          grace: seconds.

        Returns:
          The state as it is when the wait is over, as values of the round. What is not used is not sent.

        Raises:
          ArgumentError: it is called outside a round; stale below 0; a quorum of another form.
        """
        round = self._round("change")
        self._check(round, stale, quorum, grace)
        function = self._function(fn, self._wrap)
        leaves, tree, known = _known(args)
        round.refuse_nothing(getattr(fn, "__name__", "change"), leaves)
        with outside():
            work = _Change(self, function, known, tree, stale if quorum is None else None, quorum, grace)
        name = getattr(fn, "__name__", "change")
        changed = self._add(round, name, fn, work, leaves)
        return self._seen(round, f"{name} seen", fn, _Read(self, None if work.stale == 0 else changed, 0, work.stale))

    @compat.api_boundary
    def read(self, fn: Callable[..., Any] | None = None, *args: Any, stale: int | None = 0) -> Any:
        """The state as a round begins, in a flow's round, or what a function makes of it.

        Args:
          fn: `fn(state, *args)` is computed where the state is, and its result is what is sent: some rows of a table. A
            `shardc.function` on this mesh, or a plain function, which is made one. None: the state itself.
          *args: values of the round, and arrays.
          stale: the rounds by which changes may be behind. 0: it has all changes of the rounds before, and no others if
            those have stale=0 too; s: all but those of the last s rounds, which may be in it or not; None: whatever is
            there.

        Returns:
          The state, or the result of `fn`, as values of the round. What is not used is not sent.
        """
        round = self._round("read")
        self._check(round, stale, None, 0.0)
        if fn is None:
            return self._seen(round, "shared state", self, _Read(self, None, 1, stale))
        function = self._function(fn, self._wrap_reader)
        leaves, tree, known = _known(args)
        round.refuse_nothing(getattr(fn, "__name__", "read"), leaves)
        with outside():
            work = _Pull(self, function, known, tree, stale)
        node = self._add(round, getattr(fn, "__name__", "read"), fn, work, leaves)
        return work.out_tree.unflatten(round.values_of(node))

    def _seen(self, round: Round, name: str, called: object, read: _Read) -> Any:
        """The values of a read; of one that is there already, if all see the same."""
        same = (n for n, r in _reads(round, self) if type(r) is _Read and r.is_exact and r.behind == read.behind)
        node = next(same, None) if read.is_exact else None
        return self.tree.unflatten(round.values_of(node or self._add(round, name, called, read, [])))

    def _add(
        self, round: Round, name: str, called: object, work: _Change | _Read | _Pull, leaves: Sequence[Any]
    ) -> FlowNode:
        """Add a node that is an actor of its own."""
        work.actor = "shared", id(self), len(round.nodes)
        return round.add(name, work, leaves, work.results, 1, compat.users_line(), called)

    def _round(self, what: str) -> Round:
        round = traced_round()
        if round is None:
            raise ArgumentError(f"shardc.shared: {what} is for a flow's round; outside of one, read `.value`.")
        if self._traced is not round:
            self._traced = round
            round.on_end.append(self._join)
        return round

    def _check(self, round: Round, stale: int | None, quorum: Any, grace: float) -> None:
        if stale is not None and (type(stale) is not int or stale < 0):
            raise ArgumentError(
                f"{round.where}: stale={stale!r}; it takes a whole number of rounds of 0 or more, or None for no bound."
            )
        if quorum is not None and not (
            isinstance(quorum, tuple) and len(quorum) == 2 and all(type(n) is int for n in quorum)
            and 1 <= quorum[0] <= quorum[1]
        ):  # fmt: skip
            raise ArgumentError(f"{round.where}: quorum={quorum!r}; it takes (fewest, most), such as (3, 4).")
        if not grace >= 0:
            raise ArgumentError(f"{round.where}: grace={grace!r}; it takes a number of seconds of 0 or more.")

    def _join(self, round: Round) -> None:
        """Let reads and changes wait for each other, when all of them are known."""
        self._traced = None
        changes = [n for n in round.nodes if isinstance(n.work, _Change) and n.work.shared is self]
        works = [cast("_Change", n.work) for n in changes]
        self._make_pot(round, works)
        for node, read in _reads(round, self):
            if isinstance(read, _Read):
                read.places = next((w.places for w in works), None)
            read.waits = read.waits_of(changes)
            for c, work in zip(changes, works, strict=True):
                if c is read.own or (read.is_exact and work.stale == 0):
                    work.waits = [*work.waits, (node.number, 1 - read.behind)]

    def _make_pot(self, round: Round, works: Sequence[_Change]) -> None:
        quorums = {w.quorum for w in works}
        if len(quorums) > 1:
            raise FlowError(
                f"{round.where}: the changes of a shared state have several quorums; give all the same one."
            )
        quorum = next(iter(quorums), None)
        if quorum is None:
            return
        if quorum[1] > len(works):
            raise FlowError(f"{round.where}: quorum={quorum}, but the round has {len(works)} changes of this state.")
        pot = Pot(len(works), quorum)
        for k, work in enumerate(works):
            work.pot, work.member = pot, k

    def _function(self, fn: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callee]) -> Callee:
        if not callable(fn):
            raise ArgumentError(f"shardc.shared: a change, or a read, wants a function, got {fn!r}.")
        if hasattr(fn, "call_every"):
            function: Any = fn
            if function.mesh != self.mesh:
                raise ArgumentError(f"{where_of(fn)} is on another mesh than the shared state that it takes.")
            return function
        if (fn, wrap) not in self._wrapped:
            self._wrapped[fn, wrap] = wrap(fn)
        return self._wrapped[fn, wrap]


class Pot:
    """The changes that wait to be applied together.

    Args:
      members: the number of calls that contribute.
      quorum: the fewest and the most that are applied together.
    """

    def __init__(self, members: int, quorum: tuple[int, int]) -> None:
        self.members, self._quorum = members, quorum
        self.condition = threading.Condition()
        self.given: dict[int, list[Any]] = {}
        self.enough_since: float | None = None
        self.turn = 0
        self.waiting = 0
        """The actors that wait for others."""
        self.done = [0] * members
        """The rounds of each member that are over."""

    def begin(self, rounds: Callable[[], int], is_stopped: Callable[[], bool], busy: Callable[[], int]) -> None:
        """Ready it for a run.

        Args:
          rounds: the rounds of the run, as far as they are known.
          is_stopped: whether the run has failed.
          busy: how many actors run, or could, those of `waiting` among them.
        """
        self._rounds, self._is_stopped, self._busy = rounds, is_stopped, busy
        self.given, self.enough_since, self.waiting, self.done = {}, None, 0, [0] * self.members

    @property
    def has(self) -> tuple[bool, bool]:
        """Whether the fewest are there, and the most. Members that have no more rounds do not count."""
        can = sum(k in self.given or n < self._rounds() for k, n in enumerate(self.done))
        fewest, most = self._quorum
        return len(self.given) >= min(fewest, can), len(self.given) >= min(most, can)

    def wait(self, grace: float) -> bool:
        """Wait until the changes are to be applied by the caller: True, or another one has done it."""
        turn, alone = self.turn, 0
        while self.turn == turn:
            if self._is_stopped():
                raise FlowError("the run was stopped while a change waited for others.")
            enough, full = self.has
            if not enough:
                self.enough_since = None
            elif self.enough_since is None:
                self.enough_since = monotonic()
            left = _POLL if self.enough_since is None else self.enough_since + grace - monotonic()
            if full or left <= 0:
                return True
            in_time = self.condition.wait(min(_POLL, left))
            alone = 0 if enough or in_time or self._busy() else alone + 1
            if alone == _ALONE:
                raise FlowError(
                    f"{len(self.given)} changes wait for a quorum of {self._quorum[0]}, and all others wait for them: "
                    "let no change need what another one of the same quorum gives, or take fewer."
                )
        return False


class _OnState(FunctionWork):
    """A function of the state and more.

    Attributes:
      locks: under which programs on its devices begin.
    """

    def __init__(self, shared: Shared, function: Callee, leaves: Sequence[Any], tree: Any) -> None:
        self.shared = shared
        self.locks: Sequence[Any] = [shared.lock]
        state = shared.tree.unflatten(shared.avals)
        whole, structure = jax.tree.flatten(((state, *tree.unflatten(leaves)), {}))
        super().__init__(function, whole, structure)
        count = len(shared.avals)
        self._enters, self.takes = self.takes[:count], self.takes[count:]
        self.donated = frozenset(i - count for i in self.donated if i >= count)
        self.peak += sum(p.bytes for p in self._enters)

    def settle(self, at: Mapping[int, Any]) -> bool:
        """Nothing is planned again: arguments on its mesh are moved to where they are taken, which the flow's plan
        lists."""
        del at
        return False

    def _call(self, given: list[Any]) -> list[Any]:
        """The results, under the locks."""
        shared = self.shared
        state = shared.leaves
        if shared.places is None or [p.at for p in self._enters] != [p.at for p in shared.places]:
            state = [entered(p, x) for p, x in zip(self._enters, state, strict=True)]
            if shared.places is None:
                shared.leaves, shared.places = state, self._enters
        return list(super().run([*state, *given], 0))


class _Change(_OnState):
    """The work of a change. Its result, which nobody takes, tells when it has ended.

    Attributes:
      stale: the rounds by which others may be behind; None: any.
      pot, member: where it waits for others, and its number there.
    """

    changes = True

    def __init__(  # noqa: PLR0913  # what a change is
        self, shared: Shared, function: Callee, leaves: Sequence[Any], tree: Any, stale: int | None,
        quorum: tuple[int, int] | None, grace: float,
    ) -> None:  # fmt: skip
        self.stale, self.quorum, self._grace = stale, quorum, grace
        self.pot: Pot | None = None
        self.member = 0
        super().__init__(shared, function, leaves, tree)
        if quorum is not None:  # one program applies those of so many calls
            self.seconds /= quorum[1]
        name = getattr(function, "__name__", "change")
        if self.out_tree != shared.tree or [(a.shape, a.dtype) for a in self.results] != [
            (a.shape, a.dtype) for a in shared.avals
        ]:
            raise FlowError(
                f"{name} does not return a state like the one that it changes:\n"
                f"  takes   {_described(shared.tree, shared.avals)}\n"
                f"  returns {_described(self.out_tree, self.results)}"
            )
        self._averaged = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
        whole_numbers = [x for x in leaves if not jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)]
        if quorum is not None and whole_numbers:
            raise FlowError(f"{name} takes {whole_numbers[0]!r}, and with quorum= it gets means: give it floats.")
        self.places = list(self.gives)
        token = jax.ShapeDtypeStruct((1,), shared.avals[0].dtype)
        self.results, self.gives = [token], [Place(token, shared.mesh)]

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        if self.stale != 0:
            _wait_for(given)
        return self._apply(given) if self.pot is None else self._contribute(self.pot, given)

    def _apply(self, given: list[Any]) -> list[Any]:
        shared = self.shared
        with _all(self.locks):
            shared.leaves, shared.places = self._call(given), self.places
            shared.changes += 1
            return [_one_of(shared.leaves[0])]

    def _contribute(self, pot: Pot, given: list[Any]) -> list[Any]:
        """Wait for others; one of them applies the changes of all."""
        made: list[Any] = [None]
        with pot.condition:
            pot.given[self.member] = given
            pot.condition.notify_all()
            pot.waiting += 1
            try:
                if pot.wait(self._grace):
                    made = self._apply(self._together(pot))
                    pot.given, pot.enough_since, pot.turn = {}, None, pot.turn + 1
            finally:
                pot.waiting -= 1
                pot.done[self.member] += 1
                pot.condition.notify_all()
        return made

    def _together(self, pot: Pot) -> list[Any]:
        """The arguments of all: as means over the members, but for constants."""
        columns = zip(self._averaged, *(pot.given[k] for k in sorted(pot.given)), strict=True)
        return [_mean(pot.members, *column) if averaged else column[0] for averaged, *column in columns]


@partial(jax.jit, static_argnums=0)
def _mean(members: int, *xs: Any) -> Any:
    return sum(xs[1:], xs[0]) / members


def _described(tree: Any, avals: Sequence[Any]) -> str:
    return str(tree.unflatten([f"{a.dtype.name}{list(a.shape)}" for a in avals]))


@contextmanager
def _all(locks: Sequence[Any]) -> Generator[None]:
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


def _one_of(x: Any) -> Any:
    """A number of an array, which is there when the array is."""
    return copied(x) if is_placed(x) else _first(x.addressable_data(0))


@jax.jit
def _first(x: Any) -> Any:
    return x.ravel()[:1]


class _StateReader:
    """The common part of reads.

    Attributes:
      own: the change that it follows; None: none of its own.
      behind: 0: it is a read as a round ends, 1: as one begins.
      stale: the rounds by which changes may be behind besides; None: any.
    """

    def __init__(self, own: FlowNode | None, behind: int, stale: int | None) -> None:
        self.own, self.behind, self.stale = own, behind, stale
        self.apart: int | None = stale

    @property
    def is_exact(self) -> bool:
        """Whether it has certain changes and no others."""
        return self.own is None and self.stale == 0

    def waits_of(self, changes: Sequence[FlowNode]) -> list[tuple[int, int]]:
        """The changes that it waits for, and the rounds by which they may be behind."""
        if self.stale is None:
            return [] if self.own is None else [(self.own.number, 0)]
        return [(c.number, 0 if c is self.own else self.behind + self.stale) for c in changes]


class _Read(_StateReader):
    """The work of a read of the state: a copy of what is used.

    Attributes:
      used: the leaves that somebody reads.
      locks: under which programs on its devices begin.
    """

    donated: frozenset[int] = frozenset()
    seconds: float | None = 0.0
    credits: int | None = None
    changes = False
    takes: Sequence[Place] = ()
    process: int | None = None
    where: str | None = None

    def __init__(self, shared: Shared, own: FlowNode | None, behind: int, stale: int | None) -> None:
        super().__init__(own, behind, stale)
        self.shared, self.results = shared, shared.avals
        self.places = cast("_Change", own.work).places if own is not None else None
        self.meshes: tuple[AnyMesh, ...] = (shared.mesh,)
        self.actor: object | None = None
        self.waits: Sequence[tuple[int, int]] = ()
        self.locks: Sequence[Any] = [shared.lock]
        self.used: frozenset[int] = frozenset(range(len(shared.avals)))

    @property
    def gives(self) -> Sequence[Place]:
        return self.places or [Place(a, self.shared.mesh) for a in self.shared.avals]

    @property
    def peak(self) -> int:
        return 2 * sum(p.bytes for p in self.gives)

    def begin(self) -> None:
        """Nothing to ready."""

    def end(self) -> None:
        """Nothing is held."""

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        with _all(self.locks):
            return [copied(x) if i in self.used else None for i, x in enumerate(self.shared.leaves)]


class _Pull(_StateReader, _OnState):
    """The work of a read that computes."""

    def __init__(self, shared: Shared, function: Callee, leaves: Sequence[Any], tree: Any, stale: int | None) -> None:
        _StateReader.__init__(self, None, 1, stale)
        _OnState.__init__(self, shared, function, leaves, tree)

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        if self.stale != 0:
            _wait_for(given)
        with _all(self.locks):
            return self._call(given)


def _wait_for(given: Sequence[Any]) -> None:
    """Wait until arguments are there: a program that is launched earlier makes those of all others wait with it."""
    jax.block_until_ready(given)


def _canonical(aval: Any) -> Any:
    """As JAX has it: 64 bits are 32 without `jax_enable_x64`."""
    return jax.ShapeDtypeStruct(aval.shape, jax.dtypes.canonicalize_dtype(aval.dtype))


def _own(x: Any, aval: Any) -> Any:
    """A copy of a leaf: changes may overwrite it."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return copied(x)
    return np.array(x, aval.dtype)


def _known(args: Sequence[Any]) -> tuple[list[Any], Any, list[Any]]:
    """The leaves of arguments, their structure, and what is known of them."""
    leaves, tree = jax.tree.flatten(args)
    return leaves, tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, RoundValue) else x for x in leaves]


def _reads(round: Round, shared: Shared) -> Iterator[tuple[FlowNode, _Read | _Pull]]:
    for node in round.nodes:
        if isinstance(node.work, _Read | _Pull) and node.work.shared is shared:
            yield node, node.work


def shared_works(nodes: Sequence[FlowNode]) -> list[tuple[FlowNode, _Change | _Read | _Pull]]:
    """The nodes that change or read shared states."""
    return [(n, n.work) for n in nodes if isinstance(n.work, _Change | _Read | _Pull)]


def pots_of(nodes: Sequence[FlowNode]) -> list[Pot]:
    """Where the changes of nodes wait to be applied together."""
    works = (w for _, w in shared_works(nodes))
    return list(dict.fromkeys(w.pot for w in works if isinstance(w, _Change) and w.pot is not None))


def read_only_what_is_used(built: FlowNetwork) -> None:
    """Let reads copy those leaves that somebody takes."""
    for node in built.round.nodes:
        if isinstance(node.work, _Read):
            taken = {m.output for e in built.edges if e.giver is node for m in e.moves}
            given = {o.index for o in (*built.outs, *built.state) if o is not None and o.node is node}
            node.work.used = frozenset(taken | given)
