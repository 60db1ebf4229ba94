"""Meshes: `make_mesh`, its errors, and the planner's view."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

import shardc
from shardc.errors import MeshError, ShardcError, all_offenders, did_you_mean
from shardc.machine import mesh as mesh_module
from shardc.machine.devices import RemoteDevice
from shardc.machine.mesh import (
    TOPOLOGIES,
    AnyMesh,
    _machine_of,
    auto_mesh,
    choose_devices,
    make_mesh,
    meshes_along,
    parse_bytes,
    parse_topology,
    view,
)
from shardc.machine.topology import BETWEEN_PROCESSES


def test_make_mesh_takes_the_first_devices_in_order() -> None:
    mesh = make_mesh(data=2, model=3)
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == {"data": 2, "model": 3}
    assert mesh.axis_types == (AxisType.Auto,) * 2
    assert [[d.id for d in row] for row in mesh.devices] == [[0, 1, 2], [3, 4, 5]]


def test_make_mesh_takes_the_devices_that_are_named_in_their_order() -> None:
    mesh = make_mesh(devices=jax.devices()[:3:-1], data=-1, model=2, hbm="3GB")
    assert [[d.id for d in row] for row in mesh.devices] == [[7, 6], [5, 4]]
    assert view(mesh).topology.hbm == 3 * 10**9


def test_make_mesh_for_a_topology_needs_no_devices() -> None:
    mesh = make_mesh(topology="v5p:16x16x16", data=64, model=64)
    assert isinstance(mesh, AbstractMesh)
    assert mesh.axis_types == (AxisType.Auto,) * 2
    seen = view(mesh)
    assert (seen.axes, seen.size, dict(seen.sizes)) == ((("data", 64), ("model", 64)), 4096, {"data": 64, "model": 64})
    assert (seen.topology.kind, seen.topology.shape, seen.topology.hbm) == ("v5p", (16, 16, 16), 95 * 10**9)
    assert str(seen) == "data=64, model=64 on v5p"


@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_every_topology_can_be_planned_for(kind: str) -> None:
    assert view(make_mesh(topology=kind, data=8)).topology == TOPOLOGIES[kind]
    shape = f"{TOPOLOGIES[kind].fabrics[0].most or 4}x2"
    assert "x".join(map(str, parse_topology(f"{kind}:{shape}").shape)) == shape
    link = TOPOLOGIES[kind].link
    assert min(link.bandwidth, link.latency, TOPOLOGIES[kind].flops, TOPOLOGIES[kind].memory_bandwidth) > 0


def test_hbm_overrides_the_topology() -> None:
    assert view(make_mesh(topology="v5p:4x4x2", hbm="16GiB", data=8)).topology.hbm == 16 * 2**30
    assert view(make_mesh(topology="h100", hbm="123B", data=8)).topology.hbm == 123
    assert view(make_mesh(hbm="2GB", with_memory=8)).topology.hbm == 2 * 10**9
    assert view(make_mesh(without=8)).topology.hbm == TOPOLOGIES["cpu"].hbm


def test_a_later_mesh_of_equal_axes_changes_no_function_that_is_there() -> None:
    f = shardc.function(jnp.sum, mesh=make_mesh(hbm="2GB", first=8))
    again = make_mesh(first=8)
    assert f.plan(jnp.ones(8)).mesh.limit == 2 * 10**9
    assert shardc.function(jnp.sum, mesh=again).plan(jnp.ones(8)).mesh.limit is None


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("95GB", 95 * 10**9), ("16GiB", 16 * 2**30), ("1.5 MB", 1_500_000), (".5KiB", 512), ("2T", 2 * 10**12),
        ("7", 7), (" 8 b ", 8), ("80gb", 80 * 10**9), (5, 5), (2.5e9, 2_500_000_000),
    ],
)  # fmt: skip
def test_parse_bytes(text: str | int | float, amount: int) -> None:
    assert parse_bytes(text) == amount


LIKE_JAX = [
    (lambda make: make((4, 2), ("data", "model")), "data=4, model=2"),
    (lambda make: make((4, 2), ("x", "y"), topology="v5p"), "x=4, y=2"),
    (lambda make: make(axis_shapes=[2, 2, 2], axis_names=["a", "b", "c"]), "a=2, b=2, c=2"),
    (lambda make: make((4,), axis_names=("data",), devices=jax.devices()[:4]), "data=4"),
    (lambda make: make(8), "data=8"),
    (lambda make: make(np.int64(8), "x"), "x=8"),
    (lambda make: make((2, 4)), "data=2, model=4"),
    (lambda make: make({"data": 8}), "data=8"),
    (lambda make: make("v5p"), "data=4, model=2"),
    (lambda make: make((1, 1, 2, 4)), "data=4, model=2"),
    (lambda make: make(axis_names=("data",)), "data=4, model=2"),
]
BY_NAME = "shardc.make_mesh takes the size of each axis by the name of the axis; write shardc.make_mesh"
WRITE = "write shardc.make_mesh(data=4, model=2), or data=-1 for all devices that there are."
DEVICES = "write a list of devices, as devices=shardc.devices()[:4]."
NEEDS = "A mesh needs a positive number of devices for each axis, got"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_mesh(), f"{NEEDS} no axis; {WRITE}"),
        (
            lambda: make_mesh(a=0, b=True, c=2, d=1.5),
            f"{NEEDS} a=0, b=True, d=1.5; {WRITE}",
        ),
        (
            lambda: make_mesh(a=3, b=-1),
            "The mesh a=3 x b=-1 cannot use all of 8 devices: the product of the other axes, 3, does not divide 8. "
            "Give all sizes.",
        ),
        (lambda: make_mesh(a=-1, b=-1), f"{NEEDS} a=-1, b=-1; {WRITE}"),
        (
            lambda: make_mesh(a=4, b=4),
            "The mesh a=4 x b=4 needs 16 devices, this machine has 8 (cpu). Use a smaller mesh; for fake CPU devices "
            "set XLA_FLAGS=--xla_force_host_platform_device_count=16 and NPROC=32 before Python starts; to "
            'plan without devices name a topology, as in topology="v5p".',
        ),
        (
            lambda: make_mesh(topology="v5p:4x4", a=8, b=4),
            "The mesh a=8 x b=4 needs 32 devices, topology v5p:4x4 has 16.",
        ),
        (
            lambda: make_mesh(topology="v5q", a=2),
            f"There is no topology 'v5q'. Did you mean \"v5p\"? Known are {', '.join(TOPOLOGIES)}.",
        ),
        (
            lambda: make_mesh(topology="abacus", a=2),
            f"There is no topology 'abacus'. Known are {', '.join(TOPOLOGIES)}.",
        ),
        (
            lambda: make_mesh(topology="v5p:4x", a=2),
            "topology='v5p:4x': the shape after the colon is written 4x4x2.",
        ),
        (lambda: make_mesh(devices=cast(Any, 4), a=4), f"devices=4: {DEVICES}"),
        (lambda: make_mesh(devices=[0, 1], a=2), f"devices=: 0 is no device; {DEVICES}"),
        (
            lambda: make_mesh(devices=jax.devices()[:1] * 2, a=2),
            f"devices=: {jax.devices()[0]} is there 2 times; name each device once.",
        ),
        (
            lambda: make_mesh(devices=jax.devices()[:3], a=2),
            "The mesh a=2 needs 2 devices, devices= names 3; name as many, or give one axis the size -1.",
        ),
        (
            lambda: make_mesh(devices=jax.devices(), topology="v5p", a=2),
            "topology= plans without devices, devices= names some that are there; give only one of them.",
        ),
        (lambda: make_mesh(topolgy="v5p"), f"{NEEDS} topolgy='v5p'; {WRITE} Did you mean \"topology\"?"),
        *((lambda call=call: call(make_mesh), f"{BY_NAME}({right}).") for call, right in LIKE_JAX),
        *(
            (
                lambda hbm=hbm: make_mesh(hbm=hbm, a=2),
                f'hbm={hbm!r} is read as bytes, and a device has more; write the unit: hbm="{int(hbm)}GB", or '
                f'hbm="{int(hbm)}B" if so few are meant.',
            )
            for hbm in (80, "80", " 80 ", 9_999, 0)
        ),
        *(
            (
                lambda hbm=hbm: make_mesh(hbm=hbm, a=2),
                f'hbm={hbm!r} is not an amount of memory; write "95GB", "16GiB" or a number of bytes.',
            )
            for hbm in ("lots", "1.2.3GB", "", "-1GB", "1XB")
        ),
    ],
)
def test_errors_say_what_and_how(make: Callable[[], object], text: str) -> None:
    with pytest.raises(MeshError) as error:
        make()
    assert str(error.value) == text


AXIS_TYPES = [(AxisType.Auto,) * 2, (AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Manual)]


@pytest.mark.parametrize("types", AXIS_TYPES, ids=str)
def test_view_is_the_same_for_all_axis_types(types: tuple[AxisType, ...]) -> None:
    concrete = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("a", "b"), types)
    expected = view(make_mesh(a=4, b=2))
    assert (expected.axes, expected.topology) == ((("a", 4), ("b", 2)), TOPOLOGIES["cpu"])
    for mesh in (concrete, concrete.abstract_mesh, AbstractMesh((4, 2), ("a", "b"), types)):
        assert view(mesh) == expected
        assert hash(view(mesh)) == hash(expected)


def test_views_differ_by_axes_order_and_topology() -> None:
    meshes = [make_mesh(a=4, b=2), make_mesh(b=2, a=4), make_mesh(topology="v5p", a=4, b=2), make_mesh(a=2, b=2)]
    assert len({view(m) for m in meshes}) == 4


@pytest.mark.parametrize(
    ("device_kind", "kind"),
    [
        ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA GB200", "gb200"),
        ("TPU7x", "tpu7x"), ("cpu", "cpu"),
    ],
)  # fmt: skip
def test_view_knows_jax_device_kinds(device_kind: str, kind: str) -> None:
    platform = "cpu" if kind == "cpu" else "tpu" if "TPU" in device_kind else "gpu"
    mesh = AbstractMesh((8,), ("a",), abstract_device=AbstractDevice(device_kind, None, platform))
    assert view(mesh).topology.kind == kind


@pytest.mark.parametrize("types", AXIS_TYPES[1:], ids=str)
def test_auto_mesh(types: tuple[AxisType, ...]) -> None:
    concrete = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("a", "b"), types)
    device = AbstractDevice("TPU v5p", None, "tpu")
    abstract = AbstractMesh((4, 2), ("a", "b"), types, abstract_device=device)
    found: AnyMesh
    for mesh in (concrete, abstract):
        found = auto_mesh(mesh)
        assert type(found) is type(mesh)
        assert found.axis_types == (AxisType.Auto,) * 2
        assert auto_mesh(found) is found
        assert view(found) == view(mesh)
    assert auto_mesh(concrete) == make_mesh(a=4, b=2)


@pytest.mark.parametrize("axes", [{"pipe": 4}, {"pipe": 2, "data": 3}, {"data": 3, "pipe": 2}])
def test_meshes_along_an_axis_hold_its_devices(axes: dict[str, int]) -> None:
    mesh = make_mesh(**axes)
    assert isinstance(mesh, Mesh)
    ranks = meshes_along(mesh, "pipe")
    at = mesh.axis_names.index("pipe")
    for i, rank in enumerate(ranks):
        assert isinstance(rank, Mesh)
        assert rank.axis_names == (("data",) if "data" in axes else ("pipe",))
        assert list(rank.devices.flat) == list(mesh.devices.take([i], at).flat)
    assert [dict(r.shape) for r in meshes_along(make_mesh(**axes, topology="h100"), "pipe")] == [
        dict(r.shape) for r in ranks
    ]


def test_a_view_compares_by_what_it_says() -> None:
    seen = view(make_mesh(topology="v5p:4x4x2", a=4, b=2))
    assert seen == view(make_mesh(topology="v5p:4x4x2", a=4, b=2))
    assert pickle.loads(pickle.dumps(seen.topology)) == seen.topology
    with pytest.raises(TypeError):
        seen.sizes["a"] = 3  # type: ignore[index]


def test_errors_are_of_one_tree_and_of_pythons_kinds() -> None:
    assert issubclass(MeshError, ShardcError)
    assert issubclass(MeshError, ValueError)


def test_error_helpers() -> None:
    assert did_you_mean("modle", ["data", "model"]) == ' Did you mean "model"?'
    assert did_you_mean("model", ["model"]) == ""
    assert did_you_mean("x", ["data", "model"]) == ""
    assert all_offenders("Two:", ["one\nmore", "two"]) == "Two:\n  one\n  more\n  two"
    assert all_offenders("None:", []) == "None:"


def devices_of(*counts: int) -> list[SimpleNamespace]:
    """So many devices of each process, numbered as JAX numbers them, in no order."""
    found = [
        SimpleNamespace(id=2048 * p + k, process_index=p, platform="cpu")
        for p, n in enumerate(counts)
        for k in range(n)
    ]
    return found[::2] + found[1::2]


def test_the_devices_of_a_process_lie_side_by_side() -> None:
    chosen = choose_devices(devices_of(4, 4), {"data": 2, "model": 4})
    assert [d.id for d in chosen] == [0, 1, 2, 3, 2048, 2049, 2050, 2051]


def test_a_smaller_mesh_takes_as_many_devices_of_each_process() -> None:
    assert [d.id for d in choose_devices(devices_of(4, 4), {"data": 4})] == [0, 1, 2048, 2049]
    assert [d.id for d in choose_devices(devices_of(4, 2, 3), {"data": 3, "model": 2})] == [
        0,
        1,
        2048,
        2049,
        4096,
        4097,
    ]


@pytest.mark.parametrize(
    ("counts", "axes", "text"),
    [
        (
            (4, 4),
            {"data": 3},
            "The mesh data=3 needs 3 devices, and 2 processes, the smallest of which has 4, cannot each give the same "
            "number. Make the product of the sizes a multiple of 2, at most 8, as in shardc.make_mesh(data=2); or "
            "start another number of processes.",
        ),
        (
            (4, 4, 4),
            {"data": 2, "model": 1},
            "The mesh data=2 x model=1 needs 2 devices, and 3 processes, the smallest of which has 4, cannot each give "
            "the same number. Make the product of the sizes a multiple of 3, at most 12, as in "
            "shardc.make_mesh(data=3); or start another number of processes.",
        ),
        (
            (4, 2),
            {"data": 6},
            "The mesh data=6 needs 6 devices, and 2 processes, the smallest of which has 2, cannot each give the same "
            "number. Make the product of the sizes a multiple of 2, at most 4, as in shardc.make_mesh(data=4); or "
            "start another number of processes.",
        ),
        (
            (4, 4),
            {"data": 16},
            "The mesh data=16 needs 16 devices, the 2 processes of this run have 8 (cpu). Use a smaller mesh; for fake "
            "CPU devices set XLA_FLAGS=--xla_force_host_platform_device_count=8 and NPROC=16 before Python "
            'starts; to plan without devices name a topology, as in topology="v5p".',
        ),
    ],
)
def test_meshes_that_processes_cannot_share(counts: tuple[int, ...], axes: dict[str, int], text: str) -> None:
    with pytest.raises(MeshError) as error:
        choose_devices(devices_of(*counts), axes)
    assert str(error.value) == text


def test_a_mesh_that_is_too_large_for_a_run_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher sets the number of devices, over XLA_FLAGS."""
    monkeypatch.setattr(mesh_module, "current", object)
    with pytest.raises(MeshError, match=r"Use a smaller mesh; for fake CPU devices start the run with --devices 8; to"):
        choose_devices(devices_of(4, 4), {"data": 16})


def test_devices_on_a_torus_keep_their_order_along_links() -> None:
    chips = [
        SimpleNamespace(id=4 * y + x, process_index=x // 2 + 2 * (y // 2), coords=(x, y, 0), platform="tpu")
        for y in range(4) for x in range(4)
    ]  # fmt: skip
    assert choose_devices(chips[::-1], {"data": 16}) == chips
    assert [d.coords[:2] for d in choose_devices(chips, {"data": 4})] == [(0, 0), (2, 0), (0, 2), (2, 2)]


def test_the_border_between_processes_is_a_slower_fabric() -> None:
    """The mesh is seen as one of 2 processes x 4 devices."""
    mesh = make_mesh(data=4, model=2)
    devices = [
        SimpleNamespace(process_index=k // 4, platform="cpu", device_kind="cpu", slice_index=0) for k in range(8)
    ]  # as jaxlib has them under jax.distributed: all in one slice
    fake = SimpleNamespace(devices=np.asarray(devices).reshape(4, 2), shape=mesh.shape)
    machine = _machine_of(cast(Any, fake))
    assert machine.fabrics == (*TOPOLOGIES["cpu"].fabrics, BETWEEN_PROCESSES)
    spans = dict(machine.layout)
    assert [(s.fabric.tier, s.count) for s in spans["data"]] == [(0, 2), (1, 2)]
    assert [(s.fabric.tier, s.count) for s in spans["model"]] == [(0, 2)]
    assert BETWEEN_PROCESSES.bandwidth < TOPOLOGIES["cpu"].fabrics[0].bandwidth
    assert view(mesh).topology == TOPOLOGIES["cpu"]


def test_a_size_of_all_devices_that_there_are() -> None:
    """So a script that goes on with fewer processes has the mesh of their size."""
    assert dict(make_mesh(data=-1).shape) == {"data": 8}
    assert dict(make_mesh(data=-1, model=2).shape) == {"data": 4, "model": 2}
    assert dict(make_mesh(data=2, model=-1, topology="v5p:4x4x2").shape) == {"data": 2, "model": 16}


def test_devices_of_another_runtime_make_a_mesh():
    there = [RemoteDevice(1, i, "cpu", "cpu") for i in range(4)]
    mesh = make_mesh(devices=there, data=2, model=-1)
    assert dict(mesh.shape) == {"data": 2, "model": 2} and list(mesh.devices.flat) == there
