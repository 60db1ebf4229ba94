"""Lowers a saved plan: a program and where its values were --> the boxed program, as it was, without a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardc import compat
from shardc.errors import ArgumentError, PlacementError, all_offenders, did_you_mean
from shardc.ir.box import Boxed
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.passes import as_saved
from shardc.passes.estimate.backend import backend_of
from shardc.passes.place.domain import Domains
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.place import Placed
from shardc.passes.place.problem import Node, Problem
from shardc.passes.recompute.recompute import recomputed
from shardc.plan.borders import match_donated, problem_of
from shardc.plan.digest import digests
from shardc.plan.offload import with_names
from shardc.plan.plan import SpmdPlan
from shardc.plan.request import Argument, Request
from shardc.plan.rows import Row, operation_text, placement_word, ports_in, rows_before_placing
from shardc.plan.saved_plan import SavedLeaf, SavedPlan
from shardc.sbp.placement import Pin, Placement
from shardc.sbp.sub_axes import in_sub_axes, keeps_pieces

MOST = 4
"""Operations that an error names, of each sort."""


def replay(saved: SavedPlan, request: Request) -> SpmdPlan:
    """The plan that was saved, of the same program.

    Raises:
      ArgumentError: the program or the mesh is another one, and all that differs is named; or a pin of the function is
        not kept; or the file was changed so that it is no plan.
    """
    pins = {path: Pin(saved.arguments[path].placement) for path in saved.pinned if path in saved.arguments}
    request = replace(request, imbalance=saved.imbalance)
    mesh, context = request.mesh, replace(request.context, pins=list(map(pins.get, request.program.in_paths)))
    where = f"{saved.name} is not a plan of {request.program.name} as it is called"
    if saved.rows is None:
        raise ArgumentError(
            f"{saved.name} holds the borders of a pipeline's plan alone; pin them, with "
            "in_placements=shardc.load_plan(...).in_placements, and leave plan= out."
        )
    program = as_saved(request.program, context, saved)
    wrong = _differences(saved, program, mesh) + _pins_not_kept(saved, program, request)
    mesh = mesh if wrong else _cut(saved, mesh, program)
    if wrong:
        raise ArgumentError(
            all_offenders(f"{where}; leave plan= out to plan it anew, and save that with plan.save(...):", wrong)
        )
    leaves = [*saved.arguments.values(), *saved.captured]
    arguments = [*request.arguments, *[Argument()] * (len(leaves) - len(request.arguments))]
    pinned = [replace(a, pin=Pin(p.placement, said=saved.name)) for a, p in zip(arguments, leaves, strict=True)]
    ends = [Pin(leaf.placement, said=saved.name) for leaf in saved.results.values()]
    ties = match_donated(program, pinned)
    asked = replace(request, program=program, mesh=mesh, arguments=tuple(pinned), results=tuple(ends))
    boxed = _boxed(saved, asked, problem_of(asked, ties))
    backend = backend_of(mesh.topology.backend)
    plan = SpmdPlan(
        program, mesh, boxed, tuple(boxed.placements[v] for v in boxed.jaxpr.invars),
        tuple(in_sub_axes(p.placement, mesh) for p in ends), tuple(ties), request=asked, gap=saved.gap,
        recomputed=recomputed(boxed, mesh, backend, program.to_fit),
        recomputed_for_speed=recomputed(boxed, mesh, backend, program.for_speed),
    )  # fmt: skip
    plan = with_names(plan, saved.offloaded, f"as in {saved.name}")
    if math.isclose(plan.seconds, saved.seconds, rel_tol=1e-9):
        return plan
    return replace(plan, gap=None)  # by another cost model, or from elsewhere, it may be as good: nothing is proved


def _cut(saved: SavedPlan, mesh: MeshView, program: Program) -> MeshView:
    """The mesh with the sub-axes of the plan.

    Raises:
      ArgumentError: the file was changed so that it is no plan.
    """
    if not saved.cuts:
        return mesh
    known = all(axis in mesh.sizes and math.prod(n) == mesh.sizes[axis] for axis, n in saved.cuts.items())
    cut = mesh.cut(saved.cuts) if known else mesh
    avals = [*program.in_avals, *program.out_avals]
    leaves = zip([*saved.arguments.values(), *saved.captured, *saved.results.values()], avals, strict=True)
    if not known or not all(
        _is_possible(leaf.placement, len(aval.shape), mesh) and keeps_pieces(leaf.placement, aval.shape, cut)
        for leaf, aval in leaves
    ):
        raise ArgumentError(
            f"{saved.name} was changed so that it is no plan: axes cannot be cut as {dict(saved.cuts)}."
        )
    return cut


def _differences(saved: SavedPlan, program: Program, mesh: MeshView) -> list[str]:
    """A line for each thing in which a program is not the one that was saved."""
    wrong: list[str] = []
    if dict(saved.mesh) != dict(mesh.sizes) or list(saved.mesh) != list(mesh.sizes):
        wrong.append(f"the plan is for the mesh {_axes_text(saved.mesh)}, this is {_axes_text(mesh.sizes)}.")
    given = len(program.given_avals)
    wrong += _other_leaves("argument", saved.arguments, program.in_paths[:given], program.in_avals)
    captured = [aval.str_short(short_dtypes=True) for aval in program.in_avals[given:]]
    if captured != [leaf.type for leaf in saved.captured]:
        theirs = ", ".join(leaf.type for leaf in saved.captured)
        ours = ", ".join(captured)
        wrong.append(f"the function closes over {ours or 'nothing'}, the plan's over {theirs or 'nothing'}.")
    wrong += _other_leaves("result", saved.results, program.out_paths, program.out_avals)
    return wrong + _other_operations(saved, program, with_types=not wrong)


def _axes_text(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{a}={n}" for a, n in axes.items())


def _other_leaves(what: str, saved: Mapping[str, SavedLeaf], paths: Sequence[str], avals: Sequence[Any]) -> list[str]:
    now = {path: aval.str_short(short_dtypes=True) for path, aval in zip(paths, avals, strict=False)}
    both = [(p, t, saved[p].type) for p, t in now.items() if p in saved]
    return [
        *(f"{what} {p} is {t}, in the plan {then}." for p, t, then in both if t != then),
        *(f"{what} {p} {t} is not in the plan.{did_you_mean(p, saved)}" for p, t in now.items() if p not in saved),
        *(f"{what} {p} {leaf.type} is in the plan alone." for p, leaf in saved.items() if p not in now),
    ]


def _other_operations(saved: SavedPlan, program: Program, *, with_types: bool) -> list[str]:
    """The differences between the operations: kinds and types, else order, else parameters and operands.

    Without types only the kinds: where arguments have other types, so have most operations.
    """
    eqns = all_eqns(program.jaxpr)
    now, then = list(map(operation_text, eqns)), [row.text for row in saved.rows or () if row.is_operation]
    if not with_types:
        now, then = ([text.partition(" ")[0] for text in texts] for texts in (now, then))
    lines = {text: compat.source_line(eqn) for text, eqn in zip(reversed(now), reversed(eqns), strict=True)}
    more, less = Counter(now) - Counter(then), Counter(then) - Counter(now)
    if more or less:
        return [
            *_some([f"{_times(n)}{text} at {lines[text]} is not in the plan." for text, n in more.items()]),
            *_some([f"{_times(n)}{text} is in the plan alone." for text, n in less.items()]),
        ]
    if now != then:
        n = next(n for n, (a, b) in enumerate(zip(now, then, strict=True)) if a != b)
        return [f"from {now[n]} at {lines[now[n]]} on, the operations are the same in another order."]
    made = digests(program.jaxpr) if with_types else dict(saved.digests)
    names = [name for name in made.keys() | saved.digests.keys() if made.get(name) != saved.digests.get(name)]
    first = {eqn.primitive.name: compat.source_line(eqn) for eqn in reversed(eqns)}
    return _some([
        f"{name}, first at {first[name]}, has other parameters, or reads or makes something else, than in the plan."
        if name in first else "what the function gives back are other values than in the plan."
        for name in sorted(names)
    ])  # fmt: skip


def _times(n: int) -> str:
    return "" if n == 1 else f"{n} times "


def _some(lines: Sequence[str]) -> list[str]:
    return [*lines[:MOST], *([f"... and {len(lines) - MOST} more of this sort."] if len(lines) > MOST else [])]


def _pins_not_kept(saved: SavedPlan, program: Program, request: Request) -> list[str]:
    """A line for each pin of the function that the plan does not keep."""
    arguments = zip(program.in_paths, request.arguments, strict=False)
    results = zip(program.out_paths, request.results, strict=True)
    pins = [
        *((path, saved.arguments.get(path), a.pin) for path, a in arguments),
        *((f"result {path}".rstrip(), saved.results.get(path), pin) for path, pin in results),
    ]
    return [
        f"{path} is pinned at {placement_word(pin.placement)} by {pin.said}, the plan has it at "
        f"{placement_word(leaf.placement)}."
        for path, leaf, pin in pins
        if pin is not None and leaf is not None and not pin.allows(leaf.placement)
    ]


def _boxed(saved: SavedPlan, asked: Request, problem: Problem) -> Boxed:
    """The program with its values where the plan has them, boxed by the ways that they went.

    Raises:
      ArgumentError: the file was changed so that it is no plan.
    """
    wrong, jaxpr = f"{saved.name} was changed so that it is no plan:", problem.scope.jaxpr
    leaves = [*saved.arguments.values(), *saved.captured]
    ends = zip([*leaves, *saved.results.values()], [*asked.program.in_avals, *asked.program.out_avals], strict=True)
    words = [placement_word(p) for (_, p), aval in ends if not _is_possible(p, len(aval.shape), asked.mesh.whole)]
    if words:
        raise ArgumentError(f"{wrong} an argument or result cannot be at {', '.join(words)}.")
    pins = [in_sub_axes(leaf.placement, asked.mesh) for leaf in leaves]
    ways = [
        (in_sub_axes(a.arrival, asked.mesh), p) if a.arrival is not None and a.moves else (p,)
        for a, p in zip(asked.arguments, pins, strict=True)
    ]
    moved = zip(jaxpr.eqns, [way for way in ways if len(way) > 1], strict=False)
    rows = [*(Row(operation_text(eqn), (way,), way[1:]) for eqn, way in moved), *(saved.rows or ())]
    if list(map(_shape, rows)) != list(map(_shape, rows_before_placing(jaxpr))):
        raise ArgumentError(f"{wrong} rows are missing, or operands in one.")
    placed, lines = _placed(problem, asked.mesh, ports_in(problem, [way[0] for way in ways], rows))
    if lines:
        raise ArgumentError(all_offenders(wrong, lines))
    try:
        return insert_boxing(problem, placed, asked.mesh, paths=(path for row in rows for path in row.reads))
    except PlacementError as error:
        raise ArgumentError(f"{wrong} {error}") from error


def _placed(
    problem: Problem, mesh: MeshView, known: Mapping[Node, Mapping[int, Placement]]
) -> tuple[Placed, list[str]]:
    """The choice of each node that has the known placements at its ports, and a line for each that has none."""
    domains = Domains(problem, mesh, [a for a, n in mesh.axes if n > 1])
    choices, lines = [0] * len(problem.nodes), list[str]()
    for node, ports in known.items():
        if node.pin is not None and node.pin.fixed is None:
            legal = all(map(node.pin.allows, ports.values()))
        else:
            found = domains.of[node.number].choices_at(ports)
            choices[node.number], legal = int(found.argmax()), bool(found.any())
        if not legal:
            what = node.eqn.primitive.name if node.eqn is not None else f"{node.kind} {node.path}".rstrip()
            lines.append(f"{what} cannot be computed at {', '.join(map(placement_word, ports.values()))}.")
    ports_of = {n: domains.placements(n, choices[n.number]) for n in problem.nodes}
    return Placed(ports_of, math.nan, math.inf), _some(list(dict.fromkeys(lines)))


def _is_possible(placement: Placement, rank: int, mesh: MeshView) -> bool:
    return placement.keys() <= mesh.sizes.keys() and all(dim in range(rank) for dim in placement.splits)


def _shape(row: Row) -> tuple[str, list[bool], int]:
    return row.text, [bool(path) for path in row.reads], len(row.makes)
