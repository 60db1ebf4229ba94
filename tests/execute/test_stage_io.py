"""A logical array becomes the pieces of stages, and these the logical array."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from shardc.arrays.place import Place
from shardc.arrays.placed import StackedArray
from shardc.execute.stage_io import PiecedArrays
from shardc.pipeline.cut_search.split_scans import Piece
from shardc.sbp.placement import Placement, S

X = np.arange(24, dtype=np.float32).reshape(6, 4)


def meshes():
    return [Mesh(np.array(jax.devices()[i : i + 4]), ("data",)) for i in (0, 4)]


@pytest.mark.parametrize(("rows", "is_one"), [((3, 3), True), ((2, 4), False)])
def test_rows_of_two_stages(rows, is_one):
    whole = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("pipe", "data"))
    at = [Place(jax.typeof(X[:n]), m, Placement({"data": S(1)})) for n, m in zip(rows, meshes(), strict=True)]
    ways = PiecedArrays([Piece(0, (0, rows[0])), Piece(0, (rows[0], 6))], at, whole, "pipe")
    pieces = ways.split([X])
    np.testing.assert_array_equal(np.concatenate(pieces), X)
    (left,) = ways.assemble([a.enter(p) for a, p in zip(at, pieces, strict=True)])
    assert isinstance(left, StackedArray) != is_one, "as many rows on each rank: JAX can say its sharding"
    np.testing.assert_array_equal(np.asarray(left), X)
    again = ways.split([left])
    assert [p.shape for p in again] == [(n, 4) for n in rows]
