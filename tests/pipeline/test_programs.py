"""What people write: stages of any size, values that skip stages, remat, scans, keys, odd results; as on one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
from shardc import S, accumulate, make_mesh, stage_boundary
from shardc.pipeline.schedule.methods import METHODS
from shardc.pipeline.schedule.schedule import Schedule
from tests.pipeline.pipelines import (
    assert_same,
    batch,
    chain,
    check,
    dense,
    error,
    even_cuts,
    layers,
    loss,
    on_host,
    training,
)

pytestmark = pytest.mark.usefixtures("compiled_fast")

THREE = partial(loss, cuts=(0, 1))
ROWS = {"batch": {"data": S(0)}}


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


# stages


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stages", "count", "m"), [(1, 2, 3), (2, 5, 1), (3, 5, 2), (4, 7, 3), (4, 4, 9)])
def test_layers_that_do_not_divide_and_few_microbatches(stages, count, m):
    step = training(partial(loss, cuts=even_cuts(count, stages)), m)
    check(step, (layers(count), batch(2 * m)), make_mesh(pipe=stages))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 3), ("breadth-first", 3)])
def test_three_stages_of_a_rank(schedule, chunks):
    step = training(partial(loss, cuts=range(5)), 5)
    pipeline = shardc.Pipeline(schedule=schedule, chunks=chunks)
    check(step, (layers(6), batch(10)), make_mesh(pipe=2), pipeline=pipeline)


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_of_unequal_size(first):
    devices = np.array(jax.devices())
    meshes = [jax.sharding.Mesh(d, ("data",)) for d in (devices[:4], devices[4:6])]
    pipeline = shardc.Pipeline(meshes=meshes[first:] + meshes[:first])
    check(training(loss, 4), (layers(3), batch(16)), None, pipeline=pipeline, in_placements=ROWS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("axes", "places"),
    [
        ({"data": 2}, {"batch": {"data": S(0)}}),
        ({"model": 2}, {"params": [{"w": {"model": S(i % 2)}, "b": {}} for i in range(3)]}),
        ({"model": 4}, {"params": [{"w": {"model": S(1)}, "b": {"model": S(0)}} for _ in range(3)]}),
    ],
)
def test_uneven_splits_inside_stages(axes, places):
    check(training(loss, 3), (layers(3, 5), batch(9, 5)), make_mesh(pipe=2, **axes), in_placements=places)


# what crosses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("m", [1, 4])
def test_tied_embeddings(m):
    def tied(params, batch):
        x = stage_boundary(jnp.tanh(batch["x"] @ params["table"]))
        x = stage_boundary(jnp.tanh(x @ params["w"]))
        return error(x @ params["table"].T, batch)

    params = {"table": layers(1)[0]["w"], "w": layers(1, seed=3)[0]["w"]}
    split = {"params": {"table": {"model": S(1)}}}
    check(training(tied, m), (params, batch(8)), make_mesh(pipe=3))
    check(training(tied, m), (params, batch(8)), make_mesh(pipe=3, model=2), in_placements=split)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_one_layer_in_all_stages(wrap):
    def shared(layer, batch):
        return error(chain([layer] * 3, batch["x"], (0, 1)), batch)

    places = {"params": {"w": {"model": S(1)}, "b": {"model": S(0)}}}
    check(training(wrap(shared), 4), (layers(1)[0], batch(8)), make_mesh(pipe=3, model=2), in_placements=places)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_value_that_skips_stages(schedule):
    def skipping(params, batch):
        early = dense(params[0], batch["x"])
        x = chain(params[1:], stage_boundary(early), (0, 1))
        return error(x + early, batch)

    check(training(skipping, 5), (layers(4), batch(10)), make_mesh(pipe=4), schedule)


def test_integers_in_what_crosses():
    def choosing(params, batch):
        x = dense(params[0], batch["x"])
        x, best, index = stage_boundary((x, jnp.argmax(x, -1), batch["index"]))
        x, best = stage_boundary((dense(params[1], x) + 0.1 * best[:, None], best))
        return (dense(params[2], x)[jnp.arange(len(best)), best] * index).mean()

    check(training(choosing, 4), (layers(3), batch(8, index=np.arange(8))), make_mesh(pipe=3))


def test_a_second_stream_that_the_last_stage_reads():
    def late(params, batch):
        x = stage_boundary(dense(params[0], batch["x"]))
        second = dense(params[1], batch["y"])
        return (dense(params[3], stage_boundary(dense(params[2], x)) * second)).mean()

    check(training(late, 4), (layers(4), batch(8)), make_mesh(pipe=3))


def test_losses_of_every_stage():
    def balanced(params, batch):
        x, extra = batch["x"], 0.0
        for i, layer in enumerate(params):
            x = dense(layer, x)
            extra += (x**2).mean()
            x = stage_boundary(x) if i < 2 else x
        return error(x, batch) + 0.1 * extra + 0.01 * sum((layer["w"] ** 2).sum() for layer in params)

    check(training(balanced, 4), (layers(3), batch(8)), make_mesh(pipe=3))


# the loop


def test_the_gradient_of_an_accumulated_loss():
    whole = accumulate(loss, microbatches=4, reduce="sum")

    def step(params, batch):
        return jax.value_and_grad(lambda p, b: 3 * whole(p, b) + sum((q["w"] ** 2).sum() for q in p), (0, 1))(
            params, batch
        )

    check(step, (layers(3), batch(8)), make_mesh(pipe=2, data=2))


def test_results_that_are_stacked_or_summed():
    def predicting(params, batch):
        early = dense(params[0], batch["x"])
        x = chain(params[1:], stage_boundary(early), ())
        return error(x, batch), {"prediction": x, "early": early, "rows": jnp.int32(len(x)), "size": jnp.abs(x).sum(0)}

    def both(params, batch):
        (value, more), grads = jax.value_and_grad(predicting, has_aux=True)(params, batch)
        return value, more, grads, batch["x"], jnp.ones(3), params[0]["b"]

    kinds = {"prediction": "stack", "early": "stack", "rows": "sum", "size": "sum"}
    reduced = accumulate(both, microbatches=4, reduce=("mean", kinds, "sum", "stack", "stack", "mean"))

    def step(params, batch):
        return reduced(params, batch)

    check(step, (layers(3), batch(8)), make_mesh(pipe=2))
    check(step, (layers(3), batch(8)), make_mesh(pipe=2, data=2), in_placements=ROWS)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "eager-1f1b"])
def test_evaluation_has_forwards_only(schedule):
    step = accumulate(lambda params, batch: chain(params, batch["x"], (0, 1)), microbatches=4, reduce="stack")
    function = check(lambda params, batch: step(params, batch), (layers(3), batch(8)), make_mesh(pipe=3), schedule)
    assert {a.kind for row in function.plan(layers(3), batch(8)).schedule.rows for a in row} == {"F"}


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "breadth-first"])
def test_evaluation_with_two_stages_of_a_rank(schedule):
    step = accumulate(partial(loss, cuts=range(3)), microbatches=4)
    check(lambda params, batch: step(params, batch), (layers(4), batch(8)), make_mesh(pipe=2), schedule)


@pytest.mark.parametrize("trained", [1, 2])
def test_frozen_stages_have_no_backward(trained):
    def part(own, frozen, batch):
        return loss([*frozen[:trained], own, *frozen[trained:]], batch, (0, 1))

    gradient = accumulate(jax.value_and_grad(part), microbatches=4, in_axes=(None, None, 0))

    def step(params, batch):
        return gradient(params[trained], params[:trained] + params[trained + 1 :], batch)

    check(step, (layers(3), batch(8)), make_mesh(pipe=3))


# remat, scans and what else stands inside a stage


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: error(chain_of_remat(p, b["x"]), b),
        jax.checkpoint(THREE),
        jax.checkpoint(THREE, policy=jax.checkpoint_policies.dots_saveable),
        lambda p, b: error(jax.checkpoint(partial(chain, cuts=(0, 1)))(p, b["x"]), b),
        lambda p, b: error(jax.jit(jax.checkpoint(partial(chain, cuts=(0, 1))))(p, b["x"]), b),
    ],
    ids=["blocks", "loss", "loss, dots kept", "model", "jitted model"],
)
def test_remat(loss, schedule):
    check(training(loss, 4), (layers(3), batch(8)), make_mesh(pipe=3), schedule)


def chain_of_remat(params, x):
    for i, layer in enumerate(params):
        x = jax.checkpoint(dense)(layer, jnp.sin(x))
        x = stage_boundary(x) if i < 2 else x
    return x


@pytest.mark.parametrize("recompute", ["full", ("none", "full", "none")])
def test_recompute_by_the_plan(recompute):
    pipeline = shardc.Pipeline(schedule="zb-h1", recompute=recompute)
    check(training(THREE, 4), (layers(3), batch(8)), make_mesh(pipe=3), pipeline=pipeline)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_scans_inside_stages(axes, schedule):
    def scanned(params, batch):
        def body(x, layer):
            return dense(layer, x), None

        x, _ = jax.lax.scan(body, batch["x"], params[0])
        x, _ = jax.lax.scan(jax.checkpoint(body), stage_boundary(x), params[1])
        return error(x, batch)

    params = [jax.tree.map(lambda *xs: np.stack(xs), *layers(3, seed=s)) for s in (0, 1)]
    places = {"in_placements": ROWS} if axes else {}
    check(training(scanned, 4), (params, batch(8)), make_mesh(pipe=2, **axes), schedule, **places)


def test_branches_loops_and_derivatives_of_the_users_own():
    @jax.custom_vjp
    def bend(x):
        return jnp.tanh(x)

    bend.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))

    def model(params, batch):
        x = stage_boundary(bend(batch["x"] @ params[0]["w"]))
        x = jax.lax.cond(x.sum() > 0, lambda x: 2 * x, jnp.sin, x)
        x = stage_boundary(jax.lax.fori_loop(0, 3, lambda _, x: 0.9 * x, x) @ params[1]["w"])
        slope = jax.grad(lambda x: dense(params[2], x).sum())(x)
        return error(bend(slope), batch)

    check(training(model, 4), (layers(3), batch(8)), make_mesh(pipe=3))


def test_a_boundary_under_vmap():
    def one(params, x, y):
        return ((dense(params[1], stage_boundary(dense(params[0], x))) - y) ** 2).mean()

    def model(params, batch):
        return jax.vmap(partial(one, params))(batch["x"], batch["y"]).mean()

    check(training(model, 4), (layers(2), batch(8)), make_mesh(pipe=2))


def test_callbacks_run_once_for_each_microbatch_and_see_the_values():
    seen = []

    def telling(params, batch):
        jax.debug.callback(lambda v: seen.append(float(v)), batch["x"].sum())
        x = stage_boundary(dense(params[0], batch["x"]))
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        jax.debug.callback(lambda: seen.append(0.0))
        return error(dense(params[1], x), batch)

    def step(params, batch):
        value, grads = accumulate(jax.value_and_grad(telling), microbatches=4)(params, batch)
        jax.debug.callback(lambda v: seen.append(float(v)), sum(jnp.abs(g).sum() for g in jax.tree.leaves(grads)))
        return value

    def told(step):
        seen.clear()
        jax.block_until_ready(step(layers(2), batch(8)))
        jax.effects_barrier()
        return sorted(seen)

    jax.config.update("jax_enable_x64", True)  # in all threads: JAX narrows what a callback in another one sees
    try:
        want = told(jax.jit(step))
    finally:
        jax.config.update("jax_enable_x64", False)
    assert len(want) == 13
    got = told(shardc.function(step, mesh=make_mesh(pipe=2), pipeline=shardc.Pipeline()))
    np.testing.assert_allclose(got, want, rtol=1e-10)


# random bits


def dropping(key_of):
    def model(params, batch):
        x, key = batch["x"], key_of(batch["key"][0])
        for i, layer in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
            x = jnp.where(kept, dense(layer, x), 0.0)
            x = stage_boundary(x) if i < 2 else x
        return error(x, batch)

    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_keys_in_the_batch(axes):
    keys = jax.random.split(jax.random.key(0), 8)
    places = {"in_placements": ROWS} if axes else {}
    data = batch(8, key=np.asarray(jax.random.key_data(keys)))
    step = training(dropping(jax.random.wrap_key_data), 4)
    check(step, (layers(3), data), make_mesh(pipe=3, **axes), **places)


@pytest.mark.sampled(0)
def test_typed_keys_in_the_batch_and_one_that_is_split_for_it():
    keys = jax.random.split(jax.random.key(0), 8)
    check(training(dropping(lambda k: k), 4), (layers(3), batch(8, key=keys)), make_mesh(pipe=3))

    def step(params, batch, key):
        keys = jax.random.split(key, 4)
        value = accumulate(jax.value_and_grad(dropping(lambda k: k)), microbatches=4)(params, {**batch, "key": keys})
        return value, jax.random.key_data(jax.random.split(key)[0])

    check(step, (layers(3), batch(8), jax.random.key(0)), make_mesh(pipe=3))


# around the loop


def trainer(optimizer, *, average=False):
    def step(params, state, batch, mean=None):
        value, grads = accumulate(jax.value_and_grad(THREE), microbatches=4)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        more = (optax.incremental_update(params, mean, 0.1),) if average else ()
        return params, state, value, optax.tree.norm(grads), *more

    params = layers(3)
    return step, params, jax.tree.map(np.asarray, optimizer.init(params))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("donated", [(), ("params", "state")])
def test_clipping_by_the_norm_over_all_stages(donated):
    schedule = optax.cosine_decay_schedule(0.1, 10)
    step, *state = trainer(optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(schedule, momentum=0.9)))
    mesh = make_mesh(pipe=3, data=2)
    check(step, (*state, batch(8)), mesh, in_placements=ROWS, donate_argnames=donated)


def test_an_update_that_depends_on_all_gradients_and_an_average():
    step, *state = trainer(optax.apply_if_finite(optax.adamw(1e-2, weight_decay=0.1), 3), average=True)
    check(step, (*state, batch(8), layers(3)), make_mesh(pipe=3), donate_argnames=("params", "state", "mean"))


def test_equations_before_the_loop():
    def step(params, batch):
        doubled = jax.tree.map(lambda x: 2 * x, params)
        centred = {"x": batch["x"] - batch["x"].mean(0), "y": batch["y"]}
        value, grads = accumulate(jax.value_and_grad(loss), microbatches=4)(doubled, centred)
        return jax.tree.map(jnp.subtract, params, grads), value

    check(step, (layers(3), batch(8)), make_mesh(pipe=2, data=2), in_placements=ROWS)


def test_odd_results():
    captured = jnp.arange(4.0)

    def step(params, batch, unused, count):
        scaled = lambda p, b: loss(p, {"x": b["x"] * captured, "y": b["y"]})  # noqa: E731
        value, grads = accumulate(jax.value_and_grad(scaled), microbatches=4)(params, batch)
        return value, value, grads, batch["x"], params, captured, 3.0, count + 1, unused, jnp.zeros(3), np.float32(2)

    check(step, (layers(3), batch(8), np.ones(2), np.int32(3)), make_mesh(pipe=2))


def test_bfloat16_parameters_and_float32_sums():
    def gradient(params, batch):
        value, grads = jax.value_and_grad(lambda p, b: loss(p, b).astype(jnp.float32))(params, batch)
        return value, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def step(params, batch):
        value, grads = accumulate(gradient, microbatches=4)(params, batch)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads), grads, value

    half = partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.bfloat16))
    check(step, (half(layers(3)), half(batch(8))), make_mesh(pipe=2), tolerance=2e-2)


def test_the_returned_state_is_the_next_calls_without_planning_or_compiling_again():
    step, *state = trainer(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)))
    mesh = make_mesh(pipe=3, data=2)
    function = shardc.function(
        step, mesh=mesh, pipeline=shardc.Pipeline(), in_placements=ROWS, donate_argnames=("params", "state")
    )
    one, plain = state, jax.jit(step)
    plans = set()
    for _ in range(4):
        plans.add(id(function.plan(*state, batch(8))))
        before = jax.tree.leaves(state)
        *state, value, _ = function(*state, batch(8))
        *one, want, _ = plain(*one, batch(8))
    assert len(plans) == 1
    assert all(x.is_deleted() for x in before if x.ndim), "donated buffers are used again"
    assert_same((state, value), (one, want))


# schedules of the user's own

TEXT = "mine\nrank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1B0 1F1 1B1"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "schedule",
    [TEXT, TEXT.partition("\n")[2], Schedule.parse(TEXT), METHODS["gpipe"], lambda *_: Schedule.parse(TEXT)],
    ids=["text", "text without a name", "Schedule", "Method", "function"],
)
def test_schedules_of_the_users_own(schedule):
    check(training(loss, 2), (layers(3), batch(4)), make_mesh(pipe=2), schedule)


def test_a_schedule_whose_stages_go_there_and_back():
    text = "rank 0 | 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\nrank 1 | 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
    check(training(partial(loss, cuts=range(3)), 2), (layers(4), batch(4)), make_mesh(pipe=2), text)


def test_a_schedule_that_splits_some_backwards():
    text = "rank 0 | 0F0 0F1 0B0 0I1 0W1\nrank 1 | 1F0 1I0 1F1 1W0 1B1"
    check(training(loss, 2), (layers(3), batch(4)), make_mesh(pipe=2), text)


def test_another_schedule_without_compiling_again():
    step = shardc.function(training(loss, 4), mesh=make_mesh(pipe=2), pipeline=shardc.Pipeline())
    compiled = step.compile(layers(3), batch(8))
    want = on_host(compiled(layers(3), batch(8)))
    other = compiled.with_schedule("gpipe")
    assert other.plan.schedule.name == "gpipe" and compiled.plan.schedule.name == "1f1b"
    assert_same(other(layers(3), batch(8)), want, 0)
    for schedule, message in {
        "zb-h1": "step: this plan has the backward of a stage in one task, zb-h1 wants two; plan the function anew",
        "rank 0 | 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3\nrank 1 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3": (
            "step: schedule runs the stages on ranks 1, 0, this plan on 0, 1; plan the function anew"
        ),
    }.items():
        with pytest.raises(shardc.PipelineError, match=message):
            compiled.with_schedule(schedule)


# nothing


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pin", [shardc.AUTO, {"data": S(0)}, {"data": S(1)}, {"data": shardc.P}], ids=str)
def test_empty_arrays_are_sent_summed_and_returned(pin):
    """Alone among a jitted function's results, one in pieces would be whole on every device; tasks have others."""

    def loss(params, batch):
        x, nothing = dense(params[0], batch["x"]), batch["nothing"] * params[0]["b"][:, None]
        x, nothing = stage_boundary((x, nothing))
        return error(dense(params[1], x), batch) + (nothing * params[1]["b"][:, None]).sum()

    def step(params, batch):
        value, grads = accumulate(jax.value_and_grad(loss), microbatches=2)(params, batch)
        return value, grads, 2 * params[1]["w"][:, :0], params[0]["w"][:0, :3] * value, batch["nothing"].sum(0)

    args = layers(2), batch(8, nothing=np.ones((8, 4, 0)))
    places = (shardc.AUTO, shardc.AUTO, *[pin] * 3)
    check(step, args, make_mesh(pipe=2, data=2), in_placements=ROWS, out_placements=places)
