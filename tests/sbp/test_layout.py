"""The physical array of a logical value: its shape and spec, and the way there and back."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardc.sbp.layout import (
    bits_of,
    is_plain,
    physical_shape,
    physical_spec,
    plain_placement,
    to_logical,
    to_physical,
)
from shardc.sbp.placement import Placement

SIZES = {"a": 2, "b": 4}
CASES = [
    # placement, logical shape, is plain, physical shape, physical spec
    ("{}", (3, 8), True, (3, 8), PartitionSpec()),
    ("{a: S(0)}", (4, 3), True, (4, 3), PartitionSpec("a")),
    ("{a: S(0)}", (3, 8), False, (4, 8), PartitionSpec("a")),
    ("{b: S(1), a: S(1)}", (1, 9), False, (1, 16), PartitionSpec(None, ("b", "a"))),
    ("{a: P(sum)}", (3,), False, (2, 3), PartitionSpec(("a",))),
    ("{a: P(sum), b: S(0)}", (6,), False, (2, 8), PartitionSpec(("a",), "b")),
    ("{a: P(max), b: P(max)}", (), False, (8,), PartitionSpec(("a", "b"))),
]


@pytest.mark.parametrize(("text", "shape", "plain", "physical", "spec"), CASES)
def test_shape_and_spec(text, shape, plain, physical, spec):
    placement = Placement.parse(text)
    assert is_plain(shape, placement, SIZES) is plain
    assert physical_shape(shape, placement, SIZES) == physical
    assert physical_spec(placement) == spec


@pytest.mark.parametrize(("text", "shape"), [(c[0], c[1]) for c in CASES])
def test_there_and_back(text, shape):
    placement = Placement.parse(text)
    x = -np.arange(1, 1 + np.prod(shape, dtype=np.int32), dtype=np.int32).reshape(shape)  # a maximum below zero
    physical = jax.jit(lambda x: to_physical(x, placement, SIZES))(x)
    assert physical.dtype == x.dtype and physical.shape == physical_shape(shape, placement, SIZES)
    np.testing.assert_array_equal(to_logical(physical, shape, placement, SIZES), x)


def test_padding_does_not_count():
    """9 elements over 4 devices are blocks of 3; over 2 devices each of these is 2 elements, and 1 and padding."""
    placement = Placement.parse("{b: S(0), a: S(0)}")
    x = np.arange(1, 10)
    physical = np.array(to_physical(jax.numpy.asarray(x), placement, SIZES))
    np.testing.assert_array_equal(physical, [1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9, 0, 0, 0, 0, 0])
    physical[physical == 0] = -1
    np.testing.assert_array_equal(to_logical(physical, (9,), placement, SIZES), x)


@pytest.mark.parametrize(
    ("shape", "text", "plain"),
    [
        ((4, 8), "{a: S(0)}", "{a: S(0)}"),
        ((13, 8), "{b: S(0)}", "{b: S(1)}"),
        ((13, 8), "{a: P(sum), b: S(0)}", "{a: S(1), b: S(1)}"),
        ((13, 4), "{b: S(0), a: P(sum)}", "{b: S(1)}"),
        ((13,), "{a: S(0)}", "{}"),
        ((), "{a: P(max)}", "{}"),
    ],
)
def test_plain_placement(shape, text, plain):
    found = plain_placement(shape, Placement.parse(text), SIZES)
    assert is_plain(shape, found, SIZES)
    assert set(found) == set(Placement.parse(plain)) and all(found[a] == Placement.parse(plain)[a] for a in found)


def test_bits():
    assert [bits_of(np.dtype(t)) for t in ("int8", "uint32", "float16", "float64")] == [8, 32, 16, 64]
    assert bits_of(np.dtype("bool")) == 8
