"""Plans under a limit on memory: they fit, are right, and cost no less than the bound says."""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from examples import gpt2
from examples.zoo import MODELS
from shardc import S
from shardc.ir.box import box_p
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import view
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.live_ranges import live_ranges
from shardc.passes.estimate.memory import profile_memory
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.memory_limit import LimitSearch
from shardc.passes.place.memory_prices import points_without_boxings
from shardc.passes.place.place import Placer
from tests.passes.place.test_optimal import random_problem

BOUND_TOLERANCE = 1000
"""Combinations of choices that are tried for one program, at most; programs of more are left out."""


def every_plan(problem, fit):
    """(cost, peak) of all assignments, holds included; None if they are too many."""
    sizes = [len(fit.placer.domains.of[n.number].seconds) for n in problem.nodes]
    if np.prod(sizes, dtype=float) > BOUND_TOLERANCE:
        return None
    trials = map(fit.try_, np.ndindex(*sizes))
    return [(t.found.cost, t.peak) for t in trials]


def test_against_trying_everything():
    """Random programs, a random limit between the least memory there is and that of the cheapest plan: what is found
    fits, is the cheapest that does, and is proved to be."""
    tried = 0
    for seed in range(120):
        rng = random.Random(seed)
        problem, mesh, steps = random_problem(rng)
        placer, backend = Placer(problem, mesh), backend_of(mesh.topology.backend)
        unlimited = LimitSearch(placer, {}, backend, 1e18)
        everything = every_plan(problem, unlimited)
        if everything is None:
            continue
        cheapest = placer.tables.best()
        least, most = min(peak for _, peak in everything), unlimited.try_(cheapest.values).peak
        assert unlimited.memory.least() <= least, "everything where it takes least"
        if least >= most:
            continue
        limit = rng.randint(least, most - 1)
        truth = min(cost for cost, peak in everything if peak <= limit)
        found = LimitSearch(placer, {}, backend, limit).run(cheapest).best
        where = seed, steps, dict(mesh.axes), mesh.topology.kind
        assert found is not None, where
        assert found.peak <= limit, where
        assert found.found.cost == pytest.approx(truth, rel=1e-9), where
        assert found.found.gap == 0, where
        tried += 1
    assert tried >= 10


def test_nothing_changes_where_the_cheapest_fits():
    step, state, batch = training("mlp")
    free, roomy = (train_plan(step, state, batch, hbm) for hbm in (None, "1GB"))
    assert roomy.unlimited is None
    assert roomy.explain().splitlines()[:-2] == free.explain().splitlines()[:-2]


def training(name):
    zoo = MODELS[name]
    cfg = zoo.configs["test"]
    init, step = zoo.make_step(cfg, lambda f: f)
    return step, init(jax.random.key(0)), next(zoo.batches(cfg, 16, 0))


def train_plan(step, state, batch, hbm, topology=None):
    return train_function(step, hbm, topology).plan(*state, batch)


def train_function(step, hbm, topology=None):
    mesh = shardc.make_mesh(topology=topology, data=4, model=2, hbm=hbm)
    return shardc.function(step, mesh=mesh, donate_argnames=("params", "opt_state"), in_placements={"params": {}})


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.sampled(0))])
def test_a_training_step_within_a_limit(name):
    """Whole parameters are pinned, so that the optimizer's state is what is split: it fits, runs, and is right."""
    step, state, batch = training(name)
    want = jax.jit(step)(*state, batch)
    free = train_plan(step, state, batch, None)
    limit = int(0.9 * free.memory.peak)
    f = train_function(step, f"{limit}B")
    compiled = f.compile(*state, batch)
    plan = f.plan(*state, batch)
    assert plan.memory.peak <= limit
    assert 0 <= plan.gap < 1
    assert plan.unlimited.peak == free.memory.peak
    stats = compiled.memory_stats()
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert taken - stats.alias_size_in_bytes <= limit
    assert compiled.audit().ok
    got = f(*jax.tree.map(jnp.copy, state), batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=2e-5)


def test_scanned_layers_are_split_by_themselves(golden):
    """Whole parameters and optimizer state are cheapest for a large batch. Under a limit they are split, if nothing is
    left to recompute."""
    cfg = gpt2.Config(layers=6, d_model=256, heads=4, seq=64, learning_rate=1e-3, scan_layers=True, remat=True)
    init, step = gpt2.make_step(cfg, lambda f: f)
    state = jax.eval_shape(init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((256, 64), np.int32) for k in ("inputs", "targets")}

    def plan(hbm):
        mesh = shardc.make_mesh(topology="v5p", data=8, hbm=hbm)
        f = shardc.function(
            step, mesh=mesh, donate_argnames=("params", "opt_state"), in_placements={"batch": {"data": S(0)}}
        )
        return f.plan(*state, batch)

    free = plan("95GB")
    tight = plan(int(0.8 * free.memory.peak))
    assert tight.memory.peak <= 0.8 * free.memory.peak
    assert tight.memory.arguments < 0.7 * free.memory.arguments
    assert tight.gap < 1
    golden("within_a_limit", "\n".join(tight.explain().splitlines()[-3:]))


def test_sums_that_a_loop_carries_are_split():
    """Sums of gradients over microbatches are whole, and reduced once behind the loop; under a limit they are split,
    and reduced in each of its steps. On so many devices that no product has its pieces go around."""
    cfg = gpt2.Config(12, 1024, 16, 1024, 8192, scan_layers=True, remat=True, dtype=jnp.bfloat16)
    init, step = gpt2.make_step(cfg, lambda fn: shardc.accumulate(fn, microbatches=4))
    state = jax.eval_shape(init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((256, 1024), np.int32) for k in ("inputs", "targets")}
    split = shardc.rules({"*kernel": {"data": S(-2)}, "*embedding": {"data": S(-1)}})

    def plan(hbm):
        f = shardc.function(
            step, mesh=shardc.make_mesh(topology="v5p", data=32, hbm=hbm), donate_argnames=("params", "opt_state"),
            in_placements={"params": split, "opt_state": split, "batch": {"data": S(0)}},
        )  # fmt: skip
        return f.plan(*state, batch)

    def reduced(plan):
        """The number of reductions of the kernels' gradients: one for all, or one for each layer."""
        return {c.count for c in plan.collectives if c.kind == "reduce_scatter" and c.value.endswith("1024,4096]")}

    free = plan("95GB")
    tight = plan(int(0.7 * free.memory.peak))
    assert reduced(free) == {1}
    assert reduced(tight) == {4 * cfg.layers}
    assert tight.memory.peak <= 0.7 * free.memory.peak
    assert tight.recomputed is None
    assert tight.seconds < 1.03 * free.seconds


def test_what_never_fits(golden):
    def loss(params, x):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    params = {"layers": [jax.ShapeDtypeStruct((512, 512), np.float32)] * 3}
    x = jax.ShapeDtypeStruct((256, 512), np.float32)
    mesh = shardc.make_mesh(topology="v5p", data=4, hbm="1.2MB")
    with pytest.raises(shardc.MemoryLimitError) as raised:
        shardc.function(step, mesh=mesh, in_placements={"x": {"data": S(0)}}).plan(params, x)
    pinned = shardc.function(step, mesh=mesh, in_placements={"params": {}}, donate_argnames=("params",))
    with pytest.raises(shardc.MemoryLimitError) as alone:
        pinned.plan(params, x)
    golden("never_fits", f"{raised.value}\n\n{alone.value}")


def test_what_a_limit_is():
    known = view(shardc.make_mesh(topology="h200", data=4))
    assert known.limit == known.topology.hbm == 141 * 10**9
    assert view(shardc.make_mesh(topology="h200", data=4, hbm="1GB")).limit == 10**9
    assert view(shardc.make_mesh(data=4)).limit is None
    assert view(shardc.make_mesh(data=4, hbm="1GB")).limit == 10**9
    assert view(shardc.make_mesh(topology="cpu", data=4)).limit is None


def test_more_than_a_guess_is_no_error():
    large = jax.ShapeDtypeStruct((2**20, 2**12), np.float32)
    mesh = shardc.make_mesh(topology="cpu", data=4)
    plan = shardc.function(lambda x: x + 1, mesh=mesh, in_placements={"x": {}}).plan(large)
    assert plan.memory.peak > mesh_memory(mesh)


def mesh_memory(mesh):
    return view(mesh).topology.hbm


def two_readers(x, ws):
    """Reads x whole first and last."""
    y = x @ ws[0]
    for w in ws[1:-1]:
        y = jnp.tanh(y @ w)
    return y + x @ ws[-1]


def test_copies_are_parted(tmp_path):
    """A boxing for two readers is repeated behind a parting, waits there, and the program computes the same."""
    mesh = shardc.make_mesh(data=8)
    rng = np.random.default_rng(0)
    x, ws = rng.normal(size=(64, 64)), [rng.normal(size=(64, 64)) / 8 for _ in range(6)]
    plan = shardc.function(two_readers, mesh=mesh, in_placements={"x": {"data": S(1)}, "ws": {}}).plan(x, ws)
    problem = plan.counterfactuals[0].problem
    placer = Placer(problem, view(mesh))
    choices = placer.tables.best().values
    for n in problem.nodes:  # x is held where it comes in, and read whole by every reader
        d = placer.domains.of[n.number]
        for c in range(len(d.seconds)):
            ports = placer.domains.placements(n, c)
            split = shardc.Placement.parse("{data: S(1)}")
            if ports[-1] == split if n.path == "x" or n.kind == "hold" else not any(p.items_ for p in ports):
                choices[n.number] = c
    placed = placer.placed(type(placer.tables.best())(choices, 0.0, 0.0))
    together, apart = (insert_boxing(problem, placed, view(mesh), partings) for partings in ((), (4,)))

    def boxes(boxed):
        return [e for e in all_eqns(boxed.jaxpr) if e.primitive is box_p]

    assert [len(e.invars) for e in boxes(together)] == [1]
    assert [len(e.invars) for e in boxes(apart)] == [1, 2]
    between = []
    for boxed in (together, apart):
        got = jax.core.eval_jaxpr(boxed.jaxpr, (), x, *ws)
        np.testing.assert_allclose(got[0], two_readers(x, ws), rtol=1e-4, atol=1e-5)
        points = points_without_boxings(boxed.jaxpr)
        assert points.size == live_ranges(boxed.jaxpr).points
        assert points[-1] + 1 == live_ranges(problem.scope.jaxpr).points
        taken = profile_memory(boxed.jaxpr, boxed.placements, {"data": 8}, backend=backend_of("tpu")).bytes
        between.append(taken[points == 4].min())
    assert between[0] - between[1] >= x.size * 4
    parted = replace(plan, boxed=apart, outputs=tuple(apart.placements[v] for v in apart.jaxpr.outvars))
    parted.save(tmp_path / "plan.json")
    saved = shardc.function(two_readers, mesh=mesh, plan=tmp_path / "plan.json")
    assert [len(e.invars) for e in boxes(saved.plan(x, ws).boxed)] == [1, 2]
    assert saved.compile(x, ws).audit().ok
    np.testing.assert_allclose(np.asarray(saved(x, ws)), two_readers(x, ws), rtol=1e-4, atol=1e-5)
