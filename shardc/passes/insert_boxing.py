"""Puts the boxings into the program: `y = f x --> x' = box[src dst] x; y = f x'`.

After this pass every variable has one placement. `box` is the identity on the logical value, so the program still runs
on one device and gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.mesh import MeshView
from shardc.passes.place import Placed
from shardc.passes.problem import Nested, Node, Problem, Scope, itemsize_of
from shardc.sbp.boxing import Boxing, find_boxing
from shardc.sbp.placement import REPLICATED, Placement

box_p = Primitive("box")
box_p.def_impl(lambda x, *, src, dst, source: x)
box_p.def_abstract_eval(lambda x, *, src, dst, source: x)
mlir.register_lowering(box_p, lambda ctx, x, *, src, dst, source: [x])


@dataclass(frozen=True)
class Boxed:
    """A program with its boxings in it.

    Attributes:
      jaxpr: the program; `box` equations stand before their readers.
      placements: of every variable, those of nested bodies included.
    """

    jaxpr: Jaxpr
    placements: Mapping[Var, Placement]


@dataclass
class _Held:
    """A value in one scope: the placements that it is there in, and where it is held for its readers."""

    at: dict[Placement, Var]
    source: str
    made_by: Eqn | None
    hold: Placement | None


@dataclass
class _Inserter:
    problem: Problem
    placed: Placed
    mesh: MeshView
    placements: dict[Var, Placement] = field(default_factory=dict[Var, Placement])

    def scope(
        self, scope: Scope, inputs: Sequence[Placement], sources: Sequence[str], returns: Sequence[Placement]
    ) -> Jaxpr:
        """The jaxpr of a scope with boxings; its inputs come and its outputs leave at the given placements."""
        env: dict[Var, _Held] = {}
        eqns: list[Eqn] = []

        def define(var: Var, placement: Placement, value: Any, source: str, eqn: Eqn | None) -> None:
            self.placements[var] = placement
            hold = self.problem.holds.get(id(value)) if value is not None else None
            env[var] = _Held({placement: var}, source, eqn, self.placed.ports[hold][0] if hold else None)

        def read(atom: Atom, want: Placement) -> Atom:
            held = _Held({REPLICATED: atom}, "", None, None) if compat.is_literal(atom) else env[atom]
            if want in held.at:
                return held.at[want]
            if held.hold is not None and held.hold not in held.at:
                born = next(iter(held.at))
                through = self._boxing(atom, held.hold, want).seconds
                if through < self._boxing(atom, born, want).seconds:
                    read_to(atom, held, held.hold)
                    if want == held.hold:
                        return held.at[want]
            return read_to(atom, held, want)

        def read_to(atom: Atom, held: _Held, want: Placement) -> Var:
            src = min(held.at, key=lambda p: self._boxing(atom, p, want).seconds)
            var = compat.fresh_var(atom.aval)
            params = {"src": src, "dst": want, "source": held.source}
            eqns.append(compat.new_eqn([held.at[src]], [var], box_p, params, held.made_by))
            held.at[want] = var
            self.placements[var] = want
            return var

        for var, placement, value, source in zip(scope.jaxpr.invars, inputs, scope.inputs, sources, strict=True):
            define(var, placement, value, source, None)
        for eqn, node in zip(scope.jaxpr.eqns, scope.nodes, strict=True):
            if isinstance(node, Nested):
                entered = [read(a, self._port(n, 0)) for a, n in zip(eqn.invars, node.entries, strict=True)]
                source = compat.source_line(eqn)
                eqns.append(eqn.replace(invars=entered, params=self._nested(eqn, node, source)))
                for var, n in zip(eqn.outvars, node.exits, strict=True):
                    define(var, self._port(n, -1), n.results[-1], source, eqn)
            else:
                ports = self.placed.ports[node]
                split = len(node.operands)
                invars = [read(a, p) for a, p in zip(eqn.invars, ports[:split], strict=True)]
                eqns.append(eqn.replace(invars=invars))
                known = (env[a].source for a in eqn.invars if not compat.is_literal(a))
                source = compat.source_line(eqn) or next(known, "")
                for var, p, value in zip(eqn.outvars, ports[split:], node.results, strict=True):
                    define(var, p, value, source, eqn)
        outvars = [read(a, p) for a, p in zip(scope.jaxpr.outvars, returns, strict=True)]
        return compat.new_jaxpr(scope.jaxpr.invars, outvars, eqns, scope.jaxpr)

    def _port(self, node: Node, port: int) -> Placement:
        return self.placed.ports[node][port]

    def _nested(self, eqn: Eqn, nested: Nested, source: str) -> dict[str, Any]:
        """Parameters of a nested equation with its bodies boxed."""
        bodies: list[Jaxpr] = []
        for k, (scope, returns) in enumerate(zip(nested.scopes, nested.returns, strict=True)):
            entries = self._entries_of(eqn, nested, k)
            inputs = [self._port(n, len(n.operands)) for n in entries]
            back = [self._port(n, port) for n, port in returns] or [REPLICATED] * len(scope.outputs)
            bodies.append(self.scope(scope, inputs, [source] * len(inputs), back))
        params = dict(eqn.params)
        match eqn.primitive.name:
            case "scan":
                params["jaxpr"] = compat.close(bodies[0])
            case "while":
                params["cond_jaxpr"], params["body_jaxpr"] = map(compat.close, bodies)
            case "cond":
                params["branches"] = tuple(map(compat.close, bodies))
            case "optimization_barrier":
                pass
            case _:
                params["jaxpr"] = bodies[0]
        return params

    @staticmethod
    def _entries_of(eqn: Eqn, nested: Nested, k: int) -> list[Node]:
        """The carriers that scope `k` of a nested equation takes its inputs from."""
        if eqn.primitive.name == "while":
            nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            consts = nested.entries[:nc] if k == 0 else nested.entries[nc : nc + nb]
            return [*consts, *nested.entries[nc + nb :]]
        return nested.entries[1:] if eqn.primitive.name == "cond" else nested.entries

    def _boxing(self, atom: Atom, src: Placement, dst: Placement) -> Boxing:
        return find_boxing(tuple(atom.aval.shape), itemsize_of(atom.aval), src, dst, self.mesh)


def insert_boxing(problem: Problem, placed: Placed, mesh: MeshView) -> Boxed:
    """The problem's program with the boxings that its placement needs."""
    ins = _Inserter(problem, placed, mesh)
    inputs = [placed.ports[n][-1] for n in problem.sources]
    returns = [placed.ports[n][0] for n in problem.sinks]
    sources = [f"argument {n.path}" for n in problem.sources]
    return Boxed(ins.scope(problem.scope, inputs, sources, returns), ins.placements)
