"""Placements from the partitioning metadata of flax's variables, linen's and nnx's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import jax
from flax import linen, nnx
from flax.core import spmd
from jax.sharding import PartitionSpec

from shardc.errors import ArgumentError
from shardc.passes.trace.trace import is_nnx
from shardc.sbp.placement import AUTO, Auto, Placement

LogicalRules: TypeAlias = Sequence[tuple[str, str | tuple[str, ...] | None]]
"""Rules in flax's form: the name of a logical axis, and the mesh axis, or several, or None, that it is split over."""


def placements(tree: Any, rules: LogicalRules | None = None) -> Any:
    """Placements from the metadata of flax's variables, for `in_placements`, `out_placements` and `shardc.put`.

    Args:
      tree: for linen, variables or a training state as from `model.init` or `jax.eval_shape` of it, with the boxes of
        `nn.with_partitioning` or `nn.with_logical_partitioning`. For nnx, a module, an optimizer or a state. The state
        of an optimizer that was made from such parameters has their metadata too.
      rules: rules for logical names, as for `nn.logical_axis_rules`; by default those of the box or of that context. As
        in flax, a linen name without a rule splits nothing, and an nnx name without a rule is an axis of the mesh.

    Returns:
      A pytree like `tree` with a Placement for each box or variable, and AUTO for values without metadata. It fits the
      tree with its boxes and also the unboxed tree.

    Raises:
      ArgumentError: one array is split twice over the same axis.

    Examples:
      >>> init = linen.with_logical_partitioning(jax.nn.initializers.zeros, ("embed", "mlp"))
      >>> variables = linen.Dense(8, kernel_init=init).init(jax.random.key(0), jax.numpy.ones((1, 4)))
      >>> str(placements(variables, rules=[("embed", None), ("mlp", "model")])["params"]["kernel"])
      '{model: S(1)}'
    """
    if is_nnx(tree):
        tree = nnx.state(tree) if not isinstance(tree, nnx.Variable | nnx.State) else tree
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree, extract_fn=lambda x: x)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_metadata)
    return jax.tree.unflatten(structure, [_placement(jax.tree_util.keystr(path), x, rules) for path, x in pairs])


def _has_metadata(x: object) -> bool:
    return isinstance(x, linen.meta.AxisMetadata | nnx.Variable)


def _placement(path: str, x: Any, rules: LogicalRules | None) -> Placement | Auto:
    spec = _spec(x, rules)
    if spec is None:
        return AUTO
    axes = [a for entry in spec.partitions for a in ((entry,) if isinstance(entry, str) else entry or ())]
    twice = [a for a in dict.fromkeys(axes) if axes.count(a) > 1]
    if twice:
        raise ArgumentError(
            f"shardc.flax.placements: {path} is split twice over {', '.join(twice)}: {spec}; name each axis once."
        )
    return Placement.from_spec(spec)


def _spec(x: Any, rules: LogicalRules | None) -> PartitionSpec | None:
    """The partition spec of a box or a variable; None if it has none."""
    if isinstance(x, linen.Partitioned):
        own = x.rules if isinstance(x, linen.LogicallyPartitioned) else None
        known = rules if rules is not None else own
        if known is not None or isinstance(x, linen.LogicallyPartitioned):
            return linen.logical_to_mesh_axes(x.names, known if known is None else tuple(known))
        return x.get_partition_spec()
    if isinstance(x, nnx.Variable) and x.get_metadata().get("out_sharding"):
        with spmd.logical_axis_rules(tuple(rules)) if rules is not None else nullcontext():
            return nnx.spmd.get_var_pspec(x)
    return None
