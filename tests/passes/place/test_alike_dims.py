import itertools
import random

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import S
from shardc.machine.mesh import view
from shardc.passes.place import alike_dims
from shardc.plan.borders import problem_of
from shardc.sbp import boxing
from shardc.sbp.boxing import find_boxing
from shardc.sbp.placement import B, P, Placement

AXES = {"a": 2, "b": 2, "c": 2}
PIN = {"a": S(0), "b": S(1), "c": S(2)}


def gate(dim):
    """A gate on one qubit of a state, as simulators of circuits write it."""
    return lambda state, u: jnp.moveaxis(jnp.tensordot(u, state, ((1,), (dim,))), 0, dim)


def both(state, u):
    return gate(0)(gate(7)(state, u), u)


def of_unlike(state, u):
    return gate(1)(state, u)[..., 0] * jnp.arange(2.0)


PROGRAMS = {"last": (gate(8), PIN), "first": (gate(0), PIN), "both": (both, {}), "unlike": (of_unlike, PIN)}


def planned(f, pin, rank=9):
    mesh = shardc.make_mesh(topology="v5p:2x2x2", **AXES)
    args = jax.ShapeDtypeStruct((2,) * rank, "float32"), jax.ShapeDtypeStruct((2, 2), "float32")
    return shardc.function(f, mesh=mesh, in_placements=(pin, {}), out_placements=pin).plan(*args)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_the_plan_is_as_good_as_one_with_all_dimensions(monkeypatch, name):
    few = planned(*PROGRAMS[name])
    monkeypatch.setattr(alike_dims, "MANY", 10**9)
    every = planned(*PROGRAMS[name])
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert few.bytes_per_device == every.bytes_per_device
    assert few.gap == pytest.approx(every.gap, abs=1e-9)


def test_sixteen_dimensions_have_few_placements():
    found = planned(gate(15), PIN, 16)
    value = problem_of(found.request, found.ties).sources[0].results[0]
    assert len(value.unsplit) == 16 - 3 - 3 - 1  # those pinned, one for each axis, the one that is summed over


@pytest.mark.parametrize("shape", [(2,) * 9, (4, 6, 4, 6, 4, 6, 4, 6, 5)])
def test_boxing_that_leaves_dimensions_out_costs_the_same(monkeypatch, shape):
    mesh = view(shardc.make_mesh(topology="v5p:2x2x2", **AXES))
    draw = random.Random(0)
    sbps = [B, P("sum"), *map(S, range(len(shape)))]
    ends = [Placement({a: draw.choice(sbps) for a in AXES}) for _ in range(12)]
    few = [find_boxing(shape, 4, *pair, mesh) for pair in itertools.pairwise(ends)]
    monkeypatch.setattr(boxing, "MANY", 10**9)
    every = [find_boxing(shape, 4, *pair, mesh) for pair in itertools.pairwise(ends)]
    assert [(b.seconds, b.bytes) for b in few] == [(b.seconds, b.bytes) for b in every]
    for found, (src, dst) in zip(few, itertools.pairwise(ends), strict=True):
        assert (found.steps[0].src, found.steps[-1].dst) == (src, dst)
