"""Convolutions: contractions over features, with windows over space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from shardc.sbp.rules.contraction import bilinear
from shardc.sbp.signature import Joined, OperandWindow, Operation, Rule, Site, rule


@rule("conv_general_dilated", "conv_of_ranges")
def convolution(op: Operation) -> Rule:
    """Factors: batch `n`, output features `o`, input features `c` (summed), whole groups `g` of features or of the
    batch. Along space the positions of the result `x`, each of which reads a window; or, if the kernel is larger than
    the result, as in a gradient of weights, the positions of the kernel `k` (summed)."""
    spec = op.params["dimension_numbers"]
    features, batches = op.params["feature_group_count"], op.params["batch_group_count"]
    lhs, rhs, out = ("n", "c"), ("o", "c"), ("n", "o")
    if features > 1:
        lhs, rhs, out = ("n", "g"), ("g", None), ("n", "g")
    elif batches > 1:
        lhs, rhs, out = ("g", "c"), ("g", "c"), (None, "g")
    space = [_space(op, i) for i in range(len(spec.lhs_spec) - 2)]
    summed = [s.kernel for s in space if s.kernel]
    kernel = op.operands[1].shape
    return Rule(
        (
            _place(spec.lhs_spec, (*lhs, *(s.factor for s in space))),
            _place(spec.rhs_spec, (*rhs, *(s.kernel for s in space))),
        ),
        (_place(spec.out_spec, (*out, *(None if s.kernel else s.factor for s in space))),),
        reduced=dict.fromkeys(summed if features > 1 else ["c", *summed], "sum"),
        partials=bilinear(op),
        neutral={0: "zero", 1: "zero"},
        granule={"g": max(features, batches)} if max(features, batches) > 1 else {},
        local=_convolve, windows=tuple(s.window for s in space if s.window), across=_convolve,
        flops=2.0 * math.prod(op.results[0].shape) * math.prod(kernel) / max(kernel[spec.rhs_spec[0]], 1),
        kind="convolution",
    )  # fmt: skip


class _Space(NamedTuple):
    """Factors of a spatial dimension: of the image, and of the kernel if it is split in place of the result."""

    factor: str | None = None
    kernel: str | None = None
    window: OperandWindow | None = None


def _space(op: Operation, i: int) -> _Space:
    """Element x of the result reads the dilated image at x·stride + k·dilation - padding, for each k of the kernel."""
    p, spec = op.params, op.params["dimension_numbers"]
    image, kernel = op.operands[0].shape[spec.lhs_spec[2 + i]], op.operands[1].shape[spec.rhs_spec[2 + i]]
    out = op.results[0].shape[spec.out_spec[2 + i]]
    stride, between, dilation, padding = (
        p[name][i] for name in ("window_strides", "lhs_dilation", "rhs_dilation", "padding")
    )
    if 0 in (image, kernel, out):
        return _Space()
    joined = _joined(op)[i]
    ranges = () if joined is None else joined[1]
    whole = tuple(padding) == (0, 0) and between == 1 and joined is None
    if kernel > out:
        if whole and dilation == 1 and out == 1:
            return _Space(f"k{i}", f"k{i}")
        reach = -padding[0], dilation, (out - 1) * stride + 1, between
        return _Space(f"k{i}", f"k{i}", OperandWindow(0, f"k{i}", 1, *reach, ranges=ranges))
    if whole and stride == 1 and kernel == 1:
        return _Space(f"x{i}")
    reach = -padding[0], stride, (kernel - 1) * dilation + 1, between
    return _Space(f"x{i}", None, OperandWindow(0, f"x{i}", 2, *reach, ranges=ranges))


def _joined(op: Operation) -> Joined:
    """The ranges that are joined along each spatial dimension."""
    return op.params.get("joined") or (None,) * len(op.params["window_strides"])


def _place(dimensions: Sequence[int], names: Sequence[str | None]) -> tuple[str | None, ...]:
    where = dict(zip(dimensions, names, strict=True))
    return tuple(where[d] for d in range(len(dimensions)))


def _convolve(site: Site, x: Any, kernel: Any) -> Sequence[Any]:
    """The convolution of the local groups. A window already has its padding and dilation."""
    p, spec = site.op.params, site.op.params["dimension_numbers"]
    out_features = spec.rhs_spec[0]
    whole, here = site.op.operands[1].shape[out_features], kernel.shape[out_features]
    split = [d in site.operands[0].splits for d in spec.lhs_spec[2:]]

    def count(name: Literal["feature_group_count", "batch_group_count"]) -> int:
        groups = p[name]
        return groups * here // whole if groups > 1 else 1

    joined = tuple(None if cut else j for cut, j in zip(split, _joined(site.op), strict=True))
    return site.bind(
        x, kernel, feature_group_count=count("feature_group_count"), batch_group_count=count("batch_group_count"),
        padding=tuple((0, 0) if s else tuple(pair) for s, pair in zip(split, p["padding"], strict=True)),
        lhs_dilation=tuple(1 if s else d for s, d in zip(split, p["lhs_dilation"], strict=True)),
        **({"joined": joined} if "joined" in p else {}),
    )  # fmt: skip
