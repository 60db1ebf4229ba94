"""A plan as JSON: where every value lies and what is boxed, by the paths of arguments and the numbers of operations.

It holds nothing of how the plan was found, so that any version of the planner can lower it (`shardc.plan.replay`).
An operation's number counts the equations of the canonical program, those of a body after the one that they are in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import box_p
from shardc.ir.nested import NESTED, bodies_of
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.passes.trace.pins import Rules
from shardc.plan.borders import moves, without_entries
from shardc.plan.plan import SpmdPlan
from shardc.plan.rewrites import rewrites_of
from shardc.sbp.placement import REPLICATED, Placement

Chain: TypeAlias = tuple[tuple[Placement, Placement], ...]
"""The boxings before one reader, in their order."""


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """An argument or result as a saved plan has it: its type, `f32[8,128]`, and where it lies."""

    type: str
    placement: Placement

    def __str__(self) -> str:
        return f"{self.type} {placement_word(self.placement)}"


@dataclass(frozen=True)
class SavedPlan:
    """A plan as it was saved: where every value lies, and how to see whether a program is still the same.

    Attributes:
      function: name of the function.
      mesh: names and sizes of the axes.
      seconds: what a call takes, by the cost model that the plan was made with.
      gap: by what part of the least cost there is its cost may be above it, by the same; None where nothing was proved.
      arguments, results: by path.
      captured: the arrays that the function closes over, in order.
      operations: for each equation its text, `dot_general f32[8,4] f32[4,2] -> f32[8,2]`, and the placements of what it
        reads and makes; None if the borders alone were saved, as of a pipeline.
      boxings: those before each reader, by its name: `12.0` is operand 0 of operation 12, `12/1.0` result 0 of its body
        1, `results.0` that of the function.
      digests: for each primitive, of the parameters and connections of its operations.
      name: the file's, or the function's.
      recomputed: which values are computed again and not kept for want of memory (`recompute`); operations,
        boxings and digests are those of the program that does so.
      cheaper: the same of what takes less then, in the program that was traced; in this one `recomputed` counts.
      rewrites: the rewrites that made the program (`shardc.plan.rewrites`).
      pinned: the arguments that were pinned then, by path; none where there are no rewrites.
      shared: how many devices share the rounds of each loop (`share_loops`).
      scans: the number of chunks of each kind of associative scan (`chunk_scans`).
    """

    function: str
    mesh: Mapping[str, int]
    seconds: float
    gap: float | None
    arguments: Mapping[str, SavedLeaf]
    results: Mapping[str, SavedLeaf]
    captured: Sequence[SavedLeaf]
    operations: Sequence[tuple[str, str]] | None
    boxings: Mapping[str, Chain]
    digests: Mapping[str, str]
    name: str
    recomputed: Sequence[str] = ()
    cheaper: Sequence[str] = ()
    rewrites: Sequence[str] = ()
    pinned: Sequence[str] = ()
    shared: Sequence[int] = ()
    scans: Sequence[tuple[str, int]] = ()

    @cached_property
    def in_placements(self) -> dict[str, Any]:
        """Every argument pinned where the plan has it, for `shardc.function(in_placements=...)`."""
        by_name: dict[str, dict[str, Placement]] = {}
        for path, leaf in self.arguments.items():
            name, _, inner = path.partition("/")
            by_name.setdefault(name, {})[inner] = leaf.placement
        return {name: leaves[""] if "" in leaves else Rules(tuple(leaves.items())) for name, leaves in by_name.items()}

    @cached_property
    def out_placements(self) -> Any:
        """Every result pinned where the plan has it, for `shardc.function(out_placements=...)`."""
        leaves = {path: leaf.placement for path, leaf in self.results.items()}
        return leaves[""] if "" in leaves else Rules(tuple(leaves.items()))

    def __repr__(self) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in self.mesh.items())
        what = "borders alone" if self.operations is None else f"{len(self.operations)} operations"
        return f"SavedPlan({self.name}: {self.function} on {axes}, {len(self.arguments)} arguments, {what})"


def record(plan: SpmdPlan) -> SavedPlan:
    """The saved form of a plan."""
    jaxpr, count = plan.boxed.jaxpr, sum(map(moves, plan.arguments))
    recorder = _Recorder(plan.boxed.placements)
    entered, begin = _entered(plan, count)
    inputs = [entered.get(v, p) for v, p in zip(jaxpr.invars, plan.inputs, strict=True)]
    recorder.scope(jaxpr.eqns[begin:], jaxpr.outvars, "results.")
    program = without_entries(plan.program, plan.arguments)
    names = [done.names if done else () for done in (plan.recomputed, plan.cheaper)]
    borders = record_borders(program, plan.mesh, inputs, plan.outputs, plan.seconds, plan.gap)
    operations, boxings = recorder.operations, recorder.boxings
    pins = zip(borders.arguments, plan.arguments, strict=False)
    pinned = tuple(path for path, a in pins if a.pin is not None) if borders.rewrites else ()
    found = replace(borders, operations=operations, boxings=boxings, pinned=pinned)
    return replace(found, recomputed=names[0], cheaper=names[1])


def record_borders(
    program: Program, mesh: MeshView, inputs: Sequence[Placement], outputs: Sequence[Placement], seconds: float,
    gap: float | None,
) -> SavedPlan:  # fmt: skip
    """Where the arguments and results of a plan live, without its operations."""
    leaves = [SavedLeaf(_type(a), p) for a, p in zip(program.in_avals, inputs, strict=True)]
    results = [SavedLeaf(_type(a), p) for a, p in zip(program.out_avals, outputs, strict=True)]
    given = len(leaves) - len(program.captured)
    return SavedPlan(
        program.name, dict(mesh.sizes), seconds, gap,
        dict(zip(program.in_paths[:given], leaves[:given], strict=True)),
        dict(zip(program.out_paths, results, strict=True)), leaves[given:], None, {}, digests(program.jaxpr),
        program.name, rewrites=rewrites_of(program), shared=program.shared, scans=program.scans,
    )  # fmt: skip


def _entered(plan: SpmdPlan, count: int) -> tuple[dict[Var, Placement], int]:
    """Where those `count` arguments are brought that arrive elsewhere than pinned, and how many equations do it."""
    found: dict[Var, Placement] = {}
    made_of: dict[Var, Any] = {}
    for n, eqn in enumerate(plan.boxed.jaxpr.eqns):
        if len(found) == count:
            return found, n
        source: Any = made_of.get(eqn.invars[0], eqn.invars[0]) if eqn.invars else None
        out = eqn.outvars[0]
        made_of[out] = source
        if eqn.primitive is not box_p:
            found[source] = plan.boxed.placements[out]
    return found, len(plan.boxed.jaxpr.eqns)


class _Recorder:
    def __init__(self, placements: Mapping[Var, Placement]) -> None:
        self.placements = placements
        self.operations: list[tuple[str, str]] = []
        self.boxings: dict[str, Chain] = {}

    def scope(self, eqns: Sequence[Eqn], outputs: Sequence[Atom], end: str) -> None:
        waiting: list[Eqn] = []
        for eqn in eqns:
            if eqn.primitive is box_p:
                waiting.append(eqn)
                continue
            number = len(self.operations)
            self._before(waiting, eqn.invars, f"{number}.")
            waiting = []
            bodies = bodies_of(eqn)
            inside = "".join(f"; inside {self._row(b.invars)} -> {self._row(b.outvars)}" for b in bodies)
            says = f"{self._row(eqn.invars)} -> {self._row(eqn.outvars)}{inside}"
            self.operations.append((operation_text(eqn), says))
            for k, body in enumerate(bodies):
                self.scope(body.eqns, body.outvars, f"{number}/{k}.")
        self._before(waiting, outputs, end)

    def _row(self, atoms: Sequence[Atom]) -> str:
        return ", ".join(placement_word(REPLICATED if compat.is_literal(a) else self.placements[a]) for a in atoms)

    def _before(self, boxes: Sequence[Eqn], atoms: Sequence[Atom], reader: str) -> None:
        """Notes boxings with the operand that they are for; what a boxing only passes through is for the next one."""
        position = {a: k for k, a in reversed(list(enumerate(atoms))) if not compat.is_literal(a)}
        k = -1
        for box in reversed(boxes):
            k = position.get(box.outvars[0], k)
            step = (box.params["src"], box.params["dst"])
            self.boxings[f"{reader}{k}"] = (step, *self.boxings.get(f"{reader}{k}", ()))


def placement_word(placement: Placement) -> str:
    """A placement; the one that names no axis is `B`."""
    return str(placement) if placement else "B"


def _type(aval: Any) -> str:
    return aval.str_short(short_dtypes=True)


def operation_text(eqn: Eqn) -> str:
    """`dot_general f32[8,4] f32[4,2] -> f32[8,2]`."""
    sides = (" ".join(_type(a.aval) for a in side) for side in (eqn.invars, eqn.outvars))
    return " ".join(filter(None, (eqn.primitive.name, " -> ".join(sides))))


def digests(jaxpr: Jaxpr) -> dict[str, str]:
    """For each primitive a digest of the parameters and connections of its operations, the same in every process.

    Values of literals are not in it: a plan holds whatever they are.
    """
    numbers: dict[Var, int] = {}
    hashes: dict[str, Any] = {}

    def number(atom: Atom) -> str:
        return "literal" if compat.is_literal(atom) else str(numbers.setdefault(atom, len(numbers)))

    for var in jaxpr.invars:
        number(var)
    for n, eqn in enumerate(all_eqns(jaxpr)):
        bodies = [f"{[number(v) for v in b.invars]} -> {[number(a) for a in b.outvars]}" for b in bodies_of(eqn)]
        params = {k: v for k, v in eqn.params.items() if k not in NESTED.get(eqn.primitive.name, ())}
        wires = f"{[number(a) for a in eqn.invars]} -> {[number(v) for v in eqn.outvars]}"
        weak = [bool(getattr(v.aval, "weak_type", False)) for v in eqn.outvars]
        line = f"{n} {operation_text(eqn)} {weak} {wires} {bodies} {_stable(params)}\n"
        hashes.setdefault(eqn.primitive.name, hashlib.sha256()).update(line.encode())
    results = f"{[number(a) for a in jaxpr.outvars]}"
    hashes.setdefault("results", hashlib.sha256()).update(results.encode())
    return {name: h.hexdigest()[:12] for name, h in sorted(hashes.items())}


def _stable(value: Any) -> str:
    """A parameter as text that is the same in every process."""
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
        return "{" + ", ".join(sorted(f"{_stable(k)}: {_stable(v)}" for k, v in items)) + "}"
    if isinstance(value, frozenset | set):
        return "{" + ", ".join(sorted(map(_stable, value))) + "}"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_stable, value))})"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        body: Jaxpr = getattr(value, "jaxpr", value)
        return _stable(digests(body))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
