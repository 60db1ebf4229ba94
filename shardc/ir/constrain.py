"""The primitive behind `shardc.constrain`: the identity, with a pin that the planner keeps.

JAX's own sharding constraints are pins too. It differentiates and batches as the identity; the cotangent is free.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from shardc.compat import Eqn
from shardc.sbp.placement import Pin, Placement, S

constrain_p = Primitive("constrain")
constrain_p.def_impl(lambda x, *, pin: x)
constrain_p.def_abstract_eval(lambda x, *, pin: x)
ad.deflinear2(constrain_p, lambda ct, _, *, pin: [ct])
mlir.register_lowering(constrain_p, lambda ctx, x, *, pin: [x])


def _batch(args: Any, dims: Any, *, pin: Pin) -> tuple[Any, Any]:
    """Batching adds a dimension that the pin leaves whole."""
    ((x,), (dim,)) = args, dims
    moved = Placement([(a, S(s.dim + (s.dim >= dim)) if isinstance(s, S) else s) for a, s in pin.placement.items()])
    return constrain_p.bind(x, pin=Pin(moved, pin.fixed)), dim


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
            open_dims = {d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED}
            known = PartitionSpec(*(None if d in open_dims else entry for d, entry in enumerate(spec)))
            placement = Placement.from_spec(known).resolve(rank)
            free = open_dims or eqn.params.get("unconstrained_dims")
            return Pin(placement, frozenset(placement) if free else None)
    return None
