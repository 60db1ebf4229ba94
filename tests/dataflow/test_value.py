"""Values stand for arrays: they are looked at and handed on. `tests/test_flows.py` has what they refuse."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardc.dataflow.round import Round
from shardc.dataflow.value import Held, RoundValue
from shardc.errors import TracingError


@pytest.fixture
def value():
    aval = jax.ShapeDtypeStruct((2, 3), np.dtype("int32"))
    return RoundValue(aval, Held(0), Round("train", "train (train.py:7)"), "state/w")


def test_a_value_has_a_shape_and_a_dtype(value):
    assert (value.shape, value.dtype, value.ndim, value.size) == ((2, 3), np.dtype("int32"), 2, 6)
    assert repr(value) == f"{value}" == "Value(int32[2,3], state/w)"


def test_a_value_is_a_leaf_and_a_key(value):
    assert jax.tree.leaves({"a": [value]})[0] is value
    assert {value: 1}[value] == 1


def test_a_refusal_names_round_use_and_value(value):
    with pytest.raises(TracingError, match=r"^train \(train.py:7\): an index from state/w, a value of the round"):
        range(5)[value]


def test_a_name_that_no_array_has_is_no_attribute(value):
    assert not hasattr(value, "sharding")
    with pytest.raises(AttributeError, match=r"Value\(int32\[2,3\], state/w\) has no attribute 'shap'"):
        _ = value.shap
