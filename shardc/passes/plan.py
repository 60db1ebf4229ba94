"""The plan: a program with a placement for every value, its boxings, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from shardc import compat
from shardc.mesh import MeshView
from shardc.passes.canonicalize import NESTED
from shardc.passes.collective import Collective
from shardc.passes.constrain import constrain_p
from shardc.passes.insert_boxing import Boxed, insert_boxing
from shardc.passes.memory import Memory, all_eqns, estimate_memory
from shardc.passes.place import place
from shardc.passes.problem import Border, build_problem
from shardc.passes.program import Program
from shardc.passes.run_once import runs_once
from shardc.passes.tally import tally
from shardc.passes.transfer import is_transfer
from shardc.sbp.placement import REPLICATED, Pin, Placement
from shardc.sbp.signature import has_rule


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


@dataclass(frozen=True)
class Gathered:
    """Operations of one primitive that were computed whole on every device for want of a rule."""

    primitive: str
    count: int
    sources: tuple[str, ...]


class Plan:
    """A program placed on a mesh. Needs no devices.

    Attributes:
      program: the traced function.
      mesh: names, sizes and topology.
      collectives: what moves: kind, axes, bytes sent per device (all executions), count, source line.
      seconds: time of one call: computing and moving, without overlap.
      gap: how far the cost may be above the optimum, relative; None where nothing is proved.
      ties: for each result the number of the donated input whose buffer it takes; None if none.
      arguments, results: what was known of each input and said of each result before planning.
      notes: what `explain` should say besides.
    """

    def __init__(
        self, program: Program, mesh: MeshView, boxed: Boxed, gap: float | None,
        inputs: Sequence[Placement], outputs: Sequence[Placement], ties: Sequence[int | None],
        arguments: Sequence[Argument], results: Sequence[Pin | None], notes: Sequence[str],
    ) -> None:  # fmt: skip
        self.program, self.mesh, self.boxed = program, mesh, boxed
        cost = tally(boxed, mesh)
        self.collectives: tuple[Collective, ...] = cost.collectives
        self.compute_seconds, self.seconds = cost.compute_seconds, cost.seconds
        self.gap = gap
        self.inputs, self.outputs, self.ties = tuple(inputs), tuple(outputs), tuple(ties)
        self.arguments, self.results = tuple(arguments), tuple(results)
        self.notes = tuple(notes)

    @cached_property
    def bytes_per_device(self) -> int:
        """Bytes that each device sends in one call."""
        return sum(c.bytes for c in self.collectives)

    @cached_property
    def memory(self) -> Memory:
        """Bytes that each device holds."""
        return estimate_memory(self.boxed.jaxpr, self.boxed.placements, self.mesh.sizes)

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """Operations without a rule that cost a gather or a repeated computation."""
        found: dict[str, list[str]] = {}
        for eqn in all_eqns(self.boxed.jaxpr):
            name = eqn.primitive.name
            planned = has_rule(name) or name in _BY_THE_PLANNER or is_transfer(eqn) or runs_once(eqn)
            if not planned and any(v.aval.shape for v in eqn.outvars):
                found.setdefault(name, []).append(compat.source_line(eqn))
        return tuple(Gathered(n, len(s), tuple(dict.fromkeys(s))) for n, s in sorted(found.items()))

    @cached_property
    def in_placements(self) -> Any:
        """A placement for each leaf of the arguments: an attribute, and an item, for each argument."""
        return self._in_tree

    @cached_property
    def out_placements(self) -> Any:
        """A placement for each leaf of the result."""
        return jax.tree.unflatten(self.program.out_tree, self.outputs)

    _in_tree: Any = None

    def explain(self) -> str:
        """What lives where, what moves, why, how many bytes, and which line of the user's code made it."""
        from shardc.report.explain import explain  # noqa: PLC0415  # reports know plans, plans no reports

        return explain(self)

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


def donations(plan: Plan) -> dict[int, int]:
    """For each result that can take an input's buffer, being tied to it and lying as it does, that input."""
    return {
        k: tie
        for k, (tie, out, aval) in enumerate(zip(plan.ties, plan.outputs, plan.program.out_avals, strict=True))
        if tie is not None and plan.inputs[tie] == out and plan.program.in_avals[tie].dtype == aval.dtype
    }


def pin_entries(program: Program, arguments: Sequence[Argument]) -> Program:
    """Arguments that arrive elsewhere than they are pinned: `f x --> f constrain[pin] x`."""
    moved: dict[compat.Var, compat.Var] = {}
    eqns: list[compat.Eqn] = []
    for var, a in zip(program.jaxpr.invars, arguments, strict=False):
        if _moves(a):
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
    return Program(
        program.name, jaxpr, program.in_paths, program.out_paths, program.captured, program.in_tree, program.out_tree
    )


def make_plan(
    program: Program, mesh: MeshView, arguments: Sequence[Argument], results: Sequence[Pin | None],
    notes: Sequence[str] = (),
) -> Plan:  # fmt: skip
    """Places a program on a mesh."""
    arguments = [replace(a, pin=_without_idle(a.pin, mesh)) for a in arguments]
    arguments += [Argument()] * (len(program.in_paths) - len(arguments))
    results = [_without_idle(pin, mesh) for pin in results]
    program = pin_entries(program, arguments)
    ties = match_donated(program, arguments)
    inputs = [
        Border(a.pin if a.arrival is None else _without_idle(Pin(a.arrival), mesh)) for a in arguments
    ]
    outputs: list[Border] = []
    for pin, tie, var in zip(results, ties, program.jaxpr.outvars, strict=True):
        if pin is None and tie is None and compat.is_literal(var):
            pin = Pin(REPLICATED)
        if pin is None and tie is not None and _moves(arguments[tie]):
            pin = arguments[tie].pin  # where the next call wants it
        outputs.append(Border(pin, tie))
    problem = build_problem(program.jaxpr, inputs, outputs, program.in_paths, program.out_paths)
    placed = place(problem, mesh)
    boxed = insert_boxing(problem, placed, mesh)
    return Plan(
        program, mesh, boxed, placed.gap,
        [placed.ports[n][-1] for n in problem.sources], [placed.ports[n][0] for n in problem.sinks], ties,
        arguments, [b.pin for b in outputs], notes,
    )  # fmt: skip


def _moves(a: Argument) -> bool:
    return a.pin is not None and a.arrival is not None and not a.pin.allows(a.arrival)


def _without_idle(pin: Pin | None, mesh: MeshView) -> Pin | None:
    """Axes of one device place nothing."""
    if pin is None:
        return None
    idle = [a for a, n in mesh.axes if n == 1]
    return Pin(pin.placement.without(idle), None if pin.fixed is None else pin.fixed - set(idle)) if idle else pin

