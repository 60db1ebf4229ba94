"""Lowers a saved plan: a program and where its values were --> the boxed program, as it was, without a search."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.errors import ArgumentError, all_offenders, did_you_mean
from shardc.ir.box import Boxed, box_p
from shardc.ir.nested import NESTED, bodies_of, with_bodies
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns, operation_of
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import backend_of
from shardc.passes.place.insert_boxing import latest
from shardc.passes.place.problem import Node, Problem
from shardc.passes.recompute.recompute import choice_named, recompute, recomputed
from shardc.plan.borders import match_donated, moves, pin_entries, problem_of
from shardc.plan.counterfactual import ports_in
from shardc.plan.plan import SpmdPlan
from shardc.plan.request import Argument, Request
from shardc.plan.rewrites import rewritten
from shardc.plan.saved_json import rows_of
from shardc.plan.saved_plan import SavedLeaf, SavedPlan, digests, operation_text, placement_word
from shardc.sbp.placement import REPLICATED, Pin, Placement
from shardc.sbp.ring import Ring, goes_around, ring_of, ring_signatures
from shardc.sbp.signature import Setting, Signature

MOST = 4
"""Operations that an error names, of each sort."""


def replay(saved: SavedPlan, request: Request) -> SpmdPlan:
    """The plan that was saved, of the same program.

    Raises:
      ArgumentError: the program or the mesh is another one, and all that differs is named; or a pin of the function is
        not kept; or the file was changed so that it is no plan.
    """
    pinned = {path: saved.arguments[path].placement for path in saved.pinned if path in saved.arguments}
    request = rewritten(request, saved.rewrites, saved.shared, pinned)
    program, mesh = request.program, request.mesh
    where = f"{saved.name} is not a plan of {program.name} as it is called"
    if saved.operations is None:
        raise ArgumentError(
            f"{saved.name} holds the borders of a pipeline's plan alone; pin them, with "
            "in_placements=shardc.load_plan(...).in_placements, and leave plan= out."
        )
    jaxpr, cheaper = recompute(program.jaxpr, choice_named(program.jaxpr, saved.cheaper))
    jaxpr, recomputation = recompute(jaxpr, choice_named(jaxpr, saved.recomputed))
    program = program.after("recompute", jaxpr)
    wrong = _differences(saved, program, mesh) + _pins_not_kept(saved, program, request)
    if wrong:
        raise ArgumentError(
            all_offenders(f"{where}; leave plan= out to plan it anew, and save that with plan.save(...):", wrong)
        )
    leaves = [*saved.arguments.values(), *saved.captured]
    arguments = [*request.arguments, *[Argument()] * (len(leaves) - len(request.arguments))]
    pinned = [replace(a, pin=Pin(p.placement, said=saved.name)) for a, p in zip(arguments, leaves, strict=True)]
    ends = [Pin(leaf.placement, said=saved.name) for leaf in saved.results.values()]
    program = pin_entries(program, pinned)
    ties = match_donated(program, pinned)
    asked = replace(request, program=program, arguments=tuple(pinned), results=tuple(ends))
    problem = problem_of(asked, ties)
    boxed = _Replayer(saved, problem, mesh).program(program, pinned)
    wrong = _illegal(problem, mesh, boxed)
    if wrong:
        raise ArgumentError(all_offenders(f"{saved.name} was changed so that it is no plan:", wrong))
    backend = backend_of(mesh.topology.kind)
    plan = SpmdPlan(
        program, mesh, boxed, tuple(boxed.placements[v] for v in boxed.jaxpr.invars),
        tuple(p.placement for p in ends), tuple(ties), request=asked, gap=saved.gap,
        recomputed=recomputed(boxed, mesh, backend, recomputation), cheaper=recomputed(boxed, mesh, backend, cheaper),
    )  # fmt: skip
    if math.isclose(plan.seconds, saved.seconds, rel_tol=1e-9):
        return plan
    return replace(plan, gap=None)  # by another cost model, or from elsewhere, it may be as good: nothing is proved


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
    now, then = list(map(operation_text, eqns)), [text for text, _ in saved.operations or ()]
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


@dataclass
class _Held:
    """A value in one scope: the placements that it is there in."""

    at: dict[Placement, Atom]
    source: str
    made_by: Eqn | None


class _Replayer:
    def __init__(self, saved: SavedPlan, problem: Problem, mesh: MeshView) -> None:
        self.saved, self.problem, self.mesh = saved, problem, mesh
        self._numbers = itertools.count()
        self.placements: dict[Var, Placement] = {}

    def program(self, program: Program, arguments: Sequence[Argument]) -> Boxed:
        jaxpr, count = program.jaxpr, sum(map(moves, arguments))
        env: dict[Var, _Held] = {}
        for var, a, path in zip(jaxpr.invars, arguments, program.in_paths, strict=True):
            assert a.pin is not None
            at = a.arrival if a.arrival is not None and moves(a) else a.pin.placement
            self._define(env, var, at, f"argument {path}", None)
        eqns: list[Eqn] = []
        for eqn in jaxpr.eqns[:count]:  # what arrives elsewhere is brought to where the plan has it
            (var,), (out,) = eqn.invars, eqn.outvars
            want = eqn.params["pin"].placement
            self._box(eqns, env[var], next(iter(env[var].at)), want, var)
            eqns.append(eqn.replace(invars=[env[var].at[want]]))
            self._define(env, out, want, env[var].source, eqn)
        rest, outvars = self._scope(jaxpr.eqns[count:], jaxpr.outvars, env, "results.", self._ends())
        return Boxed(compat.new_jaxpr(jaxpr.invars, outvars, [*eqns, *rest], jaxpr), self.placements)

    def _ends(self) -> list[Placement]:
        return [leaf.placement for leaf in self.saved.results.values()]

    def _define(self, env: dict[Var, _Held], var: Var, at: Placement, source: str, eqn: Eqn | None) -> None:
        self.placements[var] = at
        env[var] = _Held({at: var}, source, eqn)

    def _box(self, eqns: list[Eqn], held: _Held, src: Placement, dst: Placement, atom: Atom) -> None:
        var = compat.fresh_var(atom.aval)
        value = None if compat.is_literal(atom) else self.problem.values[atom]
        shared = self.problem.view_for(value, self.mesh).shared
        params = {"src": src, "dst": dst, "source": held.source, "shared": shared}
        after = latest(eqns) if dst in held.at else []  # boxed once more, not to be kept
        eqns.append(compat.new_eqn([held.at[src], *after], [var], box_p, params, held.made_by))
        held.at[dst] = var
        self.placements[var] = dst

    def _read(self, env: dict[Var, _Held], eqns: list[Eqn], atom: Atom, want: Placement, reader: str) -> Atom:
        held = _Held({REPLICATED: atom}, "", None) if compat.is_literal(atom) else env[atom]
        for src, dst in self.saved.boxings.get(reader, ()):
            if src in held.at:
                self._box(eqns, held, src, dst, atom)
        if want not in held.at:
            raise ArgumentError(
                f"{self.saved.name} was changed so that it is no plan: {reader} reads its value at "
                f"{placement_word(want)}, but it is only at {', '.join(map(placement_word, held.at))}."
            )
        return held.at[want]

    def _scope(
        self, eqns: Sequence[Eqn], outvars: Sequence[Atom], env: dict[Var, _Held], end: str, ends: Sequence[Placement]
    ) -> tuple[list[Eqn], list[Atom]]:
        made: list[Eqn] = []
        for eqn in eqns:
            n = next(self._numbers)
            assert self.saved.operations is not None
            (wants, gives), *inside = rows_of(self.saved.operations[n][1])
            invars = [
                self._read(env, made, a, want, f"{n}.{k}")
                for k, (a, want) in enumerate(zip(eqn.invars, wants, strict=True))
            ]
            source = compat.source_line(eqn)
            params = eqn.params
            if eqn.primitive.name in NESTED:
                params = with_bodies(eqn, [
                    self._body(body, f"{n}/{k}.", source, *row)
                    for k, (body, row) in enumerate(zip(bodies_of(eqn), inside, strict=True))
                ])  # fmt: skip
            else:
                known = (env[a].source for a in eqn.invars if not compat.is_literal(a))
                source = source or next(known, "")
            made.append(eqn.replace(invars=invars, params=params))
            for var, at in zip(eqn.outvars, gives, strict=True):
                self._define(env, var, at, source, eqn)
        leave = enumerate(zip(outvars, ends, strict=True))
        return made, [self._read(env, made, a, want, f"{end}{k}") for k, (a, want) in leave]

    def _body(
        self, body: Jaxpr, end: str, source: str, takes: Sequence[Placement], gives: Sequence[Placement]
    ) -> Jaxpr:
        env: dict[Var, _Held] = {}
        for var, at in zip(body.invars, takes, strict=True):
            self._define(env, var, at, source, None)
        eqns, outvars = self._scope(body.eqns, body.outvars, env, end, gives)
        return compat.new_jaxpr(body.invars, outvars, eqns, body)


def _illegal(problem: Problem, mesh: MeshView, boxed: Boxed) -> list[str]:
    """A line for each operation that cannot be computed at its placements."""
    axes = [a for a, n in mesh.axes if n > 1]
    known: dict[Any, bool] = {}
    lines: list[str] = []
    for node, ports in ports_in(problem, boxed).items():
        key = (id(node.options), id(node.fixed), id(node.rule), node.pin, tuple(ports.items()))
        if key not in known:
            known[key] = _is_legal(node, ports, axes, mesh)
        if not known[key]:
            at = ", ".join(map(placement_word, ports.values()))
            what = node.eqn.primitive.name if node.eqn is not None else f"{node.kind} {node.path}".rstrip()
            lines.append(f"{what} cannot be computed at {at}.")
    return _some(list(dict.fromkeys(lines)))


def _is_legal(node: Node, ports: Mapping[int, Placement], axes: Sequence[str], mesh: MeshView) -> bool:
    if node.pin is not None:
        return all(node.pin.allows(p) for p in ports.values())
    if node.fixed is not None:
        return all(p == node.fixed[1][port] for port, p in ports.items())
    before = {pair for p in ports.values() for names in p.splits.values() for pair in itertools.combinations(names, 2)}
    if any((b, a) in before for a, b in before):
        return False  # pieces of one operand are cut in another order than those of another
    splits: dict[str, int] = {}
    ring = _ring_at(node, ports, mesh)
    for axis in axes:
        options = node.options
        if ring is not None and node.rule is not None and axis == ring.axis:
            options = ring_signatures(node.rule, operation_of(node.equation))
        option = next((s for s in options if _fits(s, ports, axis)), None)
        if option is None:
            return False
        if option.split:
            splits[option.split] = splits.get(option.split, 1) * mesh.sizes[axis]
    granules = node.rule.granule if node.rule else {}
    return all(granules.get(f, 0) % n == 0 for f, n in splits.items())


def _ring_at(node: Node, ports: Mapping[int, Placement], mesh: MeshView) -> Ring | None:
    """The ring that an operation is, if it can be one."""
    count = len(node.operands)
    if node.rule is None or node.rule.terms is None or len(ports) < count + 1:
        return None
    at, sizes = [ports[k] for k in range(count + 1)], {a: n for a, n in mesh.axes if n > 1}
    setting = Setting(operation_of(node.equation), tuple(at[:count]), tuple(at[count:]), sizes)
    ring = ring_of(node.rule, setting)
    return ring if ring is not None and goes_around(ring, node.rule, setting) else None


def _fits(option: Signature, ports: Mapping[int, Placement], axis: str) -> bool:
    sbps = (*option.operands, *option.results)
    return all(sbps[port] == p[axis] for port, p in ports.items())
