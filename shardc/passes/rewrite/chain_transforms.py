"""Takes Fourier transforms of several dimensions apart, into transforms of one dimension each.

    fft[3 dims] x   -->   fft over dim 2, then dim 1, then dim 0

A transform needs its dimensions whole. In a chain each step needs one: a volume that is split along one dimension is
transformed along the others first, exchanged once, and transformed along the last. Each step transposes its dimension
to the end and back, which one transform of several dimensions does not need.

The order decides how many exchanges there are. A dimension that a pin splits comes last, and a transform that follows
another one goes the other way: it begins with the dimension that is whole then. Real transforms leave no choice for
the last dimension: it is the first into the half spectrum, and the last out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.constrain import pin_of
from shardc.ir.nested import in_bodies
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns, renamed, with_atoms
from shardc.passes import Context
from shardc.passes.trace.canonicalize import inlined_eqns
from shardc.sbp.placement import Pin

Order: TypeAlias = tuple[int, ...]
"""The dimensions of a value, in the order in which a transform takes them."""
_FORWARD: Final = (lax.FftType.FFT, lax.FftType.RFFT)


def chain_transforms(program: Program, context: Context) -> Program:
    """The program with Fourier transforms of one dimension only; itself if it has no others."""
    if not any(map(_is_of_several, all_eqns(program.jaxpr))):
        return program
    chainer = _Chainer(dict(zip(program.jaxpr.invars, context.pins, strict=False)))
    return program.after("chain_transforms", chainer.run(program.jaxpr))


def _is_of_several(eqn: Eqn) -> bool:
    return eqn.primitive is primitives.fft_p and len(eqn.params["fft_lengths"]) > 1


class _Chainer:
    """The walk that takes transforms apart.

    Attributes:
      orders: of values that have one, because a pin splits them or a transform made them.
    """

    def __init__(self, pins: Mapping[Var, Pin | None]) -> None:
        self.orders: dict[Atom, Order] = {v: order for v, pin in pins.items() if (order := _order_of(pin, v))}

    def run(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns, names = list[Eqn](), dict[Var, Atom]()
        for old in jaxpr.eqns:
            eqn = with_atoms(old, names)
            if _is_of_several(eqn):
                found, (names[eqn.outvars[0]],) = self.chain(eqn)
                eqns += found
                continue
            eqn = in_bodies(eqn, self.run)
            self.pass_on(eqn)
            eqns.append(eqn)
        outvars = renamed(jaxpr.outvars, names)
        return compat.new_jaxpr(jaxpr.invars, outvars, eqns, jaxpr)

    def pass_on(self, eqn: Eqn) -> None:
        """Gives a result the order of its pin, or of the first operand that has one and the same shape."""
        for v in eqn.outvars:
            same = [a for a in eqn.invars if not compat.is_literal(a) and a.aval.shape == v.aval.shape]
            known = (self.orders[a] for a in same if a in self.orders)
            if order := _order_of(pin_of(eqn), v) or next(known, None):
                self.orders[v] = order

    def chain(self, eqn: Eqn) -> tuple[list[Eqn], list[Atom]]:
        """The equations of a chain, and its result."""
        (x,), kind, lengths = eqn.invars, eqn.params["fft_type"], eqn.params["fft_lengths"]
        rank = len(x.aval.shape)
        every = range(rank - len(lengths), rank)
        usual = tuple(reversed(every)) if kind in _FORWARD else tuple(every)
        order = [d for d in self.orders.get(x, usual) if d in every]
        if kind == lax.FftType.RFFT:
            order = [rank - 1, *(d for d in order if d != rank - 1)]
        if kind == lax.FftType.IRFFT:
            order = [*(d for d in order if d != rank - 1), rank - 1]
        found, results = inlined_eqns(_chain(eqn, order), [x], eqn, ())
        (out,) = results
        self.orders[out] = tuple(reversed(order))
        return found, results


def _order_of(pin: Pin | None, v: Var) -> Order | None:
    """The dimensions of a value, those that its pin splits last, and of the others the last one first; None if it
    splits none."""
    if pin is None or not pin.placement.splits:
        return None
    return tuple(sorted(range(len(v.aval.shape)), key=lambda d: (d in pin.placement.splits, -d)))


def _chain(eqn: Eqn, order: Sequence[int]) -> Any:
    """The closed jaxpr of transforms along the dimensions of `order`, one after the other."""
    kind, lengths = eqn.params["fft_type"], eqn.params["fft_lengths"]
    rank = len(eqn.invars[0].aval.shape)
    between = lax.FftType.FFT if kind in _FORWARD else lax.FftType.IFFT

    def run(x: Any) -> Any:
        for d in order:
            of_this = kind if d == rank - 1 else between
            y = jnp.moveaxis(x, d, -1)
            y = primitives.fft_p.bind(y, fft_type=of_this, fft_lengths=(lengths[d - rank],))
            x = jnp.moveaxis(y, -1, d)
        return x

    aval = eqn.invars[0].aval
    return jax.make_jaxpr(run)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
