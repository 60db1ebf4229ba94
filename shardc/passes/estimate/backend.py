"""Backend models: which values XLA materializes on each kind of device.

XLA fuses operations into loops, and what stays inside a loop never reaches memory. Here are tables of primitives, and
what differs between kinds of devices; `passes/estimate/live_ranges.py` applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Final, NamedTuple

import jax.numpy as jnp

from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.walk import LINEAR
from shardc.machine.topology import BackendKind, MiB
from shardc.sbp.placement import Placement


class FusionKind(Enum):
    """How XLA makes the result of an equation.

    VIEW: the operand's memory under another shape.
    CHEAP: fused into each loop that reads it.
    COSTLY: fused into the loop that reads it if there is only one.
    REDUCED: a reduction loop: it fuses what it reads, and materializes its result.
    WRITTEN: a loop that fuses what it reads and always materializes its result.
    MOVED: a collective.
    MADE: all else, such as library calls. It reads memory, and materializes its result.
    """

    __hash__ = object.__hash__  # Enum hashes the name, in Python; kinds are looked up for each equation
    VIEW = auto()
    CHEAP = auto()
    COSTLY = auto()
    REDUCED = auto()
    WRITTEN = auto()
    MOVED = auto()
    MADE = auto()


_NAMES: Final[dict[FusionKind, tuple[str, ...]]] = {
    FusionKind.VIEW: (
        "bitcast_convert_type", "constrain", "copy", "copy_p", "expand_dims", "layout_constraint", "name",
        "random_unwrap", "random_wrap", "reshape", "send", "sharding_constraint", "squeeze", "stage_boundary",
        "stop_gradient",
    ),
    FusionKind.CHEAP: (
        "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "conj", "convert_element_type", "copysign",
        "dynamic_slice", "eq", "eq_to", "floor", "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "le_to",
        "lt", "lt_to", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pad", "real",
        "reduce_precision", "rev", "round", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
        "sign", "slice", "square", "sub", "transpose", "xor",
    ),
    FusionKind.COSTLY: (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "complex", "cos", "cosh", "digamma", "div",
        "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p", "log2", "logistic", "nextafter",
        "polynomial", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
    ),
    FusionKind.REDUCED: (
        "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
        "reduce_xor",
    ),
    FusionKind.WRITTEN: ("concatenate", "dynamic_update_slice", "stack"),
}  # fmt: skip
IN_LOOPS: Final = frozenset((FusionKind.VIEW, FusionKind.CHEAP, FusionKind.COSTLY))
"""Kinds that can be fused into the loops that read them."""
_KINDS: Final = {name: kind for kind, names in _NAMES.items() for name in names}

REINDEXING: Final = frozenset(("broadcast_in_dim", "dynamic_slice", "iota", "pad", "rev", "slice", "transpose"))
"""Cheap primitives that read elements from other positions. A loop does not write its result over their operands."""

UPDATES: Final = frozenset((
    "dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_min",
    "scatter_max", "scatter_sub",
))  # fmt: skip
"""Primitives that write their result over operand 0 if nothing reads it later."""

LOOKUPS: Final = frozenset(("gather", *UPDATES)) - {"dynamic_update_slice"}
"""Primitives that address rows by index (`find_row_tables`)."""

CONVOLUTIONS: Final = frozenset(("conv_general_dilated", "conv_of_ranges"))

PRODUCTS: Final = CONVOLUTIONS | {"dot_general"}


def kind_of(eqn: Eqn) -> FusionKind:
    name = eqn.primitive.name
    return _boxing(eqn.params["src"], eqn.params["dst"]) if name == "box" else _KINDS.get(name, FusionKind.MADE)


@lru_cache(maxsize=4096)
def _boxing(src: Placement, dst: Placement) -> FusionKind:
    """A boxing is cheap if it only slices, or fills with neutral elements, what the device has; others move data."""
    local = all(a not in src or src.get(a) == dst.get(a) or a in dst.partial_axes for a in {*src, *dst})
    return FusionKind.CHEAP if local else FusionKind.MOVED


class ScheduledEqn(NamedTuple):
    """An equation with its place in the program, and properties of it that are read often.

    Attributes:
      operands: without literals.
      start, at: points of the program, before its bodies and behind them.
      home: the jaxpr that it is in.
    """

    eqn: Eqn
    kind: FusionKind
    operands: Sequence[Var]
    start: int
    at: int
    home: Jaxpr


@dataclass(frozen=True, slots=True)
class Backend:
    """The properties of XLA on one kind of device.

    Attributes:
      reductions_read_memory: a reduction does not fuse its operand: it reads it from memory, or reads the factors of
        the product that it sums, with broadcast ones at full size.
      eager: cheap operations and collectives start as early as they can, also outside of loops. In a loop, what follows
        from the inputs of a step alone starts with the step. All-reduces wait for each other and are one operation, so
        that all their operands and results are live at one time.
      one_layout: only the last dimensions are contiguous in memory: a collective along another dimension than the first
        copies, and so does a convolution.
      tiles: arrays are padded to tiles of 8 x 128 words. Arrays that rows are gathered from or scattered to are padded
        row by row.
      pieces_stay: a loop does not write over a value that was made in place: by an update, a loop, a branch, or block
        by block as a product whose pieces go around a ring.
      fuses_siblings: loops that read the same memory and do not depend on each other are fused into one loop with
        several results. Then a value that is only divided by a scalar, as a clipped gradient, is recomputed in the
        loops that read it.
      materializes_scores: `find_scores` decides which arrays of a softmax are materialized, where it reads products of
        a smaller type.
      accumulates_over: a product is added to what a loop carries while it is written, with these operations between:
        neither of both is read or written by itself. None: it is not.
      multiplies_in: the type in which products of float32 at the default precision multiply, where it is narrower.
      workspace, batched_workspace: bytes that a library takes for a matrix product, and for one with batch dimensions,
        while it runs.
    """

    reductions_read_memory: bool
    eager: bool
    one_layout: bool
    tiles: bool
    pieces_stay: bool
    fuses_siblings: bool
    materializes_scores: bool
    accumulates_over: frozenset[str] | None
    multiplies_in: Any = None
    workspace: int = 0
    batched_workspace: int = 0


CPU: Final = Backend(
    reductions_read_memory=True, eager=True, one_layout=True, tiles=False, pieces_stay=False, fuses_siblings=False,
    materializes_scores=False, accumulates_over=None,
)  # fmt: skip
"""Seen in the scheduled HLO of the zoo: `ynn_fusion` reads arrays, `wrapped_copy` follows `all_gather`, one
`all-reduce` has all gradients, and `wrapped_broadcast` and `all_gather` are first in the schedule."""

TPU: Final = Backend(
    reductions_read_memory=False, eager=False, one_layout=False, tiles=True, pieces_stay=True, fuses_siblings=True,
    materializes_scores=True, accumulates_over=LINEAR, multiplies_in=jnp.dtype(jnp.bfloat16),
)  # fmt: skip
"""Seen in the HLO of GPT-2 for v5p: `multiply_reduce_fusion`; arrays of layout `T(8,128)`. Small products fuse their
operands (`convolution_add_fusion`). Large ones read them from memory, and `divide_convert_fusion` materializes what a
softmax passes to them: this case is counted. Gradients of a loss in chunks, f32[32768,4096] added up over 8 rounds: a
`bitcast_add_fusion` takes the cycles of the product alone; so does a product in bfloat16 that is added up in float32.
Seen in T5 and DLRM: a fusion has no `aliasing_operands` where an operand was updated in place, and
`broadcast_maximum_fusion`, `select_select_fusion` have several results. Float32 weights of an MLP for v5e: gathered in
bfloat16."""

GPU: Final = Backend(
    reductions_read_memory=False, eager=False, one_layout=False, tiles=False, pieces_stay=False, fuses_siblings=False,
    materializes_scores=False, accumulates_over=LINEAR - {"convert_element_type"}, workspace=4 * MiB,
    batched_workspace=32 * MiB,
)  # fmt: skip
"""Not measured. Products are library calls, which read memory; loops and reductions fuse. The workspaces are those of
programs compiled ahead of time for H100 (jax 0.12.0.1): cuBLASLt got 4 MiB for a product, 32 MiB for a batched one, the
limits of XLA's matmul_utils.h (kDefaultWorkspace; kHopperWorkspace, from H100 on). Products by Triton take none. Those
that a loop adds up are a `gemm_fusion_dot` of three operands; a product in bfloat16 that is added up in float32 is
followed by a `loop_add_fusion`."""


def backend_of(kind: BackendKind) -> Backend:
    """The model of a compiler, as in `Topology.backend`."""
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}[kind]
