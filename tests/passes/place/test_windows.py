"""The computing beside which boxings can run, by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.passes.place.windows import OverlapWindows, edge_key, free_seconds
from shardc.plan.borders import problem_of


@pytest.mark.parametrize(
    ("edges", "free"),
    [
        ([(0, 3, 0.0)], [6.0]),  # nothing is sent yet: all steps
        ([(1, 3, 0.0), (0, 1, 0.0), (2, 2, 0.0)], [5.0, 1.0, 0.0]),
        ([(0, 3, 2.0)], [6.0]),  # its own steps are free for it
        ([(0, 3, 2.0), (0, 3, 0.0)], [6.0, 4.0]),
        ([(0, 2, 2.0), (0, 1, 2.0)], [2.0, 1.0]),  # what is needed first goes first, and is late all the same
        ([(0, 1, 9.0), (1, 3, 0.0)], [1.0, 5.0]),  # what is too long for its steps takes no later ones
    ],
)
def test_what_other_boxings_leave(edges: list[tuple[int, int, float]], free: list[float]) -> None:
    assert free_seconds(edges, [1.0, 2.0, 3.0]) == free


def test_the_windows_of_a_loop() -> None:
    """The weights of a round of two products can come beside those before their reader; its result beside none."""

    def f(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w[0]) @ w[1], None), x, w)[0]

    mesh = shardc.make_mesh(topology="v5p", data=8)
    ours = shardc.function(f, mesh=mesh, in_placements={"x": {"data": S(0)}})
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((64, 32), (4, 2, 32, 32))]
    plan = ours.plan(*shapes)
    problem = problem_of(plan.request, plan.ties)
    found = OverlapWindows.of(problem, lambda n: 1.0, lambda value, reader: 0.0)
    (loop,) = [item for item in problem.scope.nodes if hasattr(item, "scopes")]
    rows = loop.scopes[0].inputs[-1]
    readers = [r for r in rows.readers if r.node.kind != "hold"] or rows.readers[0].node.results[0].readers
    windows = {found[edge_key(rows if r in rows.readers else rows.readers[0].node.results[0], r)] for r in readers}
    assert windows == {0.0, 1.0}
    assert found[edge_key(problem.sources[0].results[0], problem.sources[0].results[0].readers[0])] == 0.0
