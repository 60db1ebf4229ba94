"""The primitive behind `shardc.constrain`: the identity, with a pin that the planner keeps.

JAX's own sharding constraints are pins too. It differentiates and batches as the identity; the cotangent is free.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from shardc.compat import ClosedJaxpr, Eqn
from shardc.errors import PlacementError
from shardc.sbp.placement import Pin, Placement, S

constrain_p = Primitive("constrain")
"""A pin of a shardc function that is called in another trace has besides what JAX makes of it; shardc drops that.

`outside`: the jaxpr of a sharding constraint over the mesh of that function. JAX finds the devices in it.
`refused`: why JAX has none.
"""


def _plain(x: Any, *, pin: Pin, outside: ClosedJaxpr | None = None, refused: str = "") -> Any:
    if refused:
        raise PlacementError(refused)
    return x if outside is None else jex.jaxpr_as_fun(outside)(x)[0]


def _transpose(ct: Any, x: Any, *, pin: Pin, **outer: Any) -> list[Any]:
    """The cotangent is free; JAX constrains it as it does that of its own constraint."""
    return [constrain_p.bind(ct, pin=Pin(pin.placement, frozenset()), **outer) if outer else ct]


def _batch(args: Any, dims: Any, *, pin: Pin, outside: ClosedJaxpr | None = None, **outer: Any) -> tuple[Any, Any]:
    """Batching adds a dimension that the pin leaves whole."""
    ((x,), (dim,)) = args, dims
    moved = Placement([(a, S(s.dim + (s.dim >= dim)) if isinstance(s, S) else s) for a, s in pin.placement.items()])
    if outside is not None:
        one = lambda x: jex.jaxpr_as_fun(outside)(x)[0]  # noqa: E731
        outer["outside"] = jax.make_jaxpr(jax.vmap(one, dim, dim))(x)
    return constrain_p.bind(x, pin=Pin(moved, pin.fixed, pin.said), **outer), dim


constrain_p.def_impl(_plain)
constrain_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(constrain_p, _transpose)
mlir.register_lowering(constrain_p, mlir.lower_fun(_plain, multiple_results=False))
batching.primitive_batchers[constrain_p] = _batch


def pin_of(eqn: Eqn) -> Pin | None:
    """The pin of an equation; None if it is no constraint."""
    if eqn.primitive is constrain_p:
        return eqn.params["pin"]
    if eqn.primitive.name == "sharding_constraint":
        sharding = eqn.params["sharding"]
        if isinstance(sharding, NamedSharding):
            spec = sharding.spec
            rank = len(eqn.outvars[0].aval.shape)
            open_dims = {d for d, entry in enumerate(spec.partitions) if entry is PartitionSpec.UNCONSTRAINED}
            entries = (None if d in open_dims else entry for d, entry in enumerate(spec.partitions))
            known = PartitionSpec(*entries, unreduced=spec.unreduced)
            placement = Placement.from_spec(known).resolve(rank)
            free = open_dims or eqn.params.get("unconstrained_dims")
            return Pin(placement, frozenset(placement) if free else None)
    return None
