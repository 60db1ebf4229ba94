"""What is after a collective, from what is before it, in NumPy alone."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from shardc import Placement
from shardc.execute.check.compare import coordinates, expected, rounding, spread, sum_bound, unlike, valid
from shardc.passes.lower.lower_borders import Passage
from shardc.sbp.cost import BoxingStep

R = np.random.default_rng(0)


def pieces(x, placement, sizes):
    """The pieces of devices, padding zero; of a sum each device has a random part."""
    found = {}
    for at in coordinates(sizes):
        logical, local = valid(x.shape, placement, sizes, at, 0)
        shape = [-(-n // np.prod([sizes[a] for a in placement.axes_of(d)], dtype=int)) for d, n in enumerate(x.shape)]
        found[at] = np.zeros(shape, x.dtype)
        found[at][local] = x[logical]
    return found


@pytest.mark.parametrize(
    "kind, axes, src, dst",
    [
        ("all_gather", ("a",), "{a: S(0)}", "{}"),
        ("all_gather", ("b", "a"), "{b: S(1), a: S(1)}", "{}"),
        ("all_to_all", ("a",), "{a: S(0), b: S(1)}", "{b: S(1), a: S(1)}"),
        ("permute", ("a", "b"), "{a: S(0), b: S(0)}", "{b: S(0), a: S(0)}"),
        ("permute", ("a", "b"), "{a: S(0)}", "{b: S(0)}"),
    ],
)
@pytest.mark.parametrize("shape", [(12, 6), (7, 5)], ids=str)
def test_what_moves_is_equal(kind, axes, src, dst, shape):
    sizes, src, dst = {"a": 3, "b": 2}, Placement.parse(src), Placement.parse(dst)
    x = R.normal(size=shape)
    step = BoxingStep(kind, axes, src, dst)
    passage = Passage(kind, None, axes, ((shape, src),), step=step, shape=shape)
    after = pieces(x, dst, sizes)
    for at, (where, want, bound) in expected(passage, pieces(x, src, sizes), sizes).items():
        wrong, _ = unlike(after[at][where], want, bound)
        assert not wrong.any() and np.all(bound == 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64], ids=str)
def test_sums_in_any_order_are_within_the_bound(dtype):
    terms = (R.normal(size=(8, 64)) * 10.0 ** R.integers(-3, 3, (8, 64))).astype(dtype)
    sizes, src = {"a": 8}, Placement.parse("{a: P(sum)}")
    passage = Passage("all_reduce", None, ("a",), step=BoxingStep("all_reduce", ("a",), src, Placement()), shape=(64,))
    _, want, bound = expected(passage, {(i,): terms[i] for i in range(8)}, sizes)[0,]
    for order in itertools.islice(itertools.permutations(range(8)), 0, 40320, 401):
        total = np.zeros(64, dtype)
        for i in order:
            total = (total + terms[i]).astype(dtype)
        assert not unlike(total, want.astype(want.dtype), bound)[0].any()
    total[3] = -total[3] - terms[0][3]
    assert unlike(total, want, bound)[0].tolist() == [i == 3 for i in range(64)]


def test_a_sum_that_overflows_in_some_order_may_be_anything():
    size = np.asarray([1e5, 1.0])
    assert np.isinf(sum_bound(3, np.float16, size)).tolist() == [True, False]
    wrong, _ = unlike(np.asarray([np.nan, np.nan]), np.asarray([2.0, 2.0]), np.asarray([np.inf, 1.0]))
    assert wrong.tolist() == [False, True]


@pytest.mark.parametrize("op, want", [("max", [3.0, np.nan]), ("min", [1.0, np.nan])])
def test_maxima_are_exact(op, want):
    sizes, src = {"a": 2}, Placement.parse(f"{{a: P({op})}}")
    passage = Passage("all_reduce", None, ("a",), step=BoxingStep("all_reduce", ("a",), src, Placement()), shape=(2,))
    before = {(0,): np.asarray([1.0, np.nan]), (1,): np.asarray([3.0, 2.0])}
    _, found, bound = expected(passage, before, sizes)[1,]
    assert not unlike(np.asarray(want), found, bound)[0].any() and bound == 0


def test_integers_differ_where_rounding_changes_them_alone():
    a = np.arange(4)
    assert unlike(a + (a == 2), a, rounding(a, a))[0].tolist() == [False, False, True, False]
    assert spread(a, [a, a]) == 0 and np.isinf(spread(a, [a, a + 1]))


def test_an_infinite_bound_lets_integers_be():
    a = np.arange(4)
    assert not unlike(a + 1, a, np.inf)[0].any()


def test_rounding_moves_an_array_as_much_as_its_runs_say():
    x = R.normal(size=1000).astype(np.float32)
    bound = spread(x, [x * np.float32(1 + 1e-6), x])
    assert bound.min() > 1e-6 and bound.max() < 4e-5
