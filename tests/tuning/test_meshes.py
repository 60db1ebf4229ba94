"""The meshes that there are to choose from: each once, and all."""

import math
from itertools import permutations, product

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardc
from shardc import AUTO, B, S
from shardc.errors import MeshError
from shardc.machine.mesh import make_mesh, view
from shardc.tuning.meshes import all_sizes, factorizations, is_grid, merged_sizes, roles_of, shape_key, slice_of

NAMES = ("data", "fsdp", "model")


@pytest.mark.parametrize(("n", "parts"), [(1, 3), (8, 1), (8, 3), (12, 2), (60, 3), (512, 3)])
def test_factorizations_are_all_there_once(n, parts):
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    every = {f for f in product(divisors, repeat=parts) if math.prod(f) == n}
    found = list(factorizations(n, parts))
    assert len(found) == len(every)
    assert set(found) == every


def test_meshes_of_few_axes_come_first_and_take_the_outer_and_the_inner_name():
    found = all_sizes(4, NAMES)
    assert len(found) == len(set(found)) == 6
    used = [{a: n for a, n in sizes if n > 1} for sizes in found]
    assert used == [{"data": 4}, {"model": 4}, {"fsdp": 4}, {"data": 2, "model": 2}, {"data": 2, "fsdp": 2}, {
        "fsdp": 2, "model": 2,
    }]  # fmt: skip


def test_merged_sizes_put_two_axes_on_either():
    found = list(merged_sizes((("pipe", 2), ("data", 4), ("model", 8)), NAMES))
    assert found == [(("pipe", 2), ("data", 32), ("model", 1)), (("pipe", 2), ("data", 1), ("model", 32))]


@pytest.mark.parametrize(
    ("topology", "devices", "shape"),
    [
        ("v5p", 1, "1x1x1"),
        ("v5p", 4, "2x2x1"),
        ("v5p", 64, "4x4x4"),
        ("v5p", 128, "8x4x4"),
        ("v5p", 512, "8x8x8"),
        ("v5p", 4096, "16x16x16"),
        ("v5p", 2 * 8960, "28x20x16x2"),
        ("v5e", 256, "16x16"),
        ("v5e", 512, "16x16x2"),
        ("v5e", 34, "2x1x17"),
        ("h100", 4, "4"),
        ("h100", 512, "8x64"),
        ("h100", 12, "6x2"),
        ("gb200", 144, "72x2"),
    ],
)
def test_a_slice_is_compact(topology, devices, shape):
    found, count = slice_of(topology, devices)
    assert (found, count) == (f"{topology}:{shape}", devices)
    assert make_mesh(topology=found, data=devices).size == devices


@pytest.mark.parametrize(
    ("topology", "devices", "found"),
    [("v5p:2x2x2", None, 8), ("v5p:4x4x4", 32, 32), ("cpu", 8, 8), ("h100:8x4", None, 32)],
)
def test_a_shape_that_is_said_is_kept(topology, devices, found):
    assert slice_of(topology, devices) == (topology, found)


def test_a_file_is_kept(tmp_path):
    file = tmp_path / "here.json"
    file.write_text(view(make_mesh(topology="v5p", data=8)).topology.to_json())
    assert slice_of(str(file), 8) == (str(file), 8)


def test_slices_that_cannot_be():
    with pytest.raises(MeshError, match="has no number of devices"):
        slice_of("v5p", None)
    with pytest.raises(MeshError, match=r"devices=16: topology v5p:2x2x2 has 8"):
        slice_of("v5p:2x2x2", 16)
    with pytest.raises(MeshError, match="There is no topology 'v7'"):
        slice_of("v7", 8)


def keys(topology, devices, roles):
    """By what is equal, the meshes of so many devices that are grids."""
    found = {}
    for sizes in all_sizes(devices, NAMES):
        mesh = view(make_mesh(topology=topology, **dict(sizes)))
        if is_grid(mesh):
            found.setdefault(shape_key(mesh, roles), []).append(sizes)
    return found


def drawn(sizes, shape, roles):
    """The same told by the places of devices: along each axis, from the first on, in the machine turned all ways."""
    numbers = np.arange(math.prod(shape)).reshape([n for _, n in sizes])
    place = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape, order="F"), -1)
    lines = {a: place[np.moveaxis(numbers, k, 0).reshape(n, -1)[:, 0]] for k, (a, n) in enumerate(sizes) if n > 1}
    turns = [t for t in permutations(range(len(shape))) if [shape[d] for d in t] == list(shape)]
    return min(
        sorted((repr(roles[a]), sorted(map(tuple, line[:, list(turn)].tolist()))) for a, line in lines.items())
        for turn in turns
    )


@pytest.mark.parametrize("roles", [dict.fromkeys(NAMES, ""), {"data": "rows", "fsdp": "", "model": ""}])
@pytest.mark.parametrize(
    ("topology", "shape"),
    [("v5p:4x4x4", (4, 4, 4)), ("v5p:8x4x4", (8, 4, 4)), ("v5e:8x8", (8, 8)), ("v5p:6x4", (6, 4))],
)
def test_meshes_that_are_one_are_found(topology, shape, roles):
    found = keys(topology, math.prod(shape), roles)
    for alike in found.values():
        assert len({repr(drawn(sizes, shape, roles)) for sizes in alike}) == 1
    assert len(found) == len({repr(drawn(alike[0], shape, roles)) for alike in found.values()})


def test_eight_devices_that_are_all_alike():
    free = keys("cpu", 8, dict.fromkeys(NAMES, ""))
    assert [dict(alike[0]) for alike in free.values()] == [
        {"data": 8, "fsdp": 1, "model": 1},
        {"data": 4, "fsdp": 1, "model": 2},
        {"data": 2, "fsdp": 2, "model": 2},
    ]
    assert len(keys("cpu", 8, {"data": "rows", "fsdp": "", "model": ""})) == 6
    assert len(keys("cpu", 8, {a: a for a in NAMES})) == 10


def test_axes_lie_along_whole_parts_of_dimensions():
    def fits(**axes):
        return is_grid(view(make_mesh(topology="v5p:6x6", **axes)))

    assert fits(data=6, model=6)
    assert fits(data=12, model=3)
    assert fits(data=18, model=2)
    assert not fits(data=9, model=4)
    assert not fits(data=4, model=9)
    assert fits(data=2, model=6)  # a part of the machine
    assert not fits(data=2, model=4)  # a row, and two devices of the next


ROWS = {"data": S(0)}


@pytest.mark.parametrize(
    ("said", "alike"),
    [
        (AUTO, [NAMES]),
        (ROWS, [("data",), ("fsdp", "model")]),
        ({**ROWS, ...: AUTO}, [("data",), ("fsdp", "model")]),
        ({"data": S(0), "fsdp": S(0)}, [("data",), ("fsdp",), ("model",)]),  # which is outside
        ({"data": S(0), "fsdp": B, ...: AUTO}, [("data",), ("fsdp",), ("model",)]),
        (PartitionSpec("model"), [("data", "fsdp"), ("model",)]),
        ((S(0), S(1), B), [("data",), ("fsdp",), ("model",)]),
        ({"data": S(0), "fsdp": S(1)}, [("data",), ("fsdp",), ("model",)]),
        ({}, [NAMES]),
    ],
)
def test_axes_of_which_the_same_is_said_are_alike(said, alike):
    mesh = make_mesh(topology="cpu", data=2, fsdp=2, model=2)
    for f in (
        shardc.function(lambda x: x * 2, mesh=mesh, in_placements={"x": said}),
        shardc.function(lambda x: x * 2, mesh=mesh, out_placements=said),
    ):
        found = roles_of(NAMES, *f.look(np.zeros((8, 8))))
        groups = {}
        for axis in NAMES:
            groups.setdefault(repr(found[axis]), []).append(axis)
        assert sorted(map(tuple, groups.values())) == sorted(alike)


def test_constraints_inside_say_something_too():
    mesh = make_mesh(topology="cpu", data=2, fsdp=2, model=2)
    f = shardc.function(lambda x: shardc.constrain(x * 2, {"fsdp": S(0)}) + 1, mesh=mesh)
    found = roles_of(NAMES, *f.look(np.zeros((8, 8))))
    assert found["data"] == found["model"] != found["fsdp"]
