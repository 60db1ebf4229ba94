"""What of a program is in memory: XLA joins operations to loops, and what stays inside a loop never is.

Tables of primitives, and what XLA does its own way on each kind of device; `passes/estimate/live_ranges.py` applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from shardc.compat import Eqn, Var
from shardc.sbp.placement import Placement


class Kind(Enum):
    """How an equation's result comes to be.

    VIEW: it is its operand's memory under another shape.
    CHEAP: it is computed in each loop that reads it.
    COSTLY: it is computed in the loop that reads it, if that is one.
    REDUCED: a loop over what it reads, with a result of its own.
    WRITTEN: a loop whose result is in memory, and which computes what it reads.
    MOVED: a collective.
    MADE: all else. It reads memory, and its result is in memory.
    """

    __hash__ = object.__hash__  # an enum's own hashes its name, in Python: kinds are looked up for each equation
    VIEW = auto()
    CHEAP = auto()
    COSTLY = auto()
    REDUCED = auto()
    WRITTEN = auto()
    MOVED = auto()
    MADE = auto()


_NAMES: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.VIEW: (
        "bitcast_convert_type", "constrain", "copy", "copy_p", "expand_dims", "layout_constraint", "name",
        "random_unwrap", "random_wrap", "reshape", "send", "sharding_constraint", "squeeze", "stage_boundary",
        "stop_gradient",
    ),
    Kind.CHEAP: (
        "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "conj", "convert_element_type", "copysign",
        "dynamic_slice", "eq", "eq_to", "floor", "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "le_to",
        "lt", "lt_to", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pad", "real",
        "reduce_precision", "rev", "round", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
        "sign", "slice", "square", "sub", "transpose", "xor",
    ),
    Kind.COSTLY: (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "complex", "cos", "cosh", "digamma", "div",
        "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p", "log2", "logistic", "nextafter",
        "polynomial", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
    ),
    Kind.REDUCED: (
        "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
        "reduce_xor",
    ),
    Kind.WRITTEN: ("concatenate", "dynamic_update_slice", "stack"),
}  # fmt: skip
IN_LOOPS: Final = frozenset((Kind.VIEW, Kind.CHEAP, Kind.COSTLY))
"""Kinds that are computed in loops."""
_KINDS: Final = {name: kind for kind, names in _NAMES.items() for name in names}

ELSEWHERE: Final = frozenset(("broadcast_in_dim", "dynamic_slice", "iota", "pad", "rev", "slice", "transpose"))
"""Of what is cheap, that whose elements come from another place: a loop over it does not write over what it reads."""

UPDATES: Final = frozenset((
    "dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_min",
    "scatter_max", "scatter_sub",
))  # fmt: skip
"""Their result takes the place of operand 0, if that is read no more."""

LOOKUPS: Final = frozenset(("gather", *UPDATES)) - {"dynamic_update_slice"}
"""They take rows by their numbers (`find_tables`)."""

PRODUCTS: Final = frozenset(("conv_general_dilated", "dot_general"))

CONVOLUTIONS: Final = frozenset(("conv_general_dilated",))


def kind_of(eqn: Eqn) -> Kind:
    name = eqn.primitive.name
    return _boxing(eqn.params["src"], eqn.params["dst"]) if name == "box" else _KINDS.get(name, Kind.MADE)


@lru_cache(maxsize=4096)
def _boxing(src: Placement, dst: Placement) -> Kind:
    """A boxing that takes a part of what is there, or fills up, is computed where it is read; others move."""
    local = all(a not in src or src.get(a) == dst.get(a) or a in dst.partial_axes for a in {*src, *dst})
    return Kind.CHEAP if local else Kind.MOVED


class Step(NamedTuple):
    """An equation, where it stands in a program, and what is asked for again and again of it.

    Attributes:
      operands: without literals.
      start, at: points of the program: from before its bodies to behind them.
      home: id of the jaxpr that it is in.
    """

    eqn: Eqn
    kind: Kind
    operands: Sequence[Var]
    start: int
    at: int
    home: int


@dataclass(frozen=True, slots=True)
class Habits:
    """What XLA does its own way on one kind of device.

    Attributes:
      sums_read_memory: a reduction reads its operand from memory, or the factors of the product that it sums, those
        that are broadcast at their full size.
      eager: what is cheap, and every collective, begins as soon as it can, out of loops too, and with a loop's step
        what follows from what that begins with; reductions over the mesh wait for each other and are one operation, so
        that all operands and all results are there at one time.
      one_layout: only the last dimensions are contiguous in memory: a collective along another dimension than the first
        copies, and so does a convolution.
      tiles: arrays are kept in tiles of 8 x 128 words, the last ones filled up; and what rows are gathered from or
        scattered to, row by row.
      pieces_stay: a loop does not write over what came to be in its place: by an update, a loop, a branch, or as a
        product whose pieces go around.
      joins_loops: loops over the same memory, of which none waits for another, are one. So what only loops read that
        is no more than divided by one number, as gradients that are clipped, is computed in them.
      writes_scores: the rows of a softmax that come from products of a smaller type are in memory or are not as
        `find_scores` says.
    """

    sums_read_memory: bool
    eager: bool
    one_layout: bool
    tiles: bool
    pieces_stay: bool
    joins_loops: bool
    writes_scores: bool


CPU: Final = Habits(
    sums_read_memory=True, eager=True, one_layout=True, tiles=False, pieces_stay=False, joins_loops=False,
    writes_scores=False,
)  # fmt: skip
"""Seen in the scheduled HLO of the zoo: `ynn_fusion` reads arrays, `wrapped_copy` follows `all_gather`, one
`all-reduce` has all gradients, and `wrapped_broadcast` and `all_gather` stand first in the schedule."""

TPU: Final = Habits(
    sums_read_memory=False, eager=False, one_layout=False, tiles=True, pieces_stay=True, joins_loops=True,
    writes_scores=True,
)  # fmt: skip
"""Seen in the HLO of GPT-2 for v5p: `multiply_reduce_fusion`; arrays of layout `T(8,128)`. Small products compute what
they read (`convolution_add_fusion`); large ones read it from memory, and `divide_convert_fusion` keeps what a softmax
gives them, so that this is what is counted. In that of T5 and DLRM: `aliasing_operands` of a fusion are none where an
operand is of updates in its place, and `broadcast_maximum_fusion`, `select_select_fusion` have several results."""

GPU: Final = Habits(
    sums_read_memory=False, eager=False, one_layout=False, tiles=False, pieces_stay=False, joins_loops=False,
    writes_scores=False,
)  # fmt: skip
"""Not measured: products are library calls, which read memory; loops and reductions fuse."""


def habits_of(device: str) -> Habits:
    """Of a kind of device, as `Topology.kind` has it."""
    return CPU if device == "cpu" else TPU if device.startswith("v") else GPU
