"""The examples in docstrings are correct."""

import doctest

import pytest

from shardc.pipeline.schedule import network
from shardc.runtime import actor, executor


@pytest.mark.parametrize("module", [actor, executor, network], ids=lambda m: m.__name__)
def test_examples(module):
    assert doctest.testmod(module).attempted
    assert not doctest.testmod(module).failed
