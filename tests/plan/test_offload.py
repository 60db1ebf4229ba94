"""Programs with values in the memory of the host: what one device computes, call after call, and what the plan says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from examples import llama
from shardc import S
from shardc.errors import ArgumentError, PipelineError

pytestmark = pytest.mark.usefixtures("compiled_fast")

LAYERS, WIDTH, HIDDEN, ROWS = 3, 12, 33, 10
DONATED = ("params", "opt_state")


def init():
    k = np.random.default_rng(0)
    params = {"up": k.normal(size=(LAYERS, WIDTH, HIDDEN)), "down": k.normal(size=(LAYERS, HIDDEN, WIDTH))}
    state = {"mu": jax.tree.map(np.zeros_like, params), "nu": jax.tree.map(np.zeros_like, params), "count": 0}
    return params, state


def batch(i=0):
    return np.random.default_rng(i).normal(size=(ROWS, WIDTH))


def loss(params, x):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x) @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def step(params, opt_state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt_state["mu"], grads)
    nu = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, opt_state["nu"], grads)
    params = jax.tree.map(lambda p, m, v: p - 0.01 * m / (jnp.sqrt(v) + 1e-3), params, mu, nu)
    return params, {"mu": mu, "nu": nu, "count": opt_state["count"] + 1}, value


def three_calls(f, state=None):
    params, opt_state = init() if state is None else state
    values = []
    for i in range(3):
        params, opt_state, value = f(params, opt_state, batch(i))
        values.append(float(value))
    return params, opt_state, values


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-12)


def kind(x):
    return getattr(x, "physical", x).sharding.memory_kind


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def expected():
    return three_calls(jax.jit(step))


PINS = {
    "data": ({"data": 4}, {"x": {"data": S(0)}}),
    "uneven state": ({"data": 2, "model": 4}, {"params": {"model": S(2)}, "opt_state": shardc.rules({"*": {}})}),
    "zero": ({"data": 8}, {"x": {"data": S(0)}, "opt_state": shardc.rules({"*u/*": {"data": S(2)}})}),
    "chosen": ({"data": 2, "model": 2}, {}),
    "one device": ({"data": 1}, {}),
}


@pytest.mark.parametrize("case", PINS)
def test_state_on_the_host_through_three_calls(case, expected):
    axes, pins = PINS[case]
    mesh = shardc.make_mesh(**axes)
    f = shardc.function(step, mesh=mesh, in_placements=pins, donate_argnames=DONATED, offload=["opt_state/*"])
    found = three_calls(f)
    same(found, expected)
    _, state, _ = found
    assert {kind(x) for x in jax.tree.leaves((state["mu"], state["nu"]))} == {"pinned_host"}
    assert kind(state["count"]) == "device"  # a scalar is not moved
    compiled = f.compile(*found[:2], batch())
    assert compiled.audit().ok
    assert compiled.plan is f.plan(*init(), batch())  # the plan of the first call is that of the next


def test_state_goes_from_one_memory_to_the_other():
    """State on the device goes to a function that wants it on the host, and the reverse; donated state is gone."""
    mesh = shardc.make_mesh(data=4)
    pins = {"params": {"data": S(1)}, "opt_state": shardc.rules({"*u/*": {"data": S(1)}})}
    plain = shardc.function(step, mesh=mesh, in_placements=pins, donate_argnames=DONATED)
    host = shardc.function(step, mesh=mesh, in_placements=pins, donate_argnames=DONATED, offload=["opt_state/*"])
    state, other = init(), init()
    for f in (plain, host, host, plain, host, plain):
        before = state[1]
        *state, value = f(*state, batch())
        *other, same_value = plain(*other, batch())
        assert float(value) == float(same_value)
        assert {kind(x) for x in jax.tree.leaves(state[1]["mu"])} == {"pinned_host" if f is host else "device"}
        if isinstance(before["mu"]["up"], jax.Array):
            assert before["mu"]["up"].is_deleted()
    same(state, other)


def limited(hbm, offload="auto", **topology):
    mesh = shardc.make_mesh(data=4, hbm=hbm, **topology)
    pins = {"x": {"data": S(0)}, "params": {}, "opt_state": {}}
    return shardc.function(step, mesh=mesh, in_placements=pins, donate_argnames=DONATED, offload=offload)


@pytest.fixture
def peak():
    return limited("4GB").plan(*init(), batch()).memory.peak


def test_a_step_that_does_not_fit_fits_with_values_on_the_host(peak, expected):
    limit = int(0.6 * peak)
    with pytest.raises(shardc.MemoryLimitError, match=r'It fits with offload="auto": \d+ values? in the memory'):
        limited(limit, "never").plan(*init(), batch())
    f = limited(limit)
    plan = f.plan(*init(), batch())
    assert plan.memory.peak <= limit < peak
    assert plan.memory.host > 0
    assert plan.unlimited.peak == peak
    same(three_calls(f), expected)
    assert f.compile(*init(), batch()).audit().ok


def test_nothing_is_on_the_host_where_all_fits(peak):
    plan = limited(peak).plan(*init(), batch())
    assert plan.offloaded is None and plan.memory.host == 0
    assert "host memory" not in plan.explain().lower()


def test_residuals_of_loops_on_the_host(expected):
    """With an argument that nothing else can move: no argument is donated."""
    k = np.random.default_rng(0)
    params, x = init()[0], k.normal(size=(4096, WIDTH))
    grad, pins = jax.value_and_grad(loss), {"x": {"data": S(0)}}
    free = shardc.function(grad, mesh=shardc.make_mesh(data=4, topology="v5e"), in_placements=pins).plan(params, x)
    for part in (0.7, 0.6, 0.5, 0.4):
        mesh = shardc.make_mesh(data=4, hbm=int(part * free.memory.peak))
        f = shardc.function(grad, mesh=mesh, in_placements=pins, offload="auto")
        plan = f.plan(params, x)
        if plan.offloaded is not None:
            break
    assert plan.offloaded.names[0].startswith("#")
    assert plan.memory.peak <= plan.mesh.limit
    same(f(params, x), jax.jit(grad)(params, x))


def test_saved_plans_keep_what_is_on_the_host(tmp_path, peak):
    plan = limited(int(0.8 * peak)).plan(*init(), batch())
    plan.save(tmp_path / "plan.json")
    saved = shardc.load_plan(tmp_path / "plan.json")
    assert saved.offloaded == plan.offloaded.names
    mesh = shardc.make_mesh(data=4)
    again = shardc.function(step, mesh=mesh, donate_argnames=DONATED, plan=saved).plan(*init(), batch())
    assert again.digest == plan.digest
    assert again.memory == plan.memory and again.host_moves == plan.host_moves
    plain = limited("4GB").plan(*init(), batch())
    assert plain.digest != plan.digest
    plain.save(tmp_path / "plain.json")
    assert "offloaded" not in (tmp_path / "plain.json").read_text()


def test_explain_lists_what_lives_on_the_host():
    f = shardc.function(
        step, mesh=shardc.make_mesh(data=4, topology="v5e"), donate_argnames=DONATED, offload=["opt_state/mu/*"]
    )
    plan = f.plan(*init(), batch())
    text = plan.explain()
    assert "moving to and from host memory" in text
    assert "Host memory:" in text and "named by offload=" in text
    assert ", on the host" in text
    assert "memory_move[source=opt_state/mu/up to=host]" in plan.explain(after="offload")
    assert "memory_move" not in plan.explain(after="insert_boxing")
    assert plan.explain(why="opt_state/mu/up")


@pytest.mark.parametrize("like", ["plain", "on the host", "on the device"])
def test_a_checkpoint_holds_state_on_the_host_and_the_run_goes_on(tmp_path, expected, like):
    mesh = shardc.make_mesh(data=4)
    f = shardc.function(step, mesh=mesh, donate_argnames=DONATED, offload=["opt_state/*"])
    g = shardc.function(step, mesh=mesh, donate_argnames=DONATED)
    with shardc.checkpoints(tmp_path) as saved:
        state = f(*init(), batch(0))[:2]
        saved.step(0, state)
    others = {
        "plain": init,
        "on the host": lambda: f(*init(), batch(0))[:2],
        "on the device": lambda: g(*init(), batch(0))[:2],
    }
    with shardc.checkpoints(tmp_path) as saved:
        state, start = saved.last(or_else=others[like]())
    assert start == 1
    assert like == "plain" or kind(state[1]["mu"]["up"]) == ("pinned_host" if like == "on the host" else "device")
    for i in (1, 2):
        *state, value = f(*state, batch(i))
    same((*state, float(value)), (*expected[:2], expected[2][-1]))


def test_options_that_mean_nothing():
    mesh = shardc.make_mesh(data=4)
    with pytest.raises(ArgumentError, match=r'offload=True: write "never", "auto", or a list'):
        shardc.function(step, mesh=mesh, offload=True)
    with pytest.raises(ArgumentError, match=r"offload='alway': write"):
        shardc.function(step, mesh=mesh, offload="alway")
    with pytest.raises(ArgumentError, match=r"'optstate/\*' matches no argument"):
        shardc.function(step, mesh=mesh, offload=["optstate/*"]).plan(*init(), batch())
    with pytest.raises(PipelineError, match="keep all values on their devices"):
        shardc.function(step, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline(), offload="auto")


def test_a_nan_is_named_though_state_is_on_the_host():
    f = shardc.function(
        step, mesh=shardc.make_mesh(data=2, model=4), donate_argnames=DONATED, offload=["opt_state/*"],
        in_placements={"params": {"model": S(2)}, "opt_state": shardc.rules({"*u/*": {"model": S(1)}})},
    )  # fmt: skip
    params, state = init()
    params["up"][0, 0, 0] = np.nan
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in dot_general at"):
        f(params, state, batch())
    params, state = init()
    with jax.debug_nans(True):
        params, state, _ = f(params, state, batch())
        params, state, _ = f(params, state, batch())
    assert kind(state["mu"]["up"]) == "pinned_host"


@pytest.mark.sampled(0)
def test_llama_fits_with_its_state_on_the_host():
    config = replace(llama.CONFIGS["test"], scan_layers=True)
    make, step = llama.make_step(config)
    k, state = np.random.default_rng(0), jax.tree.map(np.asarray, make(jax.random.key(0)))
    rows = {name: k.integers(0, config.vocab, (8, config.seq)) for name in ("inputs", "targets")}
    pins = {"batch": {"data": S(0)}, "params": {}, "opt_state": {}}

    def on(offload, hbm="4GB"):
        mesh = shardc.make_mesh(data=4, hbm=hbm)
        return shardc.function(
            step, mesh=mesh, in_placements=pins, donate_argnames=("params", "opt_state"), offload=offload
        )

    limit = int(0.75 * on("never").plan(*state, rows).memory.peak)
    with pytest.raises(shardc.MemoryLimitError, match="It fits with offload"):
        on("never", limit).plan(*state, rows)
    f = on("auto", limit)
    plan = f.plan(*state, rows)
    assert plan.memory.peak <= limit and plan.host_inputs
    found, expected = state, state
    for _ in range(3):
        *found, value = f(*found, rows)
        *expected, one_value = jax.jit(step)(*expected, rows)
        assert float(value) == pytest.approx(float(one_value), rel=1e-10)
    same(found, expected)
