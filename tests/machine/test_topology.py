"""Machines: layouts of mesh axes, invalid topologies, and topology files."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardc
from shardc.errors import MeshError
from shardc.machine.mesh import MeshView, make_mesh, meshes_along, places_of, view
from shardc.machine.topology import (
    TOPOLOGIES,
    AxisSpan,
    Fabric,
    Topology,
    lay_along,
    merged,
    outside_by_default,
    parse_topology,
    topology_from_json,
)
from shardc.sbp.cost import send_price


def spans(topology: str, **axes: int) -> dict[str, list[tuple[int, int, int, bool]]]:
    """Dimension, count, stride and whether it is closed, of each axis."""
    seen = view(make_mesh(topology=topology, **axes))
    return {a: [(s.dim, s.count, s.stride, s.closed) for s in found] for a, found in seen.spans.items()}


@pytest.mark.parametrize(
    ("topology", "axes", "expected"),
    [
        # whole dimensions: rings where four devices or a multiple close one
        ("v5p:4x4x4", {"z": 4, "xy": 16}, {"z": [(2, 4, 1, True)], "xy": [(0, 4, 1, True), (1, 4, 1, True)]}),
        ("v5p:4x4x2", {"data": 8, "model": 4}, {"data": [(1, 4, 1, True), (2, 2, 1, False)],
                                               "model": [(0, 4, 1, True)]}),
        # parts of one: a line, and every other device, which shares the links
        ("v5p:8x1x1", {"a": 4, "b": 2}, {"a": [(0, 4, 2, True)], "b": [(0, 2, 1, False)]}),
        # on v5e and v6e only sixteen close a ring
        ("v5e:8x16", {"y": 16, "x": 8}, {"y": [(1, 16, 1, True)], "x": [(0, 8, 1, False)]}),
        # after the torus comes the network between slices
        ("v6e:4x4x2", {"slices": 2, "xy": 16}, {"slices": [(2, 2, 1, False)],
                                               "xy": [(0, 4, 1, False), (1, 4, 1, False)]}),
        # NVLink first, then the network
        ("h100:8x16", {"data": 16, "model": 8}, {"data": [(1, 16, 1, False)], "model": [(0, 8, 1, False)]}),
        ("h100:8x4", {"data": 32}, {"data": [(0, 8, 1, False), (1, 4, 1, False)]}),
        ("h100:8x4", {"data": 2, "model": 16}, {"data": [(1, 2, 1, False)],
                                               "model": [(0, 8, 1, False), (1, 2, 1, False)]}),
        # nothing said: domains are filled first, a torus has a ring for every axis, a CPU one memory for all
        ("h100", {"data": 4, "model": 8}, {"data": [(1, 4, 1, False)], "model": [(0, 8, 1, False)]}),
        ("v5p", {"data": 6, "model": 2}, {"data": [(0, 6, 1, True)], "model": [(1, 2, 1, True)]}),
        ("cpu", {"data": 4, "model": 2}, {"data": [(0, 4, 1, False)], "model": [(0, 2, 1, False)]}),
        # three does not fit into a dimension of four: no grid, so a line along the slowest that it spans
        ("v5p:2x2x2", {"pipe": 3, "data": 2}, {"pipe": [(2, 3, 1, False)], "data": [(0, 2, 1, False)]}),
    ],
)  # fmt: skip
def test_where_axes_lie(topology: str, axes: dict[str, int], expected: dict[str, Any]) -> None:
    assert spans(topology, **axes) == expected


@pytest.mark.parametrize(
    ("machine", "axes", "expected"),
    [
        # 72 does not divide these: the largest part of a domain that does
        *(("gb200", {"a": n}, {"a": [(0, inside), (1, n // inside)]})
          for n, inside in [(96, 48), (100, 50), (128, 64), (144, 72), (74, 37), (146, 2), (256, 64)]),
        ("gb300", {"a": 128}, {"a": [(0, 64), (1, 2)]}),
        ("gb200", {"a": 36}, {"a": [(0, 36)]}),
        *((kind, {"a": 128}, {"a": [(0, 8), (1, 16)]}) for kind in ("h100", "b200", "a100")),
        ("h100", {"a": 12}, {"a": [(0, 6), (1, 2)]}),
        # inner axes first, whole; each axis is a grid
        ("gb200", {"a": 32, "b": 6}, {"a": [(0, 8), (1, 4)], "b": [(0, 6)]}),
        ("gb200", {"a": 2, "b": 64}, {"a": [(1, 2)], "b": [(0, 64)]}),
        ("gb200", {"a": 16, "b": 8}, {"a": [(0, 8), (1, 2)], "b": [(0, 8)]}),
        ("tpu7x", {"a": 6, "b": 2}, {"a": [(1, 6)], "b": [(0, 2)]}),
        ("tpu7x", {"a": 6}, {"a": [(0, 2), (1, 3)]}),
        # three tiers: 8 GPUs of a domain, 9 domains of a rack
        ("racks", {"a": 64}, {"a": [(0, 8), (1, 8)]}),
        ("racks", {"a": 80}, {"a": [(0, 8), (1, 5), (2, 2)]}),
        ("racks", {"a": 2, "b": 72}, {"a": [(2, 2)], "b": [(0, 8), (1, 9)]}),
        ("racks", {"a": 12, "b": 4}, {"a": [(0, 2), (1, 6)], "b": [(0, 4)]}),
    ],
)  # fmt: skip
def test_a_machine_without_a_shape_gives_an_axis_its_fastest_links(machine, axes, expected):
    topology = racks().to_json() if machine == "racks" else machine
    found = spans(topology, **axes)
    assert {a: [(dim, count) for dim, count, *_ in s] for a, s in found.items()} == expected
    assert not outside_by_default(parse_topology(topology), tuple(axes.items()))


@pytest.mark.parametrize(
    ("machine", "axes", "outside"),
    [
        ("gb200", {"a": 73}, [(0, "a", 73, 73, 72)]),
        ("h100", {"a": 3, "b": 4}, [(0, "a", 3, 3, 2)]),
        ("h100", {"a": 3, "b": 8}, []),
        ("racks", {"a": 88}, [(1, "a", 88, 11, 9)]),
        ("v5p", {"a": 73}, []),
        ("cpu", {"a": 73}, []),
    ],
)
def test_an_axis_that_no_fast_link_has_room_for_is_told(machine, axes, outside):
    found = outside_by_default(parse_topology(racks().to_json() if machine == "racks" else machine), [*axes.items()])
    assert found == outside


def test_a_gather_over_two_domains_takes_what_their_shape_says():
    def seconds(topology: str) -> float:
        mesh = view(make_mesh(topology=topology, a=128))
        return send_price("all_gather", 2**30, mesh, ("a",)).seconds

    for bare, shaped in [("gb200", "64x2"), ("gb300", "64x2"), ("h100", "8x16"), ("b200", "8x16")]:
        assert seconds(bare) == seconds(f"{bare}:{shaped}")


def racks() -> Topology:
    """A machine of three tiers."""
    rack, spine = Fabric("switch", 1e11, 2e-6, tier=1, most=9), Fabric("switch", 5e10, 5e-6, tier=2)
    return replace(TOPOLOGIES["h100"], kind="racks", fabrics=(TOPOLOGIES["h100"].fabrics[0], rack, spine))


def test_spans_end_to_end_are_one() -> None:
    ring = Fabric("torus", 1.0, 1.0, ring=4)
    inner, outer, other = (
        AxisSpan(ring, 0, 2),
        AxisSpan(ring, 0, 4, stride=2, closed=True),
        AxisSpan(ring, 1, 4, closed=True),
    )
    assert merged((outer, other, inner)) == (AxisSpan(ring, 0, 8, closed=True), other)
    assert merged((inner, AxisSpan(ring, 0, 2, stride=4))) == (inner, AxisSpan(ring, 0, 2, stride=4))  # a gap between


def test_an_axis_of_one_device_lies_along_nothing() -> None:
    assert spans("v5p:4x4x4", one=1, x=4)["one"] == []


def test_devices_tell_where_they_are() -> None:
    """libtpu numbers the chips of a slice in blocks of 2x2; the axes are whole dimensions nevertheless."""
    machine = replace(TOPOLOGIES["v5p"], shape=(4, 2, 2))
    blocks = [(x, y) for corner in (0, 2) for y in range(2) for x in (corner, corner + 1)]
    places = [(x, y, z) for z in range(2) for x, y in blocks]
    found = dict(lay_along(machine, (("data", 2), ("model", 8)), lambda axis, i: places[8 * i if axis == 0 else i]))
    assert [(s.dim, s.count, s.closed) for s in found["model"]] == [(0, 4, True), (1, 2, False)]
    assert [(s.dim, s.count, s.closed) for s in found["data"]] == [(2, 2, False)]


def test_places_of_devices() -> None:
    chips = [SimpleNamespace(coords=(x, y, 0), slice_index=s) for s in (0, 1) for y in (0, 1) for x in (0, 1)]
    assert places_of(chips, on_torus=True, rank=2) == [(x, y, s) for s in (0, 1) for y in (0, 1) for x in (0, 1)]
    hosts = [SimpleNamespace(process_index=p) for p in (3, 3, 5, 5)]
    assert places_of(hosts, on_torus=False, rank=1) == [(0, 3), (1, 3), (0, 5), (1, 5)]
    gpus = [SimpleNamespace(process_index=p, slice_index=p // 2) for p in range(4)]  # a process for each GPU
    assert places_of(gpus, on_torus=False, rank=1) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert places_of(hosts, on_torus=True, rank=3) is None


def test_views_of_one_mesh_are_equal_and_can_be_pickled() -> None:
    one, other = (view(make_mesh(topology="h100:8x2", data=2, model=8)) for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))
    assert pickle.loads(pickle.dumps(one.topology)) == one.topology
    assert one != view(make_mesh(topology="h100:4x4", data=2, model=8))


def test_a_rank_knows_where_its_axes_lie_and_what_joins_it_to_the_next() -> None:
    mesh = make_mesh(topology="h100:8x4", pipe=4, data=2, model=4)
    for rank in meshes_along(mesh, "pipe"):
        seen = view(rank)
        assert [s.dim for s in seen.spans["model"]] == [s.dim for s in seen.spans["data"]] == [0]
        assert (seen.link.bandwidth, seen.link.latency) == (0.58 * 5e10, 2.7e-6)
    inside = view(meshes_along(make_mesh(topology="h100:8x4", data=4, pipe=2, model=4), "pipe")[0])
    assert inside.link.bandwidth == 0.58 * 4.5e11
    assert [(s.dim, s.count) for s in inside.spans["data"]] == [(1, 4)]


def test_a_part_of_a_mesh_with_memory_said_keeps_both() -> None:
    mesh = make_mesh(topology="v5p:4x4x2", hbm="16GB", pipe=2, data=16)
    assert view(meshes_along(mesh, "pipe")[0]).topology.hbm == 16 * 10**9
    assert spans("v5p:4x4x2", pipe=2, data=16)["data"] == [
        (s.dim, s.count, s.stride, s.closed) for s in view(meshes_along(mesh, "pipe")[0]).spans["data"]
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e:4x32", "topology='v5e:4x32': a pod of v5e has 16x16 chips. Several slices over the network are a further "
                     "dimension, as in v5e:4x4x2."),
        ("v5p:4x4x29", "topology='v5p:4x4x29': a pod of v5p has 16x20x28 chips. Several slices over the network are a "
                       "further dimension, as in v5p:4x4x4x2."),
        ("h100:64", "topology='h100:64': NVLink joins at most 8 h100; write the GPUs of a domain, then the number of "
                    "domains, as in h100:8x8."),
        ("h100:12x2", "topology='h100:12x2': NVLink joins at most 8 h100; write the GPUs of a domain, then the number "
                      "of domains, as in h100:6x2."),
        ("v5p:0x4", "topology='v5p:0x4': the shape after the colon is written 4x4x2."),
        ("v5p:4 x4", "topology='v5p:4 x4': the shape after the colon is written 4x4x2."),
    ],
)  # fmt: skip
def test_shapes_that_no_machine_has(text: str, message: str) -> None:
    with pytest.raises(MeshError, match=f"^{re.escape(message)}$"):
        parse_topology(text)


# --- files -----------------------------------------------------------------------------------------------------------

MEASURED = Topology(
    "here-measured", 2e10, 3e9, 4 * 10**9, 1e-5,
    (Fabric("switch", 1.5e9, 1e-6, rates=(("all_to_all", 9e8),)), Fabric("switch", 1e9, 2e-6, tier=1)),
    (("float32", 1e10),), (2, 4),
)  # fmt: skip


@pytest.mark.parametrize("machine", [MEASURED, *(replace(t, shape=(2, 4), pod=()) for t in TOPOLOGIES.values())])
def test_a_topology_is_what_its_file_says(machine: Topology, tmp_path: Path) -> None:
    assert topology_from_json(machine.to_json()) == machine
    file = tmp_path / "it.json"
    file.write_text(machine.to_json())
    mesh = make_mesh(topology=str(file), data=4, model=2)
    file.unlink()  # a mesh has read it
    seen = view(mesh)
    assert replace(seen.topology, layout=()) == machine
    assert [(s.fabric, s.count) for s in seen.spans["model"]] == [(machine.fabric(0), 2)]
    assert [(s.fabric, s.count) for s in seen.spans["data"]] == [(machine.fabric(1), 4)]


def test_a_calibration_is_for_devices_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(MEASURED.to_json())
    mesh = make_mesh(calibration=str(file), hbm="1GB", rows=4, columns=2)
    seen = view(mesh)
    assert (seen.topology.kind, seen.topology.hbm) == ("here-measured", 10**9)
    f = shardc.function(lambda x: x.sum(), mesh=mesh, in_placements={"x": {"rows": shardc.S(0)}})
    assert float(f(np.ones(8, np.float32))) == 8.0
    with pytest.raises(MeshError, match=r"needs 8 devices, topology small\.json has 4"):
        small = tmp_path / "small.json"
        small.write_text(replace(MEASURED, shape=(2, 2)).to_json())
        make_mesh(calibration=str(small), wide=8)
    with pytest.raises(MeshError, match="give only one of them"):
        make_mesh(calibration=str(file), topology="v5p", a=2)


def broken(**changes: Any) -> str:
    return json.dumps({k: v for k, v in (json.loads(MEASURED.to_json()) | changes).items() if v is not None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "The topology is not JSON: Expecting property name"),
        (broken(flops=None), "The topology: has no 'flops'"),
        (broken(flops=-1), "The topology: 'flops' must be a positive number, not -1."),
        (broken(hbm="4GB"), "The topology: 'hbm' must be a positive number, not '4GB'."),
        (broken(launch=True), "The topology: 'launch' must be a positive number, not True."),
        (broken(overlaps=1), 'The topology: "overlaps" must be an object from names to numbers, not 1.'),
        (broken(overlaps={"rings": 0.5}),
          "The topology: \"overlaps\" has the share 0.5 of 'rings'; it takes shares up to 1 of all_reduce, all_gather"),
        (broken(together=3), 'The topology: "together" must be an object from names to numbers, not 3.'),
        (broken(flop=1), "The topology: has the unknown name 'flop'. Did you mean \"flops\"?"),
        (broken(element=1e-9, cached=True), "The topology: 'element' is no longer read: write \"vector\" (elementwise "
         "operations per second) and \"special\" (those that take as long as one exp or sin) in its place; 'cached'"),
        (broken(kind="a b"), "The topology: \"kind\" must be a name of letters, digits, dots and dashes, not 'a b'."),
        (broken(shape=[2, "4"]), "The topology: \"shape\" must be a list of positive whole numbers, not [2, '4']."),
        (broken(fabrics=[]), 'The topology: "fabrics" must be a list of at least one fabric.'),
        (broken(fabrics=[{}]), "The topology, fabric 0: has no 'kind'; has no 'bandwidth'; has no 'latency'"),
        (broken(fabrics=[3]), "The topology, fabric 0: must be an object with kind, bandwidth, latency"),
        (broken(fabrics=[{"kind": "star", "bandwidth": 1, "latency": 0}]),
         "The topology, fabric 0: \"kind\" must be \"torus\" or \"switch\", not 'star'."),
        (broken(rates=[1]), 'The topology: "rates" must be an object from names to numbers, not [1].'),
    ],
)  # fmt: skip
def test_files_that_say_no_topology(text: str, message: str) -> None:
    with pytest.raises(MeshError, match=f"^{re.escape(message)}"):
        topology_from_json(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=re.escape(f"The topology {tmp_path}/none.json cannot be read: ")):
        make_mesh(topology=f"{tmp_path}/none.json", a=2)


def test_a_view_of_a_part_of_the_axes_keeps_what_they_lie_along() -> None:
    whole = view(make_mesh(topology="h100:8x4", data=4, one=1, model=8))
    part = MeshView((("model", 8), ("data", 4)), whole.topology)
    assert dict(part.spans) == {a: whole.spans[a] for a in part.spans}


def test_a_third_tier_is_data(monkeypatch: pytest.MonkeyPatch):
    """Racks of 9 NVLink domains of 8, and a spine between them: an all-reduce over all passes all three."""
    machine = racks()
    mesh = view(make_mesh(topology=machine.to_json(), far=2, near=72))
    assert [(s.dim, s.count) for s in mesh.spans["near"]] == [(0, 8), (1, 9)]
    assert [(s.dim, s.count) for s in mesh.spans["far"]] == [(2, 2)]
    sent = [send_price("all_reduce", 10**8, mesh, axes).seconds for axes in (("near",), ("far", "near"))]
    assert 0 < sent[0] < sent[1]
    monkeypatch.setattr("shardc.machine.topology.TOPOLOGIES", {**TOPOLOGIES, "racks": machine})
    with pytest.raises(MeshError, match=r"a switch joins at most 9 domains of racks; .* as in racks:8x9x2\."):
        make_mesh(topology="racks:8x18", a=144)


def test_every_known_machine_has_a_host():
    for machine in TOPOLOGIES.values():
        assert 0 < machine.host_bandwidth < machine.memory_bandwidth
        assert machine.host_memory > 0


def test_a_file_may_say_nothing_of_hosts():
    data = json.loads(TOPOLOGIES["h100"].to_json())
    assert topology_from_json(json.dumps(data)).host_bandwidth == 6.4e10
    del data["host_bandwidth"], data["host_memory"]
    plain = topology_from_json(json.dumps(data))
    assert plain.host_bandwidth == 0
    with pytest.raises(MeshError, match="host_memory"):
        topology_from_json(json.dumps({**data, "host_memory": "many"}))
    mesh = make_mesh(topology=json.dumps(data), data=2)
    step = shardc.function(lambda x: x + 1, mesh=mesh, offload="auto")
    with pytest.raises(shardc.errors.ArgumentError, match='give it "host_bandwidth"'):
        step.plan(np.ones(4))
