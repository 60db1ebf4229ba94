"""The one line that a notebook shows of a function, of what is compiled from it, of an audit and of a tuning."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardc
import shardc.equinox
import shardc.flax
from shardc import S

X = np.ones((8, 8), np.float32)
ROWS = {"x": {"data": S(0)}}


def step(w, x):
    return (x @ w).sum()


def staged(w, x):
    def loss(w, x):
        return (shardc.stage_boundary(jnp.tanh(x @ w)) @ w).sum()

    return shardc.accumulate(loss, microbatches=2)(w, x)


def of_module(model, x):
    return model(x).sum()


def at(fn):
    return f"{fn.__name__} (test_reprs.py:{fn.__code__.co_firstlineno})"


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def test_a_function(mesh):
    assert repr(shardc.function(step, mesh=mesh)) == f"Function({at(step)} on data=4, model=2 on cpu)"
    far = shardc.make_mesh(topology="v5p", data=64)
    assert repr(shardc.function(step, mesh=far)) == f"Function({at(step)} on data=64 on v5p)"
    piped = shardc.function(staged, mesh=shardc.make_mesh(pipe=2, data=4), pipeline=shardc.Pipeline())
    assert repr(piped) == f"Function({at(staged)} on pipe=2, data=4 on cpu, a pipeline of 2 ranks)"


def test_what_is_compiled(mesh):
    compiled = shardc.function(step, mesh=mesh, in_placements=ROWS).compile(X, X)
    assert repr(compiled) == repr(compiled.plan).replace("Plan(", "Compiled(", 1)
    assert repr(compiled).startswith("Compiled(step on data=4, model=2 on cpu: ")
    piped = shardc.function(staged, mesh=shardc.make_mesh(pipe=2, data=4), pipeline=shardc.Pipeline()).compile(X, X)
    assert repr(piped).startswith("CompiledPipeline(staged on pipe=2, data=4 on cpu: 2 stages, 1f1b, ")


def test_functions_of_modules(mesh):
    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    f = shardc.flax.function(of_module, mesh=mesh)
    assert repr(f) == f"Function({at(of_module)} on data=4, model=2 on cpu)"
    assert repr(f.compile(linear, X)).startswith("Compiled(of_module on data=4, model=2 on cpu: ")
    module = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    g = shardc.equinox.function(of_module, mesh=mesh)
    assert repr(g) == f"Function({at(of_module)} on data=4, model=2 on cpu)"
    assert repr(g.compile(module, X[0])).startswith("Compiled(of_module on data=4, model=2 on cpu: ")


def test_a_flow():
    @shardc.flow
    def passed(state):
        return state, None

    assert repr(passed) == f"Flow({at(passed.__wrapped__)})"


def test_an_audit(mesh):
    found = shardc.function(step, mesh=mesh, in_placements={"x": {"data": S(0)}, "w": {}}).compile(X, X).audit()
    assert str(found).startswith("audit: planned = found (1 collective, ")
    assert repr(found) == f"Audit({str(found).removeprefix('audit: ')})"


def test_a_tuning():
    found = shardc.tune(step, X, X, devices=8, topology="v5p", tries=3)
    count = len(found.candidates)
    assert repr(found) == f"Tuning(step on {found.where}: {count} candidates, the first {found.best!r})"
    assert repr(found.best).startswith("Candidate(") and repr(found.best).endswith("s)")
    small = shardc.tune(step, X, X, devices=8, topology="v5p", tries=1, hbm="4B")
    assert repr(small.candidates[0]).endswith((", does not fit in memory)", "per device.)"))
