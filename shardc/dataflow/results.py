"""Results of a run of a flow, and the values that it keeps meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

import jax

from shardc.dataflow.beginning import LateValue, LateValues, array_of, begun, known, value_of
from shardc.dataflow.chart import FlowChart, measured_flow_chart
from shardc.dataflow.page import flow_page
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.remote import FlowProcesses
from shardc.dataflow.round import FlowNode, Origin
from shardc.dataflow.timing.measured import mean_seconds, seconds_by_node
from shardc.dataflow.value import RoundValue
from shardc.errors import FlowError
from shardc.report.drawn import Drawn
from shardc.report.page.page import write_page
from shardc.runtime.actor import Span


class Rounds(list[Any], Drawn):
    """The values that each round of a run gave, in order. A recorded run can be drawn, planned above measured.

    Attributes:
      pending: what late values of the last rounds are, besides the state: a list of arrays for each, the oldest first,
        for `run(..., pending=)` to go on from. Empty if nothing is late.
      spans: the times of all nodes, if the run recorded them.
      python: of host functions in threads, the seconds of each recorded run in which their thread computed.
    """

    def __init__(
        self, given: Iterable[Any], pending: Any, plan: PlannedFlow | None = None, spans: Sequence[Span] = (),
        python: Mapping[str, Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(given)
        self.pending = pending
        self.spans = list(spans)
        self.python = dict(python or {})
        self._plan = plan

    @property
    def seconds(self) -> dict[str, float]:
        """The mean seconds of each node, of a run that recorded them, without those in which it waited for a turn: for
        devices, or for Python's interpreter. `plan.simulate(seconds=)` takes them; those of a host function in a thread
        say besides how long it was in Python (`.held`)."""
        if self._plan is None or not self.spans:
            return {}
        nodes = self._plan.nodes
        return {nodes[n].name: mean_seconds(times) for n, times in self._by_node(self._plan).items()}

    def _by_node(self, plan: PlannedFlow) -> dict[int, list[float]]:
        return seconds_by_node(plan.network, plan.nodes, self.spans, self.python)

    @property
    def chart(self) -> FlowChart:
        if self._plan is None or not self.spans:
            raise FlowError("Nothing to show: no round was recorded; run(..., record=True) records them.")
        return measured_flow_chart(self._plan, self.spans, len(self), self._by_node(self._plan))

    def report(self, path: str | PathLike[str]) -> None:
        """Writes the page of the flow's plan, with the recorded rounds below the planned ones.

        Raises:
          FlowError: no round was recorded.
          ArgumentError: as `plan.report`.
        """
        chart = self.chart
        assert self._plan is not None
        write_page(flow_page(self._plan, chart), path)


class RunResults:
    """The values that one run of a flow keeps: arguments that do not change, results that are returned.

    Attributes:
      given: the arguments of each node that are known from the start.
      number: of the run.
      fired: how often each step has run.
      turns: a context in which calls take the turns of the gang's client that runs the flow.
      record: whether each node is waited for, so that its times are those of its devices.
      python: of host functions in threads, the seconds of each run in which their thread computed.
    """

    def __init__(
        self, plan: PlannedFlow, here: frozenset[FlowNode], state: Sequence[Any], items: Any, late: LateValues,
        past: Mapping[tuple[LateValue, int], Any],
    ) -> None:  # fmt: skip
        self._plan, self._built, self._here, self._late, self._past = plan, plan.built, here, late, past
        self.record, self.number = False, 0
        self.python: dict[str, list[float]] = {n.name: [] for n in here if n.work.where == "thread"}
        self.turns: Callable[[], AbstractContextManager[object]] = nullcontext
        self.fired = dict.fromkeys((s.label for row in plan.network.actors for s in row), 0)
        self.given: dict[FlowNode, list[Any]] = {}
        for node in plan.nodes:
            leaves = [None if isinstance(x, RoundValue) else x for x in node.given]
            for at, i in plan.built.constants[node].items() if node in here else ():
                leaves[at] = begun(node.work.takes[at], state[i])
            self.given[node] = leaves
        inputs = plan.nodes[0]
        if items is not None:
            self.given[inputs] = [items]
        self._logs: dict[tuple[FlowNode, int], Any] = {}
        self._state: dict[FlowNode, dict[int, dict[int, Any]]] = {}
        for origin in plan.built.outs:
            if origin is not None and origin.node is not None:
                self._logs[origin.node, origin.index] = []
        for origin in plan.built.state:
            if origin.node is not None:
                self._state[origin.node] = {}
        self._first_state, self._first_values = list(map(array_of, state)), list(map(value_of, state))
        self._newest = dict.fromkeys(self._state, -1)
        self._behind = max((o.delay - 1 for o in plan.built.state if o.node is not None), default=0)
        self._lock = threading.Lock()

    def begin_with(self, round: int) -> None:
        """Begin with this round: those before, another process has run in place of this one."""
        period = self._plan.network.period
        self.fired = {s.label: -(-(round - s.round) // period) for row in self._plan.network.actors for s in row}

    def keep(self, node: FlowNode, round: int, logged: list[tuple[int, Any]], state: dict[int, Any]) -> None:
        """Record results: of the state, what the last rounds gave that all of its parts have."""
        for i, value in logged:
            self._logs[node, i].append(value)
        if not state:
            return
        with self._lock:
            self._state[node][round] = state
            self._newest[node] = round
            whole = min(self._newest.values()) - self._behind
            for n, kept in self._state.items():
                least = whole if self._built.apart is not None else self._newest[n]
                for r in [r for r in kept if r < least]:
                    del kept[r]

    def share_logs(self, remote: FlowProcesses) -> None:
        """Let all processes know what the rounds gave."""
        self._logs = remote.logs(self._logs)

    def past(self, rounds: int) -> dict[tuple[LateValue, int], Any]:
        """Values of the last of so many rounds that later ones return, or have as state."""
        outs = self._built.outs
        found: dict[tuple[LateValue, int], Any] = {}
        for i, value in self._late.of_out.items():
            o = outs[i]
            assert o is not None
            found |= {(value, k): self._out(i, o, rounds + o.delay - k) for k in value.back if k <= o.delay}
        for i, value in self._late.of_state.items():
            delay = self._built.state[i].delay
            if value.node in self._here:
                mine = [k for k in value.back if k < delay and value.home(k) in (value.node, None)]
                found |= {(value, k): self.leaf(i, rounds + delay - 1 - k) for k in mine}
        return found

    def state(self, round: int) -> list[Any]:
        """The state after a round; -1: before the first one."""
        return [self.leaf(i, round) for i in range(len(self._built.state))]

    def leaf(self, i: int, round: int) -> Any:
        """Leaf i after a round: its origin is what the next round takes."""
        origin, first = self._built.state[i], self._first_state
        if origin.node is None:
            return first[origin.index]
        made = round + 1 - origin.delay
        if made < 0:
            return self._past[self._late.of_state[i], -made] if round >= 0 else known(origin.first[0], first)
        kept = self._state[origin.node]
        return (kept[made] if self._built.apart == 0 else kept.get(made, kept[max(kept)]))[origin.index]

    def last_complete(self) -> tuple[int, list[Any] | None]:
        """The last rounds of which the whole state is there: their number, and the state; None if a part is lost."""
        newest = min(self._newest.values(), default=-1)
        try:
            leaves = self.state(newest)
        except KeyError:
            return newest + 1, None
        lost = any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
        return newest + 1, None if lost else leaves

    def given_in(self, rounds: int) -> Iterator[Any]:
        """The values that each of the first rounds gave; None for a node that did not run in it."""
        round, built = self._plan.round, self._built
        for r in range(rounds):
            pairs = enumerate(zip(round.outs, built.outs, strict=True))
            leaves = [x if o is None else self._out(i, o, r) for i, (x, o) in pairs]
            yield round.out_tree.unflatten(leaves)

    def _out(self, i: int, origin: Origin | None, r: int) -> Any:
        """Result i of round r."""
        assert origin is not None
        if origin.node is None:
            return self._first_values[origin.index]
        made = r - origin.delay
        if made < 0:
            return self._past[self._late.of_out[i], -made]
        every = origin.node.every
        if (made + 1) % every:
            return None
        logs = self._logs[origin.node, origin.index]
        return logs[made // every] if made // every < len(logs) else None
