"""Random meshes and placements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import AUTO, B, P, S
from shardc.sbp.placement import REDUCE_OPS, ReduceOp
from tests.harnesses.cases import Case

MESHES: tuple[dict[str, int], ...] = ({"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2})

mesh_of = functools.cache(lambda number: shardc.make_mesh(**MESHES[number]))


@dataclass(frozen=True)
class Draw:
    """A mesh, a pin (or AUTO) for each argument, and a pytree of them for the result.

    Pins of partial maxima and minima, which live only inside a function, are for `shardc.constrain`.
    """

    mesh: int
    ins: tuple[Any, ...]
    outs: Any

    def __str__(self) -> str:
        leaves = jax.tree.leaves(self.outs, is_leaf=is_pin)
        return f"mesh {MESHES[self.mesh]}, in {_text(self.ins)}, out {_text(leaves)}"

    def at_border(self) -> tuple[tuple[Any, ...], Any]:
        """`in_placements` of the arguments and `out_placements`; AUTO for what is pinned inside."""
        return jax.tree.map(lambda pin: AUTO if _is_inner(pin) else pin, (self.ins, self.outs), is_leaf=is_pin)

    def inside(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its arguments and results pinned where that cannot be said at the border."""

        def constrained(pins: Any, values: Any) -> Any:
            one = lambda pin, x: shardc.constrain(x, pin) if _is_inner(pin) else x  # noqa: E731
            return jax.tree.map(one, pins, values, is_leaf=is_pin)

        def run(*args: Any) -> Any:
            return constrained(self.outs, fn(*constrained(self.ins, args)))

        return run


def is_pin(x: object) -> bool:
    return x is AUTO or isinstance(x, dict)


def _is_inner(pin: Any) -> bool:
    return isinstance(pin, dict) and any(isinstance(s, P) and s.op != "sum" for s in pin.values())


def draw_for(case: Case, args: Sequence[Any], want: Any, *numbers: int) -> Draw:
    """The draw of a case that `numbers` (the seed, which draw of how many) stand for."""
    rng = np.random.default_rng(case.seed(*numbers))
    mesh = int(rng.integers(len(MESHES)))
    pin = lambda x: _pin(x, mesh, rng)  # noqa: E731
    return Draw(mesh, tuple(jax.tree.map(pin, list(args))), jax.tree.map(pin, want))


def _pin(x: Any, mesh: int, rng: np.random.Generator) -> Any:
    if rng.random() < 0.25:
        return AUTO
    ops = _partial_ops(x)
    partial = [P(ops[rng.integers(len(ops))])] if ops else []  # one for all axes: they do not mix
    sbps = [B, *map(S, range(np.ndim(x))), *partial]
    axes = rng.permutation(list(MESHES[mesh]))  # the order in which they cut
    return {str(axis): sbps[rng.integers(len(sbps))] for axis in axes}


def _partial_ops(x: Any) -> tuple[ReduceOp, ...]:
    """How a value may be partial.

    As a sum if it is finite, for an infinity less itself is no number. As a maximum if it has an order, and if what is
    no number stays none: of two bytes it comes out infinite, and a NaN below all numbers comes out above them.
    """
    dtype = x.dtype if hasattr(x, "dtype") else jnp.asarray(x).dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == np.bool_:
        return ()
    values = np.asarray(x).astype(np.complex128)
    finite = bool(np.isfinite(values).all())
    lost = np.isnan(values) & (np.signbit(values.real) | (dtype.itemsize < 4))
    ordered = not jnp.issubdtype(dtype, np.complexfloating) and not lost.any()
    return tuple(op for op in REDUCE_OPS if (finite if op == "sum" else ordered))


def _text(pins: Sequence[Any]) -> str:
    return "(" + ", ".join("AUTO" if p is AUTO else _dict_text(p) for p in pins) + ")"


def _dict_text(pin: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{a}: {s}" for a, s in pin.items()) + "}"
