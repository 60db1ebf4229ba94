"""A counter of microbatches is computed in front of the loop; state that reads data is not."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import shardc
from shardc.compat import close
from shardc.ir.loop import Loop
from shardc.passes import Context
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.precompute_state import precompute_state
from shardc.sbp import rules

assert rules  # imported for what it registers


def scans(program):
    return [len(Loop.of(e).carries) for e in program.jaxpr.eqns if e.primitive.name == "scan"]


@pytest.mark.parametrize(
    ("after", "carries"), [(lambda n, x: n + 1, [1, 1]), (lambda n, x: n + x.sum(), [2]), (lambda n, x: n, [1])]
)
def test_before_and_after(after, carries):
    def step(n, x):
        fn = lambda n, x: ((x * n).sum(), after(n, x))  # noqa: E731
        return shardc.accumulate(fn, microbatches=4, in_axes={"x": 0}, reduce=("sum", "carry:n"))(n, x)

    args = jnp.float32(2), np.arange(8, dtype=np.float32)
    arguments = Arguments(step, ())
    program = trace(arguments, arguments.bind(args, {}), marks=True)
    found = precompute_state(program, Context())
    assert scans(found) == carries
    got, want = (jaxpr_as_fun(close(p.jaxpr))(*args, *p.captured) for p in (found, program))
    assert [float(x) for x in got] == [float(x) for x in want]
