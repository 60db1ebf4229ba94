"""Warnings about plans that are about to run, by their whole text."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.report.plan_warnings import warnings_of

LARGE = np.ones((1024, 1024), np.float32)


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=8)


def said(fn, *args, mesh, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardc.function(fn, mesh=mesh, in_placements={}, **options).compile(*args)
    assert all(w.category is shardc.ShardcWarning for w in caught)
    return [str(w.message) for w in caught]


def line(fn):
    return f"{fn.__name__} (test_plan_warnings.py:{fn.__code__.co_firstlineno})"


def updated(w, x):
    return jax.tree.map(lambda a: a - x.sum(), w), x.sum()


def updated_alone(w, x):
    return updated(w, x)[0]


def gradient(w, x):
    return jax.value_and_grad(lambda w: (w * x.sum()).sum())(w)


def gradients(w, x, y):
    return jax.grad(lambda w, x: (w * x * y).sum(), argnums=(0, 1))(w, x)


SMALL = np.ones(8, np.float32)
WARNED = [
    (updated, {"w": LARGE, "b": SMALL}),
    (updated, {"w": LARGE}),
    (updated, LARGE),
    (updated, [LARGE]),
    (updated_alone, {"w": LARGE}),
]


@pytest.mark.parametrize(("fn", "w"), WARNED, ids=["two leaves", "one leaf", "an array", "a list", "no other result"])
def test_state_that_is_not_donated(mesh, fn, w):
    """Whether it has one leaf or several."""
    (text,) = said(fn, w, SMALL, mesh=mesh)
    assert text == (
        f"{line(fn)}: w is returned as results but not donated: during a call each device holds its 4.0 MiB twice. "
        "With donate_argnames='w' the results reuse the buffers."
    )
    assert said(fn, w, SMALL, mesh=mesh, donate_argnames="w") == []


@pytest.mark.parametrize(
    ("fn", "args"),
    [(updated, (SMALL, SMALL)), (updated_alone, (LARGE, SMALL)), (gradient, (LARGE, SMALL)), (gradients, (LARGE,) * 3)],
)
def test_what_may_be_no_state(mesh, fn, args):
    """A result like the only argument, or gradients of arrays."""
    assert said(fn, *args, mesh=mesh) == []


def staged(w, x):
    return (shardc.stage_boundary(jnp.tanh(x @ w)) @ w).sum()


def accumulated(w, x):
    return shardc.accumulate(lambda w, x: jnp.tanh(x @ w).sum(), microbatches=2)(w, x)


ARGS = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)


def test_a_boundary_without_a_pipeline():
    """Only on a mesh with the axis of pipelines."""
    warned = [
        f"{line(staged)}: the mesh has an axis 'pipe' and the function a stage boundary, at test_plan_warnings.py:"
        f"{staged.__code__.co_firstlineno + 1} (staged), but it is no pipeline: all devices run all stages together. "
        "With pipeline=shardc.Pipeline() the stages run along 'pipe', one after the other; to do without, name the "
        "axis otherwise."
    ]
    mesh = shardc.make_mesh(pipe=2, data=4)
    assert said(staged, *ARGS, mesh=mesh) == warned
    assert said(accumulated, *ARGS, mesh=mesh) == []
    for axes in ({"data": 8}, {"stage": 2, "data": 4}, {"pipe": 1, "data": 8}):
        assert said(staged, *ARGS, mesh=shardc.make_mesh(**axes)) == []


def test_a_boundary_in_a_pipeline():
    def step(w, x):
        return shardc.accumulate(staged, microbatches=2)(w, x)

    assert said(step, *ARGS, mesh=shardc.make_mesh(pipe=2, data=4), pipeline=shardc.Pipeline()) == []


def test_a_boundary_in_a_loop():
    def looped(w, x):
        return jax.lax.scan(lambda x, _: (shardc.stage_boundary(jnp.tanh(x @ w)), None), x, None, 3)[0]

    assert len(said(looped, *ARGS, mesh=shardc.make_mesh(pipe=2, data=4))) == 1


def test_an_axis_on_slow_links_though_faster_ones_have_room():
    def notes(topology, n):
        mesh = shardc.make_mesh(topology=topology, fsdp=n)
        fn = shardc.function(lambda w: w * 2, mesh=mesh, in_placements={"w": {"fsdp": shardc.S(0)}}, out_placements={})
        plan = fn.plan(LARGE)
        return [str(s) for s in plan.explain().split("\n\n") if s.startswith("Notes")], warnings_of(plan, "f")

    text = (
        "No part of axis 'fsdp' of 73 devices lies within an NVLink domain of gb200, which has room for 72: no number "
        "from 2 to 72 divides 73. Collectives over it take slower links. fsdp=72 has such a divisor."
    )
    assert notes("gb200", 73) == ([f"Notes\n  {text}"], [f"f: {text}"])
    assert notes("gb200", 128) == notes("gb200:64x2", 73) == ([], [])
