"""What a pipeline returns: where it lies, and how other functions, the host and people come to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S, accumulate, make_mesh
from tests.pipeline.pipelines import assert_same, batch, layers, loss, training

pytestmark = pytest.mark.usefixtures("compiled_fast")
PARAMS, BATCH = layers(3), batch(8)
ROWS = {"batch": {"data": S(0)}}
STEP = training(lambda p, b: loss(p, b, (0, 1)), 4)
AXIS = "of_results"  # its meshes are no other test's


def norm(params):
    return sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


@pytest.fixture(scope="module")
def results():
    """Parameters, on three stages, and the function that made them."""
    mesh = make_mesh(pipe=3, **{AXIS: 2})
    places = {"params": {}, "batch": {AXIS: S(0)}}
    step = shardc.function(STEP, mesh=mesh, in_placements=places, out_placements={}, pipeline=shardc.Pipeline())
    return step(PARAMS, BATCH)[0], step


def test_one_call_brings_all_to_a_mesh_or_to_the_host(results):
    params, step = results
    want, *_ = jax.jit(STEP)(PARAMS, BATCH)
    for mesh in (make_mesh(data=8), step.mesh):
        there = shardc.put(params, mesh, {})
        assert {x.sharding.mesh for x in jax.tree.leaves(there)} == {mesh}
        assert_same(there, want, 1e-5)
        assert_same(jax.jit(norm)(there), norm(want), 1e-5)
        assert_same(shardc.function(norm, mesh=mesh, in_placements={})(there), norm(want), 1e-5)
    host = shardc.fetch(params)
    assert {type(x) for x in jax.tree.leaves(host)} == {np.ndarray}
    assert_same(host, want, 1e-5)
    for given in (params, host, there):  # and back
        assert_same(step(given, BATCH)[2], jax.jit(STEP)(want, BATCH)[2], 1e-5)


def test_arrays_of_stages_are_one_folded_error_with_the_call_that_mends_it(results):
    params, _ = results
    function = shardc.function(norm, mesh=make_mesh(data=8), in_placements={})
    with pytest.raises(shardc.ArgumentError) as error:
        function(params)
    head, *lines = str(error.value).splitlines()
    assert "6 arrays live on other devices" in head
    assert "params = shardc.put(params, mesh, {})" in head
    assert "params = shardc.fetch(params)" in head
    assert lines == [
        f"  params/*/b  x3 f32[4]: {AXIS}=2, stage 0 on devices 0, 1; …; {AXIS}=2, stage 2 on devices 4, 5",
        f"  params/*/w  x3 f32[4,4]: {AXIS}=2, stage 0 on devices 0, 1; …; {AXIS}=2, stage 2 on devices 4, 5",
    ]


def test_show_names_stages_and_devices(results):
    params, _ = results
    head, columns, _, *rows = shardc.show(params).splitlines()
    assert head == "6 arrays, 80 bytes on the fullest device"
    assert "mesh                    devices   a device holds" in columns
    assert [row.split() for row in rows[:2]] == [
        ["0/b", "f32[4]", "B", f"{AXIS}=2,", "stage", "0", "0,", "1", "[4]", "16", "bytes"],
        ["0/w", "f32[4,4]", "B", f"{AXIS}=2,", "stage", "0", "0,", "1", "[4,4]", "64", "bytes"],
    ]
    assert shardc.show(params[2]["w"]).startswith(f"f32[4,4] at B on {AXIS}=2, stage 2: a device holds [4,4], 64 bytes")


def test_an_array_on_the_mesh_of_another_stage_is_not_taken_for_one_of_ours():
    ours, theirs = (jax.sharding.Mesh(np.asarray(jax.devices()[i : i + 2]), ("own",)) for i in (0, 2))
    x = shardc.put(np.ones(3), theirs, {"own": S(0)})
    with pytest.raises(shardc.ArgumentError, match="own=2 on devices 2, 3"):
        shardc.function(lambda x: x.sum(), mesh=ours)(x)


def test_fetch_takes_what_is_no_plain_array():
    mesh = make_mesh(data=4)
    uneven = shardc.put(np.arange(6.0), mesh, {"data": S(0)})
    key = shardc.put(jax.random.key(3), mesh, {})
    got = shardc.fetch({"x": uneven, "key": key, "none": None, "name": "x", "n": 3})
    np.testing.assert_array_equal(got["x"], np.arange(6.0))
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    assert len(got["key"].devices()) == 1
    assert (got["none"], got["name"], got["n"]) == (None, "x", 3)


def test_evaluation_between_steps_reads_parameters_where_they_lie():
    mesh = make_mesh(pipe=3, data=2)
    step = shardc.function(STEP, mesh=mesh, in_placements=ROWS, pipeline=shardc.Pipeline())
    watch = shardc.function(
        lambda params, batch: accumulate(lambda p, b: loss(p, b, (0, 1)), microbatches=4)(params, batch), mesh=mesh,
        in_placements=ROWS, pipeline=shardc.Pipeline(),
    )  # fmt: skip
    params, *_ = step(PARAMS, BATCH)
    assert_same(watch(params, BATCH), loss(shardc.fetch(params), BATCH), 1e-5)
    assert watch.plan(params, BATCH).homes[:6] == step.plan(params, BATCH).homes[:6] == (0, 0, 1, 1, 2, 2)
