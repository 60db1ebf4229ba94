"""The planner against enumeration: on one axis the cost is the minimum over all assignments of signatures."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from examples import gpt2
from examples.plans.gpt2 import data_tensor
from shardc import S
from shardc.machine.mesh import make_mesh, view
from shardc.passes.place.place import Placer
from shardc.passes.place.problem import Requirement, build_problem, first_of_alike
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp.placement import Pin, Placement
from shardc.solver import AssignmentCost

FUNCTIONS = {
    "two matmuls": (lambda x, w, v: (x @ w) @ v, [(16, 4), (4, 8), (8, 4)]),
    "a residual": (lambda x, w: jnp.tanh(x @ w) + x, [(8, 8), (8, 8)]),
    "a loss": (lambda x, w: ((x @ w) ** 2).sum(), [(32, 4), (4, 8)]),
    "a softmax": (lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True), [(16, 8)]),
}


def problem_of(name, pin):
    fn, shapes = FUNCTIONS[name]
    jaxpr, _ = canonicalize(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)))
    inputs = [Requirement(Pin(pin)), *(Requirement() for _ in shapes[1:])]
    paths = [f"x{i}" for i in range(len(shapes))]
    return build_problem(jaxpr, inputs, [Requirement(Pin(Placement()))], paths, ["out"])


@pytest.mark.parametrize("pin", [Placement(), Placement({"a": S(0)}), Placement({"a": S(1)})], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_axis_is_solved_to_the_optimum(name, pin):
    mesh = view(make_mesh(topology="cpu", a=4))
    problem = problem_of(name, pin)
    placer = Placer(problem, mesh)
    found = placer.tables.best()
    placed, tables = placer.placed(found), placer.tables
    made = {v: placed.ports[x.maker][len(x.maker.operands) + x.port] for v, x in problem.values.items()}
    near = placer.near(made)
    assert near is not None
    assert AssignmentCost(tables.unary, tables.pairwise).cost(near) == pytest.approx(found.cost, rel=1e-3)
    choices = [range(len(u)) for u in tables.unary]
    assert np.prod([len(c) for c in choices]) < 3e6
    best = np.inf
    for choice in itertools.islice(itertools.product(*choices), 200_000):
        cost = sum(u[o] for u, o in zip(tables.unary, choice, strict=True))
        if cost < best:
            best = min(best, cost + sum(t[choice[i], choice[j]] for (i, j), t in tables.pairwise.items()))
    complete = np.prod([len(c) for c in choices]) <= 200_000
    assert placed.seconds <= best * (1 + 1e-9)
    assert not complete or placed.seconds == pytest.approx(best, rel=1e-9)
    assert placed.gap is not None and placed.gap <= 1e-6


def plan_text():
    init, step = gpt2.make_step(gpt2.CONFIGS["test"])
    rows = jax.ShapeDtypeStruct((8, 16), np.int32)
    args = (*jax.eval_shape(init, jax.random.key(0)), {"inputs": rows, "targets": rows})
    plan = shardc.function(mesh=make_mesh(topology="cpu", data=4, model=2), **data_tensor())(step).plan(*args)
    return f"{plan.collectives} {plan.in_placements} {plan.out_placements} {plan.seconds}\n"


def test_the_plan_is_the_same_in_every_process():
    code = "import tests.conftest; from tests.passes.place.test_place import plan_text; print(plan_text(), end='')"
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert there == plan_text() and "all_reduce" in there


@pytest.mark.parametrize("largest", [1, 5, 2**40])
def test_the_first_of_rows_that_are_alike(largest):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (200, 4))
    rows[rows == 2] = largest
    want = np.sort(np.unique(rows, axis=0, return_index=True)[1])
    np.testing.assert_array_equal(first_of_alike(list(rows.T)), want)
    assert len(first_of_alike(list(rows[:0].T))) == 0
