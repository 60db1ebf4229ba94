"""The peer: the same step under jax.jit, its arguments and results where shardc's plan has them."""

from __future__ import annotations

from typing import Any

import jax

import shardc


def shardings(placements: Any, mesh: Any) -> Any:
    """A tree of placements --> the tree of NamedShardings."""
    return jax.tree.map(lambda p: p.to_sharding(mesh), placements, is_leaf=lambda x: isinstance(x, shardc.Placement))


def jitted(step: Any, plan: Any, mesh: Any, options: dict[str, Any]) -> Any:
    """`step` under jax.jit with the plan's border and the same donation."""

    def peer(*args):
        return step(*args)

    donated = [i for i, name in enumerate(plan.in_placements.names) if name in options.get("donate_argnames", ())]
    return jax.jit(
        peer,
        in_shardings=tuple(shardings(plan.in_placements, mesh)),
        out_shardings=shardings(plan.out_placements, mesh),
        donate_argnums=donated,
    )
