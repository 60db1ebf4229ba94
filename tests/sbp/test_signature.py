"""Signatures that must be offered, and those that must not be, such as errors known from other systems."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardc.sbp import rules
from shardc.sbp.rules.elementwise import conversion_ops
from shardc.sbp.signature import find_rule, signatures
from tests.sbp.cases import CASES
from tests.sbp.harness import equation_of

assert rules  # imported for what it registers


def _offers(name: str) -> list[str]:
    fn, args, primitive = CASES[name]
    with jax.enable_x64(True):
        op = equation_of(fn, *args, primitive=primitive).op
    return [str(s) for s in signatures(find_rule(op), op)]


OFFERED = [
    ("dot", "S(1), S(0) -> P(sum)"), ("dot", "P(sum), B -> P(sum)"), ("dot", "B, S(1) -> S(1)"),
    ("dot_batch", "S(0), S(3) -> S(0)"), ("dot_bf16", "B, P(sum) -> P(sum)"),
    ("conv", "S(2), S(1) -> P(sum)"), ("conv_depthwise", "S(2), S(2) -> S(2)"),
    ("conv", "S(1), B -> S(1)"), ("conv_2d", "S(3), B -> S(3)"), ("conv_transposed", "S(2), B -> S(2)"),
    ("conv_of_weights", "S(1), S(1) -> P(sum)"), ("conv_of_weights_depthwise", "S(2), S(2) -> P(sum)"),
    ("reduce_window_sum", "S(1) -> S(1)"), ("reduce_window_max", "S(2) -> S(2)"),
    ("reduce_window_two", "S(1), S(1), B, B -> S(1), S(1)"),
    ("select_and_gather_add", "S(1), S(1) -> S(1)"), ("select_and_scatter_add", "S(2), S(2) -> S(2)"),
    ("reduce_sum_float", "S(0) -> P(sum)"), ("reduce_max_float", "S(2) -> P(max)"),
    ("reduce_max_float", "P(max) -> P(max)"),
    ("reduce_or_bool", "S(1) -> P(max)"), ("reduce_and_bool", "S(1) -> P(min)"),
    ("gather_fill_or_drop", "S(0), B -> P(sum)"), ("gather_fill_or_drop", "S(1), B -> S(2)"),
    ("gather_fill_or_drop", "B, S(1) -> S(1)"), ("gather_kept", "S(0), B -> P(sum)"),
    ("gather_batched", "S(0), S(0) -> S(0)"), ("gather_two", "S(2), B -> P(sum)"),
    ("scatter_add_clip", "S(0), B, B -> S(0)"), ("scatter_add_clip", "B, S(0), S(0) -> P(sum)"),
    ("scatter_add_clip", "P(sum), B, P(sum) -> P(sum)"), ("scatter_max_clip", "B, S(1), S(1) -> P(max)"),
    ("scatter_add_batched", "S(0), S(0), S(0) -> S(0)"), ("scatter_unique", "P(max), B, P(max) -> P(max)"),
    ("max", "P(max), B -> P(max)"), ("neg", "P(max) -> P(min)"), ("select_n", "B, P(sum), P(sum) -> P(sum)"),
    ("reshape_(4, 6)_(24,)", "S(0) -> S(0)"), ("reshape_(5, 4, 6)_(5, 24)", "S(1) -> S(1)"),
    ("broadcast_in_dim", "B -> S(1)"), ("iota_int32", " -> S(1)"), ("pad", "P(sum), P(sum) -> P(sum)"),
    ("concatenate", "S(0), S(0), S(0) -> S(0)"), ("rev", "S(1) -> S(1)"), ("fft", "P(sum) -> P(sum)"),
    ("convert_float32_to_float64", "P(sum) -> P(sum)"), ("convert_int32_to_float32", "P(max) -> P(max)"),
    ("gather_partial_slice", "S(0), B -> P(sum)"), ("scatter_add_window", "S(0), B, B -> S(0)"),
    ("gather_bool", "S(0), B -> P(max)"), ("scatter_mul_clip", "P(sum), B, B -> P(sum)"),
    ("ragged_rows", "S(0), B, B -> S(0)"), ("ragged_rows", "S(1), S(1), B -> P(sum)"),
    ("ragged_rows", "B, S(0), B -> P(sum)"), ("ragged_rows", "B, S(2), B -> S(1)"),
    ("ragged_rows_summed", "S(0), S(0), B -> P(sum)"), ("ragged_rows_summed", "B, B, B -> S(0)"),
    ("ragged_batched_sizes", "S(0), S(1), S(0) -> S(0)"), ("triangular_solve", "B, S(2) -> S(2)"),
    ("triangular_solve_right", "B, S(0) -> S(0)"), ("symmetric_product", "S(2), B -> P(sum)"),
    ("argmax", "S(1) -> B"), ("argmax", "S(0) -> S(0)"), ("top_k", "S(1) -> B, B"), ("reduce_prod_float", "S(0) -> B"),
    ("reduce_and_int", "S(1) -> B"), ("reduce_xor_bool", "S(1) -> B"), ("cumsum", "S(1) -> S(1)"),
    ("cumlogsumexp_lowest", "S(0) -> S(0)"), ("cummax", "P(max) -> P(max)"),
    ("random_bits_32", "B -> S(2)"), ("random_split_rbg", "B -> S(1)"), ("random_gamma_one_key", "B, S(0) -> S(0)"),
    ("convert_float32_to_bfloat16", "P(min) -> P(min)"), ("convert_bool_to_int32", "P(max) -> P(max)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "signature"), OFFERED)
def test_offered(name: str, signature: str) -> None:
    assert signature in _offers(name)


WRONG = [
    ("convert_float64_to_int32", "P"), ("convert_float64_to_float32", "P(sum)"),
    ("convert_float32_to_bfloat16", "P(sum)"),
    ("convert_int32_to_int8", "P"), ("convert_int8_to_int32", "P(sum)"), ("convert_int32_to_float64", "P(sum)"),
    ("convert_int32_to_uint32", "P(max)"), ("convert_float32_to_bool", "P"), ("convert_float32_to_float8_e4m3fn", "P"),
    ("div_int", "P"), ("sqrt", "P(sum)"), ("sqrt", "P(max)"), ("log", "P(max)"), ("rsqrt", "P"), ("max", "P(sum)"),
    ("max", "P(min)"), ("abs", "P"), ("square", "P"), ("integer_pow_2", "P"), ("integer_pow_3", "P(sum)"),
    ("integer_pow_3_int", "P"), ("neg_int", "P(max)"), ("scatter_mul_clip", "P(max)"),
    ("scatter_mul_clip", "B, B, P"), ("scatter_clip", "P"),
    ("scatter_apply", "P"), ("reduce_prod_float", "P"), ("reduce_max_float", "P(sum)"), ("reduce_sum_float", "P(max)"),
    ("reduce_sum_float", "P(min)"), ("reduce_and_int", "P"), ("sort", "P"), ("argmax", "P"),
    ("dot_int8", "P(sum), B"), ("dot", "P(sum), P(sum)"), ("mul", "P(sum), P(sum)"), ("add", "P(sum), B"),
    ("gather_bool", "P(sum)"), ("reduce_precision", "P"), ("triangular_solve", "P(sum), B"),
    ("sort", "S(1)"), ("cummax_complex", "S(0)"), ("argmax_wraps", "S"),
    ("ragged_narrow", "S(0), B"), ("ragged_of_batch", "S(0)"), ("symmetric_product", "P"), ("ragged_rows", "B, B, S"),
    ("triangular_solve", "B, S(1)"), ("scatter_mul_clip", "P(sum), B, P"), ("scatter_windows_clip", "P"),
    ("scatter_add_windows_clip", "B, B, S(1)"), ("cumprod", "P"), ("cumlogsumexp", "P"), ("cummax", "P(min)"),
    ("scatter_clip", "B, S"), ("scatter_mul_clip", "B, S"), ("conv", "S(1), S(0)"), ("conv", "B, S(0)"),
    ("conv_of_weights", "S(1), B"), ("reduce_window_sum", "P(max)"), ("reduce_window_max", "P(sum)"),
    ("reduce_window", "S(2)"), ("reduce_window", "S(1)"), ("select_and_gather_add_padded", "S"),
    ("select_and_scatter_add", "B, P"), ("select_and_scatter_add", "S(1), B"), ("select_and_gather_add", "P(sum), P"),
    ("random_bits_of_rbg", "S"), ("random_bits_of_rbg", "B -> S"), ("random_split_unsafe_rbg", "S"),
    ("random_fold_in_unsafe_rbg", "S"), ("random_bits_of_threefry4x32", "B -> S"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "operands"), WRONG)
def test_not_offered(name: str, operands: str) -> None:
    assert not [s for s in _offers(name) if s.startswith(operands)]


def test_conversions_agree_with_numpy_on_what_they_cover() -> None:
    assert conversion_ops(np.float32, np.float64) == ("sum", "max", "min")
    assert conversion_ops(np.int32, np.int64) == ("max", "min")
    assert conversion_ops(np.uint32, np.int32) == ("sum",)
    assert conversion_ops(np.complex64, np.float32) == ()
    assert conversion_ops("float16", "bfloat16") == conversion_ops("bfloat16", "float16") == ("max", "min")
