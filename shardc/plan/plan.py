"""The plan: a program with a placement for every value, its boxings, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax

from shardc import compat
from shardc.compat import NESTED
from shardc.errors import MemoryLimitError
from shardc.ir.box import Boxed
from shardc.ir.collective import Collective
from shardc.ir.constrain import constrain_p
from shardc.ir.host_callback import runs_once
from shardc.ir.program import Program
from shardc.ir.transfer import is_transfer
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import Habits, habits_of
from shardc.passes.estimate.memory import Memory, Profile, profile_memory
from shardc.passes.estimate.plan_cost import tally
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.memory_limit import GOOD_ENOUGH, Fit, Fitted, Trial
from shardc.passes.place.place import Placed, Placer
from shardc.passes.place.problem import Border, Problem, build_problem
from shardc.passes.recompute.choose_residuals import choose_residuals
from shardc.passes.recompute.recompute import Choice, Offers, Recomputed, Repeated, compute_again, recomputed
from shardc.passes.trace.find_signatures import found_of
from shardc.sbp.placement import REPLICATED, Pin, Placement
from shardc.sbp.signature import has_rule
from shardc.solver import Assignment, relative_gap

if TYPE_CHECKING:
    from shardc.pipeline.plan import PipelinePlan
    from shardc.plan.counterfactual import Again


@dataclass(frozen=True)
class Argument:
    """What is known of one input before planning.

    Attributes:
      pin: what the user said; None is AUTO.
      arrival: where the array already lives on the mesh; None if it is put where the plan wants it.
      donated: its buffer may be reused for a result.
    """

    pin: Pin | None = None
    arrival: Placement | None = None
    donated: bool = False


NOTHING: Final = Repeated()


@dataclass(frozen=True)
class Gathered:
    """Operations of one primitive that were computed whole on every device for want of a rule."""

    primitive: str
    count: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class FoundSignatures:
    """Operations of one primitive without a rule whose signatures were found.

    Attributes:
      how: what justifies them: "its batching rule" or "experiment".
      rule: the decorator to paste.
    """

    primitive: str
    how: str
    rule: str
    count: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Unlimited:
    """The cheapest plan, that memory ruled out: its seconds, and the most bytes that it has on a device."""

    seconds: float
    peak: int


class Plan:
    """A program placed on a mesh. Needs no devices.

    Attributes:
      program: the traced function.
      mesh: names, sizes and topology.
      collectives: what moves: kind, axes, bytes sent per device (all executions), count, source line.
      time: seconds of one call by what they go to: computing, memory, each kind of collective, and what of them hides.
      seconds: all of it: of one call.
      added_seconds: the equations' seconds one by one, as searches add them up: nothing is fused, nothing hides.
      gap: by what part of the least cost there is the cost may be above it; None where nothing is proved.
      ties: for each result the number of the donated input whose buffer it takes; None if none.
      arguments, results: what was known of each input and said of each result before planning.
      notes: what `explain` should say besides.
      unlimited: the plan that would have been, had there been more memory; None if memory decided nothing.
      recomputed: what is computed again and not kept for want of memory; None: nothing. `program` is one that does so.
      cheaper: the same of what loops would keep for later loops, if keeping it takes longer than computing it again.
    """

    def __init__(
        self, program: Program, mesh: MeshView, boxed: Boxed, gap: float | None,
        inputs: Sequence[Placement], outputs: Sequence[Placement], ties: Sequence[int | None],
        arguments: Sequence[Argument], results: Sequence[Pin | None], notes: Sequence[str],
        unlimited: Unlimited | None = None, recomputed: Recomputed | None = None, cheaper: Recomputed | None = None,
    ) -> None:  # fmt: skip
        self.program, self.mesh, self.boxed = program, mesh, boxed
        cost = tally(boxed, mesh)
        self.collectives: tuple[Collective, ...] = cost.collectives
        self.time = cost.time
        self.compute_seconds, self.seconds = cost.time.computing, cost.time.total
        self.added_seconds = cost.added
        self.gap = gap
        self.inputs, self.outputs, self.ties = tuple(inputs), tuple(outputs), tuple(ties)
        self.arguments, self.results = tuple(arguments), tuple(results)
        self.notes = tuple(notes)
        self.unlimited, self.recomputed, self.cheaper = unlimited, recomputed, cheaper

    @cached_property
    def bytes_per_device(self) -> int:
        """Bytes that each device sends in one call."""
        return sum(c.bytes for c in self.collectives)

    @cached_property
    def memory(self) -> Memory:
        """Bytes that each device holds, as XLA will compile the plan: what it fuses is not counted."""
        return profile_of(self).memory

    @property
    def without_rule(self) -> list[compat.Eqn]:
        """The equations without a rule, and of more than scalars."""
        found: list[compat.Eqn] = []
        for eqn in all_eqns(self.boxed.jaxpr):
            name = eqn.primitive.name
            planned = has_rule(name) or name in _BY_THE_PLANNER or is_transfer(eqn) or runs_once(eqn)
            if not planned and any(v.aval.shape for v in eqn.outvars):
                found.append(eqn)
        return found

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """Operations without a rule that cost a gather or a repeated computation."""
        found: dict[str, list[str]] = {}
        for eqn in self.without_rule:
            found.setdefault(eqn.primitive.name, []).append(compat.source_line(eqn))
        return tuple(Gathered(n, len(s), tuple(dict.fromkeys(s))) for n, s in sorted(found.items()))

    @cached_property
    def found(self) -> tuple[FoundSignatures, ...]:
        """Operations without a rule that are split by signatures that were found."""
        uses: dict[tuple[str, str, str], list[str]] = {}
        for eqn in all_eqns(self.boxed.jaxpr):
            if (found := found_of(eqn)) is not None:
                uses.setdefault((found.fn.primitive.name, found.fn.how, str(found)), []).append(compat.source_line(eqn))
        return tuple(FoundSignatures(*key, len(s), tuple(dict.fromkeys(s))) for key, s in sorted(uses.items()))

    @cached_property
    def in_placements(self) -> Any:
        """A placement for each leaf of the arguments: an attribute, and an item, for each argument."""
        return self._in_tree

    @cached_property
    def out_placements(self) -> Any:
        """A placement for each leaf of the result."""
        return jax.tree.unflatten(self.program.out_tree, self.outputs)

    _in_tree: Any = None

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON: where every value lies, and what is boxed, the same text in every process.

        `shardc.function(plan=path)` lowers it as it is, without a search; `shardc.load_plan(path)` reads it.
        """
        from shardc.plan.saved_json import to_json  # noqa: PLC0415  # what is saved knows plans
        from shardc.plan.saved_plan import record  # noqa: PLC0415

        Path(path).write_text(to_json(record(self)), "utf-8")

    def diff(self, other: Plan | PipelinePlan) -> str:
        """What another plan of the same function does differently, as text: placements of arguments and results, what
        moves, time, memory. Of plans of different functions, what has the same path."""
        from shardc.report.diff import diff  # noqa: PLC0415  # reports know plans

        return diff(self, other)

    @cached_property
    def again(self) -> Again:
        """This plan's problem, to be solved again with other things said. Built from what the plan was made of."""
        from shardc.plan.counterfactual import Again  # noqa: PLC0415  # it knows plans, and they it only here

        return Again(self)

    def explain(self, why: str | None = None, *, pins: bool = False) -> str:
        """What lives where, what moves, why, how many bytes, and which line of the user's code made it.

        Args:
          why: asks for one value: why it lies where it does, who makes and reads it with which boxings between, and
            what the whole plan would cost if it lay elsewhere. Named by the path of an argument or result, by the
            scopes and the primitive of the operation that makes it (`blocks_0/attn/q/dot_general`), the end or a part
            of such a name, or a line (`model.py:41`); `*` matches any text. The placement is solved again up to three
            times for each of the first three values that the name means.
          pins: adds what each pin costs against leaving its values AUTO. Solves once for each.

        Raises:
          ArgumentError: `why` is the name of nothing.
        """
        from shardc.report.explain import explain  # noqa: PLC0415  # reports know plans, plans no reports
        from shardc.report.whys import pins_section, why_section  # noqa: PLC0415

        if why is not None:
            return why_section(self, why)
        return explain(self) + (f"\n\n{pins_section(self)}" if pins else "")

    def __repr__(self) -> str:
        return (
            f"Plan({self.program.name} on {self.mesh}: {len(self.collectives)} collectives, "
            f"{self.bytes_per_device} bytes per device, {self.seconds:.3g} s)"
        )


_BY_THE_PLANNER = frozenset(("box", "constrain", "sharding_constraint", "shard_map", *NESTED))


def match_donated(program: Program, arguments: Sequence[Argument]) -> list[int | None]:
    """For each result the donated input that it replaces: the same path (but for the place in the result's tuple) and
    aval."""
    waiting: dict[tuple[str, tuple[int, ...], Any], list[int]] = {}
    for i, (path, var, argument) in enumerate(zip(program.in_paths, program.jaxpr.invars, arguments, strict=False)):
        if argument.donated:
            aval = var.aval
            for key in (path, path.partition("/")[2]):
                waiting.setdefault((key, aval.shape, aval.dtype), []).append(i)
    taken: set[int] = set()
    ties: list[int | None] = []
    for path, var in zip(program.out_paths, program.jaxpr.outvars, strict=True):
        key_paths = dict.fromkeys((path, path.partition("/")[2] if path.partition("/")[0].isdigit() else path))
        candidates = [i for k in key_paths for i in waiting.get((k, var.aval.shape, var.aval.dtype), ())]
        hit = next((i for i in candidates if i not in taken), None)
        if hit is not None:
            taken.add(hit)
        ties.append(hit)
    return ties


def may_replace(program: Program, ties: Sequence[int | None]) -> dict[int, int]:
    """For each result that takes an input's buffer if it lies as that does, the input."""
    results, arguments = enumerate(zip(ties, program.out_avals, strict=True)), program.in_avals
    return {k: tie for k, (tie, aval) in results if tie is not None and arguments[tie].dtype == aval.dtype}


def donations(plan: Plan) -> dict[int, int]:
    """For each result that can take an input's buffer, being tied to it and lying as it does, that input."""
    tied = may_replace(plan.program, plan.ties)
    return {k: i for k, i in tied.items() if plan.inputs[i] == plan.outputs[k]}


def profile_of(plan: Plan) -> Profile:
    """What a plan holds at each point of its program."""
    return profile_memory(
        plan.boxed.jaxpr, plan.boxed.placements, plan.mesh.sizes, ties=donations(plan),
        habits=habits_of(plan.mesh.topology.kind),
    )  # fmt: skip


def pin_entries(program: Program, arguments: Sequence[Argument]) -> Program:
    """Arguments that arrive elsewhere than they are pinned: `f x --> f constrain[pin] x`."""
    moved: dict[compat.Var, compat.Var] = {}
    eqns: list[compat.Eqn] = []
    for var, a in zip(program.jaxpr.invars, arguments, strict=False):
        if moves(a):
            moved[var] = compat.fresh_var(var.aval)
            eqns.append(compat.new_eqn([var], [moved[var]], constrain_p, {"pin": a.pin}, None))
    if not moved:
        return program

    def rename(atoms: Sequence[compat.Atom]) -> list[compat.Atom]:
        return [a if compat.is_literal(a) else moved.get(a, a) for a in atoms]

    body = [e.replace(invars=rename(e.invars)) for e in program.jaxpr.eqns]
    jaxpr = compat.new_jaxpr(
        program.jaxpr.invars, rename(program.jaxpr.outvars), [*eqns, *body], program.jaxpr
    )
    return replace(program, jaxpr=jaxpr)


def without_entries(program: Program, arguments: Sequence[Argument]) -> Program:
    """The inverse of `pin_entries`: `f constrain[pin] x --> f x`."""
    count = sum(map(moves, arguments))
    moved = {e.outvars[0]: e.invars[0] for e in program.jaxpr.eqns[:count]}

    def rename(atoms: Sequence[compat.Atom]) -> list[compat.Atom]:
        return [a if compat.is_literal(a) else moved.get(a, a) for a in atoms]

    eqns = [e.replace(invars=rename(e.invars)) for e in program.jaxpr.eqns[count:]]
    jaxpr = compat.new_jaxpr(program.jaxpr.invars, rename(program.jaxpr.outvars), eqns, program.jaxpr)
    return replace(program, jaxpr=jaxpr)


def make_plan(
    program: Program, mesh: MeshView, arguments: Sequence[Argument], results: Sequence[Pin | None],
    notes: Sequence[str] = (), limit: int | None = None, where: str = "",
) -> Plan:  # fmt: skip
    """Places a program on a mesh, so that it takes at most `limit` bytes of each device; None: as much as it likes.

    Raises:
      MemoryLimitError: no placement was found that fits. It begins with `where`, the function.
    """
    jaxpr, cheaper = compute_again(program.jaxpr, Choice(*choose_residuals(program.jaxpr, mesh)))
    placing = Placing.of(replace(program, jaxpr=jaxpr), mesh, arguments, results, notes, cheaper)
    return placing.plan if limit is None else placing.within(limit, where)


@dataclass(frozen=True, eq=False)
class Placing:
    """A program that is to be placed on a mesh: once wherever is cheapest, then within any limits on memory."""

    traced: Program
    search: _Search

    @classmethod
    def of(
        cls, program: Program, mesh: MeshView, arguments: Sequence[Argument], results: Sequence[Pin | None],
        notes: Sequence[str] = (), cheaper: Repeated = NOTHING,
    ) -> Placing:  # fmt: skip
        arguments = [replace(a, pin=without_idle(a.pin, mesh)) for a in arguments]
        arguments += [Argument()] * (len(program.in_paths) - len(arguments))
        results = [without_idle(pin, mesh) for pin in results]
        entered = pin_entries(program, arguments)
        ties = match_donated(entered, arguments)
        wanted: list[Pin | None] = []
        for pin, tie, var in zip(results, ties, entered.jaxpr.outvars, strict=True):
            if pin is None and tie is None and compat.is_literal(var):
                pin = Pin(REPLICATED)
            if pin is None and tie is not None and moves(arguments[tie]):
                pin = arguments[tie].pin  # where the next call wants it
            wanted.append(pin)
        return cls(program, _Search(entered, mesh, arguments, wanted, ties, notes, cheaper))

    @property
    def plan(self) -> Plan:
        """The cheapest, whatever memory it takes."""
        return self.search.plan

    def nearest(self, limit: int) -> Plan:
        """A plan that takes at most so many bytes of each device, or if none was found one that takes least. All that
        it keeps without the limit it keeps."""
        whole = _Within(self.search, limit)
        if whole.fits:
            return self.plan
        fitted = whole.fit()
        return self._instead(whole.plan_of(fitted.best or fitted.least))

    def _instead(self, plan: Plan) -> Plan:
        plan.unlimited = Unlimited(self.plan.seconds, self.plan.memory.peak)
        return plan

    def within(self, limit: int, where: str = "") -> Plan:
        """A plan that takes at most so many bytes of each device, as it may by computing again what it does not keep.

        Raises:
          MemoryLimitError: none was found. It begins with `where`, the function.
        """
        whole = _Within(self.search, limit)
        if whole.fits:
            return self.plan
        plans, fitted = _all_within(whole, self.traced)
        if plans:
            return self._instead(min(plans, key=lambda p: p.seconds))
        from shardc.report.misfit import misfit  # noqa: PLC0415  # reports know plans, plans no reports

        least, s = min(fitted, key=lambda f: f.least.peak), self.search
        raise MemoryLimitError(misfit(s.program, s.mesh, s.arguments, least, limit, where or s.program.name), self.plan)


def _all_within(whole: _Within, traced: Program) -> tuple[list[Plan], list[Fitted]]:
    """Plans that fit, of the program as it is and as it computes again what it does not keep; and what was found where
    none does at once."""
    search, limit = whole.search, whole.limit
    if whole.fitting.charges.least_arguments() > limit:  # then nothing fits, and the error says why
        return [], [whole.fit()]
    offers = Offers(search.plan.boxed, profile_of(search.plan), search.mesh, search.habits)
    plans, fitted = list[Plan](), dict[_Within, Fitted]()

    def fit(s: _Within) -> None:
        fitted[s] = found = s.fit(alone=not offers.most)
        if found.best is not None:
            plans.append(s.plan_of(found.best))

    if offers.most < search.plan.memory.peak - limit and whole.may_fit:
        fit(whole)
    least_cost = whole.fitting.least_cost
    hopeless = plans and least_cost(limit + offers.most) > (1 - GOOD_ENOUGH) * least_cost(limit)
    if not (hopeless or any(map(_near, plans))):
        missed, found = _computing_again(whole, offers, traced)
        plans += found
        smallest = min(missed, key=lambda s: s.plan.memory.peak)
        cheapest = sorted((s for s in missed if s not in fitted and s.may_fit), key=lambda s: s.plan.seconds)[:1]
        for s in dict.fromkeys(s for s in (*cheapest, smallest) if s not in fitted):
            better = s.may_fit and not any(_near(p) or (1 - GOOD_ENOUGH) * p.seconds <= s.plan.seconds for p in plans)
            if better or not plans:
                fit(s)
    return plans, list(fitted.values())


def _computing_again(whole: _Within, offers: Offers, traced: Program) -> tuple[list[_Within], list[Plan]]:
    """What computes again too little for its cheapest plan to fit, beginning with nothing; and the plans of what
    computes enough. What a layer's values take while it runs, and what lies elsewhere then, is not known before. Where
    all is too little, what is worth it comes first: the rest is to lie elsewhere."""
    limit, peak = whole.limit, whole.plan.memory.peak
    missed, plans, tried, dearest = [whole], list[Plan](), [Choice()], math.inf
    low, high, wanted = 0.0, math.inf, float(peak - limit if peak - limit <= offers.most else offers.worth)
    for _ in range(TRIES):
        choice, freed = offers.choose(wanted, dearest)
        if choice in tried:
            if wanted == math.inf or high < math.inf:
                break
            wanted = math.inf
            continue
        tried.append(choice)
        trial = _Within(whole.search.computing_again(choice, traced), limit)
        if trial.fits:
            plans.append(trial.plan)
            high = min(wanted, offers.most)
            if _near(trial.plan) or trial.plan.memory.peak > FULL * limit:
                break
        else:
            missed.append(trial)
            both = choice.stacks and choice.values and dearest == math.inf
            if both and trial.plan.memory.peak > peak - ENOUGH * freed:
                # what is written out fills another point as it is computed again, as logits do: loops pay what is dear
                dearest = offers.typical
                continue
            low = wanted = max(wanted, freed)
        if high < math.inf:
            wanted = (low + high) / 2
        elif len(missed) <= PATIENT:
            wanted += MORE * (trial.plan.memory.peak - limit)
        else:
            wanted = math.inf
    return missed, plans


def _near(plan: Plan) -> bool:
    """Whether a plan is proved to cost next to nothing more than the best without a limit."""
    return plan.gap is not None and plan.gap <= GOOD_ENOUGH


TRIES: Final = 6
"""To find what to compute again, at most."""
PATIENT: Final = 3
"""Tries that free too little after which all is computed again."""
MORE: Final = 1.25
"""So many times what one of them takes too much is freed besides by the next."""
ENOUGH: Final = 0.9
"""Part of the bytes that are to be freed which is, else what is computed again fills another point."""
FULL: Final = 0.95
"""Part of the limit that a plan takes for which no other is looked for that frees less."""


@dataclass(frozen=True, eq=False)
class _Search:
    """The plans of one program: as it is, or as it computes again what it does not keep, of which some may be
    `cheaper` than to keep it anyway."""

    program: Program
    mesh: MeshView
    arguments: Sequence[Argument]
    results: Sequence[Pin | None]
    ties: Sequence[int | None]
    notes: Sequence[str]
    cheaper: Repeated
    repeated: Repeated = NOTHING
    bound: float = math.inf

    def computing_again(self, choice: Choice, traced: Program) -> _Search:
        """The same for the program that computes again what was chosen. What the one that keeps it costs at least is as
        low as a bound may be."""
        jaxpr, repeated = compute_again(self.program.jaxpr, choice, traced.jaxpr)
        program = replace(self.program, jaxpr=jaxpr)
        return replace(self, program=program, repeated=repeated, bound=self.cheapest.bound)

    @cached_property
    def habits(self) -> Habits:
        return habits_of(self.mesh.topology.kind)

    @cached_property
    def placer(self) -> Placer:
        return Placer(problem_of(self.program, self.mesh, self.arguments, self.results, self.ties), self.mesh)

    @cached_property
    def cheapest(self) -> Assignment:
        """The cheapest choices found. A program that computes something again may go without a proof of its own."""
        if self.bound == math.inf:
            return self.placer.tables.best()
        found = self.placer.tables.best(proved=False)
        return replace(found, bound=max(found.bound, min(self.bound, found.cost)))

    @cached_property
    def plan(self) -> Plan:
        """The cheapest, whatever memory it takes."""
        placed = self.placer.placed(self.cheapest)
        return self.plan_of(placed, insert_boxing(self.placer.problem, placed, self.mesh))

    def plan_of(self, placed: Placed, boxed: Boxed) -> Plan:
        problem = self.placer.problem
        gap = max(placed.gap, relative_gap(placed.seconds, self.bound))
        inputs, outputs = [placed.ports[n][-1] for n in problem.sources], [placed.ports[n][0] for n in problem.sinks]
        return Plan(
            self.program, self.mesh, boxed, gap if math.isfinite(gap) else None, inputs, outputs, self.ties,
            self.arguments, self.results, self.notes,
            recomputed=recomputed(boxed, self.mesh, self.habits, self.repeated),
            cheaper=recomputed(boxed, self.mesh, self.habits, self.cheaper),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Within:
    """A search, and a limit in bytes of each device."""

    search: _Search
    limit: int

    @property
    def plan(self) -> Plan:
        """The cheapest, whatever memory it takes."""
        return self.search.plan

    @property
    def fits(self) -> bool:
        """Whether the cheapest does."""
        return self.plan.memory.peak <= self.limit

    @cached_property
    def fitting(self) -> Fit:
        """The search for what fits."""
        s = self.search
        return Fit(s.placer, may_replace(s.program, s.ties), s.habits, self.limit)

    @cached_property
    def may_fit(self) -> bool:
        """Whether it would, were every value where it takes least."""
        return self.fitting.charges.least() <= self.limit

    def fit(self, alone: bool = True) -> Fitted:
        return self.fitting.run(self.search.cheapest, alone)

    def plan_of(self, trial: Trial) -> Plan:
        return self.search.plan_of(trial.placed, trial.boxed)


def problem_of(
    program: Program, mesh: MeshView, arguments: Sequence[Argument], results: Sequence[Pin | None],
    ties: Sequence[int | None],
) -> Problem:  # fmt: skip
    """The placement problem of a program; of a plan's own `program`, `arguments`, `results` and `ties`, that plan's."""
    inputs = [
        Border(a.pin if a.arrival is None else without_idle(Pin(a.arrival), mesh)) for a in arguments
    ]
    outputs = [Border(pin, tie) for pin, tie in zip(results, ties, strict=True)]
    return build_problem(program.jaxpr, inputs, outputs, program.in_paths, program.out_paths)


def moves(a: Argument) -> bool:
    """Whether an argument arrives elsewhere than it is pinned."""
    return a.pin is not None and a.arrival is not None and not a.pin.allows(a.arrival)


def without_idle(pin: Pin | None, mesh: MeshView) -> Pin | None:
    """Axes of one device place nothing."""
    if pin is None:
        return None
    idle = [a for a, n in mesh.axes if n == 1]
    if not idle:
        return pin
    fixed = None if pin.fixed is None else pin.fixed - set(idle)
    return replace(pin, placement=pin.placement.without(idle), fixed=fixed)

