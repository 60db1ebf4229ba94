"""The loops over tables in both implementations: against plain formulas, against each other, and messages against all
assignments."""

import itertools
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.solver import SolverOptions, minimize
from shardc.solver.cost_tables import CHUNK, Lookup, double
from shardc.solver.dual import Dual
from shardc.solver.graph import Members
from shardc.solver.kernels import _compiled, kernels_after, kernels_for, numba_kernels, numpy_kernels
from shardc.solver.kernels.numba_kernels import compiled
from shardc.solver.kernels.numpy_messages import least_sums
from tests.solver.problems import every, random_problem, repeated_layers, shapes

LONG = numba_kernels.LONG


@pytest.fixture(params=[numpy_kernels, numba_kernels], ids=["numpy", "numba"])
def kernels(request):
    return request.param


def costs(rng, *shape, forbidden=0.2):
    return np.where(rng.random(shape) < forbidden, np.inf, rng.standard_normal(shape))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("columns", [1, 3, 17, LONG, 100])
def test_least_sums(rows, columns):
    rng = np.random.default_rng(rows * 100 + columns)
    table, here = costs(rng, rows, columns), rng.standard_normal(rows)
    out, other = np.zeros((2, columns))
    numba_kernels.least_sums(table.reshape(-1), here, out)
    least_sums(table, here, other, np.empty(3 * columns))
    np.testing.assert_array_equal(out, (table + here[:, None]).min(0))
    np.testing.assert_array_equal(other, out)


@pytest.mark.parametrize("seed", range(5))
def test_least_product(kernels, seed):
    rng = np.random.default_rng(seed)
    k, a, b = rng.integers(1, 9, 3)
    left, right = costs(rng, k, a), costs(rng, k, b)
    np.testing.assert_array_equal(
        kernels.least_product(left, right), (left[:, :, None] + right[:, None]).min(0, initial=np.inf)
    )


@pytest.mark.parametrize("seed", range(5))
def test_least_gain(seed):
    """What both rows forbid says nothing of either."""
    rng = np.random.default_rng(seed)
    columns = costs(rng, *rng.integers(1, 7, 2))
    found = numpy_kernels.least_gain(columns)
    for a, b in itertools.product(range(columns.shape[1]), repeat=2):
        both = [x - y for x, y in zip(columns[:, a], columns[:, b], strict=True) if np.isfinite(x) or np.isfinite(y)]
        assert found[a, b] == min(both, default=np.inf)


def test_block():
    rng = np.random.default_rng(0)
    table, rows, columns = costs(rng, 5, 7), np.array([0, 3, 4]), np.array([6, 2])
    np.testing.assert_array_equal(numpy_kernels.block(table, rows, columns), table[rows[:, None], columns])


@pytest.mark.parametrize("seed", range(5))
def test_what_is_allowed_of_a_block(seed):
    rng = np.random.default_rng(seed)
    table, mine, theirs = costs(rng, 5, 7), rng.standard_normal(5), rng.standard_normal(7)
    allowed = numpy_kernels.affordable(table, mine, theirs, 0.5)
    np.testing.assert_array_equal(allowed, table + mine[:, None] + theirs <= 0.5)
    some = np.ix_(rows := np.array([0, 3, 4]), columns := np.array([6, 2]))
    found, fewer = numpy_kernels.block_of_allowed(table, allowed, rows, columns)
    np.testing.assert_array_equal(found, np.where(allowed, table, np.inf)[some])
    assert fewer == (np.isfinite(table) & ~allowed)[some].any()


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (4, 0), (1, 1), (30, 1), (200, 5), (200, 90)])
def test_kinds_of_rows(rows, columns):
    rng = np.random.default_rng(rows + columns)
    different = rng.integers(0, 3, (max(rows // 4, 1), columns)).astype(np.float64)
    table = different[rng.integers(0, len(different), rows)]
    first, number = numpy_kernels.kinds(table.view(np.uint64) if table.size else np.zeros((rows, columns), np.uint64))
    kinds = dict.fromkeys(map(tuple, table.tolist()))
    assert [tuple(row) for row in table[first].tolist()] == list(kinds)
    np.testing.assert_array_equal(table[first][number], table)


@pytest.mark.parametrize("seed", range(60))
def test_is_plain(seed):
    """Not what has a row of nothing, one that follows from the other, or a sum of two vectors."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 5, 2)
    table = rng.standard_normal((rows, 1)) + rng.standard_normal(columns)
    if seed % 3:
        table += rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.3)
    if seed % 2:
        table[rng.random((rows, columns)) < rng.choice([0.2, 0.6])] = np.inf
    finite = np.isfinite(table)
    if finite.all():
        rest = table - table.min(1, keepdims=True)
        want = np.abs(rest - rest.min(0)).max() > 1e-13 * np.abs(table).max()
    else:
        want = finite.any(1).all() and (finite.sum(1) != 1).any() and (finite.sum(0) != 1).any()
    assert numpy_kernels.is_plain(table, 1e-13) == want


@pytest.mark.parametrize("seed", range(30))
def test_unbeaten(seed):
    """Each value that goes is beaten by one that stays, and one stays of those that beat each other."""
    rng = np.random.default_rng(seed)
    place = rng.integers(0, 4, (rng.integers(1, 9), 2))  # beaten is what is as large in both ways: an order
    gain = np.where((place[:, None] >= place).all(-1), 0.0, -1.0)
    kept = numpy_kernels.unbeaten(gain)
    for a in set(range(len(place))) - set(kept.tolist()):
        assert (gain[a, kept] >= 0).any()
    least = {tuple(p) for p in place.tolist() if not ((place <= p).all(1) & (place < p).any(1)).any()}
    assert sorted(map(tuple, place[kept].tolist())) == sorted(least)


@pytest.mark.parametrize("seed", range(20))
def test_least_of_sum(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, rng.integers(2, 6))
    arrays, begins, strides, taken = [], [], [], 0
    for _ in range(rng.integers(1, 5)):
        shape = np.where(rng.random(len(sizes)) < 0.5, sizes, 1)
        array = costs(rng, *shape)
        arrays.append(array)
        begins.append(taken)
        taken += array.size
        step, row = 1, []
        for n, some in zip(sizes[::-1], shape[::-1], strict=True):
            row.append(0 if some < n else step)
            step *= int(some)
        strides.append(row[::-1])
    entries = np.concatenate([a.reshape(-1) for a in arrays])
    found, other = both(lambda k: k.least_of_sum(entries, np.asarray(begins), np.asarray(strides), sizes))
    np.testing.assert_array_equal(found, other)
    want = np.broadcast_to(sum(arrays), sizes).min(-2)
    np.testing.assert_allclose(found, want.reshape(-1), rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_least_of_groups(kernels, seed):
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, 4, 9), rng.integers(0, 5, 7)
    table = Lookup(costs(rng, 4, 5), rows, columns)
    group, other = rng.permutation(np.arange(9) % 3), rng.permutation(np.arange(7) % 4)
    found = kernels.least_of_groups(table.matrix, Members(rows, group, 3), Members(columns, other, 4))
    whole = table.whole()
    want = [[whole[np.ix_(group == g, other == h)].min() for h in range(4)] for g in range(3)]
    np.testing.assert_array_equal(found, want)


def dual_of(unary, pairwise, kernels):
    near = [{} for _ in unary]
    for (i, j), table in pairwise.items():
        near[i][j], near[j][i] = table, np.ascontiguousarray(table.T)
    return Dual(unary, near, kernels)


def cost(unary, pairwise, x):
    return sum(u[a] for u, a in zip(unary, x, strict=True)) + sum(t[x[i], x[j]] for (i, j), t in pairwise.items())


@pytest.mark.parametrize("shape", shapes)
@pytest.mark.parametrize("seed", range(10))
def test_messages_say_what_is_so(kernels, shape, seed):
    """The bound is one, no value costs less than its excess says, and neither does what is handed change the costs."""
    unary, pairwise = random_problem(shape, seed)
    all_costs = {tuple(x): cost(unary, pairwise, x) for x in every(unary)}
    least, dual = min(all_costs.values()), dual_of(unary, pairwise, kernels)
    last = -np.inf
    for _ in range(4):
        bound = dual.raise_bound()
        assert last - 1e-9 <= bound <= least + 1e-9
        last = bound
    excess = np.split(dual.excess(), dual.first[1:])
    for v, more in enumerate(excess):
        for value, by in enumerate(more):
            assert dual.bound + by <= min(c for x, c in all_costs.items() if x[v] == value) + 1e-9
    constant, own, tables = dual.rest([np.arange(u.size) for u in unary])
    assert constant == pytest.approx(dual.bound)
    for x, c in all_costs.items():
        assert constant + cost(own, tables, x) == pytest.approx(c)


def test_tables_keep_their_identity(kernels):
    """The `dtype` of a compiled loop's result equals NumPy's, but is not identical."""
    table = kernels.least_product(np.eye(3), np.eye(3))
    assert double(table) is table
    assert double(np.eye(2, dtype=np.float32)).dtype == np.float64


@pytest.mark.parametrize("seed", range(10))
def test_assignments_are_improved(kernels, seed):
    unary, pairwise = repeated_layers(seed, layers=4, width=3, values=4)
    dual, rng = dual_of(unary, pairwise, kernels), np.random.default_rng(seed)
    some, other = (np.asarray([rng.integers(u.size) for u in unary], np.intp) for _ in range(2))
    assert dual.cost(some) == pytest.approx(cost(unary, pairwise, some))
    better = dual.improve(some, 3)
    assert dual.cost(better) <= dual.cost(some)
    mixed = dual.better_of(some, other)
    assert dual.cost(mixed) <= min(dual.cost(some), dual.cost(other)) + 1e-9
    assert all(m in (a, b) for m, a, b in zip(mixed, some, other, strict=True))


def test_where_nothing_can_be_kept_it_is_compiled_anew():
    space = {}
    exec("def twice(x):\n    return 2 * x", space)  # of no file
    assert compiled(space["twice"])(21) == 42


def test_a_first_call_imports_nothing_more_of_numba():
    program = """
import sys
import numpy as np
import shardc.solver.kernels.numba_kernels as kernels
before = set(sys.modules)
kernels.least_product(np.zeros((2, 2)), np.zeros((2, 2)))
print(sorted(m for m in set(sys.modules) - before if m.startswith("numba")))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def both(call):
    """What both implementations give."""
    return call(numpy_kernels), call(numba_kernels)


def same(call):
    """Both implementations give the same, bit for bit."""
    for a, b in zip(*both(lambda k: tuple(np.atleast_1d(*call(k)))), strict=True):
        np.testing.assert_array_equal(a, b)


sizes = st.integers(1, 12)
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(seeds, sizes, sizes, sizes, st.sampled_from([0.0, 0.2, 0.7]))
def test_both_implementations_of_each_loop_agree(seed, rows, columns, more, forbidden):
    rng = np.random.default_rng(seed)
    table, other = costs(rng, rows, columns, forbidden=forbidden), costs(rng, rows, more, forbidden=forbidden)
    some, there = rng.integers(0, rows, more), rng.integers(0, columns, rows)
    same(lambda k: (k.least_product(table, other),))
    group, groups = np.unique(rng.integers(0, 4, more), return_inverse=True)[1], rng.permutation(rows) % min(rows, 3)
    mine, theirs = Members(some, group, int(group.max()) + 1), Members(there, groups, min(rows, 3))
    same(lambda k: (k.least_of_groups(table, mine, theirs), np.zeros(1)))


def test_tables_larger_than_a_cache_are_read_in_parts():
    rng = np.random.default_rng(0)
    left, right, wide = rng.random((300, 9)), rng.random((300, 41)), rng.random((3, CHUNK + 5))
    assert left.size * right.shape[1] > CHUNK
    same(lambda k: (k.least_product(left, right), k.least_product(wide, right[:3]), k.least_product(right[:3], wide)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", shapes)
def test_both_implementations_of_messages_agree(shape):
    """Bounds, readings and messages are the same bits after several sweeps."""
    for seed in range(6):
        unary, pairwise = random_problem(shape, seed, most=6)
        rng = np.random.default_rng(seed)
        unary = [u + rng.random(u.shape) for u in unary]
        pairwise = {pair: t + rng.random(t.shape) for pair, t in pairwise.items()}
        ours, other = both(lambda k, u=unary, p=pairwise: dual_of(u, p, k))
        for _ in range(5):
            assert ours.raise_bound() == other.raise_bound()
            np.testing.assert_array_equal(ours.messages, other.messages)
            np.testing.assert_array_equal(ours.readings, other.readings)
        some, another = (np.asarray([rng.integers(u.size) for u in unary], np.intp) for _ in range(2))
        calls = ("excess",), ("cost", some), ("improve", some, 3), ("better_of", some, another)
        for name, *arguments in calls:
            np.testing.assert_array_equal(*(getattr(d, name)(*arguments) for d in (ours, other)))


@pytest.mark.parametrize("shape", shapes)
def test_both_implementations_find_the_same_assignment(shape):
    """Values, costs and bounds are equal."""

    def found(kernels):
        for seed in range(8):
            unary, pairwise = random_problem(shape, seed, forbidden=0.1, most=6)
            unary = [u + np.random.default_rng(seed).random(u.shape) for u in unary]
            yield minimize(unary, pairwise, options=SolverOptions(kernels=kernels))
        yield minimize(*repeated_layers(3, layers=20, values=5), options=SolverOptions(kernels=kernels))

    one, other = both(lambda k: list(found(k)))
    assert one == other


def test_large_problems_are_compiled(monkeypatch):
    monkeypatch.setattr("shardc.solver.kernels._compiled", cache(_compiled.__wrapped__))
    small, large = [np.zeros((2, 3)), np.zeros((1, 5))], [np.zeros((2, 3)), np.zeros((2, 3))]
    assert kernels_for(small, 12) is numpy_kernels
    assert kernels_for(large, 12) is numba_kernels
    assert kernels_for(small, 12) is numba_kernels  # which is loaded now


def test_large_problems_are_solved_without_numba(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "shardc.solver.kernels.numba_kernels")
    monkeypatch.delattr("shardc.solver.kernels.numba_kernels")
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr("shardc.solver.kernels._compiled", cache(_compiled.__wrapped__))
    with caplog.at_level("INFO", "shardc"):
        assert kernels_for([np.zeros((2, 3))], 0) is numpy_kernels
    assert "pip install 'shardc[fast]'" in caplog.text


def test_a_small_plan_imports_no_numba():
    program = """
import sys
import jax.numpy as jnp
import shardc
from shardc import S

mesh = shardc.make_mesh(topology="v5e:2x4", data=4, model=2)
step = shardc.function(lambda x, w, v: jnp.tanh(x @ w) @ v, mesh=mesh, in_placements={"x": {"data": S(0)}})
step.plan(jnp.ones((16, 32)), jnp.ones((32, 64)), jnp.ones((64, 8)))
print(sorted({"numba", "llvmlite", "scipy.optimize"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_long_search_goes_on_with_compiled_loops():
    assert kernels_after(1e8, 1000, numpy_kernels) is numpy_kernels
    assert kernels_after(1e9, 0, numpy_kernels) is kernels_after(0, 10**6, numpy_kernels) is numba_kernels
    unary, pairwise = random_problem(next(iter(shapes)), 0, most=6)
    ours, other = dual_of(unary, pairwise, numpy_kernels), dual_of(unary, pairwise, numpy_kernels)
    for _ in range(3):
        assert ours.raise_bound() == other.raise_bound()
        other.kernels = numba_kernels
    np.testing.assert_array_equal(ours.messages, other.messages)
