"""The treatment of every primitive that JAX lowers: each name, of every supported release, has a rule or is in one
list, with the reason. A rule that keeps a dimension whole has its reason in `KEEPS`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import jax
import pytest

from shardc.ir.host_callback import CALLBACKS
from shardc.ir.nested import NESTED
from shardc.passes.trace.canonicalize import IDENTITIES, INLINED
from shardc.sbp import rules
from shardc.sbp.signature import find_rule, rule_names
from tests.sbp.cases import CASES
from tests.sbp.harness import equation_of

assert rules  # imported for what it registers

KEEPS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper"),
        "the dimension that queries and keys are multiplied over, and positions that a mask counts",
    ),
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
        "closed_call", "composite", "custom_jvp_call", "custom_linear_solve", "custom_partitioning", "custom_vjp_call",
        "custom_vmap_call", "eval_jaxpr", "jit", "linear_call", "program_order",
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
    "inside of the operation of this name with _wrapper": ("dot_product_attention_bwd", "dot_product_attention_fwd"),
    "kernels of a GPU alone, whose split no test here can prove": (
        "dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper", "dot_product_attention_fp8_fwd",
        "dot_product_attention_fp8_fwd_wrapper", "scaled_matmul", "scaled_matmul_wrapper",
    ),
    "a stream of bits, made as a whole": ("rng_bit_generator",),
    "any function over windows; no public function of JAX makes it": ("select_and_scatter",),
    "a sharding of JAX's own, by the user": ("inspect_sharding",),
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
LISTED: Final = [name for table in TABLES for names in table.values() for name in names]
LOWERED: Final = """
import jax
from jax._src.interpreters import mlir
tables = mlir._lowerings, *mlir._platform_specific_lowerings.values()
print(*{p.name for table in tables for p in table})
"""


@pytest.fixture(scope="module")
def lowered() -> set[str]:
    """The primitives that JAX lowers, without those that shardc adds."""
    told = subprocess.run([sys.executable, "-c", LOWERED], check=True, capture_output=True, text=True)
    return set(told.stdout.split())


def test_every_primitive_has_a_rule_or_is_in_one_list(lowered: set[str]) -> None:
    with_rule = set(rule_names())
    assert [name for name, times in Counter([*with_rule, *LISTED]).items() if times > 1] == []
    assert KEEPS.keys() - with_rule == set(), "rules that are not there"
    assert len(lowered) > 200
    assert lowered - with_rule - set(LISTED) == set(), "names without a rule that no list has"
    assert {*KEEPS, *LISTED} - lowered - NOT_EVERYWHERE == set(), "names that JAX does not have"


def test_what_is_planned_is_known_to_a_pass() -> None:
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


def test_rules_that_keep_a_dimension_whole_have_a_reason(whole_in: dict[str, list[bool]], lowered: set[str]) -> None:
    keep = {name for name, cases in whole_in.items() if name in lowered and all(cases)}
    assert keep == KEEPS.keys() & whole_in.keys()
