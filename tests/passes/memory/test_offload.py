"""Values moved to the host: the same numbers, fewer bytes on the device, updates one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import shardc
from shardc import S, compat
from shardc.ir.memory_move import is_memory_move
from shardc.ir.walk import all_eqns, local_bytes
from shardc.passes.memory.offload import HostChoice
from shardc.passes.recompute.recompute_residuals import find_residuals
from shardc.plan.offload import options_of, with_choice

LAYERS, ROWS, WIDTH = 3, 16, 8


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(jnp.sin(h) @ w), None

    return (jax.lax.scan(layer, x, params["w"])[0] @ params["last"]).mean()


def step(params, momentum, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


def arguments():
    k = np.random.default_rng(0)
    params = {"w": k.normal(size=(LAYERS, WIDTH, WIDTH)), "last": k.normal(size=(WIDTH, 5))}
    return params, jax.tree.map(np.ones_like, params), k.normal(size=(ROWS, WIDTH))


@pytest.fixture(scope="module")
def plan():
    with jax.enable_x64(True):
        mesh = shardc.make_mesh(data=4, topology="v5e")
        donated = ("params", "momentum")
        pins = {"x": {"data": S(0)}, "params": {}, "momentum": {}}
        f = shardc.function(step, mesh=mesh, donate_argnames=donated, in_placements=pins)
        return f.plan(*arguments())


def everything(plan):
    return with_choice(plan, options_of(plan).all, "everything")


def test_the_program_is_the_same_on_one_device(plan):
    moved = everything(plan)
    assert any(map(is_memory_move, all_eqns(moved.boxed.jaxpr)))
    with jax.enable_x64(True):
        flat = jax.tree.leaves(arguments())
        found, expected = (jaxpr_as_fun(compat.close(p.boxed.jaxpr))(*flat) for p in (moved, plan))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_value_on_the_host_goes_there_and_back(plan):
    moved = everything(plan)
    residuals = list(find_residuals(plan.boxed.jaxpr))
    assert residuals
    assert moved.host_inputs == moved.host_outputs == {0, 1, 2, 3}  # parameters and momentum; not the batch
    sent = {to: sum(m.bytes for m in moved.host_moves if m.to == to) for to in ("host", "device")}
    assert sent["host"] == sent["device"] == moved.memory.host
    assert moved.seconds == pytest.approx(plan.seconds + sum(sent.values()) / plan.mesh.topology.host_bandwidth)
    rows = [m for m in moved.host_moves if m.count == LAYERS]
    assert len(rows) == 2 * len(residuals)


def test_what_is_on_the_host_takes_no_memory_of_the_device(plan):
    moved = everything(plan)
    momentum = plan.memory.arguments - plan.in_borders[-1].bytes  # parameters and momentum
    assert moved.memory.arguments == plan.memory.arguments - momentum
    assert moved.memory.peak < plan.memory.peak


def test_a_residual_alone(plan):
    stack = next(find_residuals(plan.boxed.jaxpr)).stack
    moved = with_choice(plan, HostChoice(stacks=(stack,)), "a test")
    assert not moved.host_inputs and not moved.host_outputs
    assert {m.to for m in moved.host_moves} == {"host", "device"}
    assert moved.memory.host == local_bytes(stack, plan.boxed.placements[stack], plan.mesh.sizes)


def test_updates_are_made_one_after_the_other(plan):
    """Between the moves of one leaf to the device and to the host there are none of another leaf."""
    moved = with_choice(plan, HostChoice({2: 2, 3: 3}), "a test")
    order = [(e.params["to"], e.params["source"]) for e in moved.boxed.jaxpr.eqns if is_memory_move(e)]
    leaves = ["momentum/last", "momentum/w"]
    assert order == [(to, leaf) for leaf in leaves for to in ("device", "host")]


def test_the_fewest_bytes_that_are_enough(plan):
    options = options_of(plan)
    assert not options.choose(plan.memory.peak)
    few = options.choose(plan.memory.peak - 1)
    assert len(few.arguments) + len(few.stacks) == 1
    more = options.choose(options.profile(options.all)[1].peak)
    assert len(more.arguments) + len(more.stacks) > 1
    assert options.choose(100) is None
