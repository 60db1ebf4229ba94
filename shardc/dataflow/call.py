"""A call of a function in a round: what it becomes."""

from __future__ import annotations

from typing import Any

import jax

from shardc import compat
from shardc.dataflow.round import Round, outside, traced_round
from shardc.dataflow.value import Made, Value
from shardc.dataflow.work import Callee, FunctionWork


def call_in_round(function: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], every: int) -> Any:
    """Adds a call to the round that is traced, and gives its results as Values."""
    round = traced_round()
    assert round is not None
    leaves, tree = jax.tree.flatten((args, kwargs))
    with outside():
        known = [_known(round, function, x) if isinstance(x, Value) else x for x in leaves]
        work = FunctionWork(function, known, tree)
    name = getattr(function, "__name__", type(function).__name__)
    node = round.add(name, work, leaves, work.results, every, compat.users_line())
    return work.out_tree.unflatten(round.values_of(node))


def _known(round: Round, function: Callee, v: Value) -> Any:
    """What is known of a value before its function is planned: shape and dtype, and where it lies on the same mesh."""
    if isinstance(v.origin, Made):
        place = round.nodes[v.origin.node].work.gives[v.origin.index]
        if place.mesh is not None and place.placement is not None and place.mesh == function.mesh:
            sharding = place.sharding(v.aval)
            if sharding is not None:
                return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(v.shape, v.dtype)
