"""Lowers a boxed program to the computation of one device on its pieces, inside shard_map.

Each equation runs its rule's local piece, each `box` the steps of its path, each `memory_move` a copy between the
memories of a device and its host. Nothing else moves data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p, boxing_of
from shardc.ir.constrain import pin_of
from shardc.ir.host_callback import run_once, runs_once
from shardc.ir.loop import Loop
from shardc.ir.memory_move import is_memory_move
from shardc.ir.nested import REMAT, bodies_of, is_kept_apart, parted, while_of
from shardc.ir.transfer import send_p
from shardc.ir.user_shard_map import is_unit, run_unit
from shardc.ir.walk import all_eqns, is_narrow_copy, operation_of
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import PRODUCTS
from shardc.passes.lower.lower_boxing import MeshWire, emit_step
from shardc.sbp.boxing import Shape
from shardc.sbp.cost import BoxingStep
from shardc.sbp.piece import run_piece
from shardc.sbp.placement import REPLICATED, Placement, is_even
from shardc.sbp.signature import Site, Wire, extent, find_rule, is_extended


class Lowering:
    """An interpreter of a boxed jaxpr on local pieces.

    Attributes:
      raised: exceptions of callbacks while it runs.
      index: the coordinate of this device along an axis.
      wire: the collectives inside operations.
    """

    def __init__(self, boxed: Boxed, mesh: MeshView) -> None:
        self.boxed, self.mesh = boxed, mesh
        self.raised: list[BaseException] = []
        self.sizes = {a: n for a, n in mesh.axes if n > 1}
        self.index: Callable[[str], Any] = lax.axis_index
        self.wire: Wire = MeshWire(self.sizes)
        # XLA:GPU fuses zeros with what overwrites them; an empty array takes memory from the start of the program on
        # XLA:CPU has not all products of bfloat16 that give float32, which a plan that was saved for a TPU may ask for
        narrowed = mesh.topology.backend == "cpu" and any(map(is_narrow_copy, all_eqns(boxed.jaxpr)))
        self.widened = PRODUCTS if narrowed else frozenset[str]()
        self.blank = jax.numpy.zeros if mesh.topology.backend == "gpu" else lax.empty

    def run(self, jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
        """The local results of a jaxpr from its local arguments. The user's rules of promotion are for their code."""
        env: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            for eqn in jaxpr.eqns:
                with compat.with_source(eqn):
                    results = self.equation(eqn, [read(a) for a in eqn.invars])
                env |= dict(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive is box_p:
            return [self.box(eqn, lax.optimization_barrier(operands)[0] if operands[1:] else operands[0])]
        if pin_of(eqn) is not None or eqn.primitive is send_p:
            return operands
        if is_memory_move(eqn):
            return [self.memory_move(eqn, operands[0])]
        nested = _NESTED.get(eqn.primitive.name)
        return nested(self, eqn, operands) if nested else self.operation(eqn, operands)

    def operation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if runs_once(eqn):
            return run_once(eqn, operands, self.sizes, self.raised)
        if is_unit(eqn):
            return run_unit(eqn, operands)
        if eqn.primitive.name in self.widened and eqn.outvars[0].aval.dtype == "float32":
            operands = [x.astype("float32") for x in operands]
        op = operation_of(eqn)
        rule = find_rule(op)
        site = Site(
            op,
            tuple(map(self.placement, eqn.invars)),
            tuple(map(self.placement, eqn.outvars)),
            self.sizes,
            self.index,
            compat.bind_with(eqn.primitive, eqn.params),
            self.wire,
            self.blank,
        )
        return run_piece(site, rule, operands)

    def placement(self, atom: Atom) -> Placement:
        return REPLICATED if compat.is_literal(atom) else self.boxed.placements[atom]

    def box(self, eqn: Eqn, x: Any) -> Any:
        aval = eqn.invars[0].aval
        shape = tuple(aval.shape)
        if compat.is_literal(eqn.invars[0]):
            x = jax.numpy.asarray(x, aval.dtype)
        steps = boxing_of(eqn, self.mesh).steps
        keys = x if is_extended(aval.dtype) else None
        if keys is not None:  # the words of the keys move: one more dimension
            x = jax.random.key_data(keys)
            shape = (*shape, *x.shape[keys.ndim :])
        for step in steps:
            x = self.step(eqn, step, x, shape)
        return x if keys is None else jax.random.wrap_key_data(x, impl=jax.random.key_impl(keys))

    def step(self, eqn: Eqn, step: BoxingStep, x: Any, shape: Shape) -> Any:
        """The piece after a step of a boxing."""
        del eqn
        return emit_step(step, x, shape, self.sizes, self.index)

    def scan(self, step: Callable[..., Any], carry: Any, xs: Any, length: int, reverse: bool, unroll: Any) -> Any:
        return lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=unroll)

    def while_loop(self, cond: Callable[..., Any], body: Callable[..., Any], init: list[Any], eqn: Eqn) -> list[Any]:
        del eqn
        return lax.while_loop(cond, body, init)

    def switch(self, index: Any, branches: Sequence[Callable[..., list[Any]]], operands: Sequence[Any]) -> list[Any]:
        return lax.switch(index, branches, *operands)

    def memory_move(self, eqn: Eqn, x: Any) -> Any:
        if eqn.params["to"] == "device":
            return jax.device_put(x, jax.memory.Space.Device)
        (v,) = eqn.outvars  # padding is hidden here, because nothing computes on the host
        return jax.device_put(self.hide_padding(x, tuple(v.aval.shape), self.placement(v)), jax.memory.Space.Host)

    def hide_padding(self, x: Any, shape: tuple[int, ...], placement: Placement) -> Any:
        """Zeroes the padding of a result that leaves the program unevenly split."""
        if is_even(shape, placement, self.sizes):
            return x
        for dim, size in enumerate(shape):
            axes = placement.axes_of(dim)
            if axes:
                _, valid = extent(size, axes, self.sizes, self.index)
                at = lax.broadcasted_iota(np.int32, x.shape, dim)
                x = lax.select(at < valid, x, lax.full_like(x, 0))
        return x


class WholeLowering(Lowering):
    """Runs on whole values on one device; boxings and moves to the host are the identity."""

    def box(self, eqn: Eqn, x: Any) -> Any:
        return x

    memory_move = box


def _scan(low: Lowering, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
    loop = Loop.of(eqn)
    body, afters = loop.body, [c.after for c in loop.carries]
    consts, carry, xs = parted(operands, loop.consts, loop.carries, loop.rows)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        carry, ys = parted(low.run(body, [*consts, *carry, *x]), loop.carries, loop.stacks)
        return list(map(_typed, carry, afters)), ys

    carry = list(map(_typed, carry, afters))
    carry, ys = low.scan(step, carry, xs, loop.length, loop.reverse, eqn.params["unroll"])
    return [*carry, *ys]


def _typed(x: Any, like: Atom) -> Any:
    """A carry with the logical dtype and weak type, so that it leaves the body as it came in."""
    return compat.as_aval(x, like.aval)


def _while(low: Lowering, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
    loop = while_of(eqn)
    cond, body = loop.cond, loop.body
    cond_consts, body_consts, init = parted(operands, loop.cond_consts, loop.body_consts, loop.carries)
    return low.while_loop(
        lambda carry: low.run(cond, [*cond_consts, *carry])[0],
        lambda carry: list(map(_typed, low.run(body, [*body_consts, *carry]), body.outvars)),
        list(map(_typed, init, body.outvars)),
        eqn,
    )


def _cond(low: Lowering, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
    index, *rest = operands

    def branch(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
        return lambda *xs: [_typed(o, v) for o, v in zip(low.run(jaxpr, xs), jaxpr.outvars, strict=True)]

    return low.switch(index, list(map(branch, bodies_of(eqn))), rest)


def _remat(low: Lowering, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
    """A remat in the backward pass recomputes; the barrier keeps XLA from sharing that with the forward pass."""
    if is_kept_apart(eqn):
        operands = list(lax.optimization_barrier(tuple(operands)))
    return low.run(bodies_of(eqn)[0], operands)


def _barrier(low: Lowering, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
    return lax.optimization_barrier(operands)


_NESTED: Final[Mapping[str, Callable[[Lowering, Eqn, list[Any]], Sequence[Any]]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "optimization_barrier": _barrier,
    **dict.fromkeys(REMAT, _remat),
}
