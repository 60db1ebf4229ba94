"""The cost model: closed forms on rings, lines and switches; the cheapest path if axes differ in speed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.machine.mesh import MeshView, make_mesh, view
from shardc.machine.topology import TOPOLOGIES, Fabric, Topology
from shardc.sbp.boxing import boxing_table, find_boxing
from shardc.sbp.cost import (
    COLLECTIVES,
    FEMTO,
    LIGHT,
    BoxingStep,
    group_of,
    heavy_seconds,
    light_seconds,
    memory_seconds,
    send_price,
    step_price,
    wire_cost,
)
from shardc.sbp.placement import Placement

MB = 2**20
V5P_WAY, V5P_BOTH = 0.82 * 9e10, 0.82 * 1.8e11  # what is reached
NVLINK, NETWORK = 0.58 * 4.5e11, 0.58 * 5e10


def seen(topology: str, **axes: int) -> MeshView:
    return view(make_mesh(topology=topology, **axes))


def seconds(kind: str, piece: int, mesh: MeshView, *axes: str) -> float:
    """Seconds on the links, without latency."""
    return send_price(kind, piece, mesh, axes).wire / FEMTO  # type: ignore[arg-type]


def near(expected: float) -> object:
    return pytest.approx(expected, rel=1e-3)


# --- one fabric ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 8, 16])
def test_a_ring_sends_both_ways(n: int) -> None:
    ring = seen(f"v5p:{n}x4x4", y=16, x=n)
    assert seconds("all_gather", MB, ring, "x") == near((n - 1) * MB / V5P_BOTH)
    assert seconds("reduce_scatter", MB, ring, "x") == near((n - 1) * MB / V5P_BOTH)
    assert seconds("all_reduce", MB, ring, "x") == near(2 * (n - 1) / n * MB / V5P_BOTH)
    # of the whole value V = n·n·p the book has V / (4·W)
    assert seconds("all_to_all", MB, ring, "x") == near(n * n * MB / 4 / V5P_BOTH)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_a_line_has_one_way_to_each(n: int) -> None:
    line = seen(f"v5p:{n}x4x4", y=16, x=n)
    assert seconds("all_gather", MB, line, "x") == near((n - 1) * MB / V5P_WAY)
    assert seconds("all_reduce", MB, line, "x") == near(2 * (n - 1) / n * MB / V5P_WAY)
    assert seconds("all_to_all", MB, line, "x") == near(n * n // 4 * MB / V5P_WAY)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_switch_gives_each_device_its_port(n: int) -> None:
    domain = seen("h100:8x4", b=4 * 8 // n, a=n)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert seconds(kind, MB, domain, "a") == near((n - 1) * MB / NVLINK)
    assert seconds("all_reduce", MB, domain, "a") == near(2 * (n - 1) / n * MB / NVLINK)
    assert seconds("permute", MB, domain, "a") == near(MB / NVLINK)


def test_latency_is_the_start_and_the_hops_that_wait() -> None:
    ring, line, domain = seen("v5p:8x4x4", y=16, x=8), seen("v5e:8x8", y=8, x=8), seen("h100:8", a=8)
    assert group_of(ring, ("x",)).latency["all_gather"] == (1 + 4) * FEMTO // 10**6
    assert group_of(ring, ("x",)).latency["all_reduce"] == (1 + 2 * 4) * FEMTO // 10**6
    assert group_of(line, ("x",)).latency["all_gather"] == (1 + 7) * FEMTO // 10**6
    assert group_of(domain, ("a",)).latency["all_gather"] == round((6.6e-6 + 7 * 6e-7) * FEMTO)


# --- several at once -------------------------------------------------------------------------------------------------


def test_two_rings_are_twice_as_fast() -> None:
    torus = seen("v5p:4x4x4", z=4, y=4, x=4)
    for axes in (("x",), ("x", "y"), ("x", "y", "z")):
        n, k = 4 ** len(axes), len(axes)
        assert seconds("all_gather", MB, torus, *axes) == near((n - 1) * MB / (k * V5P_BOTH))
        assert seconds("all_reduce", MB, torus, *axes) == near(2 * (n - 1) / n * MB / (k * V5P_BOTH))
        # each dimension carries what leaves its ring's half: 4/4 of the n pieces of a device
        assert seconds("all_to_all", MB, torus, *axes) == near(n * MB / V5P_BOTH)


def test_two_axes_on_one_dimension_are_its_ring() -> None:
    split, whole = seen("v5p:8x4x4", c=16, b=4, a=2), seen("v5p:8x4x4", c=16, a=8)
    assert group_of(split, ("a", "b")) == group_of(whole, ("a",)) == group_of(split, ("b", "a"))


def test_devices_that_are_not_neighbours_share_the_links_between() -> None:
    mesh = seen("v5p:8x4x4", c=16, b=4, a=2)  # b: every second one, a ring that another group uses too
    assert seconds("all_gather", MB, mesh, "b") == near(3 * MB / (V5P_BOTH / 2))
    assert seconds("all_gather", MB, mesh, "a") == near(MB / V5P_WAY)  # two of eight close no ring


def test_a_gather_crosses_the_network_first_and_an_exchange_goes_straight() -> None:
    mesh = seen("h100:8x16", data=16, model=8)
    both = ("data", "model")
    network, nvlink = 15 * MB / NETWORK, 7 * 16 * MB / NVLINK
    assert seconds("all_gather", MB, mesh, *both) == near(network + nvlink)
    assert seconds("all_reduce", 128 * MB, mesh, *both) == near(2 * (network + nvlink))
    assert seconds("all_to_all", MB, mesh, *both) == near(7 * MB / NVLINK + 15 * 8 * MB / NETWORK)
    assert seconds("permute", MB, mesh, *both) == near(MB / NETWORK)
    assert seconds("all_gather", MB, mesh, "data") / seconds("all_gather", MB, mesh, "model") == near(15 / 7 * 9)


def test_slices_of_a_tpu_are_joined_by_their_hosts_network() -> None:
    mesh = seen("v5e:4x4x2", slices=2, y=4, x=4)
    assert seconds("all_gather", MB, mesh, "slices") == near(MB / (0.82 * 2.5e10 / 8))


@pytest.mark.parametrize("topology", ["cpu", "v5p:4x4x4", "v5p", "h100:8x8", "h100", "v5e:4x8x2"])
def test_bytes_do_not_depend_on_the_machine(topology: str) -> None:
    mesh = seen(topology, a=4, b=16)
    for kind in COLLECTIVES:
        assert send_price(kind, MB, mesh, ("a", "b")).bytes == send_price(kind, MB, seen("cpu", a=64), ("a",)).bytes


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("topology", ["cpu", "v5p:4x4x4", "h100:8x8"])
def test_more_bytes_and_more_devices_take_longer(kind: str, topology: str) -> None:
    mesh = seen(topology, a=2, b=4, c=8)
    times = [send_price(kind, size, mesh, ("c",)).seconds for size in (1, 2**10, 2**20, 2**40)]  # type: ignore[arg-type]
    assert times == sorted(times)
    if kind != "permute":
        groups = (("c",), ("b", "c"), ("a", "b", "c"))
        of_piece = [group_of(mesh, axes).wire[kind] for axes in groups]
        assert of_piece == sorted(of_piece)


def test_nothing_is_sent_by_one_device_or_of_nothing() -> None:
    mesh = seen("v5p", a=1, b=4)
    assert send_price("all_reduce", MB, mesh, ("a",)).seconds == 0
    assert send_price("all_reduce", 0, mesh, ("b",)).seconds == 0


def test_a_collective_is_no_faster_than_the_memory() -> None:
    slow = Topology("slow", 1e12, 1e9, 10**9, 0.0, (Fabric("switch", 1e12, 0.0),), shape=(4,))
    mesh = MeshView((("a", 4),), slow)
    assert wire_cost("all_gather", MB, 5 * MB, group_of(mesh, ("a",)), 10**6) == 5 * MB * 10**6


def test_a_local_step_counts_little_and_a_keep_of_a_maximum_nothing() -> None:
    mesh, whole, split = seen("v5p", a=4), Placement(), Placement.parse("{a: S(0)}")
    cut = step_price(BoxingStep("slice", ("a",), whole, split), (64, 64), 4, mesh)
    assert (cut.bytes, cut.wire) == (0, 0)
    assert cut.seconds == pytest.approx(LIGHT * 2 * 64 * 64 / 2.8e12, rel=0.05)
    assert step_price(BoxingStep("keep", ("a",), whole, Placement.parse("{a: P(max)}")), (64, 64), 4, mesh).seconds == 0
    assert step_price(BoxingStep("keep", ("a",), whole, Placement.parse("{a: P(sum)}")), (64, 64), 4, mesh).seconds > 0


# --- paths -----------------------------------------------------------------------------------------------------------


def test_the_slow_axis_is_sent_less() -> None:
    """A sum over both axes: scattered over NVLink first, so that an eighth of it crosses the network."""
    src, dst = Placement.parse("{data: P(sum), model: P(sum)}"), Placement()
    mesh = seen("h100:8x16", data=16, model=8)
    at_once = find_boxing((4096, 4096), 4, src, dst, mesh)
    assert [s.kind for s in at_once.steps] == ["all_reduce"]
    one_by_one = sum(
        step_price(BoxingStep("all_reduce", (axis,), a, b), (4096, 4096), 4, mesh).seconds
        for axis, a, b in (("data", src, Placement.parse("{model: P(sum)}")),
                           ("model", Placement.parse("{model: P(sum)}"), dst))
    )  # fmt: skip
    assert at_once.seconds < one_by_one / 3


def test_a_path_that_sends_more_bytes_on_fast_links_wins() -> None:
    """Both axes are split on one dimension, the fast one outside: to put the slow one outside, it is enough to permute
    over the network, but cheaper to gather over NVLink and cut again."""
    src, dst = Placement.parse("{model: S(0), data: S(0)}"), Placement.parse("{data: S(0)}")
    shape = (128, 4096)
    fast, equal = seen("h100:2x64", data=64, model=2), seen("cpu", data=64, model=2)
    paths = [find_boxing(shape, 4, src, dst, mesh) for mesh in (fast, equal)]
    assert paths[0].bytes >= paths[1].bytes
    assert paths[0].seconds <= sum(step_price(s, shape, 4, fast).seconds for s in paths[1].steps)


FABRICS = st.builds(
    Fabric,
    st.sampled_from(["torus", "switch"]),
    st.sampled_from([1e9, 6.25e9, 9e10, NVLINK, 1.234e8]),
    st.sampled_from([0.0, 1e-7, 3e-6]),
    st.integers(0, 1),
    ring=st.sampled_from([0, 2, 4]),
    rates=st.sampled_from([(), (("all_reduce", 5e9),), (("all_to_all", 2e8), ("permute", 7e9))]),
)


@st.composite
def meshes(draw: st.DrawFn) -> MeshView:
    """Two or three small axes, each along a fabric of its own."""
    from shardc.machine.topology import lay_out  # noqa: PLC0415

    counts = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=3))
    fabrics = sorted(draw(st.lists(FABRICS, min_size=len(counts), max_size=len(counts))), key=lambda f: f.tier)
    kinds: dict[int, Fabric] = {}
    fabrics = [kinds.setdefault(f.tier, f) for f in fabrics]  # what is of one tier is alike
    axes = tuple(zip("abc", counts, strict=False))
    machine = Topology("odd", 1e12, 1e11, 10**9, 1e-6, tuple(fabrics), shape=tuple(reversed(counts)))
    return MeshView(axes, Topology(**{**vars(machine), "layout": lay_out(machine, axes)}))


@settings(max_examples=40, deadline=None)
@given(meshes(), st.lists(st.integers(0, 40), min_size=0, max_size=2), st.sampled_from(["sum", "max"]), st.data())
def test_the_table_is_the_path_search_where_axes_differ(
    mesh: MeshView, shape: list[int], op: str, data: st.DataObject
) -> None:
    table = boxing_table(tuple(shape), 4, mesh, op)  # type: ignore[arg-type]
    names = list(table.index)
    for _ in range(25):
        src, dst = (data.draw(st.sampled_from(names)) for _ in range(2))
        found = find_boxing(tuple(shape), 4, src, dst, mesh).seconds
        assert table.seconds[table.index[src], table.index[dst]] == found, (src, dst)


def test_the_table_and_the_path_agree_about_what_would_take_for_ever() -> None:
    mesh = seen("h100:8x16", data=16, model=8)
    shape = (2**20, 2**19)  # 2 TB
    table = boxing_table(shape, 4, mesh)
    for src, dst in (("{data: S(0)}", "{}"), ("{model: P(sum)}", "{}"), ("{data: S(0), model: S(1)}", "{}")):
        p, q = Placement.parse(src), Placement.parse(dst)
        assert table.seconds[table.index[p], table.index[q]] == find_boxing(shape, 4, p, q, mesh).seconds
        assert 0 < table.seconds[table.index[p], table.index[q]] < 1000


# --- operations ------------------------------------------------------------------------------------------------------


def test_operations_are_bound_by_the_matrix_units_or_by_memory() -> None:
    mesh = seen("h100", a=8)  # of its figures 0.58 are reached
    assert heavy_seconds(0.58 * 9.89e14, 1.0, mesh, "bfloat16") == pytest.approx(1.0)
    assert heavy_seconds(1.0, 0.58 * 3.35e12, mesh, "bfloat16") == pytest.approx(1.0)
    assert heavy_seconds(1.0, 0.58 * 3.35e12, mesh, "bfloat16", passes=3.0) == pytest.approx(3.0)
    assert light_seconds(0.58 * 3.35e12, mesh) == pytest.approx(LIGHT)
    assert memory_seconds(0.58 * 3.35e12, mesh) == pytest.approx(1.0)


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float16", 1), ("float32", 2), ("float8_e4m3fn", 0.5)])
def test_matrix_units_are_faster_in_narrow_types(dtype: str, factor: float) -> None:
    assert heavy_seconds(0.58 * 9.89e14, 0, seen("h100", a=8), dtype) == pytest.approx(factor, rel=0.01)


def test_types_and_kinds_of_operation_have_shares_of_their_own() -> None:
    ironwood, gb300 = TOPOLOGIES["tpu7x"], TOPOLOGIES["gb300"]
    assert ironwood.flops_in("float8_e4m3fn") == pytest.approx(2 * 0.82 * ironwood.flops_in("bfloat16"))
    assert gb300.flops_in("bfloat16", "attention") == pytest.approx(0.72 * gb300.flops_in("bfloat16"))
    assert gb300.flops_in("float4_e2m1fn") == pytest.approx(3 * gb300.flops_in("float8_e4m3fn"))


def test_tpus_multiply_float32_in_bfloat16() -> None:
    assert heavy_seconds(0.82 * 4.59e14, 0, seen("v5p", a=8), "float32") == pytest.approx(1.0)


@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_every_machine_has_sensible_figures(kind: str) -> None:
    mesh = seen(kind, a=4, b=2)
    for axes in (("a",), ("b",), ("a", "b")):
        group = group_of(mesh, axes)
        assert group.n == math.prod(mesh.sizes[a] for a in axes)
        assert all(group.wire[k] > 0 and group.latency[k] > 0 for k in COLLECTIVES)
