"""The planner against everything there is: on small random programs the plan costs what the best of all costs."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardc.machine.mesh import make_mesh, view
from shardc.passes.estimate.plan_cost import plan_cost
from shardc.passes.place.domain import Domains
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.place import place
from shardc.passes.place.problem import Requirement, build_problem
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp.placement import B, Pin, Placement, S
from tests.passes.place.brute_force import assignments, least

MESHES = ({"a": 4}, {"a": 2, "b": 2}, {"a": 4, "b": 2}, {"a": 2, "b": 8}, {"a": 2, "b": 2, "c": 2})
FUNCTIONS = {
    "tanh": jnp.tanh, "sum": lambda x: x.sum(0), "max": lambda x: x.max(0), "transpose": jnp.transpose, "add": jnp.add,
    "mul": jnp.multiply, "dot": jnp.dot,
}  # fmt: skip
ENOUGH = 10**7
"""Combinations of choices that are tried for one program, at most; programs of more are left out."""


def random_program(rng):
    """A few operations on vectors and matrices: a function of arrays, and their shapes."""
    sizes = [rng.choice((3, 4, 8, 24, 64, 256)) for _ in range(3)]
    inputs = [tuple(rng.choice(sizes) for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(1, 3))]
    shapes, steps = list(inputs), []
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(shapes))
        offered = [("tanh", (i,)), ("sum", (i,)), ("max", (i,))] if shapes[i] else [("tanh", (i,))]
        offered += [("transpose", (i,))] if len(shapes[i]) == 2 else []
        for j, other in enumerate(shapes):
            offered += [("add", (i, j)), ("mul", (i, j))] if other == shapes[i] else []
            offered += [("dot", (i, j))] * 3 if len(shapes[i]) == 2 and other[:1] == shapes[i][1:] else []
        name, operands = rng.choice(offered)
        shapes.append(jax.eval_shape(FUNCTIONS[name], *(f32(shapes[k]) for k in operands)).shape)
        steps.append((name, operands))
    read = {k for _, operands in steps for k in operands}

    def run(*values):
        values = list(values)
        for name, operands in steps:
            values.append(FUNCTIONS[name](*(values[k] for k in operands)))
        return tuple(v for k, v in enumerate(values) if k >= len(inputs) and k not in read)

    return run, inputs, steps


def f32(shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def random_border(rng, shape, axes):
    if rng.random() < 0.4:
        return Requirement()
    return Requirement(Pin(Placement({a: rng.choice([B, *map(S, range(len(shape)))]) for a in axes})))


def random_problem(rng):
    run, inputs, steps = random_program(rng)
    mesh = view(make_mesh(topology=rng.choice(("cpu", "v5p", "h100")), **rng.choice(MESHES)))
    jaxpr, _ = canonicalize(jax.make_jaxpr(run)(*map(f32, inputs)))
    borders = [random_border(rng, s, mesh.sizes) for s in inputs]
    results = [random_border(rng, v.aval.shape, mesh.sizes) for v in jaxpr.outvars]
    names = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(len(results))]
    return build_problem(jaxpr, borders, results, *names), mesh, steps


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.sampled(0)) for n in range(250, 2500, 250))])
def test_no_assignment_of_placements_costs_less(first):
    tried = 0
    for seed in range(first, first + 250):
        problem, mesh, steps = random_problem(random.Random(seed))
        axes = [a for a, n in mesh.axes if n > 1]
        domains = Domains(problem, mesh, axes)
        shared = [h for h in problem.holds.values() if len(h.results[0].readers) > 2]
        if assignments(problem, domains) > ENOUGH or any(len(h.results[0].readers) > 4 for h in shared):
            continue
        if any(domains.of[h.number].also is None for h in shared):  # so many places that a hold keeps one of them
            continue
        tried += 1
        truth, placed = least(problem, mesh, axes), place(problem, mesh)
        where = seed, steps, dict(mesh.axes)
        assert placed.seconds == pytest.approx(truth, rel=1e-6, abs=0), where
        assert placed.gap is not None and placed.seconds <= (1 + placed.gap) * truth * (1 + 1e-6), where
        assert plan_cost(insert_boxing(problem, placed, mesh), mesh).added <= truth * (1 + 1e-6), where
    assert tried > 200  # in each of ten parts
