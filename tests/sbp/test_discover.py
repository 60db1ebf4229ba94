"""`discover`: the rules have every signature that it finds, or a reason is given."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import shardc
from shardc.sbp import rules
from shardc.sbp.signature import find_rule, signatures
from tests.sbp.cases import CASES
from tests.sbp.harness import equation_of, on_device

pytestmark = pytest.mark.usefixtures("compiled_fast")

assert rules  # imported for what it registers
ROUNDING = "the parts are rounded each for itself: equal up to an error that nobody bounds"
DATA = "holds for the data of the case: of random floats no two are equal, all are finite and none is 0"
SHAPE = "holds for the shapes of the case: nothing is taken from the operand, or its only legal value is 0"
REASONS: tuple[tuple[str, str, str], ...] = (
    (r"eq|ne|eq_int|ne_int|eq_to|is_finite|sign_int|convert_.*_to_bool", "P|B, P", DATA),
    ("nextafter", "P|B, P", ROUNDING),
    (r"convert_float64_to_.*|convert_int32_to_float64|convert_float32_to_float8_e4m3fn", "P", ROUNDING),
    ("convert_int32_to_int8", "P", "a narrowing conversion wraps on all of XLA's backends, but nothing promises it"),
    ("shift_left", "P", "sums of what is shifted are rare, and a shift is cheap behind any reduction"),
    (r"clamp.*", r"P\(sum\), B, B -> P\(min\)", DATA),
    ("select_n_scalar", "B", "one branch is never taken: the condition is a constant of the case"),
    (r"reshape_\(0, 3\)_\(3, 0\)|dot_empty|gather_nothing", ".*", SHAPE),
    (r"dynamic_slice|dynamic_update_slice", r".*, P|P\(sum\), P", SHAPE),
    ("pad_negative", "B, P|P", SHAPE),
    (r"reduce|reduce_window(_two)?", "B, .*P", "linear in an initial value, which is a scalar and a constant"),
    ("sort", "B, P", "linear in what is sorted along with the keys; the keys would have to be whole"),
    ("scatter_apply", "P|B, B, P", "linear in the operand, with a function that happens to be; no update is read"),
    (r"scatter_mul_.*", "B, B, P", "linear in the updates, if no two of them meet"),
    (r"scatter_(windows_)?(clip|fill_or_drop|promise_in_bounds)", "P|B, B, P", "which update wins is not defined"),
    ("gather_one_row", "B, P|P", SHAPE),
    (r"scatter.*_windows_fill_or_drop", "S", "holds for the data of the case: most windows fall outside"),
    (r"ragged_one(_summed)?", r"B, (B|S\(0\)), S\(0\)", DATA),
    ("ragged_of_batch", ".*", "sizes of a ragged batch are not read on a CPU; other machines may"),
    (r"reduce_prod_all_int|reduce_(and|or)_(bool|uint)", ".*", DATA),
    (r"cumsum_empty|top_none", ".*", SHAPE),
    (
        r"in_order_.*",
        r".*P\(sum\)",
        "a sum in parts has an order of its mesh, which is what the operation is there to avoid",
    ),
    ("attention_gradients_whole", r"B, B, S\(3\), B, S\(3\)", "a kernel computes whole heads of values"),
    (
        "attention_gradients_whole",
        r"B, B, P\(sum\), B, P\(sum\)",
        "linear in the values with the result that they gave",
    ),
    (
        r"attention_(?!gradients|alone).*",
        r"B, B, P\(sum\).* -> P\(sum\), B",
        "a rule makes all results partial",
    ),
)
"""Cases, the signatures found for them, and the reason why no rule has these."""
SLOW = {n for n in CASES if n.startswith("attention_gradients")} - {"attention_gradients_whole"}
"""Of gradients of attention, which have six operands and take a minute, one stands for all."""


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [n for n in CASES if n not in SLOW])
def test_nothing_is_found_that_no_rule_has(name: str) -> None:
    fn, args, primitive = CASES[name]
    with jax.enable_x64(True):
        eqn = equation_of(fn, *args, primitive=primitive)
        left_out = [i for i, x in enumerate(eqn.inputs) if name.startswith("attention") and not x.size]
        given = [i for i in range(len(eqn.inputs)) if i not in left_out]

        def call(*xs: Any) -> list[Any]:
            operands = dict(zip(given, xs, strict=True))
            return eqn.bind(*(operands.get(i, x) for i, x in enumerate(eqn.inputs)))

        found = shardc.discover(call, *(on_device(eqn.inputs[i]) for i in given))
        known = {
            str(replace(s, operands=tuple(s.operands[i] for i in given))) for s in signatures(find_rule(eqn.op), eqn.op)
        }
    reasons = [said for cases, said, _ in REASONS if re.fullmatch(cases, name)]
    missing = [str(s) for s in found.signatures if str(s) not in known]
    assert not [s for s in missing if not any(re.match(said, s) for said in reasons)]


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


FOUND = [
    (lambda x, w: x @ w, (_floats(4, 6), _floats(6, 2)), '"a b, b c -> a c", linear=(0, 1)'),
    (lambda x: jax.nn.softmax(x, -1), (_floats(4, 6),), '"a _ -> a _"'),
    (lambda x: x.max(1), (_floats(4, 6),), '"a b -> a", reduce="max"'),
    (lambda t, i: t[i], (_floats(8, 6), np.arange(5)), '"_ a, b -> b a", linear=(0,)'),
    (lambda x: (x.sum(1), x.T), (_floats(3, 5),), '"a _ -> a, _ a", linear=(0,)'),
    (lambda x, y: x + y, (_floats(1, 5), _floats(1, 5)), '"_ a, _ a -> _ a", linear=((0, 1),)'),
]

OF_KEYS = [
    (jax.vmap(jax.random.bits), 6, (), "a -> a", "_ -> _"),  # rbg draws for all keys at once, from the first
    (lambda k: jax.random.split(k, 3), (), (), " -> _", " -> _"),
    (jax.vmap(jax.random.split), 6, (), "a -> a _", "a -> a _"),
    (jax.vmap(jax.random.fold_in), 6, (np.arange(6),), "a, a -> a", "a, a -> a"),
    (lambda k, x: x + jax.random.normal(k, x.shape), (), (_floats(4, 6),), ", _ _ -> _ _", ", _ _ -> _ _"),
    (jax.random.key_data, (4, 3), (), "a b -> a b _", "a b -> a b _"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fn", "shape", "args", "said", "said_of_rbg"), OF_KEYS)
def test_keys_are_drawn_and_cut(fn, shape, args, said, said_of_rbg) -> None:
    for impl, text in (("threefry2x32", said), ("rbg", said_of_rbg)):
        key = jax.random.key(0, impl=impl)
        assert shardc.discover(fn, jax.random.split(key, shape) if shape else key, *args).text == text


@pytest.mark.parametrize(("fn", "args", "said"), FOUND)
def test_it_prints_what_to_paste(fn, args, said) -> None:
    found = shardc.discover(fn, *args)
    assert str(found).splitlines()[0] == f"@shardc.signature({said})"
    declared = shardc.signature(found.text, linear=found.linear, reduce=found.reduce)(fn)  # pyright: ignore
    for got, want in zip(jax.tree.leaves(declared(*args)), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_one_line_cannot_say_stands_below() -> None:
    found = shardc.discover(lambda x: (x.sum(1), x.max(1)), _floats(4, 6))
    assert [str(s) for s in found.left_out] == ["S(1) -> P(sum), P(max)"]
    assert str(found).endswith("S(1) -> P(sum), P(max)    not expressed by the line above")


def test_one_draw_may_deceive() -> None:
    x = np.zeros((4, 2))  # either half has the maximum of the whole, as long as all are zeros
    data = iter([(x,), (_floats(4, 2),)] * 2)
    assert "S(0) -> B" in map(str, shardc.discover(lambda x: x.max(0), x, draws=1).signatures)
    found = shardc.discover(lambda x: x.max(0), x, draws=2, draw=lambda _: next(data))
    assert [str(s) for s in found.signatures] == ["S(0) -> P(max)", "S(1) -> S(0)"]
