"""Boxing: exact in a NumPy simulation; on equally fast axes no more bytes than an exhaustive search finds."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import replace

import numpy as np
import pytest

from shardc.machine.mesh import MeshView, make_mesh, view
from shardc.sbp.boxing import all_placements, boxing_table, find_boxing
from shardc.sbp.cost import step_price
from shardc.sbp.placement import B, P, Placement, ReduceOp
from tests.sbp.exhaustive import Exhaustive
from tests.sbp.simulate import place, read, simulate

ONE_AND_TWO_AXES = [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 4}]
RANK_3 = [pytest.param(shape, marks=pytest.mark.sampled(0)) for shape in [(8, 8, 8), (5, 3, 1)]]
SHAPES = [(16,), (5,), (1,), (8, 16), (5, 7), (13, 1), (0, 3), *RANK_3]
THREE_AXES = {"a": 2, "b": 2, "c": 2}
ITEMSIZE = 4


def view_of(axes: dict[str, int], topology: str = "cpu") -> MeshView:
    return view(make_mesh(topology=topology, **axes))


def at_once(mesh: MeshView) -> MeshView:
    """A machine without latencies and with infinitely fast memory: there, least time is fewest bytes."""
    machine = mesh.topology
    fabrics = tuple(replace(f, latency=0.0) for f in machine.fabrics)
    return replace(mesh, topology=replace(machine, launch=0.0, memory_bandwidth=1e30, fabrics=fabrics))


def placements(rank: int, axes: dict[str, int], ops: tuple[ReduceOp, ...] = ("sum",)) -> list[Placement]:
    return list(dict.fromkeys(p for op in ops for p in all_placements(rank, tuple(axes), op)))


def check(shape: tuple[int, ...], axes: dict[str, int], ops: tuple[ReduceOp, ...], limit: int | None = None) -> None:
    """Check that every boxing (or `limit` of them) is a path, moves the right values and the fewest bytes."""
    rng = np.random.default_rng(zlib.crc32(repr((shape, axes, ops)).encode()))
    mesh, fewest = at_once(view_of(axes)), Exhaustive(shape, ITEMSIZE, axes, ops)
    found = placements(len(shape), axes, ops)
    assert len(found) == len(fewest.index)
    pairs = list(itertools.product(found, found))
    for i in rng.permutation(len(pairs))[:limit]:
        src, dst = pairs[i]
        x = rng.integers(-50, 50, shape).astype(float)
        boxing = find_boxing(shape, ITEMSIZE, src, dst, mesh)
        where = f"{shape} on {axes}, {src} -> {dst}: {[(s.kind, s.axes, str(s.dst)) for s in boxing.steps]}"
        assert boxing.bytes == fewest.fewest(src, dst), where
        pieces, at = place(x, src, axes, rng), src
        for step in boxing.steps:
            assert step.src == at, where
            pieces, at = simulate(step, pieces, shape, axes), step.dst
        assert at == dst, where
        for copy in read(pieces, dst, shape, axes):
            np.testing.assert_array_equal(copy, x, err_msg=where)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("axes", ONE_AND_TWO_AXES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_boxings_are_exact_and_cheapest(shape: tuple[int, ...], axes: dict[str, int]) -> None:
    check(shape, axes, ("sum",))


@pytest.mark.sampled
@pytest.mark.parametrize("axes", ONE_AND_TWO_AXES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (8, 16), (5, 7)], ids=str)
@pytest.mark.parametrize("ops", [("max",), ("min",)], ids=str)
def test_max_and_min_boxings_are_exact_and_cheapest(
    shape: tuple[int, ...], axes: dict[str, int], ops: tuple[ReduceOp, ...]
) -> None:
    check(shape, axes, ops, limit=150)


@pytest.mark.parametrize("shape", [(16,), (5, 7)], ids=str)
@pytest.mark.parametrize("ops", [("max", "sum"), ("max", "min")], ids=str)
def test_boxings_from_one_partial_op_to_another_are_exact_and_cheapest(
    shape: tuple[int, ...], ops: tuple[ReduceOp, ...]
) -> None:
    check(shape, {"a": 4, "b": 2}, ops, limit=200)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(8, 16, 8), (5, 7, 1), (3, 2, 13)], ids=str)
def test_boxings_on_three_axes_are_exact_and_cheapest(shape: tuple[int, ...]) -> None:
    check(shape, THREE_AXES, ("sum",), limit=400)


T = 64 * 32 * ITEMSIZE


@pytest.mark.parametrize(
    ("src", "dst", "moved", "kinds"),
    [
        ("{a: S(0)}", "{}", T * 7 // 8, ["all_gather"]),
        ("{a: P(sum)}", "{}", 2 * T * 7 // 8, ["all_reduce"]),
        ("{a: P(max)}", "{}", 2 * T * 7 // 8, ["all_reduce"]),
        ("{a: P(sum)}", "{a: S(1)}", T * 7 // 8, ["reduce_scatter"]),
        ("{a: P(max)}", "{a: S(1)}", T * 7 // 8, ["all_to_all"]),
        ("{a: P(min)}", "{a: S(0)}", T * 7 // 8, ["all_to_all"]),
        ("{a: S(0)}", "{a: S(1)}", T * 7 // 64, ["all_to_all"]),
        ("{}", "{a: S(0)}", 0, ["slice"]),
        ("{}", "{a: P(sum)}", 0, ["keep"]),
        ("{}", "{a: P(max)}", 0, ["keep"]),
        ("{a: S(0)}", "{a: P(sum)}", 0, ["fill"]),
        ("{a: S(1)}", "{a: P(min)}", 0, ["fill"]),
        ("{a: P(sum)}", "{a: P(max)}", T * 7 // 8, ["reduce_scatter", "fill"]),
        ("{a: S(0)}", "{a: S(0)}", 0, []),
    ],
)
def test_closed_forms_on_one_axis(src: str, dst: str, moved: int, kinds: list[str]) -> None:
    boxing = find_boxing((64, 32), ITEMSIZE, Placement.parse(src), Placement.parse(dst), view_of({"a": 8}))
    assert (boxing.bytes, [s.kind for s in boxing.steps]) == (moved, kinds)


@pytest.mark.parametrize(
    ("axes", "src", "dst", "moved", "kinds"),
    [
        # other axes leave T/4 of the value
        ({"a": 4, "b": 2}, "{a: S(0), b: P(sum)}", "{a: S(0)}", T // 4, ["all_reduce"]),
        # the devices along a free axis share the work: 3/8 T to reduce half of the value, 7/8 T to gather all
        ({"a": 4, "b": 2}, "{a: P(sum)}", "{}", T * 10 // 8, ["slice", "reduce_scatter", "all_gather"]),
        # several axes by one collective
        ({"a": 4, "b": 2}, "{a: P(sum), b: P(sum)}", "{}", 2 * T * 7 // 8, ["all_reduce"]),
        ({"a": 4, "b": 2}, "{b: S(1), a: S(1)}", "{}", T * 7 // 8, ["all_gather"]),
        ({"a": 4, "b": 2}, "{a: S(0), b: S(0)}", "{a: S(1), b: S(1)}", T * 7 // 64, ["all_to_all"]),
        # another order, and another axis, are one permute of the local bytes
        ({"a": 4, "b": 2}, "{a: S(0), b: S(0)}", "{b: S(0), a: S(0)}", T // 8, ["permute"]),
        ({"a": 4, "b": 4}, "{a: S(0)}", "{b: S(0)}", T // 4, ["permute"]),
        ({"a": 2, "b": 2}, "{a: S(0), b: S(1)}", "{a: S(1), b: S(0)}", T // 4, ["permute"]),
        # a slice makes the new axis the innermost
        ({"a": 4, "b": 2}, "{a: S(0)}", "{a: S(0), b: S(0)}", 0, ["slice"]),
    ],
)
def test_closed_forms_on_two_axes(axes: dict[str, int], src: str, dst: str, moved: int, kinds: list[str]) -> None:
    boxing = find_boxing((64, 32), ITEMSIZE, Placement.parse(src), Placement.parse(dst), at_once(view_of(axes)))
    assert (boxing.bytes, [s.kind for s in boxing.steps]) == (moved, kinds)


def test_padding_counts() -> None:
    boxing = find_boxing((13,), ITEMSIZE, Placement.parse("{a: S(0)}"), Placement(), view_of({"a": 8}))
    assert boxing.bytes == 7 * 2 * ITEMSIZE  # seven pieces of ceil(13/8)


def test_seconds_are_latency_and_bytes_over_bandwidth() -> None:
    boxing = find_boxing((64, 32), ITEMSIZE, Placement({"a": P()}), Placement(), view_of({"a": 8}, "v5p"))
    assert boxing.seconds == pytest.approx((1 + 2 * 4) * 1e-6 + (2 * T * 7 / 8) / (0.82 * 1.8e11), rel=1e-4)
    src, dst = Placement.parse("{a: P(sum), b: S(0)}"), Placement.parse("{b: S(0)}")
    seconds = find_boxing((64, 32), ITEMSIZE, src, dst, view_of({"a": 4, "b": 2}, "h100")).seconds
    assert seconds == pytest.approx(6.6e-6 + 2 * 3 * 6e-7 + (2 * T / 2 * 3 / 4) / (0.6 * 4.5e11), rel=1e-4)


@pytest.mark.parametrize("split", ["{a: S(0), b: S(0)}", "{b: S(0), a: S(0)}"])
def test_steps_of_equal_bytes_are_as_few_as_they_can_be(split: str) -> None:
    src, dst = Placement.parse("{a: P(sum), b: P(sum)}"), Placement.parse(split)
    assert [s.kind for s in find_boxing((64, 32), 4, src, dst, view_of({"a": 4, "b": 2})).steps] == ["reduce_scatter"]


@pytest.mark.parametrize("shape", [(16, 8), (5, 3)], ids=str)
def test_axes_of_size_one_are_free(shape: tuple[int, ...]) -> None:
    wide, narrow = view_of({"one": 1, "a": 8}), view_of({"a": 8})
    free = find_boxing(shape, 4, Placement({"one": P()}), Placement({"one": P("max")}), wide)
    assert (free.steps, free.bytes, free.seconds) == ((), 0, 0)
    for src, dst in itertools.product(placements(2, {"one": 1, "a": 8}), repeat=2):
        plain = find_boxing(shape, 4, src.replace("one", B), dst.replace("one", B), narrow)
        assert find_boxing(shape, 4, src, dst, wide) == plain


@pytest.mark.sampled(8)
@pytest.mark.parametrize("axes", [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}], ids=str)
@pytest.mark.parametrize("shape", [(), (64,), (5, 7), (8, 1), (0, 4)], ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_boxing_table_is_find_boxing_of_all_pairs(shape: tuple[int, ...], axes: dict[str, int], op: ReduceOp) -> None:
    for topology in ("v5p", "cpu", "v5p:2x4x1", "h100:2x4", "v6e:2x2x2"):
        mesh = view_of(axes, topology)
        table = boxing_table(shape, ITEMSIZE, mesh, op)
        assert list(table.index.values()) == list(range(len(placements(len(shape), axes, (op,)))))
        pairs = list(itertools.product(table.index, repeat=2))
        for src, dst in pairs[:: max(1, len(pairs) // 400)]:
            seconds = find_boxing(shape, ITEMSIZE, src, dst, mesh).seconds
            assert table.seconds[table.index[src], table.index[dst]] == seconds, (src, dst)


ALL_SPLIT = "{a: S(0), b: S(0), c: S(0)}"


@pytest.mark.parametrize(
    ("kind", "src", "dst"),
    [("all_gather", ALL_SPLIT, "{}"), ("reduce_scatter", "{a: P(sum), b: P(sum), c: P(sum)}", ALL_SPLIT)],
)
@pytest.mark.parametrize("rows", [64, 2**20])
def test_what_xla_does_not_do_with_all_devices_at_once_takes_two_steps(
    kind: str, src: str, dst: str, rows: int
) -> None:
    """XLA:TPU would turn it into an all-reduce, which no plan lists."""
    axes = {"a": 4, "b": 4, "c": 4}
    for topology, alone in (("v5p:4x4x4", False), ("h100:8x8", True)):
        ends = Placement.parse(src), Placement.parse(dst)
        boxing = find_boxing((rows,), ITEMSIZE, *ends, view_of(axes, topology))
        assert alone == (len(boxing.steps) == 1)
        assert 1 <= boxing.bytes / (63 * rows // 64 * ITEMSIZE) < 1.1
        assert alone or not any(s.kind == kind and set(s.axes) == set(axes) for s in boxing.steps)
    one = [p.without(("a", "b")) for p in ends]
    boxing = find_boxing((rows,), ITEMSIZE, *one, view_of({"c": 64}, "v5p:4x4x4"))
    assert [s.kind for s in boxing.steps] == [kind]  # along one axis there is no other way


def test_boxing_table_knows_what_a_device_holds() -> None:
    table = boxing_table((5, 7), ITEMSIZE, view_of({"a": 4, "b": 2}))
    held = {str(p): int(table.local_bytes[i]) for p, i in table.index.items()}
    assert held["{}"] == held["{a: P(sum)}"] == 5 * 7 * ITEMSIZE
    assert held["{a: S(0)}"] == 2 * 7 * ITEMSIZE
    assert held["{a: S(0), b: S(0)}"] == 1 * 7 * ITEMSIZE
    assert held["{b: S(0), a: S(1)}"] == 3 * 2 * ITEMSIZE


def test_number_of_placements() -> None:
    assert [len(all_placements(2, axes)) for axes in ((), ("a",), ("a", "b"))] == [1, 4, 18]
    # 64 choices of sbps; a dimension that 2 axes split has 2 orders, one that 3 split has 6
    assert len(all_placements(2, ("a", "b", "c"))) == 64 + 2 * (3 * 3) + 2 * 5


def test_seconds_add_up_over_the_steps() -> None:
    mesh, src, dst = view_of({"a": 4, "b": 2}), Placement.parse("{a: P(sum)}"), Placement.parse("{b: S(0)}")
    boxing = find_boxing((64, 32), ITEMSIZE, src, dst, mesh)
    each = [step_price(s, (64, 32), ITEMSIZE, mesh) for s in boxing.steps]
    assert boxing.prices == tuple(each)
    assert boxing.seconds == pytest.approx(sum(p.seconds for p in each), rel=1e-12)
    assert len(boxing.steps) > 1
