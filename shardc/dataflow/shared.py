"""`shardc.shared`: a state that is changed as changes come, at one place: a parameter server.

Every call of `change` is an actor of its own, so that no worker waits for another one's change. A change takes the
state, under a lock; a read waits until nobody is further behind than the bound on staleness allows, then takes a copy.
What each waits for are channels without values, so the deadlock check and the simulator know them; only the order of
changes that may overtake each other is left to time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

import jax

from shardc import compat
from shardc.dataflow.moves import to_place
from shardc.dataflow.network import FlowNetwork
from shardc.dataflow.round import Node, Round, aval_of, outside, traced_round
from shardc.dataflow.value import Value
from shardc.dataflow.work import Callee, FunctionWork, Place
from shardc.errors import ArgumentError, FlowError
from shardc.machine.mesh import AnyMesh
from shardc.passes.trace.trace import where_of

_POLL: Final = 0.05
"""Seconds between two looks of a change that waits for others whether the run has ended."""


class Shared:
    """A state that flows change as changes come; made by `shardc.shared`.

    Attributes:
      mesh: where it lives.
      changes: the number of changes that were applied.
    """

    def __init__(self, state: Any, mesh: AnyMesh, wrap: Callable[[Callable[..., Any]], Callee]) -> None:
        """`wrap` makes a `shardc.function` on the mesh of a plain function that may overwrite its first argument."""
        self.mesh, self._wrap = mesh, wrap
        self.leaves, self.tree = jax.tree.flatten(state)
        self.avals = [aval_of(x) for x in self.leaves]
        self.changes = 0
        self.changed_by: Callee | None = None
        """The last function, which left the state at its own placements."""
        self.lock = threading.RLock()
        self.in_use = threading.Lock()
        self._wrapped: dict[Callable[..., Any], Callee] = {}
        self._members: dict[Round, list[tuple[Node, Node]]] = {}

    @property
    def value(self) -> Any:
        """The state as it is now: a copy, which later changes do not touch."""
        with self.lock:
            return self.tree.unflatten([x.copy() if hasattr(x, "copy") else x for x in self.leaves])

    @compat.face
    def change(
        self, fn: Callable[..., Any], *args: Any, stale: int | None = 0, quorum: tuple[int, int] | None = None,
        grace: float = 0.0,
    ) -> Any:  # fmt: skip
        """A change, in a flow's round: `state = fn(state, *args)`, once for each round of this call.

        Args:
          fn: gives the new state: a `shardc.function` on this mesh, or a plain function, which is made one.
          *args: values of the round, and arrays.
          stale: the rounds by which other changes of this state may be behind when the result is read. 0: the result has
            the changes of all others of the same round (bulk synchronous); s: nobody is more than s rounds ahead of the
            slowest (stale synchronous); None: nobody waits (asynchronous).
          quorum: (fewest, most): changes are collected, and applied together as one, with the mean of their arguments,
            when the most have come, or `grace` seconds after the fewest have. Who comes later is in the next one.
            Nobody waits for `stale` then. Calls whose run is over do not count.
          grace: seconds.

        Returns:
          The state as it is when the wait is over, as values of the round. What is not used is not sent.

        Raises:
          ArgumentError: it is called outside a round; stale below 0; a quorum of another form.
        """
        round = self._round("change")
        self._check(round, stale, quorum, grace)
        function = self._function(fn)
        source = compat.users_line()
        leaves, tree = jax.tree.flatten(args)
        with outside():
            known = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Value) else x for x in leaves]
            work = _Change(self, function, known, tree, quorum, grace)
        members = self._members_of(round)
        name = getattr(fn, "__name__", "change")
        work.actor = "shared", id(self), len(members)
        changed = round.add(name, work, leaves, [], 1, source)
        read = _Read(self, work.places)
        read.actor = work.actor
        node = round.add(f"{name} seen", read, [], self.avals, 1, source)
        bound = read.apart = None if quorum is not None else stale
        members.append((changed, node))
        read.wanted = (changed.number, bound)
        return self.tree.unflatten(round.values_of(node))

    @compat.face
    def read(self, *, stale: int | None = 0) -> Any:
        """The state as a round begins, in a flow's round.

        Args:
          stale: the rounds by which changes may be behind. 0: it has all changes of the rounds before; s: all but those
            of the last s rounds, which may be in it or not; None: whatever is there.

        Returns:
          The state as values of the round. What is not used is not sent.
        """
        round = self._round("read")
        self._check(round, stale, None, 0.0)
        self._members_of(round)
        read = _Read(self, None)
        read.actor = "shared", id(self), f"read {len(round.nodes)}"
        read.wanted = (None, None if stale is None else stale + 1)
        read.apart = stale
        return self.tree.unflatten(
            round.values_of(round.add("shared state", read, [], self.avals, 1, compat.users_line()))
        )

    def _round(self, what: str) -> Round:
        round = traced_round()
        if round is None:
            raise ArgumentError(f"shardc.shared: {what} is for a flow's round; outside of one, read `.value`.")
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

    def _members_of(self, round: Round) -> list[tuple[Node, Node]]:
        if round not in self._members:
            self._members[round] = []
            round.on_end.append(lambda: self._join(round))
        return self._members[round]

    def _join(self, round: Round) -> None:
        """Let each read wait for the changes of others, when all of them are known."""
        members = self._members.pop(round)
        changes = [changed for changed, _ in members]
        pots = {w.quorum for c in changes if isinstance(w := c.work, _Change)}
        if len(pots) > 1:
            raise FlowError(
                f"{round.where}: the changes of a shared state have several quorums; give all the same one."
            )
        if pots and None not in pots:
            pot = Pot(len(changes))
            for k, c in enumerate(changes):
                assert isinstance(c.work, _Change)
                c.work.pot, c.work.member = pot, k
        placed = next((c.work.places for c in changes if isinstance(c.work, _Change)), None)
        for node in round.nodes:
            if isinstance(node.work, _Read) and node.work.shared is self:
                node.work.places = node.work.places or placed
                own, bound = node.work.wanted
                waits = [(own, 0)] if own is not None else []
                if bound is not None:
                    waits += [(c.number, bound) for c in changes if c.number != own]
                node.work.waits = waits

    def _function(self, fn: Callable[..., Any]) -> Callee:
        if not callable(fn):
            raise ArgumentError(f"shardc.shared: change wants a function, got {fn!r}.")
        if hasattr(fn, "call_every"):
            function: Any = fn
            if function.mesh != self.mesh:
                raise ArgumentError(f"{where_of(fn)} is on another mesh than the shared state that it changes.")
            return function
        if fn not in self._wrapped:
            self._wrapped[fn] = self._wrap(fn)
        return self._wrapped[fn]


class Pot:
    """The changes that wait to be applied together.

    Args:
      members: the number of calls that contribute.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.condition = threading.Condition()
        self.given: dict[int, list[Any]] = {}
        self.full_since = 0.0
        self.turn = 0
        self.done = [0] * members
        """The rounds of each member that are over."""

    def begin(self) -> None:
        self.given, self.turn, self.done = {}, 0, [0] * self.members

    def may_come(self, rounds: int) -> int:
        """The number of members that have contributed or still can."""
        return sum(k in self.given or n < rounds for k, n in enumerate(self.done))


class _Change(FunctionWork):
    """The work of a change."""

    changes = True

    def __init__(  # what a change is
        self, shared: Shared, function: Callee, leaves: Sequence[Any], tree: Any, quorum: tuple[int, int] | None,
        grace: float,
    ) -> None:  # fmt: skip
        self.shared, self.quorum, self._grace = shared, quorum, grace
        self.pot: Pot | None = None
        self.member = 0
        state = shared.tree.unflatten(shared.avals)
        whole, structure = jax.tree.flatten(((state, *tree.unflatten(leaves)), {}))
        super().__init__(function, whole, structure)
        if self.out_tree != shared.tree or [(a.shape, a.dtype) for a in self.results] != [
            (a.shape, a.dtype) for a in shared.avals
        ]:
            raise FlowError(
                f"{getattr(function, '__name__', 'change')} does not return a state like the one that it changes:\n"
                f"  takes   {_described(shared.tree, shared.avals)}\n"
                f"  returns {_described(self.out_tree, self.results)}"
            )
        count = len(shared.avals)
        self._entries = [to_place(p, a) for p, a in zip(self.takes[:count], shared.avals, strict=True)]
        self._keeps = list(self.takes[:count]) == list(self.gives)
        self.places = list(self.gives)
        self.takes = self.takes[count:]
        self.donated = frozenset(i - count for i in self.donated if i >= count)
        self.gives = []
        self.rounds: Callable[[], int] = lambda: 1 << 62
        """The rounds of the run, as far as they are known."""
        self.is_stopped: Callable[[], bool] = lambda: False
        """Whether the run has failed."""

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        if self.pot is None:
            self._apply(given)
        else:
            self._contribute(self.pot, given)
        return []

    def _apply(self, given: list[Any]) -> None:
        shared = self.shared
        with shared.lock:
            state = shared.leaves
            if not (self._keeps and shared.changed_by is self._function):
                state = [put(x) for put, x in zip(self._entries, state, strict=True)]
            shared.leaves = list(super().run([*state, *given], 0))
            shared.changed_by = self._function
            shared.changes += 1

    def _contribute(self, pot: Pot, given: list[Any]) -> None:
        assert self.quorum is not None
        with pot.condition:
            pot.given[self.member] = given
            turn = pot.turn
            fewest = lambda: min(self.quorum[0], pot.may_come(self.rounds()))  # noqa: E731
            most = lambda: min(self.quorum[1], pot.may_come(self.rounds()))  # noqa: E731
            if len(pot.given) == fewest():
                pot.full_since = monotonic()
            while pot.turn == turn:
                if self.is_stopped():
                    raise FlowError("the run was stopped while a change waited for others.")
                left = pot.full_since + self._grace - monotonic()
                if len(pot.given) >= most() or (len(pot.given) >= fewest() and left <= 0):
                    together = [_mean(column) for column in zip(*pot.given.values(), strict=True)]
                    self._apply(together)
                    pot.given, pot.turn = {}, turn + 1
                    pot.condition.notify_all()
                    break
                pot.condition.wait(min(_POLL, left) if len(pot.given) >= fewest() else _POLL)
            pot.done[self.member] += 1
            pot.condition.notify_all()


def _mean(column: Sequence[Any]) -> Any:
    return column[0] if len(column) == 1 else _means(len(column))(*column)


_means_known: dict[int, Callable[..., Any]] = {}


def _means(count: int) -> Callable[..., Any]:
    if count not in _means_known:
        _means_known[count] = jax.jit(lambda *xs: sum(xs[1:], xs[0]) / len(xs))
    return _means_known[count]


def _described(tree: Any, avals: Sequence[Any]) -> str:
    return str(tree.unflatten([f"{a.dtype.name}{list(a.shape)}" for a in avals]))


class _Read:
    """The work of a read: a copy of what is used of the state.

    Attributes:
      wanted: the change that it follows, and the rounds by which others may be behind.
      used: the leaves that somebody reads.
    """

    donated: frozenset[int] = frozenset()
    seconds: float | None = 0.0
    peak = 0
    credits: int | None = None
    changes = False
    takes: Sequence[Place] = ()
    apart: int | None = 0

    def __init__(self, shared: Shared, places: Sequence[Place] | None) -> None:
        self.shared = shared
        self.meshes: tuple[AnyMesh, ...] = (shared.mesh,)
        self.places = places
        self.actor: object | None = None
        self.waits: Sequence[tuple[int, int]] = ()
        self.wanted: tuple[int | None, int | None] = (None, None)
        self.used: frozenset[int] = frozenset(range(len(shared.avals)))

    @property
    def gives(self) -> Sequence[Place]:
        return self.places or [Place(self.shared.mesh)] * len(self.shared.avals)

    def begin(self) -> None:
        """Nothing to ready."""

    def end(self) -> None:
        """Nothing is held."""

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        shared = self.shared
        with shared.lock:
            return [x.copy() if i in self.used and hasattr(x, "copy") else x for i, x in enumerate(shared.leaves)]


def shared_states(nodes: Sequence[Node]) -> list[Shared]:
    """The shared states that nodes use."""
    works = (n.work for n in nodes)
    return list(dict.fromkeys(w.shared for w in works if isinstance(w, _Change | _Read)))


def read_only_what_is_used(built: FlowNetwork) -> None:
    """Let reads copy those leaves that somebody takes."""
    for node in built.round.nodes:
        if isinstance(node.work, _Read):
            taken = {m.output for e in built.edges if e.giver is node for m in e.moves}
            given = {o.index for o in (*built.outs, *built.state) if o is not None and o.node is node}
            node.work.used = frozenset(taken | given)


def pots(nodes: Sequence[Node]) -> list[tuple[_Change, Pot]]:
    """The changes that are applied together."""
    return [(w, w.pot) for n in nodes if isinstance(w := n.work, _Change) and w.pot is not None]
