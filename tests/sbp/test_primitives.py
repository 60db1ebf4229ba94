"""The treatment of every primitive that JAX lowers: each name, of every supported release, is in one list, with the
reason if it is not split in every way that mathematics allows."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import jax
import pytest
from jax import lax

from shardc.ir.host_callback import CALLBACKS
from shardc.ir.nested import NESTED
from shardc.passes.trace.canonicalize import IDENTITIES, INLINED
from shardc.sbp import rules
from shardc.sbp.signature import find_rule, rule_names
from tests.sbp.cases import CASES
from tests.sbp.harness import equation_of

assert rules  # imported for what it registers

_NAMES_SPLIT: Final = """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex concatenate conj conv_general_dilated convert_element_type copy cos
    cosh cumlogsumexp cummax cummin cumprod cumsum digamma div dot_general dynamic_slice dynamic_update_slice empty eq
    eq_to erf erf_inv erfc exp exp2 expm1 floor gather ge gt igamma igamma_grad_a igammac imag integer_pow iota
    iota_2x32_shape is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name
    ne neg nextafter not one_minus_square or pad polygamma polynomial population_count pow ragged_dot_general
    random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap real reduce_and
    reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window reduce_window_max
    reduce_window_min reduce_window_sum reduce_xor regularized_incomplete_beta rem reshape rev round rsqrt scaled_dot
    scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_gather_add select_and_scatter_add
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze stack
    stop_gradient sub tan tanh threefry2x32 top_k transpose xor zeta
"""
SPLIT: Final = frozenset(_NAMES_SPLIT.split())
"""Primitives of which every dimension may be split, by at least one set of parameters."""

KEEPS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
         "tridiagonal"),
        "the matrix: every step of a factorization needs all that is left of it",
    ),
    "lu_pivots_to_permutation": "the pivots: each exchanges what those before it have left",
    **dict.fromkeys(
        ("ormqr", "triangular_solve", "tridiagonal_solve"),
        "the matrix, whose rows are used one after the other; columns of the right side are split",
    ),
    "symmetric_product": "the rows: a result's row and column would both be theirs; columns are summed",
    "fft": "the dimensions that are transformed: each result takes all elements",
    "sort": "the sorted dimension: where an element goes depends on all others, so gathering costs least",
    "reduce": "what is reduced: the initial value need not be neutral, and parts would count it again",
    "approx_top_k": "the searched dimension: which elements are missed depends on how many there are",
    "random_wrap": "the words of a key",
    "tile": "repeated dimensions: parts of the result are parts of no one piece",
    "unstack": "the dimension that becomes several results, each of one device's",
}  # fmt: skip
"""Primitives with a rule that keeps a dimension whole, and the reason."""

PLANNED: Final[Mapping[str, Sequence[str]]] = {
    "a loop, branch or barrier, planned where it stands": ("cond", "optimization_barrier", "remat2", "scan", "while"),
    "a call, planned as its body": (
        "closed_call", "composite", "custom_jvp_call", "custom_linear_solve", "custom_vjp_call", "custom_vmap_call",
        "eval_jaxpr", "jit", "linear_call", "program_order",
    ),
    "run once, on the first device, with whole values": (
        "debug_callback", "debug_print", "io_callback", "pure_callback", "rng_uniform",
    ),
    "a unit, whose specs are its signature": ("shard_map",),
    "a pin, nothing, or an error, by what it names": ("device_put",),
    "slices": ("split",),
    "nothing: how one device keeps a value": ("relayout", "with_memory_space_constraint"),
    "a pin": ("reshard", "sharding_constraint"),
}  # fmt: skip
"""Primitives that a pass replaces or opens."""

GATHERED: Final[Mapping[str, Sequence[str]]] = {
    "no operand to gather": ("empty2", "platform_index"),
    "a running rotation of rows by rows, of one matrix": ("cholesky_update",),
    "opaque: shardc.signature says what may be split": ("ffi_call", "cudnn_fusion", "call_exported"),
    "kernels of a GPU alone, whose split no test here can prove; implementation='xla' is split": (
        "dot_product_attention_bwd", "dot_product_attention_bwd_wrapper", "dot_product_attention_fp8_bwd",
        "dot_product_attention_fp8_bwd_wrapper", "dot_product_attention_fp8_fwd",
        "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fwd", "dot_product_attention_fwd_wrapper",
        "scaled_matmul", "scaled_matmul_wrapper",
    ),
    "a stream of bits, made as a whole": ("rng_bit_generator",),
    "any function over windows; no public function of JAX makes it": ("select_and_scatter",),
    "a sharding of JAX's own, by the user": ("custom_partitioning", "inspect_sharding"),
}  # fmt: skip
"""Replicated primitives, by reason."""

ABSENT: Final[Mapping[str, Sequence[str]]] = {
    "collectives, in a user's shard_map alone": (
        "all_gather", "all_gather_done", "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start",
        "all_gather_start", "all_to_all", "all_to_all_done", "all_to_all_start", "axis_index", "pbroadcast",
        "pbroadcast_done", "pbroadcast_start", "pmax", "pmin", "ppermute", "ppermute_done", "ppermute_start", "precv",
        "preduced", "psend", "psum", "psum_done", "psum_invariant", "psum_invariant_start", "psum_start", "pvary",
        "ragged_all_to_all", "reduce_scatter", "reduce_scatter_done", "reduce_scatter_start", "reduced_vary_cast",
        "reduced_vary_cast_p", "pbroadcast_dynamic", "unreduced_pmax", "unreduced_pmin", "vary_unreduced_cast",
        "unreduced_psum", "unreduced_psum_start", "unreduced_reduce_scatter", "unreduced_reduce_scatter_start",
        "vary_unreduced_cast_p",
    ),
    "tokens": ("after_all", "create_token"),
    "inside of what JAX differentiates, batches or lowers": (
        "call", "create_linear", "custom_lin", "dce_sink", "from_edtype", "geqp3", "philox2x32", "philox4x32", "pin",
        "remat_opt", "stage", "threefry4x32", "tie", "to_edtype", "unpin", "unreachable",
    ),
    "references": ("broadcast_to", "run_state"),
    "dimensions of unknown size": ("dim_as_value", "dimension_size", "shape_assertion"),
}  # fmt: skip
"""Primitives that do not occur in a planned program, by reason."""

_NOT_EVERYWHERE: Final = """
    call closed_call eval_jaxpr log2 one_minus_square pbroadcast_done pbroadcast_dynamic pbroadcast_start
    polynomial program_order psum_start reduced_vary_cast reduced_vary_cast_p relayout unreduced_pmax unreduced_pmin
    unreduced_psum_start unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p
    with_memory_space_constraint
"""
NOT_EVERYWHERE: Final = frozenset(_NOT_EVERYWHERE.split())
"""Names that some of the supported releases do not have."""

TABLES: Final = (PLANNED, GATHERED, ABSENT)
NAMES: Final = [*SPLIT, *KEEPS, *(name for table in TABLES for names in table.values() for name in names)]
LOWERED: Final = """
import jax
from jax._src.interpreters import mlir
tables = mlir._lowerings, *mlir._platform_specific_lowerings.values()
print(*{p.name for table in tables for p in table})
"""


OURS = {"user_operation", "join_ranges"}
"""Primitives of shardc that have a rule."""


def test_every_primitive_is_in_one_list() -> None:
    assert [name for name, times in Counter(NAMES).items() if times > 1] == []
    told = subprocess.run([sys.executable, "-c", LOWERED], check=True, capture_output=True, text=True)
    lowered = set(told.stdout.split())
    assert len(lowered) > 200
    assert lowered - set(NAMES) == set(), "names that no list has"
    assert set(NAMES) - lowered - NOT_EVERYWHERE == set(), "names that JAX does not have"


def test_those_with_a_rule_are_the_first_two_lists() -> None:
    assert set(rule_names()) - OURS == SPLIT | KEEPS.keys()
    planned = {name for names in PLANNED.values() for name in names}
    known = INLINED.keys() | NESTED.keys() | CALLBACKS | {"rng_uniform", *IDENTITIES}
    opened = {"split", "reshard", "sharding_constraint", "custom_linear_solve", "device_put", "shard_map"}
    assert planned - opened <= known


@pytest.fixture(scope="module")
def whole_in() -> dict[str, list[bool]]:
    """For each primitive, whether each of its cases has a dimension of the first operand that stays whole."""
    found: dict[str, list[bool]] = {}
    with jax.enable_x64(True):
        for fn, args, primitive in CASES.values():
            op = equation_of(fn, *args, primitive=primitive).op
            rule = find_rule(op)
            factors = rule.factors()
            side, avals = (rule.operands, op.operands) if op.operands else (rule.results, op.results)
            whole = any(f not in factors and n > 1 for f, n in zip(side[0], avals[0].shape, strict=True))
            found.setdefault(op.name, []).append(whole)
    return found


def test_the_lists_say_what_the_rules_do(whole_in: dict[str, list[bool]]) -> None:
    split = {name for name, cases in whole_in.items() if not all(cases)} - OURS
    assert split == SPLIT - {name for name in NOT_EVERYWHERE if not hasattr(lax, name)}
