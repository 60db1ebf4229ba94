"""How equations use the rows of stacked values."""

import jax
import numpy as np
import pytest
from jax import lax

from shardc.pipeline.cut_search.split_rows import row_use

pytestmark = pytest.mark.usefixtures("compiled_fast")

LAYERS, WIDTH = 5, 4


@pytest.mark.parametrize(
    ("fn", "stacked", "op"),
    [
        (lambda x, y: x + y, (True, True), None),
        (lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,)))), (True, True), None),
        (lambda x, y: lax.dot_general(x, y[0, 0], (((2,), (0,)), ((), ()))), (True, False), None),
        (lambda x, y: lax.reduce_sum_p.bind(x, axes=(1, 2), out_sharding=None), (True,), None),
        (lambda x, y: lax.reduce_sum_p.bind(x, axes=(0, 2), out_sharding=None), (True,), "sum"),
        (lambda x, y: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), (True,), "max"),
        (lambda x, y: lax.broadcast_in_dim(x[:, 0, 0], (LAYERS, 2, 3), (0,)), (True,), None),
        (lambda x, y: lax.reshape(x, (LAYERS, 16)), (True,), None),
        (lambda x, y: lax.reshape(x, (LAYERS * 4, 4)), None, None),
        (lambda x, y: lax.transpose(x, (0, 2, 1)), (True,), None),
        (lambda x, y: lax.transpose(x, (1, 0, 2)), None, None),
        (lambda x, y: lax.rev(x, (0,)), None, None),
        (lambda x, y: lax.rev(x, (1,)), (True,), None),
        (lambda x, y: lax.cumsum(x, 0), None, None),
        (lambda x, y: lax.sort(x, dimension=0), None, None),
    ],
)
def test_what_an_equation_does_with_rows(fn, stacked, op):
    x = np.ones((LAYERS, WIDTH, WIDTH))
    eqn = jax.make_jaxpr(fn)(x, x).jaxpr.eqns[-1]
    use = row_use(eqn)
    if stacked is None:
        assert use is None or not use.stacked[0]
    else:
        assert use is not None
        assert (use.stacked, use.op) == (stacked, op)
