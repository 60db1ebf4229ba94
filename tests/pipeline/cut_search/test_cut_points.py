"""The points at which a folded body may be cut, and the bytes that cross them."""

import numpy as np

from tests.pipeline.cut_search.folded import ROWS, STEPS, WIDTHS, measured, traced


def test_points_lie_where_little_crosses():
    body, points, _ = measured(traced(STEPS["value_and_grad"]))
    assert (np.diff(points.ahead) > 0).all()
    rows = ROWS // 2
    skip, item = rows * 8, 4
    for width in WIDTHS[1:4]:
        at = points.activation == (rows * width + skip) * item
        assert at.any()
        assert points.gradient[at].min() <= (rows * width + skip) * item
    table = body.loop.body.invars[[v.aval.shape for v in body.loop.body.invars].index((10, 8))]
    head = next(t for t, e in enumerate(body.eqns) if e.outvars[0].aval.shape == (rows, 10))
    tied = (points.ahead > body.reads[table][0]) & (points.ahead <= head)
    assert tied.any() and (points.once[tied] >= np.prod(table.aval.shape) * item).all()
