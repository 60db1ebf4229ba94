"""Placements: their algebra, text and errors, and the elements that each device holds."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
from collections.abc import Callable

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardc.errors import PlacementError
from shardc.machine.mesh import make_mesh
from shardc.sbp.placement import (
    AUTO,
    REPLICATED,
    SBP,
    B,
    P,
    Pin,
    Placement,
    S,
    as_sbp,
    block_sizes,
    is_even,
    local_extent,
    local_shape,
)
from tests.sbp.simulate import devices, ids

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


@st.composite
def placements(draw: st.DrawFn, low: int = -4) -> Placement:
    op = draw(st.sampled_from(["sum", "max", "min"]))
    sbp: st.SearchStrategy[SBP] = st.one_of(st.builds(S, st.integers(low, 4)), st.just(B), st.just(P(op)))
    axes = draw(st.lists(NAMES, unique=True, max_size=5))
    return Placement([(a, draw(sbp)) for a in axes])


# what may be written


def test_sbps_print_and_compare() -> None:
    assert [repr(s) for s in (S(0), S(-1), B, P(), P("max"))] == ["S(0)", "S(-1)", "B", "P(sum)", "P(max)"]
    assert repr(AUTO) == "AUTO"
    assert S(1) == S(1) != S(0)
    assert P() == P("sum") != P("min")
    assert len({S(0), S(0), B, P(), P("sum")}) == 3


def test_as_sbp() -> None:
    assert [as_sbp(x) for x in (S(2), B, P("min"), P, None)] == [S(2), B, P("min"), P("sum"), B]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: S("x"), "S('x'): a split needs the number of a dimension, as in S(0)."),
        (lambda: S(True), "S(True): a split needs the number of a dimension, as in S(0)."),
        (
            lambda: P("data"),
            "P('data'): a partial value is reduced by sum, max or min. Did you mean "
            "jax.sharding.PartitionSpec('data')?",
        ),
        (lambda: as_sbp("data"), "'data' is not an sbp; write S(dim), B or P(op)."),
        (lambda: Placement({"a": AUTO}), "AUTO is not an sbp; write S(dim), B or P(op)."),
        (lambda: Placement([("a", S(0)), ("a", B)]), "A placement names each axis once, got ['a', 'a']."),
        (
            lambda: Placement({"a": P(), "b": S(0), "c": P("max")}),
            "One placement has one partial op, got a: P(sum), c: P(max); a sum and a max over different axes do not "
            "commute.",
        ),
        (lambda: Placement.parse("a: S(0)"), "'a: S(0)' is not a placement; write {axis: S(0), other: P(sum)}."),
        (
            lambda: Placement.parse("{a: S(0), b: Q}"),
            "'b: Q' in '{a: S(0), b: Q}' is not an axis and its sbp; write axis: S(0), B or P(sum).",
        ),
        (
            lambda: Placement.parse("{a: P(mean)}"),
            "'a: P(mean)' in '{a: P(mean)}' is not an axis and its sbp; write axis: S(0), B or P(sum).",
        ),
        (
            lambda: Placement({"a": S(2)}).resolve(2),
            "a: S(2) does not fit a value of 2 dimensions: the value has dimensions 0 to 1.",
        ),
        (
            lambda: Placement({"a": S(-3)}).resolve(2),
            "a: S(-3) does not fit a value of 2 dimensions: the value has dimensions 0 to 1.",
        ),
        (
            lambda: Placement({"a": S(0)}).resolve(0),
            "a: S(0) does not fit a value of 0 dimensions: a scalar cannot be split.",
        ),
        (
            lambda: Placement({"a": S(1), "b": S(-1)}).resolve(2),
            "{b: S(-1), a: S(1)} names dimension 1 of 2 also as -1, so the order of its axes is not defined; "
            "use one number for it.",
        ),
        (
            lambda: Placement({"a": P(), "b": S(0)}).to_spec(),
            "{b: S(0), a: P(sum)} has partial axes, which a PartitionSpec cannot express; box them to B or S first, or "
            "keep the value as a shardc.PlacedArray.",
        ),
        (
            lambda: Placement.from_spec(PartitionSpec("a", PartitionSpec.UNCONSTRAINED)),
            "PartitionSpec('a', UNCONSTRAINED) leaves dimension 1 open; shardc needs axis names or None there.",
        ),
    ],
)
def test_errors_say_what_and_how(make: Callable[[], object], text: str) -> None:
    with pytest.raises(PlacementError, match=f"^{re.escape(text)}$"):
        make()


# text


@given(placements())
def test_text_parses_back(p: Placement) -> None:
    assert Placement.parse(str(p)) == p
    assert eval(repr(p), {"Placement": Placement}) == p
    assert str(Placement.parse(str(p))) == str(p)


def test_text() -> None:
    assert str(Placement({"model": P(), "data": S(0)})) == "{data: S(0), model: P(sum)}"
    assert repr(Placement({"data": S(0)})) == "Placement.parse('{data: S(0)}')"
    assert str(REPLICATED) == str(Placement({"a": B})) == "{}"
    assert Placement.parse(" {  a :S(-1),\n b: P, c: B, } ") == Placement({"a": S(-1), "b": P()})


# order, hash, pickle


@given(placements(), st.randoms(use_true_random=False))
def test_only_the_order_within_a_dimension_matters(p: Placement, rng: random.Random) -> None:
    groups = [[(a, S(d)) for a in axes] for d, axes in p.splits.items()] + [[(a, p[a])] for a in p.partial_axes]
    shuffled: list[tuple[str, SBP]] = [("idle", B)]
    while groups := [g for g in groups if g]:  # a random interleaving that keeps the order of each group
        shuffled.append(rng.choice(groups).pop(0))
    q = Placement(shuffled)
    assert (q, hash(q), str(q)) == (p, hash(p), str(p))


@given(placements(), placements())
def test_equal_if_and_only_if_equal_text(p: Placement, q: Placement) -> None:
    assert (p == q) == (str(p) == str(q))


def test_order_within_a_dimension_is_part_of_the_placement() -> None:
    ab, ba = Placement({"a": S(0), "b": S(0)}), Placement({"b": S(0), "a": S(0)})
    assert ab != ba
    assert (ab.axes_of(0), ba.axes_of(0), ab.axes_of(1)) == (("a", "b"), ("b", "a"), ())
    assert ab != {"a": S(0), "b": S(0)}


@given(placements())
def test_pickle_and_hash(p: Placement) -> None:
    copy = pickle.loads(pickle.dumps(p))
    assert (copy, hash(copy), copy.splits) == (p, hash(p), p.splits)


def test_is_a_mapping_in_which_other_axes_are_broadcast() -> None:
    p = Placement({"a": S(1), "b": P("max"), "c": B})
    assert dict(p) == {"a": S(1), "b": P("max")}
    assert (p["a"], p["b"], p["c"], p["nowhere"]) == (S(1), P("max"), B, B)
    assert (len(p), "a" in p, "c" in p) == (2, True, False)
    assert (p.partial_axes, p.partial_op, p.splits) == (("b",), "max", {1: ("a",)})
    assert (REPLICATED.partial_op, REPLICATED.partial_axes, REPLICATED.splits) == (None, (), {})


# changes


def test_replace_makes_a_split_the_innermost() -> None:
    p = Placement({"a": S(0), "b": S(0), "c": P()})
    assert p.replace("a", S(0)).axes_of(0) == ("b", "a")
    assert p.replace("c", S(0)).axes_of(0) == ("a", "b", "c")
    assert p.replace("a", B) == Placement({"b": S(0), "c": P()})
    assert p.replace("new", P()) == Placement({"a": S(0), "b": S(0), "c": P(), "new": P()})
    with pytest.raises(PlacementError, match="one partial op"):
        p.replace("a", P("max"))


@given(placements(), st.data())
def test_moved_is_the_placement_written_anew(p: Placement, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from([*p, "new", "other"]), unique=True))
    sbp: SBP = data.draw(st.sampled_from([B, S(0), S(1), S(7), P(p.partial_op or "max")]))
    anew = Placement([*((a, s) for a, s in p.items_ if a not in axes), *((a, sbp) for a in axes)])
    moved = p.moved(axes, sbp)
    assert (moved, hash(moved), moved.splits) == (anew, hash(anew), anew.splits)


def test_without() -> None:
    p = Placement({"a": S(0), "b": S(0), "c": P()})
    assert p.without(["a", "c", "nowhere"]) == Placement({"b": S(0)})
    assert p.without([]) == p


def test_resolve() -> None:
    p = Placement({"a": S(-1), "b": S(0), "c": P(), "d": S(-1)})
    assert p.resolve(3) == Placement({"b": S(0), "a": S(2), "d": S(2), "c": P()})
    assert p.resolve(3).resolve(3) == p.resolve(3)
    assert Placement({"c": P()}).resolve(0) == Placement({"c": P()})


# JAX's words


@given(placements(low=0))
def test_spec_round_trip(p: Placement) -> None:
    split = p.without(p.partial_axes)
    assert Placement.from_spec(split.to_spec()) == split


def test_spec() -> None:
    p = Placement({"b": S(2), "c": S(0), "a": S(2)})
    assert p.to_spec() == PartitionSpec("c", None, ("b", "a"))
    assert Placement.from_spec(PartitionSpec("c", None, ("b", "a"))) == p
    assert REPLICATED.to_spec() == PartitionSpec()
    assert Placement.from_spec(PartitionSpec(None, ())) == REPLICATED


def test_unreduced_axes_are_partial_sums() -> None:
    spec = PartitionSpec("a", unreduced={"c", "b"})
    assert Placement.from_spec(spec) == Placement({"a": S(0), "b": P(), "c": P()})


def test_sharding_round_trip_and_device_order() -> None:
    mesh = make_mesh(a=2, b=4)
    p = Placement({"b": S(0), "a": S(0)})
    sharding = p.to_sharding(mesh)
    assert sharding == NamedSharding(mesh, PartitionSpec(("b", "a")))
    assert Placement.from_sharding(sharding) == p
    # JAX places the pieces where local_extent says
    for device, index in sharding.devices_indices_map((16,)).items():
        a, b = divmod(device.id, 4)
        assert (index[0].start, index[0].stop - index[0].start) == local_extent(16, "ba", mesh.shape, {"a": a, "b": b})
    abstract = AbstractMesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
    assert Placement.from_sharding(p.to_sharding(abstract)) == p
    array = jax.device_put(jax.numpy.zeros(16), sharding)
    assert Placement.from_sharding(array.sharding) == p


def test_pins() -> None:
    p = Placement({"a": S(0)})
    assert Pin(p).allows(p)
    assert not Pin(p).allows(Placement({"a": S(0), "b": P()}))
    assert Pin(p, frozenset("a")).allows(Placement({"a": S(0), "b": P()}))
    assert not Pin(p, frozenset("ab")).allows(Placement({"a": S(0), "b": P()}))
    assert Pin(p, frozenset("b")).allows(REPLICATED)


# which elements a device holds

MESHES = [(1,), (8,), (2, 4), (4, 2), (3, 2), (2, 2, 2), (1, 5)]


@pytest.mark.parametrize("counts", MESHES, ids=str)
def test_pieces_tile_the_dimension(counts: tuple[int, ...]) -> None:
    """For every size the valid elements of all pieces, in order, are the dimension; each piece's are its prefix."""
    axes = "abc"[: len(counts)]
    sizes = dict(zip(axes, counts, strict=True))
    for size in range(14):
        (local,) = local_shape([size], Placement([(a, S(0)) for a in axes]), sizes)
        tiled: list[int] = []
        for device in devices(sizes):
            offset, valid = local_extent(size, axes, sizes, dict(zip(axes, device, strict=True)))
            assert 0 <= valid <= local
            tiled += range(offset, offset + valid)
            (by_definition,) = ids([size], Placement([(a, S(0)) for a in axes]), sizes, device)
            assert by_definition == [*range(offset, offset + valid), *[None] * (local - valid)]
        assert tiled == list(range(size))


@given(st.integers(0, 13), st.permutations("abc"), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.data())
def test_extent_of_any_order_of_axes(size: int, order: list[str], counts: list[int], data: st.DataObject) -> None:
    sizes = dict(zip("abc", counts, strict=True))
    axes = tuple(order[: data.draw(st.integers(0, 3))])
    p = Placement([(a, S(0)) for a in axes])
    tiled: list[int] = []
    for coords in itertools.product(*(range(sizes[a]) for a in axes)):
        at = {"a": 0, "b": 0, "c": 0} | dict(zip(axes, coords, strict=True))
        offset, valid = local_extent(size, axes, sizes, at)
        (held,) = ids([size], p, sizes, tuple(at.values()))
        assert [i for i in held if i is not None] == list(range(offset, offset + valid))
        tiled += range(offset, offset + valid)
    assert tiled == list(range(size))
    nested = block_sizes(size, [sizes[a] for a in axes])
    assert (nested[0], len(nested)) == (size, len(axes) + 1)
    assert all(inner == math.ceil(outer / sizes[a]) for outer, inner, a in zip(nested, nested[1:], axes, strict=False))


@given(placements(low=0), st.lists(st.integers(0, 13), min_size=5, max_size=5), st.data())
def test_local_shape_and_is_even(p: Placement, shape: list[int], data: st.DataObject) -> None:
    sizes = {a: data.draw(st.integers(1, 3)) for a in p}
    local = local_shape(shape, p, sizes)
    pieces = [ids(shape, p, sizes, device) for device in devices(sizes)]
    assert {tuple(map(len, piece)) for piece in pieces} == {local}
    assert is_even(shape, p, sizes) == all(None not in held for piece in pieces for held in piece)


def test_block_sizes() -> None:
    assert block_sizes(13, (2, 4)) == (13, 7, 2)
    assert block_sizes(13, (4, 2)) == (13, 4, 2)
    assert block_sizes(1, (8,)) == (1, 1)
    assert block_sizes(0, (8, 2)) == (0, 0, 0)
    assert block_sizes(7, ()) == (7,)
    assert local_extent(13, "ab", {"a": 2, "b": 4}, {"a": 1, "b": 2}) == (11, 2)
    assert local_shape((13, 5), Placement({"b": S(1), "a": S(0)}), {"a": 2, "b": 4}) == (7, 2)
