"""Placements on a mesh with sub-axes, and on the user's mesh."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from shardc.machine.mesh import MeshView
from shardc.machine.topology import TOPOLOGIES, cut_spans, lay_out, merged, parse_topology
from shardc.sbp.cost import group_of
from shardc.sbp.placement import Pin, Placement, local_extent
from shardc.sbp.sub_axes import in_sub_axes, in_whole_axes, is_whole, keeps_pieces, pin_in_sub_axes

WHOLE = MeshView((("a", 8), ("b", 2)), TOPOLOGIES["cpu"])
CUT = WHOLE.cut({"a": (4, 2)})
parse = Placement.parse


def test_a_cut_mesh_has_names_for_the_parts_and_for_the_whole():
    assert CUT.axes == (("a[0]", 4), ("a[1]", 2), ("b", 2))
    assert CUT.whole.axes == CUT.whole_axes == WHOLE.axes
    assert CUT.joined(("a[0]", "b", "a[1]")) == ("a", "b")
    assert CUT.joined(("a[0]",)) == ("a[0]",)
    assert CUT.whole_names(("a[1]", "b", "a[0]")) == ("a", "b")
    assert str(CUT) == str(WHOLE)


@pytest.mark.parametrize(
    "text", ["{}", "{a: S(0)}", "{b: S(0), a: S(0)}", "{a: S(0), b: S(0)}", "{a: P(sum), b: P(sum)}"]
)
def test_placements_go_there_and_back(text):
    p = parse(text)
    assert in_whole_axes(in_sub_axes(p, CUT), CUT) == p
    assert in_sub_axes(p, WHOLE) is p


def test_what_is_no_whole_axis_keeps_its_parts():
    for text in ("{a[0]: S(0), a[1]: S(1)}", "{a[1]: S(0), a[0]: S(0)}", "{a[0]: S(0), b: S(0), a[1]: S(0)}"):
        assert in_whole_axes(parse(text), CUT) == parse(text)
        assert not is_whole(parse(text), (32, 32), CUT)


def test_pins_name_all_parts():
    pin = pin_in_sub_axes(Pin(parse("{a: S(1)}"), frozenset("a")), CUT)
    assert pin == Pin(parse("{a[0]: S(1), a[1]: S(1)}"), frozenset(("a[0]", "a[1]")))


@pytest.mark.parametrize("size", list(range(1, 33)))
@pytest.mark.parametrize("text", ["{a: S(0)}", "{b: S(0), a: S(0)}", "{a: S(0), b: S(0)}"])
def test_pieces_are_kept_where_it_says_so(size, text):
    p = parse(text)
    if not keeps_pieces(p, (size,), CUT):
        return
    parts = in_sub_axes(p, CUT)
    for a, i, b in itertools.product(range(4), range(2), range(2)):
        whole = local_extent(size, p.axes_of(0), WHOLE.sizes, {"a": 2 * a + i, "b": b})
        assert whole == local_extent(size, parts.axes_of(0), CUT.sizes, {"a[0]": a, "a[1]": i, "b": b})


@pytest.mark.parametrize("topology", ["v5p:8x2x1", "v5p:2x4x2", "h100:8x2", "h100:4x4"])
@pytest.mark.parametrize("counts", [(4, 2), (2, 4), (2, 2, 2)])
def test_all_parts_together_cost_what_the_axis_costs(topology, counts):
    machine = parse_topology(topology)
    axes = (("b", 2), ("a", 8))
    machine = MeshView(axes, machine).topology
    view = MeshView(axes, replace(machine, layout=lay_out(machine, axes)))
    cut = view.cut({"a": counts})
    names = dict(cut.cuts)["a"]
    assert group_of(cut, names) == group_of(view, ("a",))
    spans = cut_spans(view.spans["a"], counts)
    sizes = [[s.count for s in part] for part in spans]
    assert [math.prod(each) for each in sizes] == list(counts)
    if machine.backend == "tpu":
        assert merged(s for part in spans for s in part) == merged(view.spans["a"])
