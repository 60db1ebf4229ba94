"""What follows the loop over microbatches: frozen parameters, conditions and loops around an update, norms. Every value
stays on the stage that uses it, and the numbers are those of one device."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
from shardc import S, accumulate, make_mesh, stage_boundary
from tests.pipeline.pipelines import assert_same, on_host

pytestmark = pytest.mark.usefixtures("compiled_fast")

STAGES, WIDTH = 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, WIDTH))
LABELS = {"frozen": "frozen", "a": "train", "b": "train"}
MASK = {"frozen": False, "a": True, "b": True}


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


def weights(*shape):
    return [RNG.normal(size=shape) / 2 for _ in range(STAGES)]


def low_rank():
    return {"frozen": weights(WIDTH, WIDTH), "a": weights(WIDTH, 2), "b": weights(2, WIDTH)}


def lora(params, x, stop=True):
    for i, (w, a, b) in enumerate(zip(params["frozen"], params["a"], params["b"], strict=True)):
        x = jnp.tanh(x @ (jax.lax.stop_gradient(w) if stop else w) + x @ a @ b)
        x = stage_boundary(x) if i < STAGES - 1 else x
    return jnp.mean(x**2)


def chain(params, x):
    for i, w in enumerate(params):
        x = stage_boundary(jnp.tanh(x @ w)) if i < STAGES - 1 else x @ w
    return jnp.mean(x**2)


def less(params, grads, rate=1.0):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def size(params):
    return jnp.sqrt(sum(jnp.sum(p**2) for p in jax.tree.leaves(params)))


def gradients(loss, params, x):
    return accumulate(jax.value_and_grad(loss), microbatches=4)(params, x)


def training(loss, optimizer):
    def step(params, state, x):
        value, grads = gradients(loss, params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def pipelined(step, donate=("params", "state"), **axes):
    return shardc.function(
        step, mesh=make_mesh(pipe=STAGES, **axes), pipeline=shardc.Pipeline(), donate_argnames=donate,
        in_placements={"x": {"data": S(0)}} if axes else shardc.AUTO,
    )  # fmt: skip


def assert_at_home(plan):
    """Everything that belongs to layer i, `params/a/i`, lives on stage i before the call and after it, and nothing of
    more than one element leaves its stage but activations and their gradients."""
    program = plan.pieces.program
    places = [*zip(program.in_paths, plan.homes, strict=True)]
    places += [(b.path, b.stage) for b in plan.out_borders]
    layer = re.compile(r".*(?:frozen|a|b|w|params|state|mu|nu|trace|acc_grads|0)/(\d)$")
    of_layers = [(path, stage, m[1]) for path, stage in places if (m := layer.match(path))]
    assert len(of_layers) >= STAGES
    assert [(path, stage) for path, stage, i in of_layers if stage != int(i)] == []
    assert [t for t in plan.transfers if t.count == 1 and not t.value.endswith("[]")] == []


def run(function, args, calls):
    """The results of so many calls, each of the state that the last one gave."""
    *state, x = jax.tree.map(jnp.array, args)  # its own: some are donated
    for _ in range(calls):
        *state, value = function(*state, x)
    return on_host((state, value))


def assert_as_on_one_device(step, args, function, calls=2):
    assert function.compile(*args).audit().ok
    assert_same(run(function, args, calls), run(jax.jit(step), args, calls))


OPTIMIZERS = {
    "set_to_zero": lambda: optax.multi_transform({"train": optax.adam(0.01), "frozen": optax.set_to_zero()}, LABELS),
    "masked": lambda: optax.masked(optax.adamw(0.01), MASK),
    "adamw": lambda: optax.adamw(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)), 2
    ).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)), 2),
    "both": lambda: optax.apply_if_finite(
        optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.01, momentum=0.9)), 2
        ).gradient_transformation(), 2,
    ),
    "trust ratios": lambda: optax.MultiSteps(optax.lamb(0.01), 2).gradient_transformation(),
}  # fmt: skip


@pytest.mark.sampled(by=lambda name, stop: {name, stop})
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_moments_and_gradients_stay_on_their_stage(name, stop):
    optimizer, params = OPTIMIZERS[name](), low_rank()
    step = training(partial(lora, stop=stop), optimizer)
    plan = pipelined(step, data=2).plan(params, optimizer.init(params), X)
    assert_at_home(plan)
    peaks = [r.peak for r in plan.memory.ranks]
    assert max(peaks) < 1.7 * min(peaks)


@pytest.mark.parametrize("name", ["set_to_zero", "both"])
def test_the_numbers_of_one_device(name):
    optimizer, params = OPTIMIZERS[name](), low_rank()
    step = training(lora, optimizer)
    assert_as_on_one_device(step, (params, optimizer.init(params), X), pipelined(step))


def test_whether_many_gradients_are_finite_is_one_number_from_each_stage():
    optimizer = optax.apply_if_finite(optax.sgd(0.01), 2)

    def loss(params, x):
        return chain([sum(ws) for ws in params], x)

    params = [weights(WIDTH, WIDTH) * 4 for _ in range(STAGES)]
    plan = pipelined(training(loss, optimizer)).plan(params, optimizer.init(params), X)
    after = Counter((t.target == 0, t.value) for t in plan.transfers if not t.line.startswith("argument"))
    assert after[True, "bool[]"] == STAGES - 1
    assert {value for _, value in after} == {"f64[2,4]", "bool[]", "i32[]"}


@pytest.mark.parametrize("zero", [True, False])
def test_a_parameter_without_a_gradient_stays_where_it_is_read(zero):
    def loss(params, x):
        for i in range(STAGES):
            x = jnp.tanh(x @ jax.lax.stop_gradient(params["frozen"][i]) * params["a"][i])
            x = stage_boundary(x) if i < STAGES - 1 else x
        return jnp.mean(x**2)

    def step(params, x):
        value, grads = gradients(loss, params, x)
        grads["frozen"] = jax.tree.map(jnp.zeros_like, grads["frozen"]) if zero else grads["frozen"]
        return less(params, grads), value

    args = {"frozen": weights(WIDTH, WIDTH), "a": weights(WIDTH)}, X
    function = pipelined(step, "params")
    assert_at_home(function.plan(*args))
    assert_as_on_one_device(step, args, function)


def test_the_gradient_of_a_penalty_alone_is_made_where_its_weight_is():
    def loss(params, x):
        return chain(list(map(jax.lax.stop_gradient, params)), x) + sum(jnp.sum(w**3) for w in params)

    def step(params, x):
        value, grads = gradients(loss, params, x)
        return less(params, grads, 0.1), value

    function = pipelined(step, "params")
    assert_at_home(function.plan(weights(WIDTH, WIDTH), X))
    assert_as_on_one_device(step, (weights(WIDTH, WIDTH), X), function)


def test_a_dynamic_loss_scale():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))

    def step(params, state, scale, x):
        value, grads = gradients(lambda p, x: chain(p, x) * scale, params, x)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in grads]))

        def update(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = jax.lax.cond(finite, update, lambda p, s, g: (p, s), params, state, grads)
        return params, state, jnp.where(finite, scale * 2, scale / 2), value

    params = weights(WIDTH, WIDTH)
    function = pipelined(step, data=2)
    args = params, optimizer.init(params), 8.0, X
    assert_as_on_one_device(step, args, function)
    kept, *_ = function(*jax.tree.map(jnp.array, (*args[:2], np.inf, X)))
    assert_same(kept, params)
    plan = function.plan(*args)
    assert_at_home(plan)
    to_first = Counter(t.value for t in plan.transfers if t.count == 1 and t.target == 0)
    assert to_first["bool[]"] == STAGES - 1, "whether all its gradients are finite, from each other stage"


def test_branches_with_norms_branches_and_prints_in_them(capfd):
    def step(params, k, x):
        value, grads = gradients(chain, params, x)

        def clipped(params, grads):
            return less(params, grads, 1 / size(grads))

        def trusted(params, grads):
            ratio = size(params) / size(grads)
            jax.debug.print("ratio {}", ratio)
            return less(params, grads, ratio)

        def nested(params, grads):
            bent = [jnp.tanh(g) @ g for g in grads]
            norm = size(bent)
            return jax.lax.cond(
                norm > 0.1, lambda p: less(p, bent, 1 / size(bent)), lambda p: [h / norm for h in bent], params
            )

        return jax.lax.switch(k, [clipped, trusted, nested], params, grads), value

    params, one_device, function = weights(WIDTH, WIDTH), jax.jit(step), pipelined(step, "params")
    assert_at_home(function.plan(params, np.int32(0), X))
    for chosen in range(3):
        args = params, np.int32(chosen), X
        assert_same(function(*args), one_device(*args))
    jax.effects_barrier()
    assert len(re.findall("ratio", capfd.readouterr().out)) == 2, "one of each"


def test_loops_over_all_parameters_and_barriers():
    def step(params, x):
        value, grads = gradients(chain, params, x)
        params, grads = jax.lax.optimization_barrier((params, grads))
        params = jax.lax.fori_loop(0, 3, lambda i, p: less(p, grads, 0.1 / (i + 1)), params)
        _, params = jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, less(c[1], grads, 0.1)), (0, params))
        params, steps = jax.lax.scan(lambda p, s: ([w * s for w in p], s + 1), params, jnp.arange(1.0, 3.0))
        return params, value + steps.sum()

    function = pipelined(step, "params")
    args = weights(WIDTH, WIDTH), X
    assert_at_home(function.plan(*args))
    assert_as_on_one_device(step, args, function)


def test_a_loop_whose_steps_need_all_stages_runs_on_one():
    def step(params, x):
        value, grads = gradients(chain, params, x)
        return jax.lax.fori_loop(0, 2, lambda i, p: less(p, grads, 1 / size(p)), params), value

    assert_as_on_one_device(step, (weights(WIDTH, WIDTH), X), pipelined(step, "params"))


def test_a_condition_in_front_of_the_loop():
    def step(params, k, x):
        coarse = jax.lax.cond(k > 1, lambda p: list(map(jnp.round, p)), lambda p: p, params)
        value, grads = gradients(chain, coarse, x)
        return less(params, grads), value

    function = pipelined(step, "params")
    args = weights(WIDTH, WIDTH), np.int32(2), X
    assert_at_home(function.plan(*args))
    assert_same(function(*args), jax.jit(step)(*args))


def test_norms_of_parameters_and_averages_of_them():
    def step(params, state, x):
        norm = size(params) + size(state)
        value, grads = gradients(chain, params["w"], x)
        state = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state, params["w"])
        return {"w": less(params["w"], grads)}, state, value + norm + size(state)

    args = {"w": weights(WIDTH, WIDTH)}, weights(WIDTH, WIDTH), X
    function = pipelined(step)
    plan = function.plan(*args)
    assert_at_home(plan)
    assert_as_on_one_device(step, args, function)
