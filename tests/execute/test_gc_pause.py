"""The collector of cycles is paused while a plan is made, and as it was afterwards."""

import gc

import jax
import numpy as np
import pytest

import shardc
from shardc import B
from shardc.errors import PlacementError
from shardc.execute import gc_pause

X = jax.ShapeDtypeStruct((8,), np.float32)


@pytest.fixture
def mesh():
    return shardc.make_mesh(topology="cpu", a=2)


def test_it_is_paused_while_tracing_and_planning_and_runs_again(mesh):
    seen = []
    function = shardc.function(mesh=mesh)(lambda x: seen.append(gc.isenabled()) or x * 2)
    assert gc.isenabled()
    function.plan(X)
    assert set(seen) == {False}
    assert gc.isenabled()


def test_it_runs_again_after_an_error(mesh):
    with pytest.raises(PlacementError):
        shardc.function(mesh=mesh, in_placements={"x": {"b": B}})(lambda x: x).plan(X)
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off(mesh):
    gc.disable()
    try:
        with gc_pause.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
