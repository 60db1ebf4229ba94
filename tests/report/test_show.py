"""`shardc.show`: the text says where an array lives, and what a device holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import shardc
from shardc import P, S, StackedArray, show

VALUE = np.arange(13 * 6, dtype=np.float32).reshape(13, 6)


@pytest.fixture
def mesh():
    return shardc.make_mesh(data=4, model=2)


def lines(text):
    return [line.strip() for line in text.splitlines()]


def test_an_even_split_is_a_jax_array_and_axes_that_hold_the_same_are_a_star(mesh):
    x = shardc.put(VALUE, mesh, {"model": S(1)})
    assert isinstance(x, jax.Array)
    assert lines(show(x)) == [
        "f32[13,6] at {model: S(1)} on data=4, model=2: a device holds [13,3], 156 bytes",
        "data   model   devices      holds",
        "────────────────────────────────────",
        "*      0       0, 2, 4, 6   [:, 0:3]",
        "*      1       1, 3, 5, 7   [:, 3:6]",
    ]


def test_padding_is_shown(mesh):
    text = show(shardc.put(VALUE, mesh, {"data": S(0), "model": S(1)}))
    assert lines(text)[0] == "f32[13,6] at {data: S(0), model: S(1)} on data=4, model=2: a device holds [4,3], 48 bytes"
    assert lines(text)[3] == "0      0       0         [0:4, 0:3]"
    assert lines(text)[-1] == "3      1       7         [12:13, 3:6]   3 in dimension 0"


def test_a_device_may_hold_nothing(mesh):
    text = show(shardc.put(VALUE[:2], mesh, {"data": S(0)}))
    assert lines(text)[-1].split() == ["3", "*", "6,", "7", "nothing", "1", "in", "dimension", "0"]


@pytest.mark.parametrize("device", [7, {"data": 3, "model": 1}], ids=["number", "coordinates"])
def test_one_device_shows_its_values_without_the_padding(mesh, device):
    x = shardc.put(VALUE, mesh, {"data": S(0), "model": S(1)})
    assert lines(show(x, device=device))[1:] == [
        "device 7, at data=3, model=1, holds [12:13, 3:6], and 3 in dimension 0 of padding",
        "[[75. 76. 77.]]",
    ]


@pytest.mark.parametrize("placement", [{"data": S(0)}, {"model": S(1), "data": S(0)}, {"data": S(1), "model": S(1)}])
@pytest.mark.parametrize("rows", [13, 16])
def test_every_device_shows_what_the_indices_say(mesh, placement, rows):
    value = np.arange(rows * 6).reshape(rows, 6)
    x = shardc.put(value, mesh, placement)
    for device in mesh.devices.flat:
        _, where, *shown = show(x, device=device.id).splitlines()
        if "holds nothing" in where:
            continue
        index = where.partition("holds [")[2].partition("]")[0].split(", ")
        piece = value[tuple(slice(*(int(i) if i else None for i in part.split(":"))) for part in index)]
        assert "\n".join(shown) == str(piece)


def test_partial_values(mesh):
    x = shardc.put(VALUE, mesh, {"data": S(0), "model": P})
    assert "It is partial: the value is the sum of what the devices along model hold." in show(x)
    assert lines(show(x, device=0))[1:] == lines(
        "device 0, at data=0, model=0, holds a term of [0:4, :]\n" + str(VALUE[:4])
    )
    assert lines(show(x, device=1))[2] == "[[0. 0. 0. 0. 0. 0.]"


def test_scalars_empty_arrays_and_keys(mesh):
    assert lines(show(shardc.put(np.float32(3), mesh, {}), device=0))[1:] == [
        "device 0, at data=0, model=0, holds the whole value",
        "3.0",
    ]
    assert "an empty array" in show(shardc.put(np.zeros((0, 2)), mesh, {}))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, jax.P("data")))
    assert str(np.asarray(jax.random.key_data(keys))[2:4]) in show(keys, device=2)


def test_of_many_pieces_the_first_and_the_last(mesh):
    planned = shardc.make_mesh(topology="v5p", data=64, model=2)
    x = jax.ShapeDtypeStruct((1024, 16), "bfloat16", sharding=NamedSharding(planned, jax.P("data")))
    text = lines(show(x))
    assert len(text) == 3 + 16
    assert text[1] == "data   model   holds"
    assert text[-8] == "…      …       … 49 more"
    assert text[-1] == "63     *       [1008:1024, :]"
    assert lines(show(x, device={"data": 1, "model": 0}))[1] == "the device at data=1, model=0 holds [16:32, :]"


def test_stacked_arrays_in_their_parts(mesh):
    meshes = [jax.sharding.Mesh(d, ("model",)) for d in (mesh.devices[0], mesh.devices[1])]
    rows = [VALUE[:5], VALUE[5:]]
    parts = [
        shardc.PlacedArray(jax.device_put(x, NamedSharding(m, jax.P())), x.shape, shardc.Placement(), m)
        for m, x in zip(meshes, rows, strict=True)
    ]
    text = lines(show(StackedArray(parts)))
    assert text[0] == "f32[13,6] in 2 parts, on the stages of a pipeline"
    assert "*       0, 1      [0:5, :]" in text
    assert "*       2, 3      [5:13, :]" in text
    assert lines(show(StackedArray(parts), device=3))[1] == "device 3, at model=1, holds [5:13, :]"
    assert show(StackedArray(parts), device=7) == "f32[13,6]: this device holds no part of it"


def test_a_pytree_has_a_line_for_each_leaf_and_folds_those_alike(mesh):
    layer = {"w": shardc.put(VALUE[:12], mesh, {"data": S(0)}), "b": shardc.put(VALUE[0], mesh, {})}
    tree = {"layers": [layer] * 3, "step": 3}
    assert lines(show(tree)) == [
        "7 arrays, 288 bytes per device",
        "path             type        placement       mesh              a device holds   bytes per device",
        "────────────────────────────────────────────────────────────────────────────────────────────────",
        "layers/*/b  x3   f32[6]      B               data=4, model=2   [6]                      24 bytes",
        "layers/*/w  x3   f32[12,6]   {data: S(0)}    data=4, model=2   [3,6]                    72 bytes",
        "step             i32[]       not on a mesh",
    ]
    assert "layers/1/b: f32[6] at B" in show(tree, device=0)


def test_what_is_on_no_mesh_says_so():
    assert show(VALUE) == "f32[13,6] is not on a mesh: a NumPy array, on the host"
    assert show(jnp.ones(3)) == "f32[3] is not on a mesh: whole on device 0"
    assert show("text") == "'text', a str, is not an array"
    seen = []
    jax.jit(lambda x: seen.append(show(x)))(1.0)
    assert seen[0].startswith("f32[] is being traced and is on no device yet")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (8, "device=8: the mesh data=4, model=2 has devices 0 to 7."),
        ({"dta": 0, "model": 0}, 'dta=0, nothing for data, but the mesh is data=4, model=2. Did you mean "data"?'),
        ({"data": 4, "model": 0}, "has data=4, but the mesh is data=4, model=2."),
    ],
)
def test_a_device_that_is_not_there_is_an_error(mesh, device, message):
    with pytest.raises(shardc.ArgumentError) as error:
        show(shardc.put(VALUE, mesh, {}), device=device)
    assert message in str(error.value)
