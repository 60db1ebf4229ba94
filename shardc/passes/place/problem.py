"""The placement problem of a program: values, nodes with signatures, and the readers of each value.

Every equation becomes a node whose options are its one-axis signatures. Other nodes only carry a value and have the
same sbp at all ports: arguments, results, loop carries, the inputs and outputs of scan, while, cond and remat, and a
*hold* for each value with several readers. The graph is flat: a loop's body occurs once, weighted by its trip count.

A hold lets one boxing serve many readers: the value is boxed once, to the placement of the hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.constrain import pin_of
from shardc.ir.host_callback import once_signature, result_op, runs_once
from shardc.ir.nested import NESTED, REMAT, Body, nested_bodies
from shardc.ir.transfer import is_transfer
from shardc.ir.user_shard_map import is_unit, unit_placements, unit_signatures, whole_signature
from shardc.ir.walk import itemsize_of, operation_of
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import PRODUCTS, backend_of
from shardc.passes.estimate.traffic import PARTLY_READ, SCATTERS, UPDATED_OPERAND, accumulations, joined, narrows
from shardc.sbp import rules as _rules
from shardc.sbp.placement import SBP, B, P, Pin, Placement, ReduceOp, S
from shardc.sbp.signature import Operation, Rule, Signature, find_rule, gathered, signatures
from shardc.sbp.sub_axes import pin_in_sub_axes
from shardc.solver.kernels.numpy_kernels import kinds

del _rules  # importing it has registered its rules

_Offered: TypeAlias = tuple[Rule, tuple[Signature, ...], list[ReduceOp]]


@dataclass(eq=False, slots=True)
class Value:
    """One value of the program. `op`: the reduction that a partial placement P of it stands for."""

    aval: Any
    maker: Node
    port: int
    op: ReduceOp = "sum"
    weight: float = 1.0
    """Executions of the scope in which it is visible, and so of a boxing of it."""
    stacked: bool = False
    """Stacked results of a loop's steps: boxings that make them smaller belong inside the loop."""
    late: bool = False
    """Made once in a call, and no heavy operation depends on it: its collectives can start with those of others."""
    readers: list[Reader] = field(default_factory=list["Reader"])
    unsplit: frozenset[int] = frozenset()
    """Dimensions that are never split, because enough others behave like them (`shardc.passes.place.alike_dims`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def rank(self) -> int:
        return len(self.aval.shape)


@dataclass(eq=False, slots=True)
class Reader:
    """One use of a value by a node. `weight`: executions of a boxing for it. `small`: a boxing that makes the value
    larger is penalized."""

    node: Node
    port: int
    weight: float
    small: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """A constraint between the placements of values: an operation, or a node that carries a value.

    Attributes:
      kind: operation, source (argument), sink (result), carrier or hold.
      operands, results: the values at its ports; None is a literal.
      options: its one-axis signatures; each mesh axis chooses one of them.
      weight: its executions in one call.
      rule: the sharding rule of an operation.
      pin: the user's pin on a carrier, source or sink.
      fixed: for a unit (a user's shard_map), the number of its only option on each axis (0 on axes that are not given),
        and the placement at each port.
      plain: only placements of a jax.Array are allowed: no P, no uneven split.
      uneven: an uneven split is allowed although the node is plain, because a pin could ask for it.
      eqn: the equation.
      traffic: for a light operation, the ports whose values it reads from memory or writes to memory, and the share of
        each; for a product that only adds to what a loop carries, its result, which it reads too.
      group: for a light operation, a number that those which are fused with it have too.
      inside: whether it is part of a product (`accumulations`), and not of a group.
    """

    kind: str
    operands: list[Value | None]
    results: list[Value]
    options: tuple[Signature, ...]
    weight: float = 1.0
    rule: Rule | None = None
    pin: Pin | None = None
    fixed: tuple[Mapping[str, int], tuple[Placement, ...]] | None = None
    plain: bool = False
    uneven: bool = False
    eqn: Eqn | None = None
    path: str = ""
    number: int = -1
    traffic: tuple[tuple[int, float], ...] = ()
    group: int = -1
    inside: bool = False

    @property
    def equation(self) -> Eqn:
        """The equation of an operation."""
        assert self.eqn is not None
        return self.eqn

    @property
    def is_light(self) -> bool:
        """Whether it is an operation that is bound by memory bandwidth, and that XLA fuses with others like it."""
        return self.kind == "operation" and self.fixed is None and self.rule is not None and not self.rule.is_heavy

    @property
    def is_grouped(self) -> bool:
        """Whether it is a light operation that moves the bytes of its group."""
        return self.is_light and not self.inside

    @property
    def avals(self) -> list[Any]:
        return [v.aval if v is not None else None for v in (*self.operands, *self.results)]


@dataclass(eq=False)
class Nested:
    """A scan, while, cond or remat: carriers for its operands and results, and a scope for each body.

    Attributes:
      entries: for each operand of the equation the carrier by which it enters.
      scopes: the scope of each body.
      exits: for each result of the equation the carrier by which it leaves.
      returns: for each scope and each of its outputs, the (node, port) that reads this output.
      bodies: the bodies.
    """

    entries: list[Node]
    scopes: list[Scope]
    exits: list[Node]
    returns: list[list[tuple[Node, int]]]
    bodies: list[Body]

    def entries_into(self, k: int) -> list[Node]:
        """The carriers of the inputs of scope `k`."""
        return [self.entries[n] for n in self.bodies[k].operands]


@dataclass(eq=False)
class Scope:
    """One jaxpr with the node of each of its equations."""

    jaxpr: Jaxpr
    inputs: list[Value]
    nodes: list[Node | Nested] = field(default_factory=list["Node | Nested"])
    outputs: list[Value | None] = field(default_factory=list["Value | None"])


@dataclass(eq=False)
class Problem:
    """The placement problem of a whole program.

    Attributes:
      scope: the top scope.
      nodes: all nodes.
      sources, sinks: the nodes of the arguments, and of the results.
      holds: the hold of each value that has one, by the value's id.
      values: the value of every variable, those of nested bodies included.
      late: number and bytes of the late values that are computed from no late value, such as gradients.
    """

    scope: Scope
    nodes: list[Node]
    sources: list[Node]
    sinks: list[Node]
    holds: dict[int, Node]
    values: dict[Var, Value]
    late: tuple[int, int] = (0, 0)

    def view_for(self, value: Value | None, mesh: MeshView) -> MeshView:
        """The mesh for the cost of boxing a value. Collectives of late values count as combined into as few as can
        carry all late values, which share the start latency."""
        if value is None or not value.late or not mesh.topology.combined:
            return mesh
        count, size = self.late
        most = min(most for _, most in mesh.topology.combined)
        return mesh.where_start_is_shared(max(1, count // max(1, math.ceil(size / most))))


@lru_cache(maxsize=4096)
def _same(
    operands: tuple[int, ...], results: tuple[int, ...], shape: tuple[int, ...], partial: bool, op: ReduceOp,
    pinned: tuple[int, ...],
) -> tuple[Signature, ...]:  # fmt: skip
    """Options of a node that only carries a value of `shape`: B, P(op) if allowed, and each split.

    `operands` and `results` say by how much the dimensions of a port are shifted. A split of one element gains nothing,
    so dimensions of size 1 are only split where they are `pinned`.
    """

    def all_ports(sbp: SBP, split: str | None = None) -> Signature:
        def shifted(by: int) -> SBP:
            return S(sbp.dim + by) if isinstance(sbp, S) else sbp

        return Signature(tuple(map(shifted, operands)), tuple(map(shifted, results)), split)

    found = [all_ports(B)]
    if partial:
        found.append(all_ports(P(op)))
    found += [all_ports(S(d), f"d{d}") for d, n in enumerate(shape) if n != 1 or d in pinned]
    return tuple(found)


def _summable(dtype: Any, op: ReduceOp) -> bool:
    """Whether values of `dtype` can be partial by the reduction `op`."""
    return not _is_key(dtype) and (dtype != np.bool_ or op != "sum")


def _is_key(dtype: Any) -> bool:
    return not isinstance(dtype, np.dtype)


@dataclass(frozen=True, slots=True)
class Carried:
    """The value that a carrier carries.

    Attributes:
      aval: its type, without the leading dimensions of `shift_in` and `shift_out`.
      shift_in, shift_out: the number of additional leading dimensions of the carrier's operands, and of its results: 0
        or 1.
      pin: the user's pin.
      op: the reduction that P stands for.
    """

    aval: Any
    shift_in: int = 0
    shift_out: int = 0
    pin: Pin | None = None
    op: ReduceOp = "sum"


class Builder:
    """The walk over a canonical program that builds its problem."""

    def __init__(self, mesh: MeshView | None) -> None:
        self.mesh, self.idle = mesh, () if mesh is None else mesh.idle
        self.nodes: list[Node] = []
        self.values: dict[Var, Value] = {}
        self._offered: dict[Hashable, _Offered] = {}
        self._known: dict[Hashable, _Offered] = {}

    def add(self, node: Node) -> Node:
        node.number = len(self.nodes)
        self.nodes.append(node)
        return node

    def read(self, value: Value | None, node: Node, port: int, weight: float, small: bool = False) -> None:
        if value is not None:
            value.readers.append(Reader(node, port, weight, small))

    def carrier(
        self, kind: str, carried: Carried, operands: list[Value | None], outs: Sequence[tuple[Any, float]]
    ) -> Node:
        """A node with one sbp for all ports and no cost of its own. `outs`: aval and weight of each result."""
        aval, op = carried.aval, carried.op
        pin = None if carried.pin is None else carried.pin.without(self.idle)
        pin = pin if pin is None or self.mesh is None else pin_in_sub_axes(pin, self.mesh)
        pinned = tuple(pin.placement.splits) if pin is not None else ()
        ports = ((carried.shift_in,) * len(operands), (carried.shift_out,) * len(outs))
        options = _same(*ports, tuple(aval.shape), _summable(aval.dtype, op), op, pinned)
        node = self.add(Node(kind, operands, [], options, 0.0, pin=pin))
        node.results = [Value(a, node, i, op, w) for i, (a, w) in enumerate(outs)]
        return node

    def build(self, jaxpr: Jaxpr, env: dict[Var, Value], weight: float) -> Scope:
        scope = Scope(jaxpr, [env[v] for v in jaxpr.invars])

        def find(atom: Atom) -> Value | None:
            return None if compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [find(a) for a in eqn.invars]
            if eqn.primitive.name in NESTED:
                made = self.nested(eqn, operands, weight)
                results = [node.results[-1] for node in made.exits]
            else:
                made = self.operation(eqn, operands, weight)
                results = made.results
            scope.nodes.append(made)
            env |= dict(zip(eqn.outvars, results, strict=True))
        scope.outputs = [find(a) for a in jaxpr.outvars]
        self.values |= env
        return scope

    def operation(self, eqn: Eqn, operands: list[Value | None], weight: float) -> Node:
        pin = pin_of(eqn)
        if is_transfer(eqn):
            aval = eqn.outvars[0].aval
            node = self.carrier("carrier", Carried(aval, pin=eqn.params["pin"]), operands, [(aval, weight)])
            node.options = tuple(s for s in node.options if not isinstance(s.results[0], P))
            node.eqn, node.path, node.weight = eqn, eqn.primitive.name, weight
        elif pin is not None:
            aval = eqn.outvars[0].aval
            op = pin.placement.partial_op or "sum"
            node = self.carrier("carrier", Carried(aval, pin=pin, op=op), operands, [(aval, weight)])
            node.eqn, node.path = eqn, "constrain"
        elif runs_once(eqn):
            rule = gathered(operation_of(eqn))
            node = self.add(Node("operation", operands, [], (once_signature(eqn),), weight, rule, eqn=eqn))
            node.results = [Value(v.aval, node, i, result_op(v.aval), weight) for i, v in enumerate(eqn.outvars)]
        elif is_unit(eqn):
            along = unit_signatures(eqn)
            options = (whole_signature(eqn), *along.values())
            node = self.add(Node("operation", operands, [], options, weight, gathered(operation_of(eqn)), eqn=eqn))
            ports = tuple(p.without(self.idle) for p in unit_placements(eqn))
            node.fixed = ({a: i for i, a in enumerate(along, 1)}, ports)
            node.results = [Value(v.aval, node, i, weight=weight) for i, v in enumerate(eqn.outvars)]
        else:
            rule, options, ops = self.offered(eqn, operands)
            node = self.add(Node("operation", operands, [], options, weight, rule, eqn=eqn))
            node.results = [Value(v.aval, node, i, ops[i], weight) for i, v in enumerate(eqn.outvars)]
        for i, value in enumerate(operands):
            self.read(value, node, i, weight)
        return node

    def offered(self, eqn: Eqn, operands: Sequence[Value | None]) -> _Offered:
        """The rule of an operation, its options and the meaning of P for its results; equal operations share them. A
        program has few avals, so most are found by the identity of theirs."""
        avals = [id(a.aval) for a in eqn.invars], [id(v.aval) for v in eqn.outvars]
        partly = tuple([v and v.op for v in operands])
        key = (eqn.primitive, *map(tuple, avals), tuple(eqn.params.items()), partly)
        try:
            known = self._known.get(key)
        except TypeError:  # parameters that do not hash
            return _offer(operation_of(eqn), operands)
        if known is None:
            op = operation_of(eqn)
            sides = tuple((a.shape, a.dtype) for a in (*op.operands, *op.results))
            said = (op.name, sides, *key[3:])
            if said not in self._offered:
                self._offered[said] = _offer(op, operands)
            known = self._known[key] = self._offered[said]
        return known

    def nested(self, eqn: Eqn, operands: list[Value | None], weight: float) -> Nested:
        """The carriers on the border of a nested equation, and the scopes of its bodies."""
        bodies = nested_bodies(eqn)
        if not bodies:  # a barrier
            both = zip(operands, eqn.outvars, strict=True)
            made = [self.entry([v], Carried(out.aval), [(out.aval, weight)], weight) for v, out in both]
            return Nested(made, [], made, [], bodies)
        inner, last, scopes = weight * bodies[0].trips, bodies[-1], list[Scope]()
        insides = [weight * b.runs for b in bodies]
        takers = [[(b, b.operands.index(n)) for b in bodies if n in b.operands] for n in range(len(operands))]
        entries = [self.entered(eqn, v, mine, weight) for v, mine in zip(operands, takers, strict=True)]
        for body, inside in zip(bodies, insides, strict=True):
            inputs = [entries[n].results[takers[n].index((body, i))] for i, n in enumerate(body.operands)]
            scopes.append(self.build(body.jaxpr, dict(zip(body.jaxpr.invars, inputs, strict=True)), inside))
            if body.decides:
                self.whole(scopes[-1].outputs[0], inner)
        exits: list[Node] = []
        for j, out in enumerate(eqn.outvars):
            values = [scope.outputs[j] for scope, body in zip(scopes, bodies, strict=True) if not body.decides]
            if j < last.carries:
                node = entries[last.carried[j]]
                node.operands[1] = values[0]
                self.read(values[0], node, 1, inner)
            else:
                node = self.exit(values, last.jaxpr.outvars[j].aval, out.aval, weight, insides[-len(values) :])
            exits.append(node)
        returns = [[(exits[j], 1 if j < body.carries else k) for j in body.results] for k, body in enumerate(bodies)]
        return Nested(entries, scopes, exits, returns, bodies)

    def entered(self, eqn: Eqn, value: Value | None, takers: Sequence[tuple[Body, int]], weight: float) -> Node:
        """The carrier of an operand of a nested equation. `takers`: the bodies that take it, and the numbers of their
        inputs; empty if the operand decides which body runs."""
        if not takers:
            node = self.add(Node("carrier", [value], [], (Signature((B,), ()),), weight))
            self.read(value, node, 0, weight)
            return node
        body, i = takers[-1]
        outs = [(b.jaxpr.invars[i].aval, weight * b.runs) for b, i in takers]
        aval, row, is_carry = outs[-1][0], i >= body.rows_at, body.fixed <= i < body.rows_at
        return self.entry(
            [value, None] if is_carry else [value], Carried(aval, shift_in=int(row)),
            [*outs, (aval, weight)] if is_carry else outs, weight, small=row or eqn.primitive.name in REMAT,
        )  # fmt: skip

    def entry(
        self, operands: list[Value | None], carried: Carried, outs: Sequence[tuple[Any, float]], weight: float,
        small: bool = False,
    ) -> Node:  # fmt: skip
        """The carrier of a value that enters a nested equation; for a loop carry it also takes the value of the last
        iteration."""
        node = self.carrier("carrier", carried, operands, outs)
        self.read(operands[0], node, 0, weight, small)
        return node

    def exit(self, inner: Sequence[Value | None], aval: Any, out: Any, weight: float, insides: Sequence[float]) -> Node:
        """The carrier of one result of a nested equation; `aval` is its type inside the body. `insides`: executions of
        the bodies."""
        stacked = len(out.shape) > len(aval.shape)
        node = self.carrier("carrier", Carried(aval, shift_out=int(stacked)), list(inner), [(out, weight)])
        for port, (value, inside) in enumerate(zip(inner, insides, strict=True)):
            self.read(value, node, port, inside)
        node.results[0].stacked = stacked
        return node

    def whole(self, value: Value | None, weight: float) -> None:
        """Require that `value` is replicated, because it decides control flow."""
        if value is not None:
            node = self.add(Node("sink", [value], [], (Signature((B,), ()),), weight))
            self.read(value, node, 0, weight)


def _offer(op: Operation, operands: Sequence[Value | None]) -> _Offered:
    rule = find_rule(op)
    return rule, *_with_ops(signatures(rule, op), operands, len(op.results))


def _with_ops(
    options: tuple[Signature, ...], operands: Sequence[Value | None], results: int
) -> tuple[tuple[Signature, ...], list[ReduceOp]]:
    """The options whose partial operands agree with the values' reductions, and the reduction that P stands for in each
    result."""

    def fits(sbp: object, value: Value | None) -> bool:
        return not isinstance(sbp, P) or value is None or value.op == sbp.op

    fit = [s for s in options if all(map(fits, s.operands, operands))]
    ops: list[ReduceOp] = []
    for i in range(results):
        found: list[ReduceOp] = [sbp.op for s in fit if isinstance(sbp := s.results[i], P) and _of_values(s, operands)]
        other: list[ReduceOp] = [op for op in found if op != "sum"]
        ops.append(other[0] if other else "sum")
    fit = [
        s for s in fit
        if all(not isinstance(sbp, P) or sbp.op == op for sbp, op in zip(s.results, ops, strict=True))
    ]  # fmt: skip
    return tuple(fit), ops


def _of_values(s: Signature, operands: Sequence[Value | None]) -> bool:
    """Whether a signature depends on the placement of some operand that is not a literal."""
    return any(sbp is not B and v is not None for sbp, v in zip(s.operands, operands, strict=True))


@dataclass(frozen=True, slots=True)
class Requirement:
    """The requirement on the placement of an argument or a result of the function.

    `pin`: the placement that was asked for; None: free. `tie`: for a result, the number of the donated argument whose
    placement it takes. `back`: for a result, the number of the argument that it may be in the next call; the boxing to
    the placement of this argument is priced, but no part of the plan.
    """

    pin: Pin | None = None
    tie: int | None = None
    back: int | None = None


NEXT_CALL: Final = 0.5
"""The share of the price of a boxing that the next call may need: a move that is avoided costs more in this call."""


def build_problem(
    jaxpr: Jaxpr,
    inputs: Sequence[Requirement],
    outputs: Sequence[Requirement],
    in_paths: Sequence[str],
    out_paths: Sequence[str],
    mesh: MeshView | None = None,
) -> Problem:
    """The problem of a canonical jaxpr under requirements on its arguments and results.

    Every pin and every user's shard_map becomes a node here, and loses the mesh's idle axes; pins are of its sub-axes.
    """
    b = Builder(mesh)
    sources: list[Node] = []
    for var, asked, path in zip(jaxpr.invars, inputs, in_paths, strict=True):
        node = b.carrier("source", Carried(var.aval, pin=asked.pin), [None], [(var.aval, 1.0)])
        node.plain, node.path = asked.pin is None, path
        sources.append(node)
    scope = b.build(jaxpr, {v: n.results[0] for v, n in zip(jaxpr.invars, sources, strict=True)}, 1.0)
    sinks: list[Node] = []
    for value, var, asked, path in zip(scope.outputs, jaxpr.outvars, outputs, out_paths, strict=True):
        if asked.tie is not None and asked.pin is None:
            node = sources[asked.tie]  # the argument reads the result, as a carry of a loop does
            node.operands[0] = value
        else:
            back = None if value is None or asked.pin is not None or asked.back is None else sources[asked.back]
            outs = [] if back is None else [(var.aval, 1.0)]
            node = b.carrier("sink", Carried(var.aval, pin=asked.pin), [value], outs)
            node.plain, node.path = asked.pin is None, path
            if back is not None:
                back.operands[0] = node.results[0]
                b.read(node.results[0], back, 0, NEXT_CALL)
        b.read(value, node, 0, 1.0)
        sinks.append(node)
    _keep_sums_apart(b)
    backend = None if mesh is None else backend_of(mesh.topology.backend)
    if backend is not None:
        _join_sums(accumulations(jaxpr, backend.accumulates_over), b)
    narrow = None if backend is None else backend.multiplies_in
    for value in [v for n in b.nodes for v in n.results]:
        _add_traffic(value, narrow)
    _join_fused(b)
    late = _find_late(b)
    return Problem(scope, b.nodes, sources, sinks, _add_holds(b), b.values, late)


def _find_late(b: Builder) -> tuple[int, int]:
    """Set `late` of each value. Dependences through the next iteration of a loop do not count. Returns
    `Problem.late`."""
    waited = [n for n in b.nodes if n.kind == "operation" and not n.is_light]
    busy = set(waited)
    early: set[int] = set()
    while waited:
        node = waited.pop()
        for v in () if node.kind == "source" else node.operands:
            if v is not None:
                early.add(id(v))
                if v.maker not in busy:
                    busy.add(v.maker)
                    waited.append(v.maker)
    first: list[Value] = []
    for node in b.nodes:
        for v in node.results:
            v.late = v.weight == 1 and id(v) not in early
            if v.late and node.kind != "source" and not any(o is not None and o.late for o in node.operands):
                first.append(v)
    return len(first), sum(math.prod(v.shape) * itemsize_of(v.aval) for v in first)


def _keep_sums_apart(b: Builder) -> None:
    """Separate partial maxima and minima from partial sums: insert a carrier that is not partial where a value partial
    by max or min enters a carrier whose P is a sum."""
    for value in [v for n in b.nodes for v in n.results if v.op != "sum"]:
        for k, reader in enumerate(value.readers):
            same = any(s.operands[reader.port] == P(value.op) for s in reader.node.options)
            if reader.node.kind != "operation" and not same:
                between = b.carrier("carrier", Carried(value.aval), [value], [(value.aval, reader.weight)])
                between.options = tuple(s for s in between.options if not isinstance(s.operands[0], P))
                value.readers[k] = Reader(between, 0, reader.weight, reader.small)
                b.read(between.results[0], reader.node, reader.port, reader.weight, reader.small)
                reader.node.operands[reader.port] = between.results[0]


def _join_sums(found: Mapping[Eqn, Sequence[Eqn]], b: Builder) -> None:
    """Make sums part of the products that add to what a loop carries."""
    nodes = {n.eqn: n for n in b.nodes if n.eqn is not None} if found else {}
    for eqn, parts in found.items():
        nodes[eqn].traffic = ((len(eqn.invars), 1.0),)
        for part in parts:
            nodes[part].inside = True


def _add_traffic(value: Value, narrow: Any) -> None:
    """Add a value to the memory traffic of the light operations that move its bytes after fusion (`fused_bytes` counts
    it later). A light maker writes the value if another kind of operation reads it, or if it is a scatter. If another
    kind of operation made it, all light readers together read it once. `narrow`: of the backend (`traffic`)."""
    maker = value.maker
    if _says_where(maker) or _is_in_products(maker, narrow):
        return
    readers = list(_readers(value)) if any(r.node.kind == "carrier" for r in value.readers) else value.readers
    light = [r for r in readers if r.node.is_grouped and not _is_in_products(r.node, narrow)]
    if not maker.is_grouped:
        for r in light:
            name, port = _name(r.node), r.port
            if port == 0 and name in PARTLY_READ:
                port = len(r.node.operands)
            if port or name not in UPDATED_OPERAND:
                r.node.traffic += ((port, 1 / len(light)),)
    elif len(light) < len(readers) or _name(maker) in SCATTERS:
        port = UPDATED_OPERAND.get(_name(maker), len(maker.operands) + value.port)
        maker.traffic += ((port, 1.0),)


def _is_in_products(node: Node, narrow: Any) -> bool:
    """Whether products make a conversion as they read, of a value that is in memory."""
    if node.eqn is None or not narrows(node.eqn, narrow) or node.kind != "operation":
        return False
    (operand,), (result,) = node.operands, node.results
    reading = all(r.node.eqn is not None and r.node.eqn.primitive.name in PRODUCTS for r in result.readers)
    return reading and operand is not None and not operand.maker.is_grouped


def _join_fused(b: Builder) -> None:
    """Set `group` of each light operation, as `fused_groups` joins them."""
    values = (v for n in b.nodes if n.is_grouped for v in n.results)
    pairs = ((v.maker.number, r.node.number) for v in values for r in _readers(v) if r.node.is_grouped)
    for n, group in zip(b.nodes, joined(len(b.nodes), pairs), strict=True):
        n.group = group if n.is_grouped else -1


def _readers(value: Value) -> Iterator[Reader]:
    """The readers of a value. A pin is not a reader; the readers of its result are."""
    for r in value.readers:
        if _says_where(r.node):
            yield from _readers(r.node.results[0])
        else:
            yield r


def _says_where(n: Node) -> bool:
    return n.kind == "carrier" and n.eqn is not None and pin_of(n.eqn) is not None


def _name(n: Node) -> str:
    assert n.eqn is not None
    return n.eqn.primitive.name


def _add_holds(b: Builder) -> dict[int, Node]:
    holds: dict[int, Node] = {}
    for node, port in [(n, i) for n in b.nodes for i in range(len(n.results))]:
        value = node.results[port]
        free = [r for r in value.readers if not r.small]
        if node.kind == "hold" or len(free) < 2:
            continue
        hold = b.carrier("hold", Carried(value.aval, op=value.op), [value], [(value.aval, value.weight)])
        held = hold.results[0]
        held.stacked, held.late, held.readers = value.stacked, value.late, free
        value.readers = [r for r in value.readers if r.small]
        value.readers.append(Reader(hold, 0, value.weight))
        holds[id(value)] = hold
    return holds


def digits(options: Sequence[Signature], ports: int) -> NDArray[np.int64]:
    """Options as a matrix (option, port) of small numbers: 0 is B, 1 is P, 2 + d is S(d)."""
    rows = [[digit_of(s) for s in itertools.chain(o.operands, o.results)] for o in options]
    return np.asarray(rows, np.int64).reshape(len(options), ports)


def digit_of(sbp: object) -> int:
    return sbp.dim + 2 if isinstance(sbp, S) else 1 if isinstance(sbp, P) else 0


def first_of_alike(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.intp]:
    """The first row of each set of rows that are equal in all columns, in their order."""
    return kinds(np.ascontiguousarray(np.asarray(columns, np.int64).T).view(np.uint64))[0]
