"""A rank of a pipeline on other devices, in one process: what is compiled again, what moves, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import S
from shardc.arrays.place import Place
from shardc.arrays.placed import PlacedArray, StackedArray
from shardc.calls.remap import mover
from shardc.sbp.placement import Placement

pytestmark = pytest.mark.usefixtures("compiled_fast")


def mesh_of(*numbers, axes=("data",)):
    return Mesh(np.array([jax.devices()[i] for i in numbers]), axes)


def loss_of(params, batch):
    x = shardc.stage_boundary(jnp.tanh(batch @ params["w0"]))
    return ((x @ params["w1"]) ** 2).mean()


def train(params, batch):
    loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def start():
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(8, 7 + i)).astype(np.float32) for i in (0, 1)}
    params["w1"] = params["w1"][:7]
    return params, rng.normal(size=(16, 8)).astype(np.float32)


def one_device(params, batch, steps):
    losses = []
    for _ in range(steps):
        params, loss = jax.jit(train)(params, batch)
        losses.append(float(loss))
    return params, losses


@pytest.mark.parametrize("by_axis", [True, False])
def test_a_rank_on_other_devices(by_axis):
    if by_axis:
        step = shardc.function(
            train, mesh=shardc.make_mesh(pipe=2, data=2), pipeline=shardc.Pipeline(), donate_argnames="params",
            in_placements={"params": {"data": S(1)}, "batch": {"data": S(0)}},
        )  # fmt: skip
    else:
        step = shardc.function(
            train, pipeline=shardc.Pipeline(meshes=[mesh_of(0, 1), mesh_of(2, 3)]), donate_argnames="params",
            in_placements={"params": {"data": S(1)}, "batch": {"data": S(0)}},
        )  # fmt: skip
    params, batch = start()
    want, right = one_device(params, batch, 4)
    losses = []
    for _ in range(2):
        params, loss = step(params, batch)
        losses.append(float(loss))
    (before,) = step._executables.values()
    plan = step.plan(params, batch)
    move = step.remap(1, mesh_of(6, 7))
    with pytest.raises(shardc.ArgumentError, match=r"params/w1 f32.*stage 1 on devices 2, 3") as error:
        step(params, batch)
    assert "remap(rank, mesh)" in str(error.value)
    params = move(params)
    for _ in range(2):
        params, loss = step(params, batch)
        losses.append(float(loss))
    (after,) = step._executables.values()
    of_rank = {task: s.rank for s in plan.stages for task in s.tasks.all}
    kept = {i for i, e in after._executables.items() if before._executables.get(i) is e}
    assert kept == {i for i in after._executables if of_rank[i] == 0}
    assert params["w1"].devices() == set(jax.devices()[6:8]) and params["w0"].devices() == set(jax.devices()[:2])
    np.testing.assert_allclose(losses, right, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), shardc.fetch(params), want)
    assert after.audit().ok


def test_what_cannot_be():
    step = shardc.function(train, mesh=shardc.make_mesh(pipe=2, data=2), pipeline=shardc.Pipeline())
    for rank in (2, -1, "1"):
        with pytest.raises(shardc.PipelineError, match=r"there is no rank .*; the ranks are 0 to 1"):
            step.remap(rank, mesh_of(6, 7))
    with pytest.raises(
        shardc.MeshError, match=r"has the axes \{'data': 3\}; it needs those of its old one, \{'data': 2\}"
    ):
        step.remap(1, mesh_of(5, 6, 7))
    with pytest.raises(shardc.MeshError, match="cpu:1 belong to rank 0; give rank 1 devices of its own"):
        step.remap(1, mesh_of(1, 7))
    plain = shardc.function(train, mesh=shardc.make_mesh(data=2))
    with pytest.raises(shardc.PipelineError, match="it is no pipeline"):
        plain.remap(0, mesh_of(6, 7))
    planned = shardc.function(train, mesh=shardc.make_mesh(pipe=2, data=2, topology="v5p"), pipeline=shardc.Pipeline())
    with pytest.raises(shardc.MeshError, match="only a mesh with devices can be mapped"):
        planned.remap(0, mesh_of(6, 7))


def test_rows_of_a_moved_rank_in_a_stack():
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    meshes = mesh_of(0, 1), mesh_of(2, 3), mesh_of(7, 6)
    ends = [Place(jax.typeof(rows[:3]), m, Placement({"data": S(1)})) for m in meshes[:2]]
    pieces = [
        PlacedArray(at.enter(x), x.shape, at.at, at.mesh) for at, x in zip(ends, (rows[:3], rows[3:]), strict=True)
    ]
    moved = mover(*meshes[1:])({"w": StackedArray(pieces), "name": "layer", "none": None})
    assert [p.mesh for p in moved["w"].pieces] == [meshes[0], meshes[2]] and moved["name"] == "layer"
    np.testing.assert_array_equal(np.asarray(moved["w"]), rows)
