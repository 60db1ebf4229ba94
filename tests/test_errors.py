"""Tools that build error texts. `tests/whole/test_errors.py` pins the texts."""

from __future__ import annotations

import pytest

from shardc import errors
from shardc.errors import ShardcError, all_offenders, did_you_mean


def test_did_you_mean():
    assert did_you_mean("modle", ["data", "model"]) == ' Did you mean "model"?'
    assert did_you_mean("xyz", ["data", "model"]) == ""
    assert did_you_mean("model", ["model"]) == ""  # the same word is no help


def test_all_offenders_on_lines_of_their_own():
    assert all_offenders("Two are wrong:", ["a: 1\nb: 2", "c: 3"]) == "Two are wrong:\n  a: 1\n  b: 2\n  c: 3"


@pytest.mark.parametrize("name", [n for n in vars(errors) if n.endswith("Error")])
def test_one_tree(name):
    assert issubclass(getattr(errors, name), ShardcError)
