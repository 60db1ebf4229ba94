"""Plans of ways: what crosses between two meshes, and in what shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import shardc
from shardc import B, P, S
from shardc.machine.mesh import view
from shardc.machine.topology import DeviceLink
from shardc.sbp.placement import Placement
from shardc.sbp.way import boxes, plan_way, sizes_of

FAST, SLOW = DeviceLink(1e13, 1e-9), DeviceLink(1e7, 1e-4)
MESHES = {
    "four": view(shardc.make_mesh(topology="h100", x=4)),
    "two": view(shardc.make_mesh(topology="h100", x=2)),
    "square": view(shardc.make_mesh(topology="h100", x=2, y=2)),
    "three": view(shardc.make_mesh(topology="h100", x=3)),
    "host": None,
}


def placements(mesh):
    if mesh is None:
        return [Placement()]
    one = [Placement({"x": s}) for s in (S(0), S(1), B, P())]
    two = [{"x": S(0), "y": S(1)}, {"y": S(0), "x": S(0)}, {"x": P(), "y": S(0)}, {"x": P(), "y": P()}]
    return one + [Placement(p) for p in two if "y" in mesh.sizes]


ENDS = [(name, p) for name, mesh in MESHES.items() for p in placements(mesh)]


def planned(given, taken, shape=(12, 8), link=SLOW, takers=None):
    (giver, p), (taker, q) = given, taken
    return plan_way(shape, 4, p, MESHES[giver], q, MESHES[taker], link, takers)


def count(plan, shape):
    """How often each device of the taker gets each element."""
    into = [np.zeros(shape, np.int64) for _ in boxes(shape, plan.arrives, sizes_of(plan.taker))]
    for parcel in plan.parcels:
        for target in parcel.targets:
            into[target][tuple(slice(a, b) for a, b in parcel.box)] += 1
    return into


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("shape", [(12, 8), (7, 5), (1, 3)])
def test_each_element_comes_once_from_a_device_that_has_it(shape, link):
    for given, taken in itertools.product(ENDS, ENDS):
        plan = planned(given, taken, shape, link)
        assert not plan.leaves.partial_axes and not plan.arrives.partial_axes
        needed = boxes(shape, plan.arrives, sizes_of(plan.taker))
        for got, box in zip(count(plan, shape), needed, strict=True):
            want = np.zeros(shape, np.int64)
            want[tuple(slice(a, b) for a, b in box)] = 1
            np.testing.assert_array_equal(got, want)
        held = boxes(shape, plan.leaves, sizes_of(plan.giver))
        for p in plan.parcels:
            assert all(a <= c and d <= b for (a, b), (c, d) in zip(held[p.source], p.box, strict=True))
        assert plan.border_bytes == sum(np.prod(p.shape) * len(p.targets) for p in plan.parcels) * 4


@pytest.mark.parametrize(("given", "taken"), list(itertools.product(ENDS[::2], ENDS[1::3])))
@pytest.mark.sampled(20)
def test_over_a_slow_border_the_value_crosses_once(given, taken):
    assert planned(given, taken).border_bytes == 12 * 8 * 4


def test_what_is_partial_is_scattered_before_and_what_is_everywhere_gathered_after():
    plan = planned(("four", Placement({"x": P()})), ("four", Placement()))
    assert [s.kind for s in plan.before.steps] == ["reduce_scatter"]
    assert [s.kind for s in plan.after.steps] == ["all_gather"]
    assert plan.device_bytes * 4 == plan.border_bytes == 12 * 8 * 4


def test_over_a_fast_border_each_device_gets_its_copy():
    plan = planned(("four", Placement({"x": S(0)})), ("four", Placement()), link=FAST)
    assert not plan.after.steps and plan.border_bytes == 4 * 12 * 8 * 4


def test_devices_that_hold_the_same_share_the_sending():
    plan = planned(("four", Placement()), ("two", Placement({"x": S(0)})))
    assert len({p.source for p in plan.parcels}) == 2
    even = planned(("four", Placement()), ("four", Placement({"x": S(1)})))
    assert sorted(p.source for p in even.parcels) == [0, 1, 2, 3]


def test_processes_get_one_copy_for_all_their_devices():
    plan = planned(("four", Placement({"x": S(0)})), ("four", Placement()), link=FAST, takers=(0, 0, 1, 1))
    assert plan.border_bytes == 2 * 12 * 8 * 4
    assert {p.targets for p in plan.parcels} == {(0, 1), (2, 3)}
    alone = planned(("four", Placement({"x": S(0)})), ("four", Placement()), takers=(1, 1, 1, 1))
    assert not alone.after.steps and alone.border_bytes == 12 * 8 * 4  # what one process gets is put on all of them


def test_like_meshes_copy_device_by_device():
    plan = planned(("four", Placement({"x": S(0)})), ("four", Placement({"x": S(0)})))
    assert [(p.source, p.targets) for p in plan.parcels] == [(i, (i,)) for i in range(4)]
    assert not plan.before.steps and not plan.after.steps


def test_an_empty_value_sends_nothing():
    plan = planned(("four", Placement({"x": S(0)})), ("two", Placement({"x": S(1)})), shape=(0, 8))
    assert plan.parcels == () and plan.border_bytes == 0 and plan.border_seconds == 0.0


@pytest.mark.parametrize(("given", "taken"), list(itertools.product(ENDS[::3], ENDS[::4])))
@pytest.mark.sampled(10)
def test_a_way_is_no_slower_than_copies_of_whole_values(given, taken):
    """The bound by hand: reduce everywhere, send every device its own piece."""
    plan = planned(given, taken)
    shape, itemsize = plan.shape, plan.itemsize
    into = max(np.prod([b - a for a, b in box]) for box in boxes(shape, plan.arrives, sizes_of(plan.taker)))
    assert plan.device_bytes >= into * itemsize
    assert plan.seconds <= plan.before.seconds + plan.after.seconds + SLOW.latency + 12 * 8 * 4 / SLOW.bandwidth + 1e-12
