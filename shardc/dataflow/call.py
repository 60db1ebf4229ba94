"""A call of a function in a round: what it becomes."""

from __future__ import annotations

from typing import Any, Final

import jax

from shardc import compat
from shardc.arrays.place import Place
from shardc.dataflow.round import Round, outside, traced_round
from shardc.dataflow.value import Made, RoundValue
from shardc.dataflow.work import Callee, FunctionWork


def call_in_round(function: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], every: int) -> Any:
    """Adds a call to the round that is traced, and gives its results as Values."""
    round = traced_round()
    assert round is not None
    leaves, tree = jax.tree.flatten((args, kwargs))
    round.refuse_nothing(getattr(function, "__name__", type(function).__name__), leaves)
    with outside():
        known = [_known(round, function, x) if isinstance(x, RoundValue) else x for x in leaves]
        work = FunctionWork(function, known, tree)
    name = getattr(function, "__name__", type(function).__name__)
    node = round.add(name, work, leaves, work.results, every, compat.users_line(), function)
    if _settle not in round.on_end:
        round.on_end.append(_settle)
    return work.out_tree.unflatten(round.values_of(node))


def _known(round: Round, function: Callee, v: RoundValue) -> Any:
    """The known type of a value before its function is planned, with its sharding if it lies on the same mesh."""
    found = None
    if isinstance(v.origin, Made):
        found = _at(round.nodes[v.origin.node].work.gives[v.origin.index], function.mesh, v)
    return jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.aval.weak_type) if found is None else found


def _at(place: Place, mesh: Any, v: RoundValue) -> Any:
    """The type of a value with its sharding, if it lies on this mesh."""
    sharding = place.plain_sharding
    if sharding is None or place.mesh != mesh:
        return None
    return jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.aval.weak_type, sharding=sharding)


_TURNS: Final = 3
"""The most turns in which functions are planned for where the others leave the state."""


def _settle(round: Round) -> None:
    """Plan functions again that take what an earlier round left on their mesh at another placement: nothing moves in a
    call that its plan does not list."""
    for _ in range(_TURNS):
        again = False
        for node in round.nodes:
            work = node.work
            if type(work) is not FunctionWork or len(work.meshes) > 1:  # a change takes a state that has its own place
                continue
            at: dict[int, Any] = {}
            for i, v in enumerate(node.given):
                if isinstance(v, RoundValue) and (origin := round.origin(v)).node is not None:
                    found = _at(origin.node.work.gives[origin.index], next(iter(work.meshes)), v)
                    if found is not None:
                        at[i] = found
            again |= work.settle(at)
        if not again:
            return
