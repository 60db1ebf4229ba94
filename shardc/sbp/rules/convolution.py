"""Convolutions: contractions over features, with windows over space that stay whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from shardc.sbp.rules.contraction import bilinear
from shardc.sbp.signature import Operation, Rule, Site, rule


@rule("conv_general_dilated")
def convolution(op: Operation) -> Rule:
    """Batch `n`, output features `o`, input features `c` (summed), and whole groups `g` of features or of the batch."""
    spec = op.params["dimension_numbers"]
    features, batches = op.params["feature_group_count"], op.params["batch_group_count"]
    lhs, rhs, out = ([None] * len(s) for s in (spec.lhs_spec, spec.rhs_spec, spec.out_spec))
    parts: list[tuple[Sequence[int], Sequence[str | None]]]
    parts = [(spec.lhs_spec, ("n", "c")), (spec.rhs_spec, ("o", "c")), (spec.out_spec, ("n", "o"))]
    if features > 1:
        parts = [(spec.lhs_spec, ("n", "g")), (spec.rhs_spec, ("g", None)), (spec.out_spec, ("n", "g"))]
    elif batches > 1:
        parts = [(spec.lhs_spec, ("g", "c")), (spec.rhs_spec, ("g", "c")), (spec.out_spec, (None, "g"))]
    lhs, rhs, out = (_place(dimensions, names) for dimensions, names in parts)
    kernel = op.operands[1].shape
    return Rule(
        (lhs, rhs), (out,),
        reduced={} if features > 1 else {"c": "sum"},
        partials=bilinear(op),
        neutral={0: "zero", 1: "zero"},
        granule={"g": max(features, batches)} if max(features, batches) > 1 else {},
        local=_groups_here,
        flops=2.0 * math.prod(op.results[0].shape) * math.prod(kernel) / max(kernel[spec.rhs_spec[0]], 1),
    )  # fmt: skip


def _place(dimensions: Sequence[int], names: Sequence[str | None]) -> tuple[str | None, ...]:
    where = dict(zip(dimensions, names, strict=False))
    return tuple(where.get(d) for d in range(len(dimensions)))


def _groups_here(site: Site, x: Any, kernel: Any) -> Sequence[Any]:
    spec = site.op.params["dimension_numbers"]
    out_features = spec.rhs_spec[0]
    whole, here = site.op.operands[1].shape[out_features], kernel.shape[out_features]

    def count(name: Literal["feature_group_count", "batch_group_count"]) -> int:
        groups = site.op.params[name]
        return groups * here // whole if groups > 1 else 1

    return site.bind(
        x, kernel, feature_group_count=count("feature_group_count"), batch_group_count=count("batch_group_count")
    )
