"""Layers that are written out: their cells are found, and what one of them gives is as good as is said."""

import importlib
import itertools
import logging
import re

import jax
import numpy as np
import optax
import pytest

import shardc
from shardc import S
from shardc.solver import FORBIDDEN, Memo, SolverOptions, minimize
from shardc.solver.eliminate import Elimination, elimination_order
from shardc.solver.layer_chain import SEAMS, Numbered
from shardc.solver.operations import Operations
from shardc.solver.repeated_layers import find_chain
from tests.solver.problems import cost_of, repeated_layers

solve = importlib.import_module("shardc.solver.solve")
SIZE = 5
"""Variables of a layer."""


def layered(seed: int, layers: int, names: bool = False, forbidden: float = 0.0):
    """Layers one after the other, and something before and behind them. In a layer and between two, variables are
    linked; with `names` another link leads through the layers in the order of their names."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, SIZE)

    def table(i: int, j: int):
        entries = rng.integers(0, 30, (sizes[i % SIZE], sizes[j % SIZE])).astype(float)
        entries[rng.random(entries.shape) < forbidden] = FORBIDDEN
        return entries

    unary = [rng.integers(0, 30, size).astype(float) for size in sizes]
    inner = {(p, p + 1): table(p, p + 1) for p in range(SIZE - 1)} | {(0, 3): table(0, 3)}
    links = {(4, 0): table(4, 0), (2, 2) if seed % 3 == 0 else (3, 1): table(2, 2) if seed % 3 == 0 else table(3, 1)}
    pairwise = {
        (k * SIZE + p, k * SIZE + q): t for k in range(layers) for (p, q), t in inner.items()
    } | {(k * SIZE + p, (k + 1) * SIZE + q): t for k in range(layers - 1) for (p, q), t in links.items()}  # fmt: skip
    if names:
        order, by_name = sorted(range(layers), key=str), table(1, 4)
        pairwise |= {(a * SIZE + 1, b * SIZE + 4): by_name for a, b in itertools.pairwise(order)}
    count = layers * SIZE
    ends = [rng.integers(0, 30, 3).astype(float) for _ in range(2)]
    pairwise[0, count] = rng.integers(0, 30, (sizes[0], 3)).astype(float)
    pairwise[count - 1, count + 1] = rng.integers(0, 30, (sizes[-1], 3)).astype(float)
    return unary * layers + ends, pairwise


def chain_of(unary, pairwise):
    return find_chain(Numbered(unary, pairwise, Operations(Memo())))


def least(unary, pairwise) -> float:
    """By elimination of all variables."""
    pairs = {(min(p), max(p)): t if p[0] < p[1] else t.T for p, t in pairwise.items()}
    elimination = Elimination(unary, pairs)
    elimination.run(elimination_order(len(unary), list(pairs)))
    return elimination.least


@pytest.mark.parametrize("seed", range(12))
def test_cells_are_the_layers(seed):
    unary, pairwise = layered(seed, 60)
    chain = chain_of(unary, pairwise)
    assert chain is not None
    assert 56 <= len(chain.cells) <= 60
    assert {len(cell) for cell in chain.cells} == {SIZE}
    assert len({v for cell in chain.cells for v in cell}) == SIZE * len(chain.cells)
    for cell in chain.cells:
        assert all(unary[v] is unary[w] for v, w in zip(cell, chain.cells[0], strict=True))
    for (v, end), j in chain.across.items():
        assert (j, end[1]) in chain.problem.near.of(v)
        assert any(cell[end[0]] == v for cell in chain.cells)
    steps = {abs(a[0] // SIZE - b[0] // SIZE) for a, b in itertools.pairwise(chain.cells)}
    assert steps == {1}


def test_layers_whose_names_are_in_another_order_are_cells_too():
    """As those of parameters are, of which the gradients' norm is summed in that order."""
    found = [chain_of(*layered(seed, 60, names=True)) for seed in range(12)]
    assert sum(chain is not None and len(chain.cells) >= 48 for chain in found) >= 8
    for chain in found:
        for cell in chain.cells if chain else ():
            assert len({v // SIZE for v in cell}) <= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_what_cells_give_is_as_good_as_it_is_said_to_be(names, forbidden, caplog):
    caplog.set_level(logging.DEBUG, logger="shardc")
    by_cells = 0
    for seed in range(30):
        unary, pairwise = layered(seed, 60, names, forbidden)
        true = least(unary, pairwise)
        caplog.clear()
        found = minimize(unary, pairwise)
        if true >= FORBIDDEN:
            assert not found.cost < FORBIDDEN
            continue
        assert found.cost == cost_of(unary, pairwise, found.values)
        assert found.bound <= true * (1 + 1e-12) <= found.cost * (1 + 1e-12)
        assert found.gap <= SEAMS * (1 + 1e-9)
        by_cells += " cells: bound" in caplog.text
    assert by_cells >= 20


@pytest.mark.parametrize("seed", range(12))
def test_shares_leave_links_that_cost_nothing_at_least(seed):
    chain = chain_of(*layered(seed, 40, forbidden=0.1))
    assert chain is not None
    shares = chain.shares(chain.ring(), 1e-6)
    assert shares is not None
    for x, y in chain.links:
        with np.errstate(invalid="ignore"):
            rest = chain.problem.tables[x[1]] - shares[x][:, None] - shares[y]
        assert np.nanmin(rest) >= -1e-9


@pytest.mark.parametrize("seed", range(12))
def test_a_chain_of_fewer_cells_is_the_problem_of_fewer_layers(seed):
    unary, pairwise = layered(seed, 40)
    chain = chain_of(unary, pairwise)
    assert chain is not None
    part = chain.shorter()
    assert part is not None
    assert least(part.unary, part.pairwise) == least(*layered(seed, 43 - len(chain.cells)))


def test_a_variable_that_all_layers_read_may_have_one_value_that_is_as_good_as_any():
    unary, pairwise = layered(1, 40)
    hub = len(unary)
    cheap, dear = np.zeros((2, unary[0].size)), np.ones((2, unary[0].size))
    cheap[1] = 1.0
    for table, found in ((cheap, True), (np.asarray(np.random.default_rng(0).random(dear.shape)), False)):
        more = {(hub, k * SIZE): table for k in range(40)}
        problem = Numbered([*unary, np.asarray([1.0, 1.0])], pairwise | more, Operations(Memo()))
        assert (hub in problem.fixed) == found
        assert (find_chain(problem) is not None) == found
        assert problem.constant == (1.0 if found else 0.0)


@pytest.mark.parametrize("better", range(3))
def test_what_is_as_good_in_a_cell_is_decided_at_the_ends(better, caplog):
    """Without another problem for it: all cells have what the outermost ones have there."""
    caplog.set_level(logging.DEBUG, logger="shardc")
    layers, own = 40, np.zeros(3)
    apart = [np.where(np.eye(3, dtype=bool), 0.0, 7.0 + k + np.arange(9.0).reshape(3, 3)) for k in range(SIZE)]
    pairwise = {(v, v + 1): apart[v % SIZE] for v in range(layers * SIZE - 1)}
    dear = np.where(np.arange(3) == better, 1.0, 2.0)
    unary = [dear, *[own] * (layers * SIZE - 2), dear]
    found = minimize(unary, pairwise)
    assert found.cost == found.bound == least(unary, pairwise) == 2.0
    assert set(found.values) == {better}
    assert " cells: bound" in caplog.text
    assert "one cell between the ends" not in caplog.text


def test_the_same_on_every_run():
    first, second = (minimize(*layered(7, 60, names=True)) for _ in range(2))
    assert first == second


def disturbed(seed):
    """Layers of which some variables have other costs, and one perhaps that all layers read; or no layers at all."""
    rng = np.random.default_rng(seed)
    if seed % 4 == 0:
        count, own = int(rng.integers(2, 200)), rng.integers(0, 9, 3).astype(float)
        tables = rng.integers(0, 9, (2, 3, 3)).astype(float)
        return [own] * count, {(int(rng.integers(0, j)), j): tables[rng.integers(2)] for j in range(1, count)}
    layers = int(rng.integers(6, 70))
    unary, pairwise = repeated_layers(seed, layers, int(rng.integers(1, 4)))
    width = len(unary) // layers
    for v in rng.integers(0, len(unary), rng.integers(0, 4)):
        unary[v] = rng.integers(0, 9, 3).astype(float)
    if seed % 4 == 1:
        size = int(rng.integers(1, 4))
        table = rng.integers(0, 9, (size, 3)).astype(float)
        pairwise |= {(len(unary), k * width): table for k in range(layers)}
        unary = [*unary, rng.integers(0, 9, size).astype(float)]
    return unary, pairwise


def test_where_layers_differ_nothing_is_said_that_is_not_so(caplog):
    caplog.set_level(logging.DEBUG, logger="shardc")
    for seed in range(120):
        unary, pairwise = disturbed(seed)
        true, found = least(unary, pairwise), minimize(unary, pairwise, options=SolverOptions(chain=True))
        assert found.cost == cost_of(unary, pairwise, found.values)
        assert found.bound <= true * (1 + 1e-12) <= found.cost * (1 + 1e-12)
    assert caplog.text.count(" cells: bound") >= 20


def step(params, x):
    """Of gradient descent with a clip by the global norm, which sums in the order of names."""

    def loss(params):
        y = x
        for layer in range(len(params)):
            p = params[f"layer{layer}"]
            y = y + jax.nn.gelu(y @ p["up"] + p["bias"]) @ p["down"]
        return (y**2).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    grads = jax.grad(loss)(params)
    updates, _ = optimizer.update(grads, optimizer.init(params))
    return optax.apply_updates(params, updates)


@pytest.mark.sampled(0)
def test_a_training_step_is_placed_as_well_as_without(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="shardc")
    layers, width = 72, 256
    shapes = {"up": (width, 4 * width), "bias": (4 * width,), "down": (4 * width, width)}
    params = {f"layer{k}": {n: jax.ShapeDtypeStruct(s, np.float32) for n, s in shapes.items()} for k in range(layers)}
    x = jax.ShapeDtypeStruct((256, width), np.float32)

    def plan():
        mesh = shardc.make_mesh(topology="v5p", data=4)
        return shardc.function(mesh=mesh, in_placements={"x": {"data": S(0)}})(step).plan(params, x)

    found = plan()
    printed = re.search(r" cells: bound (\S+), cost (\S+)", caplog.text)
    assert printed
    bound, cost = map(float, printed.groups())
    assert cost - bound <= SEAMS * cost
    monkeypatch.setattr(solve, "find_chain", lambda _: None)
    whole = plan()
    assert found.added_seconds == pytest.approx(whole.added_seconds, rel=2 * SEAMS)
