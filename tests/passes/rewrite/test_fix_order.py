"""Operations that round become `in_order`; others stay. What they compute: `tests/whole/test_deterministic.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc.ir.walk import all_eqns

CASES: dict[str, tuple[Any, dict[str, int]]] = {
    "a sum": (lambda x: x.sum(0), {"in_order": 1}),
    "a maximum of absolute values": (lambda x: jnp.abs(x).max(0), {"abs": 1, "reduce_max": 1}),
    "a product in a loop": (lambda x: lax.map(lambda row: row @ x, x), {"scan": 1, "in_order": 1}),
    "integers": (lambda x: (x > 0).astype(np.int32).sum(), {"gt": 1, "convert_element_type": 1, "reduce_sum": 1}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_operations_that_round_are_in_order(name: str) -> None:
    fn, want = CASES[name]
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    plan = shardc.function(fn, mesh=shardc.make_mesh(data=4), deterministic=True).plan(x)
    assert Counter(e.primitive.name for e in all_eqns(plan.program.jaxpr)) == Counter(want)
