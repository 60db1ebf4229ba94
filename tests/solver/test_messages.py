"""Messages in single precision: quick, and no bound is taken from them."""

import numpy as np
import pytest

from shardc.solver.dual import Dual
from shardc.solver.messages import Messages
from tests.solver.problems import every, random_problem, repeated_layers, shapes


def near_of(unary, pairwise):
    near = [{} for _ in unary]
    for (i, j), table in pairwise.items():
        near[i][j], near[j][i] = table, np.ascontiguousarray(table.T)
    return near


def cost(unary, pairwise, x):
    return sum(u[a] for u, a in zip(unary, x, strict=True)) + sum(t[x[i], x[j]] for (i, j), t in pairwise.items())


@pytest.mark.parametrize("shape", shapes)
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_one_with_rough_messages(shape, seed):
    rng = np.random.default_rng(seed)
    unary, pairwise = random_problem(shape, seed)
    # thirds are nothing that single precision has, and 1e4 is so large that it loses what tells assignments apart
    unary = [u / 3 + 1e4 * rng.random() for u in unary]
    pairwise = {pair: t / 3 for pair, t in pairwise.items()}
    least = min(cost(unary, pairwise, x) for x in every(unary))
    dual = Dual(unary, near_of(unary, pairwise), rough=True)
    for _ in range(5):
        assert dual.raise_bound() <= least * (1 + 1e-12)
    exact = Dual(unary, near_of(unary, pairwise))
    for _ in range(5):
        exact.raise_bound()
    assert dual.bound == pytest.approx(exact.bound, rel=1e-5)


def test_what_is_read_is_exact():
    unary, pairwise = repeated_layers(3, layers=12, width=4, values=5)
    dual = Dual(unary, near_of(unary, pairwise), rough=True)
    dual.raise_bound()
    for values in dual.readings:
        assert dual.cost(values) == cost(unary, pairwise, values)


def test_rough_messages_are_in_the_same_order():
    unary, pairwise = repeated_layers(5, layers=4)
    near = near_of(unary, pairwise)
    level = list(range(len(unary)))
    exact, rough = Messages(unary, near, level), Messages(unary, near, level, rough=True)
    assert rough.all.dtype == np.float32
    for messages in (exact, rough):
        for forward in (True, False):
            messages.run(forward)
    np.testing.assert_allclose(rough.all, exact.all, rtol=1e-5, atol=1e-4)
    assert rough.bound == pytest.approx(exact.bound, rel=1e-5)
