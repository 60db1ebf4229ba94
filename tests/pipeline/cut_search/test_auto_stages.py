"""Pipelines whose stages are cut by cost: parity with one device, against hand cuts, memory, and errors."""

from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
import shardc.pipeline.plan
from examples.zoo import MODELS
from shardc import S
from shardc.ir.nested import bodies_of
from shardc.pipeline import make
from shardc.pipeline.cut_search.auto_stages import cut_automatically
from shardc.pipeline.schedule.simulate import simulate
from tests.whole.test_parity import assert_close

pytestmark = pytest.mark.usefixtures("compiled_fast")

ROWS = 24
DATA = {"batch": {"data": S(0)}}


def init(layers=5, width=8):
    rng = np.random.default_rng(0)
    sizes = [width * (2 if i % 3 == 1 else 1) for i in range(layers + 1)]
    sizes[-1] = width
    weights = [rng.normal(size=s) / s[0] ** 0.5 for s in pairwise(sizes)]
    return {"layers": weights, "table": rng.normal(size=(12, width))}


BATCH = {"x": np.arange(ROWS) % 12, "late": np.arange(ROWS)[::-1] % 12, "y": 5 * np.arange(ROWS) % 12}


def loss(params, batch, block=lambda f: f):
    """Unequal layers, a tied table, a skip over all of them, and a value that is made early and used late."""
    late = params["table"][batch["late"]]
    x = skip = params["table"][batch["x"]]
    for w in params["layers"]:
        x = block(lambda x, w: jnp.tanh(x @ w))(x, w)
    logits = (x + skip * late) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def train_step(gradient, params, opt_state, batch):
    value, grads = gradient(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def inside(m, **kwargs):
    return shardc.accumulate(jax.value_and_grad(partial(loss, **kwargs)), microbatches=m)


def outside(m):
    return jax.value_and_grad(shardc.accumulate(loss, microbatches=m))


def check(gradient, pipeline, mesh=None, calls=2, **kwargs):
    """The state after some calls is that of one device."""
    step = partial(train_step, gradient)
    mesh = mesh or shardc.make_mesh(pipe=2)
    in_placements = DATA if "data" in mesh.axis_names else shardc.AUTO
    with jax.enable_x64(True):
        start = init(**kwargs)
        state = want = start, OPTIMIZER.init(start)
        pipelined = shardc.function(
            step, mesh=mesh, in_placements=in_placements, donate_argnames=("params", "opt_state"), pipeline=pipeline
        )
        for _ in range(calls):
            *want, value = jax.jit(step)(*want, BATCH)
            *state, got = pipelined(*state, BATCH)
            np.testing.assert_allclose(got, value, rtol=1e-10)
        assert_close(tuple(state), tuple(want))
        return pipelined.plan(*state, BATCH)


AUTO = shardc.Pipeline(stages="auto")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "layers", "m"), [(2, 3, 3), (3, 5, 2), (4, 6, 6)])
def test_a_model_without_marks_equals_one_device(ranks, layers, m):
    plan = check(inside(m), AUTO, shardc.make_mesh(pipe=ranks), layers=layers)
    assert len(plan.stages) == ranks


def test_with_data_parallel_stages():
    plan = check(inside(3), AUTO, shardc.make_mesh(pipe=3, data=2))
    assert len(plan.stages) == 3


def test_two_stages_for_each_rank():
    plan = check(inside(4), replace(AUTO, schedule="interleaved", chunks=2), layers=6)
    assert len(plan.stages) == 4


def test_where_the_gradient_is_taken_outside_the_last_stage_has_a_forward():
    plan = check(outside(2), AUTO)
    assert not plan.cut.body.fused
    assert plan.cut.body.backward


def test_rematerialised_blocks_stay_blocks():
    plan = check(inside(4, block=jax.checkpoint), AUTO, layers=9)
    for stage in plan.stages:
        (loop,) = [e for e in stage.program.program.jaxpr.eqns if e.primitive.name == "scan"]
        assert any(e.primitive.name == "remat2" for e in bodies_of(loop)[0].eqns)


def test_a_forward_pass_alone():
    def evaluate(params, batch):
        return shardc.accumulate(loss, microbatches=4)(params, batch)

    pipelined = shardc.function(evaluate, mesh=shardc.make_mesh(pipe=3), pipeline=AUTO)
    with jax.enable_x64(True):
        np.testing.assert_allclose(pipelined(init(), BATCH), jax.jit(evaluate)(init(), BATCH), rtol=1e-10)
        assert len(pipelined.plan(init(), BATCH).stages) == 3


def test_one_stage_is_the_whole():
    def evaluate(params, batch):
        return inside(2)(params, batch)

    pipelined = shardc.function(evaluate, mesh=shardc.make_mesh(pipe=1), pipeline=AUTO)
    value, _ = pipelined(init(), BATCH)
    np.testing.assert_allclose(value, jax.jit(evaluate)(init(), BATCH)[0], rtol=1e-5)


def test_a_larger_mesh_gets_more_work():
    devices = np.asarray(jax.devices())
    meshes = [jax.sharding.Mesh(d, ("data",)) for d in (devices[:1], devices[1:5])]
    pipeline = replace(AUTO, meshes=meshes)
    step = partial(train_step, inside(2))
    pipelined = shardc.function(step, mesh=shardc.make_mesh(data=1), in_placements=DATA, pipeline=pipeline)
    start = init(layers=8, width=32)
    plan = pipelined.plan(start, OPTIMIZER.init(start), BATCH)
    matmuls = [sum(e.primitive.name == "dot_general" for e in _body(s)) for s in plan.stages]
    assert 2 * matmuls[0] < matmuls[1]


def _body(stage):
    (loop,) = [e for e in stage.program.program.jaxpr.eqns if e.primitive.name == "scan"]
    return bodies_of(loop)[0].eqns


def plan_of(mesh, pipeline=AUTO, gradient=None, batch=BATCH, **kwargs):
    start = init(**kwargs)
    step = partial(train_step, gradient or inside(2))
    return shardc.function(step, mesh=mesh, pipeline=pipeline).plan(start, OPTIMIZER.init(start), batch)


def test_marks_and_auto_are_an_error():
    def marked(params, batch):
        x = shardc.stage_boundary(jnp.tanh(params["table"][batch["x"]]))
        return (x @ params["table"].T).mean()

    gradient = shardc.accumulate(jax.value_and_grad(marked), microbatches=2)
    with pytest.raises(shardc.errors.PipelineError) as error:
        plan_of(shardc.make_mesh(pipe=2), gradient=gradient)
    assert 'stages="auto" cuts a model without boundaries' in str(error.value)
    assert "a stage_boundary at test_auto_stages.py:" in str(error.value)
    assert 'stages="marked"' in str(error.value)


def test_an_unknown_way_to_cut():
    with pytest.raises(shardc.errors.PipelineError, match=r'stages=.even.; write "marked", .* or "auto"'):
        plan_of(shardc.make_mesh(pipe=2), replace(AUTO, stages="even"))


def test_too_little_work_for_so_many_stages():
    def short(params, batch):
        return (params["table"][batch["x"]] ** 2).mean()

    gradient = shardc.accumulate(jax.value_and_grad(short), microbatches=2)
    with pytest.raises(shardc.errors.PipelineError) as error:
        plan_of(shardc.make_mesh(pipe=8), gradient=gradient)
    assert "8 stages need 7 cuts" in str(error.value)


def state_bytes(plan):
    """Bytes of the arguments that each stage holds."""
    return [s.plan.memory.arguments for s in plan.stages]


def test_memory_bounds_the_cut():
    """Late layers hold most parameters: a cut that is slower but fits, or an error, by estimate or by the account."""

    def wide(params, batch):
        x = params["table"][batch["x"]]
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        for u, v in params["wide"]:
            x = x + (x[:1] @ u) @ v  # many parameters, little work
        return (x**2).mean()

    params = {
        "table": np.zeros((12, 64)), "layers": [np.zeros((64, 64))] * 4,
        "wide": [(np.zeros((64, 4096)), np.zeros((4096, 64)))] * 4,
    }  # fmt: skip
    step = partial(train_step, shardc.accumulate(jax.value_and_grad(wide), microbatches=4))
    batch = {k: np.resize(v, 2048) for k, v in BATCH.items()}

    def plan(hbm):
        mesh = shardc.make_mesh(pipe=2, topology="cpu", hbm=hbm)
        step_ = shardc.function(step, mesh=mesh, pipeline=AUTO, donate_argnames=("params", "opt_state"))
        return step_.plan(params, OPTIMIZER.init(params), batch)

    free, tight = plan("4GB"), plan("30MB")
    assert max(state_bytes(free)) > 18e6 and free.memory.peak > 31e6
    assert tight.memory.peak < 30e6 and loop_seconds(tight) > loop_seconds(free)
    with pytest.raises(shardc.errors.PipelineError, match="the pipeline does not fit"):
        plan("24MB")
    with pytest.raises(shardc.errors.PipelineError) as error:
        plan("8MB")
    text = str(error.value)
    assert "no cut into 2 stages fits in memory" in text
    assert "stage 1: " in text and " of 8 MB, too much: parameters, their gradients and optimizer state" in text
    assert "activations of 1 microbatches" in text


def test_where_no_cut_fits_stages_recompute():
    def deep(params, x):
        for w in params:
            x = jnp.sin(jnp.cos(jnp.tanh(x @ w)) ** 2) + x
        return (x**2).mean()

    def step(params, x):
        value, grads = shardc.accumulate(jax.value_and_grad(deep), microbatches=8)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    def plan(hbm, **kwargs):
        mesh = shardc.make_mesh(pipe=2, topology="cpu", hbm=hbm)
        pipeline = shardc.Pipeline(stages="auto", schedule="gpipe", **kwargs)
        return shardc.function(step, mesh=mesh, pipeline=pipeline).plan([np.zeros((16, 16))] * 8, np.zeros((4096, 16)))

    free = plan("1GB")
    room = free.memory.peak // 4
    with pytest.raises(shardc.errors.StageMemoryError, match="no cut into 2 stages fits in memory"):
        plan(f"{room}B", recompute="none")
    tight = plan(f"{room}B")
    assert "full" in tight.pipeline.recompute and "full" not in free.pipeline.recompute
    assert tight.memory.peak <= room


# -- against hand cuts: the simulated call is at least as fast as in the best of them


def zoo_plan(name, changes, ranks, m, cuts=None, **kwargs):
    zoo = MODELS[name]
    cfg = replace(zoo.configs["tiny"], **changes)
    between = (lambda i, x: x) if cuts is None else (lambda i, x: shardc.stage_boundary(x) if i in cuts else x)
    init_fn, step_fn = zoo.make_step(cfg, partial(shardc.accumulate, microbatches=m), between)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    pipeline = shardc.Pipeline(stages="auto" if cuts is None else "marked", **kwargs)
    step = shardc.function(step_fn, mesh=shardc.make_mesh(pipe=ranks), pipeline=pipeline)
    return step.plan(*state, next(zoo.batches(cfg, zoo.rows, 0)))


def loop_seconds(plan):
    """Time that cuts are found for: of the loop, without launches."""

    def cost(label):
        task = plan.built.task(label)
        if task is None or task.plan is None or not task.id.in_loop:
            return 0.0
        return task.plan.seconds - task.plan.time.launch

    return simulate(plan.network, cost, plan.link).makespan


LATER = pytest.mark.sampled(0)


@pytest.mark.plans_eagerly
@pytest.mark.parametrize(
    ("name", "changes", "places", "ranks", "m", "kwargs"),
    [
        pytest.param("mlp", {"blocks": 6}, 5, 3, 8, {}, marks=LATER),
        pytest.param("mlp", {"blocks": 7}, 6, 4, 8, {}, marks=LATER),
        pytest.param("mlp", {"blocks": 6}, 5, 2, 4, {"schedule": "interleaved", "chunks": 2}, marks=LATER),
        pytest.param("mlp", {"blocks": 6}, 5, 3, 8, {"schedule": "gpipe"}, marks=LATER),
        pytest.param("gpt2", {"layers": 4}, 3, 2, 4, {}, marks=LATER),
        pytest.param("gpt2", {"layers": 5}, 4, 3, 4, {}, marks=LATER),
        pytest.param("gpt2", {"layers": 4, "remat": True}, 3, 3, 4, {}, marks=LATER),
        pytest.param("llama", {"layers": 4}, 3, 3, 4, {}, marks=LATER),
        pytest.param("t5", {"layers": 2}, 3, 2, 4, {}, marks=LATER),
        pytest.param("t5", {"layers": 3}, 5, 3, 4, {}, marks=LATER),
        pytest.param("unet", {}, 8, 2, 4, {}, marks=LATER),
        pytest.param("moe", {"layers": 4}, 3, 3, 4, {}, marks=LATER),
    ],
)
def test_at_least_as_good_as_the_best_hand_cut(name, changes, places, ranks, m, kwargs):
    auto = zoo_plan(name, changes, ranks, m, **kwargs)
    hands = [
        zoo_plan(name, changes, ranks, m, cuts, **kwargs) for cuts in combinations(range(places), len(auto.stages) - 1)
    ]
    assert loop_seconds(auto) <= min(map(loop_seconds, hands)) * 1.001
    assert auto.seconds <= min(h.seconds for h in hands) * 1.01


@pytest.mark.parametrize(
    ("name", "ranks", "schedule"),
    [("gpt2", 2, "1f1b")] + [pytest.param(*case, marks=LATER) for case in [("llama", 2, "gpipe"), ("t5", 3, "zb-h1")]],
)
def test_the_estimate_that_cuts_go_by_is_near_the_account(name, ranks, schedule, monkeypatch):
    found = []
    monkeypatch.setattr(make, "cut_automatically", lambda *a: found.append(cut_automatically(*a)) or found[-1])
    plan = zoo_plan(name, {}, ranks, 4, schedule=schedule, recompute="none")
    for estimate, rank in zip(found[-1][1], plan.memory.ranks, strict=True):
        assert 0.8 < estimate / rank.peak < 1.4


def test_one_block_around_everything_is_named():
    whole = shardc.accumulate(jax.value_and_grad(jax.checkpoint(loss)), microbatches=2)
    step = shardc.function(
        partial(train_step, whole), mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline(stages="auto")
    )
    params = init()
    with pytest.raises(shardc.PipelineError, match=r'as one block \(.*\).*around each layer.*recompute="full"'):
        step.plan(params, OPTIMIZER.init(params), BATCH)
