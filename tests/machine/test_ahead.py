"""Meshes of compile-only devices: which machine a plugin is asked for, in which order its devices lie, and errors.

The plugins themselves are asked in tests/whole/test_ahead.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from shardc import compat
from shardc.errors import MeshError
from shardc.machine import ahead
from shardc.machine.mesh import make_mesh, view
from shardc.machine.topology import TOPOLOGIES, topology_of


@dataclass(frozen=True)
class Device:
    """As a plugin describes one."""

    id: int
    platform: str = "gpu"
    process_index: int = 0
    coords: tuple[int, ...] | None = None
    core_on_chip: int = 0
    slice_index: int | None = None
    device_kind: str = "TPU v5"

    @property
    def client(self) -> Any:
        return type("CompileOnlyPyClient", (), {})()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, Any]]]:
    """Both plugins are there; the machines that they are asked for. They describe 64 GPUs."""
    found: list[tuple[str, str, dict[str, Any]]] = []

    def devices(platform: str, name: str, **options: Any) -> list[Any]:
        found.append((platform, name, options))
        return [Device(i) for i in range(64)]

    monkeypatch.setattr(compat, "has_plugin", lambda platform: True)
    monkeypatch.setattr(compat, "compile_only_devices", devices)
    ahead._compile_only.cache_clear()
    return found


@pytest.mark.parametrize(
    ("topology", "axes", "partitions"),
    [
        ("h100:8", {"data": 8}, "1x1x8"),
        ("h100:8x2", {"data": 2, "model": 8}, "2x1x8"),
        ("h100", {"data": 4, "model": 8}, "4x1x8"),
        ("h200", {"data": 4, "model": 6}, "4x1x6"),
        ("gb200:64", {"data": 64}, "1x16x4"),
        ("a100:4x2x2", {"data": 16}, "4x1x4"),
    ],
)
def test_gpus_are_asked_for_by_domains_hosts_and_gpus_of_a_host(asked, topology, axes, partitions) -> None:
    mesh = ahead.with_devices(make_mesh(topology=topology, **axes))
    [(platform, name, options)] = asked
    assert (platform, name, options["topology"]) == ("cuda", "", partitions)
    assert "gpu_device_info {" in options["target_config"]
    assert [d.id for d in mesh.devices.flat] == list(range(mesh.size)) and ahead.is_absent(mesh)
    assert ahead.with_devices(make_mesh(topology=topology, **axes)) is mesh and len(asked) == 1


@pytest.mark.parametrize(
    ("topology", "axes", "name", "options"),
    [
        ("v5p:2x2x4", {"data": 16}, "v5p:2x2x4", {}),
        ("v5e:4x2", {"data": 8}, "v5e:4x2", {}),
        ("v5e:4x4x2", {"data": 2, "model": 16}, "v5e:4x4", {"num_slices": 2}),
        ("v5p:8", {"data": 8}, "v5p:8x1x1", {}),
        ("v4:2x2x2", {"data": 8}, "v4:2x2x2", {"chip_config_name": "megacore"}),
        ("tpu7x:2x2x2x1", {"data": 8}, "tpu7x:2x2x1", {}),
    ],
)
def test_tpus_are_asked_for_by_slices(asked, topology, axes, name, options) -> None:
    ahead.with_devices(make_mesh(topology=topology, **axes))
    assert asked == [("tpu", name, options)]


def test_chips_lie_in_a_mesh_as_the_layout_of_a_plan_has_them(monkeypatch) -> None:
    """libtpu numbers them host by host."""
    hosts = [(x, y, z) for z in range(2) for x in (0, 2) for y in (0, 2)]
    places = [(x + i, y + j, z) for x, y, z in hosts for j in range(2) for i in range(2)]
    chips = [Device(k, "tpu", k // 4, place) for k, place in enumerate(places)]
    monkeypatch.setattr(compat, "has_plugin", lambda platform: True)
    monkeypatch.setattr(compat, "compile_only_devices", lambda *asked, **options: chips)
    ahead._compile_only.cache_clear()
    planned = make_mesh(topology="v5p:4x4x2", data=4, model=8)
    mesh = ahead.with_devices(planned)
    assert [d.coords for d in mesh.devices[0]] == [(i % 4, i // 4, 0) for i in range(8)]
    assert view(mesh).topology.layout == view(planned).topology.layout


def test_a_mesh_that_is_not_absent_stays_as_it_is() -> None:
    mesh = make_mesh(data=2)
    assert ahead.with_devices(mesh) is mesh and not ahead.is_absent(mesh)
    assert not ahead.is_absent(make_mesh(topology="h100:8", data=8))


def test_without_the_plugin_an_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(compat, "has_plugin", lambda platform: False)
    ahead._compile_only.cache_clear()
    with pytest.raises(MeshError) as error:
        ahead.with_devices(make_mesh(topology="h100:8", data=8))
    assert str(error.value) == (
        "To compile for h100, JAX's plugin for CUDA has to be installed, the machine need not be there: pip install "
        "'shardc[cuda]'. To plan for it needs no plugin."
    )
    with pytest.raises(MeshError, match=re.escape("for TPUs has to be installed, the machine need not be there: pip")):
        ahead.with_devices(make_mesh(topology="v5e:4x2", data=8))


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("topology", "text"),
    [
        ("cpu:8", "make the mesh without topology=, as shardc.make_mesh(data=8), with fake CPU devices (XLA_FLAGS="),
        ("h800:8", "shardc has no description of h800 for XLA, and cannot compile for it; it has a100, a100-40, b200,"),
        ("v5p", 'lie along each dimension, as in shardc.make_mesh(topology="v5p:2x2x2", data=8).'),
        ("v6e", 'as in shardc.make_mesh(topology="v6e:2x2", data=8).'),
        ("tpu7x", 'as in shardc.make_mesh(topology="tpu7x:2x2x2x2", data=8).'),
    ],
)
def test_machines_that_nothing_can_be_compiled_for(topology, text) -> None:
    with pytest.raises(MeshError, match=re.escape(text)):
        ahead.with_devices(make_mesh(topology=topology, data=8))


@pytest.mark.parametrize("target", sorted(ahead._TARGETS.glob("*.txtpb")), ids=lambda path: path.stem)
def test_descriptions_of_gpus_agree_with_the_topologies(target) -> None:
    machine, text = TOPOLOGIES[target.stem], target.read_text()
    figures = {key: float(n) for key, n in re.findall(r"^  (\w+): ([\d.]+)$", text, re.MULTILINE)}
    assert topology_of(re.search(r'device_description_str: "(.*)"', text)[1]) == target.stem
    assert figures["memory_bandwidth"] == pytest.approx(machine.memory_bandwidth, rel=0.05)
    assert figures["device_memory_size"] == pytest.approx(machine.hbm, rel=0.08)
    assert text.startswith("# NVIDIA ") and "Sources:" in text
    products = 2 * 2 * figures["core_count"] * figures["fpus_per_core"] * figures["clock_rate_ghz"] * 1e9
    assert products < machine.flops  # the matrix units are faster than these


def test_every_gpu_but_one_has_a_description() -> None:
    kinds = {t.kind for t in TOPOLOGIES.values() if t.backend == "gpu"}
    assert kinds - {path.stem for path in ahead._TARGETS.glob("*.txtpb")} == {"h800"}
