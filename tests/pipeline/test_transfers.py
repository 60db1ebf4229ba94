"""Where values cross from stage to stage: as small as they can be had there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import S
from shardc.machine.mesh import border
from shardc.machine.topology import DeviceLink
from shardc.pipeline import plan as plans
from tests.pipeline.pipelines import batch, check, dense, error, layers, training
from tests.pipeline.pipelines import loss as loss_of_chain


def loss(params, x):
    first, last = params
    x = shardc.stage_boundary(x @ first["w"] + first["b"])
    return jnp.mean((x @ last["w"] + last["b"]) ** 2)


def step(params, x):
    return shardc.accumulate(jax.value_and_grad(loss), microbatches=8)(params, x)


def test_rows_that_are_split_cross_split_both_ways():
    """A bias would like to see the whole gradient, and a receive of all of it looked like a gift."""
    params = [{"w": jnp.ones((128, 128)), "b": jnp.ones(128)}] * 2
    places = {"params": {}, "x": {"data": S(0)}}
    piped = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2, data=2), in_placements=places, pipeline=shardc.Pipeline()
    )
    plan = piped.plan(params, jnp.ones((2048, 128)))
    whole = 256 * 128 * 4
    assert [(t.source, t.target, t.bytes // t.count) for t in plan.transfers] == [
        (0, 1, whole // 2),
        (1, 0, whole // 2),
    ]
    assert not [c for c in plan.collectives if c.count > 1]


def clipped(params, x):
    value, grads = step(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - g / norm, params, grads), value


def test_a_sum_over_stages_has_the_line_that_it_comes_from():
    params = [{"w": jnp.ones((8, 8)), "b": jnp.ones(8)}] * 2
    plan = shardc.function(clipped, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline()).plan(
        params, jnp.ones((16, 8))
    )
    (norm,) = [t for t in plan.transfers if t.value == "f32[]" and t.source == 1]
    assert norm.line.startswith("test_transfers.py:")


def stencil(x):
    padded = jnp.pad(x, ((0, 0), (1, 1)))
    return padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]


def transformed(x):
    grid = x.reshape(len(x), 64, 64)
    return jnp.fft.irfft2(2 * jnp.fft.rfft2(grid)).reshape(x.shape)


REWRITTEN = {
    "a stencil": (stencil, "compose_windows", 200),
    "roll": (lambda x: jnp.roll(x, 1, 1), "compose_windows", 200),
    "a transform of two dimensions": (transformed, "chain_transforms", None),
    "a loop over rows": (lambda x: jax.lax.map(lambda c: jnp.sin(c) * c.sum(), x.T).T, "share_loops", None),
}
"""Of a stage: a function, the pass that rewrites it, and the most bytes that both stages send then."""


@pytest.mark.sampled
@pytest.mark.plans_eagerly
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", REWRITTEN)
def test_stages_are_rewritten_as_whole_programs_are(name, recompute):
    """Regression: a stencil in two stages sent whole arrays where one program sends borders."""
    fn, rewrite, most = REWRITTEN[name]

    def model(w, x):
        x = shardc.stage_boundary(fn(jnp.tanh(x * w[0])))
        return jnp.mean(fn(jnp.tanh(x * w[1])) ** 2)

    def step(w, x):
        return shardc.accumulate(jax.value_and_grad(model), microbatches=4)(w, x)

    w, x = jnp.float32([0.7, 0.3]), np.linspace(-1, 1, 4 * 4096, dtype=np.float32).reshape(4, 4096)
    exe = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2, data=4), in_placements={"x": {"data": S(1)}, "w": {}},
        pipeline=shardc.Pipeline(recompute=recompute),
    ).compile(w, x)  # fmt: skip
    assert exe.audit().ok
    for got, want in zip(jax.tree.leaves(exe(w, x)), jax.tree.leaves(jax.jit(step)(w, x)), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-6)
    plans = [s.plan for s in exe.plan.stages]
    taken = {t.taken for p in plans for t in p.trials if t.name == rewrite}
    assert taken and (True in taken) == any(rewrite in dict(p.program.passed) for p in plans)
    assert most is None or sum(c.bytes for c in exe.plan.collectives) < most


# meshes that are unlike

ROWS = {"params": {}, "batch": {"data": S(0)}}
MODEL = {"params": [{"w": {"model": S(1)}, "b": {"model": S(0)}} for _ in range(2)], "batch": {"data": S(0)}}
AXES = "data", "model"


def mesh_of(numbers, *sizes):
    devices = np.array(jax.devices())[np.array(numbers)]
    return Mesh(devices.reshape(sizes), AXES[: len(sizes)])


UNLIKE = {
    "4 -> 2": ([mesh_of(range(4), 4), mesh_of((4, 5), 2)], ROWS, 16),
    "2 -> 4": ([mesh_of((4, 5), 2), mesh_of(range(4), 4)], ROWS, 16),
    "2x2 -> 4": ([mesh_of(range(4), 2, 2), mesh_of(range(4, 8), 4, 1)], MODEL, 8),
    "4 -> 2x2": ([mesh_of(range(4), 1, 4), mesh_of(range(4, 8), 2, 2)], MODEL, 8),
    "other order": ([mesh_of(range(4), 4), mesh_of((7, 5, 6, 4), 4)], ROWS, 16),
    "uneven": ([mesh_of(range(4), 4), mesh_of((4, 5, 6), 3)], ROWS, 10),
    "one -> 3": ([mesh_of((0,), 1), mesh_of((4, 5, 6), 3)], ROWS, 14),
}
"""Meshes of two ranks, placements, rows."""


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", UNLIKE)
def test_stages_on_meshes_that_are_unlike(name):
    """As on one device, and what the ways have sent is what the plan lists."""
    meshes, places, rows = UNLIKE[name]
    pipeline = shardc.Pipeline(meshes=meshes)
    args = layers(2, 8), batch(rows, 8)
    f = check(training(loss_of_chain, 2), args, None, tolerance=1e-5, pipeline=pipeline, in_placements=places)
    plan = f.plan(*args)
    forward, *_ = [t for t in plan.transfers if (t.source, t.count) == (0, 2)]
    assert forward.border_bytes >= rows * 8 * 4
    assert forward.border_bytes >= forward.device_bytes >= forward.border_bytes / 4
    assert "of all devices together" in plan.explain()


def whole_between(params, batch):
    x = shardc.stage_boundary(shardc.constrain(dense(params[0], batch["x"]), {}))
    return error(dense(params[1], shardc.constrain(x, {})), batch)


@pytest.mark.usefixtures("compiled_fast")
def test_over_a_slow_border_a_value_crosses_in_pieces_and_is_gathered(monkeypatch):
    """What the boxings on either side send is in the plan, and in its text."""
    monkeypatch.setattr(plans, "border", lambda *_: DeviceLink(1e6, 1e-6))
    meshes, places, rows = UNLIKE["4 -> 2"]
    args = layers(2, 8), batch(rows, 8)
    pipeline = shardc.Pipeline(meshes=meshes)
    f = check(training(whole_between, 2), args, None, tolerance=1e-5, pipeline=pipeline, in_placements=places)
    plan = f.plan(*args)
    (there,) = [t for t in plan.transfers if t.after and (t.source, t.target) == (0, 1)]
    assert there.border_bytes == rows * 8 * 4 and there.after == there.border_bytes / 2
    assert "within stage 1, after it has crossed 0 -> 1" in plan.explain()
    listed = sum(t.bytes + t.before for t in plan.transfers if t.source == 0)
    assert plan.known_bytes >= listed


def test_rows_cross_once_between_unlike_meshes():
    """The later stage knows where the other one has its end, whether it sends or takes."""
    args = [{"w": jnp.ones((128, 128)), "b": jnp.ones(128)}] * 2, jnp.ones((2048, 128))
    places = {"params": {}, "x": {"data": S(0)}}
    for sizes in ((4, 2), (2, 4)):
        meshes = [shardc.make_mesh(topology="h100", data=n) for n in sizes]
        plan = shardc.function(step, in_placements=places, pipeline=shardc.Pipeline(meshes=meshes)).plan(*args)
        whole = 2048 * 128 * 4
        assert [(t.source, t.target, t.border_bytes) for t in plan.transfers] == [(0, 1, whole), (1, 0, whole)]
        link = border(*meshes)
        assert all(t.seconds == link.latency + t.device_bytes / 8 / link.bandwidth for t in plan.transfers)
