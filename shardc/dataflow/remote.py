"""A flow in several processes: what they compare before a run, and what all of them get to know.

Every process runs the same script and traces the same round. An actor runs where the devices of its meshes are, in all
their processes; Python on the host runs beside what reads its results, or where `process=` says. The inputs are read by
process 0. Each process hands its own state to the nodes that it runs, so values are compared before the first round.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from shardc.arrays.fetch import of_words, words
from shardc.arrays.place import Place, StagesPlace, place_of
from shardc.arrays.placed import StackedArray, as_jax
from shardc.arrays.remote_array import Arrival, RemoteArray, is_remote, is_small
from shardc.dataflow.beginning import Holder, LateValue, LateValues, SpreadValue, begun
from shardc.dataflow.moves import elsewhere
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.round import Fixed, FlowNode, Origin
from shardc.dataflow.shared import Shared
from shardc.dataflow.value import RoundValue
from shardc.errors import ArgumentError, MeshError, RoundFailedError, all_offenders
from shardc.execute.network_run import NetworkRun
from shardc.execute.process_group import (
    ProcessGroup,
    environment,
    given_whole,
    group_of_run,
    value_facts,
    value_text,
)
from shardc.execute.remote_values import bring, whole
from shardc.machine.devices import me
from shardc.passes.trace.trace import is_array
from shardc.runtime.calls import processes_text, refuse_unlike
from shardc.runtime.cluster import current
from shardc.runtime.replaced.replay import Replaceable, replaceable
from shardc.sbp.signature import is_extended

_log: Final = logging.getLogger("shardc")
_HAS: Final = "the values that it has"
_FIRST: Final = "the first item"
_ITEMS: Final = "the number of items"
_BESIDE: Final = (_HAS, _FIRST, _ITEMS)
"""Facts that may differ, or be unknown in some processes."""


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that a process says before the first round.

    Attributes:
      rounds: how many at most; None: until the inputs or a host function have no more.
      items: how many items the inputs have; None: nobody knows, or there are none.
      first: the leaves of the first item.
      values: arrays by name, wherever they live.
    """

    rounds: int | None
    items: int | None
    first: Sequence[Any]
    values: Mapping[str, Any]


def agree_on_run(plan: PlannedFlow, group: ProcessGroup, facts: RunFacts) -> None:
    """Make sure that all processes begin the same run. Waits for them.

    Args:
      group: all processes.
      facts: of this process. A value that it has whole is compared with those of the others that have it.

    Raises:
      DisagreementError: in all of them, with all that differs.
    """
    what = f"the flow {plan.name}"
    has = {name: x for name, x in facts.values.items() if given_whole(x) and not is_remote(x)}
    beside = {
        _HAS: json.dumps(list(has)),
        _FIRST: ", ".join(value_text(x) for x in facts.first if given_whole(x)),
    }
    if facts.items is not None:
        beside[_ITEMS] = str(facts.items)
    said = group.gather(what, {**_same(plan, facts.rounds), **beside})
    refuse_unlike(what, group.members, [{k: v for k, v in each.items() if k not in _BESIDE} for each in said])
    refuse_unlike(what, group.members, [{k: v for k, v in each.items() if k == _ITEMS} for each in said], True)
    others = [p for p, each in zip(group.members, said, strict=True) if each[_FIRST] != said[0][_FIRST]]
    if others and me() == group.members[0]:
        _log.warning(
            "%s: process 0 reads the inputs. Those of %s begin with another item, and are not read.",
            plan.round.where, processes_text(others),
        )  # fmt: skip
    count = Counter(name for each in said for name in json.loads(each[_HAS]))
    if any(n > 1 for n in count.values()):
        common = [name for name in has if count[name] > 1]
        group.agree(f"{what}, its values", value_facts(common, [has[name] for name in common]), where_known=True)


def digest_of(plan: PlannedFlow) -> str:
    """A digest that is equal where the same flow is planned alike."""
    parts = [f"{n.name} every {n.every} {getattr(getattr(n.work, 'plan', None), 'digest', '')}" for n in plan.nodes]
    parts += [
        f"{e.giver}>{e.taker}>{e.delay}>{e.registers}>{[(m.output, m.argument) for m in e.moves]}" for e in plan.edges
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _same(plan: PlannedFlow, rounds: int | None) -> dict[str, str]:
    """Facts that are the same in all processes: types and constants, the plan, releases and settings."""
    round, source = plan.round, plan.nodes[0]
    items = [(f"leaf {i} of the item", x) for i, x in enumerate(source.results)]
    types = {
        name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in [(v.name, v) for v in round.state] + items
    }
    return {
        **types,
        **{name: repr(x) if isinstance(x, bool | str) else type(x).__name__ for name, x in round.constants},
        "rounds=": str(rounds),
        "the structure of the item": str(getattr(source.work, "out_tree", "")),
        "the plan": f"digest {digest_of(plan)[:12]}",
        **environment(),
    }


def refuse_absent(plan: PlannedFlow) -> None:
    """Raise if processes of a flow are none of this run, or if another one has all of it.

    Raises:
      ArgumentError: `process=` of a host function is too high.
      MeshError: this process has nothing to do.
    """
    cluster, where = current(), plan.round.where
    last = 0 if cluster is None else cluster.processes - 1
    named = [(n, n.work.process) for n in plan.nodes if n.work.process is not None]
    wrong = [f"{n}: process={p}." for n, p in named if p > last]
    if wrong:
        have = f"processes 0 to {last}" if last else "one process, 0"
        raise ArgumentError(all_offenders(f"{where}: this run has {have}; process= names one of them:", wrong))
    all_processes = {p for ps in plan.built.processes for p in ps}
    if len(all_processes) == 1 and me() not in all_processes:
        raise MeshError(
            f"{where}: all of its nodes run in process {min(all_processes)}, and process {me()} would have nothing to "
            "do; give a function a mesh with devices of another process, or a host function process=, or let that "
            "process alone run the flow."
        )


def run_facts(plan: PlannedFlow, rounds: int | None, values: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a run that a process knows which joins it: types, settings, and the values that it has whole."""
    has = {name: x for name, x in values.items() if given_whole(x) and not is_remote(x)}
    return {**_same(plan, rounds), **value_facts(has, has.values())}


def replaceable_processes(plan: PlannedFlow) -> Replaceable:
    """The processes that may be replaced while a run goes on: they keep nothing of it that the others cannot give them
    again. A host function that is given nothing may have a place in its data."""
    cluster, built = current(), plan.built
    if cluster is None or cluster.config.per_island > 1 or not (cluster.config.restarts or cluster.config.joins):
        return Replaceable()
    makers = {o.node for o in built.state if o.node is not None}
    holders = [
        n for n in plan.nodes
        if n in makers or n.work.actor is not None or n.work.changes
        or not (n.work.meshes or any(isinstance(x, RoundValue) for x in n.given))
    ]  # fmt: skip
    held = {p for n in holders for p in built.processes_of(n)}
    empty = [channel for channel, e in enumerate(plan.edges) if not e.moves]
    return replaceable(plan.network, built.processes, held, empty)


def values_of_state(
    plan: PlannedFlow, state: Sequence[Any], pending: Mapping[str, Sequence[Any]] | None
) -> dict[str, Any]:
    """The arrays that a run begins with, by name."""
    found = {v.name: x for v, x in zip(plan.round.state, state, strict=True)}
    for name, turns in (pending or {}).items():
        for turn, values in enumerate(turns):
            leaves = jax.tree.leaves(values)
            found |= {f"pending {name}, message {turn}, leaf {i}": x for i, x in enumerate(leaves)}
    return found


def values_of_nodes(plan: PlannedFlow, shared: Sequence[Shared]) -> dict[str, Any]:
    """The arrays that are known since the round was traced, by name: they stay the same in all runs.

    Args:
      shared: the states that calls of the round change. One that was changed is known where it lives.
    """
    found: dict[str, Any] = {}
    for node in plan.nodes:
        given = [(i, x) for i, x in enumerate(node.given) if is_array(x) and not isinstance(x, RoundValue)]
        found |= {f"argument {i} of {node}": x for i, x in given}
        program = getattr(getattr(node.work, "plan", None), "program", None)
        found |= {f"captured array {i} of {node}": x for i, x in enumerate(getattr(program, "captured", ()))}
    for edge in plan.edges:
        firsts = [f for move in edge.moves for f in move.first if isinstance(f, Fixed)]
        found |= {f"first= {i} of {edge.giver} for {edge.taker}": f.array for i, f in enumerate(firsts)}
    for number, one in enumerate(shared):
        found |= {} if one.changes else {f"leaf {i} of shared state {number}": x for i, x in enumerate(one.leaves)}
    return found


# --- what processes tell one another besides messages -----------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A value, or one of each round, that all processes get to know.

    Attributes:
      name: of the value; equal in all processes, as their order is.
      aval: shape and dtype of one.
      homes: the processes that have it; the first one sends it.
      values: here; empty elsewhere, or if there are none.
    """

    name: Any
    aval: Any
    homes: Sequence[int]
    values: Sequence[Any]


class FlowProcesses:
    """The processes of a flow: what they tell one another before a run and after it.

    What the devices of one node's mesh hold lives in all processes of that mesh; the first of them speaks for it.

    Args:
      plan: the plan, equal in all processes.
      run: its network.
    """

    def __init__(self, plan: PlannedFlow, run: NetworkRun) -> None:
        self.run, self.cluster = run, run.cluster
        self._first: Sequence[int] = ()
        """Of each process the first round that it has run in the last run."""
        self._built, self._where = plan.built, plan.round.where
        self._name = f"a run of the flow {plan.name}, its first state"
        self._told = 0, 0
        """A run, and how many values were told after it."""

    def outcome(self, rounds: int, failed: tuple[str, int, str] | None) -> int | tuple[str, int, str]:
        """The rounds that all processes have run; or the failure of a run in any of them, as node, round and text. All
        call it together."""
        group = group_of_run()
        assert group is not None
        facts = {"failed": "" if failed is None else json.dumps(failed), "rounds": str(rounds)}
        said = group.gather("the end of a flow's run", {**facts, "first": str(self.run.first)})
        self.run.end_replaceable()
        self._first, self.run.first = [int(facts["first"]) for facts in said], 0
        known = [(p, *json.loads(facts["failed"])) for p, facts in enumerate(said) if facts["failed"]]
        if not known:
            return min(int(facts["rounds"]) for facts in said)
        process, node, round, text = min(known, key=lambda k: not k[1])  # who was only stopped knows less
        return node, round, f"process {process}: {text}"

    def agreed(self, run: int, rounds: int) -> int:
        """The rounds that all processes have run, which call this together.

        Args:
          run: the number of the run that has ended.

        Raises:
          RoundFailedError: the run failed in one of them.
        """
        self._told = run, 0
        self.run.network.forget(run - 1)
        ended = self.outcome(rounds, None)
        if not isinstance(ended, int):
            raise self.error(*ended)
        return ended

    def failure(self, node: str, round: int, text: str) -> RoundFailedError:
        """The error of a run that failed in one of several processes; all of them raise it."""
        failed = self.outcome(0, (node, round, text))
        assert not isinstance(failed, int)
        return self.error(*failed)

    def error(self, node: str, round: int, text: str) -> RoundFailedError:
        where = f"{node} failed in round {round}, in " if node else ""
        return RoundFailedError(
            f"{self._where}: {where}{text}\nThe run has stopped in all processes; go on from a checkpoint.",
            node, round, 0, None, [],
        )  # fmt: skip

    def brought(self, state: Sequence[Any]) -> list[Any]:
        """The state with those leaves here that a process reads when a run begins that has not made them."""
        readers = self._readers(state)
        returned = {f for o in self._built.outs if o is not None for f in self._first_of(o) if isinstance(f, int)}
        wanted = [i for i in range(len(state)) if i in returned or self._are_apart(readers.get(i, ()))]
        values = [(state[i], readers.get(i, ()), i in returned) for i in wanted]
        found = list(state)
        for i, x in zip(wanted, self._bring(values, self._name), strict=True):
            found[i] = x
        return found

    def _readers(self, state: Sequence[Any]) -> dict[int, set[Holder]]:
        """The nodes that take a leaf of the first state, with its place."""
        readers: dict[int, set[Holder]] = {}
        for edge in self._built.edges:
            for m in edge.moves:
                for i in (f for f in m.first if isinstance(f, int)):
                    readers.setdefault(i, set()).add((edge.taker, edge.places(m)[1]))
        for node, constants in self._built.constants.items():
            for at, i in constants.items():
                readers.setdefault(i, set()).add((node, node.work.takes[at]))
        for i, o in enumerate(self._built.state):
            if o.node is not None and i in readers:
                readers[i].add((o.node, o.node.work.gives[o.index]))
        for i, x in enumerate(state):
            if isinstance(x, StackedArray) and all(isinstance(at, StagesPlace) for _, at in readers.get(i, ())):
                readers.pop(i, None)  # its pieces are on their stages
        return readers

    @staticmethod
    def _first_of(origin: Origin) -> Sequence[int | Fixed]:
        """The values of the first state that a round returns."""
        return [origin.index] if origin.node is None else origin.first

    def _are_apart(self, who: Collection[Holder]) -> bool:
        """Whether a value of these nodes may be missing in the process of one of them."""
        return len({p for n, at in who for p in self._built.holders(n, at)}) > 1

    def _bring(self, values: Sequence[tuple[Any, Collection[Holder], bool]], what: str = "shardc.fetch") -> list[Any]:
        """Values that nodes of several processes take, in all of these: a value with pieces in other processes is whole
        here beside them, for nodes on other meshes.

        Args:
          values: each with the nodes that take it, and whether all processes do.
          what: the call that they all make.
        """
        each = range(self.cluster.processes)
        of = self._built.holders
        takers = [each if e else sorted({p for n, at in who for p in of(n, at)}) for _, who, e in values]
        found = bring([x for x, *_ in values], what, takers)
        for i, (x, (_, who, everywhere)) in enumerate(zip(found, values, strict=True)):
            if isinstance(x, jax.Array) and not is_remote(x) and not x.is_fully_addressable:
                mesh = place_of(x).mesh
                if everywhere or any(at.mesh != mesh for _, at in who):
                    found[i] = SpreadValue(x, mesh, of_words(np.asarray(words(whole(x))), x.dtype))
        return found

    def last_state(self, leaf: Callable[[int], Any], first: Sequence[Any]) -> list[Any]:
        """The state after a run: of what is in another process its value if it is small.

        Args:
          leaf: gives a leaf that a node of this process has made.
          first: the state before the run.
        """
        origins = list(enumerate(self._built.state))
        made = {i: o.node for i, o in origins if o.node is not None}
        avals = {i: v.aval for i, v in enumerate(self._built.round.state)}
        gives = {i: o.node.work.gives[o.index] for i, o in origins if o.node is not None}
        here = {i: _at(gives[i], leaf(i)) for i, n in made.items() if self._is_here(n) and gives[i].is_here}
        told = self.tell([
            Told(i, avals[i], self._built.homes(n, gives[i]), [here[i]] if i in here else [])
            for i, n in made.items() if is_small(avals[i]) or not n.work.meshes
        ])  # fmt: skip
        found: list[Any] = []
        for i, origin in origins:
            if origin.node is None:
                found.append(first[origin.index])
            elif i in here:
                found.append(here[i])
            else:
                found.append(_elsewhere(gives[i], told.get(i, ())))
        return found

    def _home(self, value: LateValue, k: int) -> Sequence[int]:
        """The processes that have a late value when a run ends; none: all have it."""
        return self._built.homes(*value.back[k][0]) if value.back.get(k) else ()

    def brought_late(self, late: LateValues, made: Mapping[tuple[LateValue, int], Any]) -> dict[Any, Any]:
        """Late values with those here that nodes of several processes take."""
        returned = set(late.of_out.values())
        wanted = [(v, k) for v, k in late.entries() if v in returned or self._are_apart(v.back[k])]
        values = [(made[value, k], value.back[k], value in returned) for value, k in wanted]
        return {**made, **dict(zip(wanted, self._bring(values), strict=True))}

    def known_late(self, late: LateValues, made: Mapping[tuple[LateValue, int], Any]) -> dict[Any, Any]:
        """The late values that a run leaves, in all processes: of what is on the devices of another one, only where it
        is, unless it is small."""
        found: dict[Any, Any] = {}
        told: list[Told] = []
        at: dict[tuple[LateValue, int], Place] = {}
        for value, k in late.entries():
            home, key = self._home(value, k), (value, k)
            if not home:
                found |= {key: made[key]} if key in made else {}
                continue
            at[key] = place = value.back[k][0][1]
            if key in made and self.cluster.me in home:
                found[key] = _at(place, made[key])
            if not isinstance(place.mesh, Mesh) or place.placement is None or is_small(value.aval):
                told.append(Told(key, value.aval, home, [found[key]] if key in found else []))
        known = self.tell(told)
        away = {key: place for key, place in at.items() if key not in found and known.get(key, True)}
        return {**found, **{key: _elsewhere(place, known.get(key, ())) for key, place in away.items()}}

    def logs(self, logs: Mapping[tuple[FlowNode, int], Sequence[Any]]) -> dict[Any, Sequence[Any]]:
        """The results of all rounds in all processes, by node and result leaf.

        Args:
          logs: with the results of nodes of this process.
        """
        homes = {(n, i): self._built.homes(n, n.work.gives[i]) for n, i in logs}
        found = self.tell([Told((n, i), n.results[i], homes[n, i], xs) for (n, i), xs in logs.items()])
        all_rounds = {
            (n, i): xs if self.cluster.me in homes[n, i] else [_elsewhere(n.work.gives[i], (x,)) for x in xs]
            for (n, i), xs in found.items()
        }
        return {(n, i): [None] * (self._lost_rounds(n) // n.every) + [*xs] for (n, i), xs in all_rounds.items()}

    def _lost_rounds(self, node: FlowNode) -> int:
        """The first rounds of the last run whose results were lost with a process."""
        return self._first[self._processes_of(node)[0]]

    def _processes_of(self, node: FlowNode) -> Sequence[int]:
        return self._built.processes_of(node)

    def _is_here(self, node: FlowNode) -> bool:
        return self.cluster.me in self._processes_of(node)

    def tell(self, told: Sequence[Told]) -> dict[Any, Sequence[Any]]:
        """The values that some processes have, in all of them, which call this together after a run."""
        (run, first), me = self._told, self.cluster.me
        self._told = run, first + len(told)
        found: dict[Any, Sequence[Any]] = {}
        for number, one in enumerate(told, first):
            if me in one.homes:
                found[one.name] = values = [_readable(x) for x in one.values]
                if me == one.homes[0]:
                    stacked = np.stack([np.asarray(words(as_jax(x))) for x in values]) if values else None
                    self.run.send(run, number, stacked, self.run.others(one.homes))
        for number, one in enumerate(told, first):
            if me not in one.homes:
                value = self.run.receive(run, number, one.aval, one.homes[0])
                found[one.name] = [] if value is None else list(value)
        return found


def _at(place: Place, x: Any) -> Any:
    """A value where a run leaves it: after few rounds it may be one of the first state, which lies anywhere."""
    is_host = isinstance(x, np.ndarray | np.generic) and isinstance(place.mesh, Mesh)
    return begun(place, x) if is_host else x


def _elsewhere(place: Place, told: Sequence[Any]) -> Any:
    """An array that other processes have, of which they may have told the value: fetching it is a call of all."""
    if place.mesh is None or (told and is_extended(place.dtype)):
        return told[0]
    arrival = Arrival(lambda: np.asarray(told[0])) if told else None
    if not isinstance(place, StagesPlace) or len(place.pieces) == 1:
        return elsewhere(place.pieces[0] if isinstance(place, StagesPlace) else place, arrival)
    ends = pairwise(accumulate((p.shape[0] for p in place.pieces), initial=0))
    rows = [Arrival(lambda a=a, b=b: np.asarray(told[0])[a:b]) if told else None for a, b in ends]
    return StackedArray(list(map(elsewhere, place.pieces, rows)))


def _readable(x: Any) -> Any:
    """A value that this process can read; the processes of its mesh call this together."""
    if isinstance(x, StackedArray) and any(isinstance(p, RemoteArray) for p in x.pieces):
        return np.asarray(x)
    return whole(x) if isinstance(x, jax.Array) and not x.is_fully_addressable else x
