"""Collectives that the compiler combines start once: as often as in the compiled program, and so in the search."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import B, P, S, make_mesh
from shardc.machine.mesh import view
from shardc.passes.estimate.combine import Started, combinations
from shardc.passes.estimate.plan_cost import instructions
from shardc.sbp.boxing import find_boxing
from shardc.sbp.cost import COLLECTIVES, FEMTO, group_of
from shardc.sbp.placement import Placement

pytestmark = pytest.mark.usefixtures("compiled_fast")
ROWS = {"data": S(0)}
RNG = np.random.default_rng(0)


def layers(*sizes: int) -> list[dict[str, Any]]:
    return [{"w": RNG.normal(size=s).astype("f") / s[0] ** 0.5, "b": np.zeros(s[1], "f")} for s in pairwise(sizes)]


def mlp(params: Any, x: Any) -> Any:
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def recurrent(params: Any, x: Any) -> Any:
    def cell(h: Any, row: Any) -> Any:
        h = mlp(params, jnp.concatenate([h, row], -1))
        return h, h

    return lax.scan(cell, jnp.zeros((x.shape[0], 8), x.dtype), x.reshape(x.shape[0], -1, 8).swapaxes(0, 1))[1]


def step_of(model: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: (model(p, x) ** 2).mean())(params)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - g / jnp.maximum(norm, 1), params, grads), loss

    return step


X = RNG.normal(size=(2048, 32)).astype("f")
WIDE = shardc.rules({"0/*": {"model": S(-1)}, "1/w": {"model": S(0)}, "*": {}})
STEPS = {
    "data": (step_of(mlp), (layers(32, 64, 8), X), {"data": 8}, {"params": {}, "x": ROWS}),
    "data and tensor": (step_of(mlp), (layers(32, 64, 8), X), {"data": 4, "model": 2}, {"params": WIDE, "x": ROWS}),
    "recurrent": (step_of(recurrent), (layers(16, 64, 8), X), {"data": 8}, {"params": {}, "x": ROWS}),
    "recurrent tensor": (step_of(recurrent), (layers(16, 64, 8), X), {"model": 8}, {"params": WIDE, "x": {}}),
}


@pytest.mark.parametrize("name", STEPS)
def test_as_many_all_reduces_are_counted_as_are_compiled(name: str) -> None:
    step, args, mesh, pins = STEPS[name]
    compiled = shardc.function(step, mesh=make_mesh(**mesh), in_placements=pins).compile(*args)
    assert compiled.audit().ok
    found, plan = re.findall(r" all-reduce(?:-start)?\(", compiled.hlo()), compiled.plan
    assert instructions(plan.boxed, plan.mesh)["all_reduce"] == len(found) > 0


def test_data_parallel_is_one_reduction_of_each_gradient_also_around_a_loop() -> None:
    for name in ("data", "recurrent"):
        step, args, mesh, pins = STEPS[name]
        plan = shardc.function(step, mesh=make_mesh(**mesh), in_placements=pins).plan(*args)
        assert [(c.kind, c.count) for c in plan.collectives] == [("all_reduce", 1)] * 5  # and the loss
        one = group_of(plan.mesh, ["data"]).latency["all_reduce"] / FEMTO
        assert one < plan.time.all_reduce < 2 * one


def test_what_waits_for_another_starts_alone_and_no_more_is_combined_than_fits() -> None:
    def f(*xs: Any) -> Any:
        a, b, c, d = map(jnp.sin, xs)
        return jnp.sin(a + b), c, jnp.sin(d)

    jaxpr = jax.make_jaxpr(f)(*[1.0] * 4).jaxpr
    eqns = [e for e in jaxpr.eqns if e.primitive.name == "sin"]

    def together(size: int, most: float, alike: list[int] = [0] * 6) -> list[list[int]]:
        started = [Started(e, "all_reduce", n, size, 1.0) for n, e in zip(alike, eqns, strict=True)]
        found = combinations(jaxpr, started, {"all_reduce": most})
        return sorted([eqns.index(s.eqn) for s in some] for some in found)

    assert together(1, 8) == [[0, 1, 2, 3], [5, 4]]  # two wait for some of the others, one of them for a + b as well
    assert together(1, 2) == [[0, 1], [2, 3], [5, 4]]
    assert together(3, 2) == [[n] for n in range(6)]
    assert together(1, 8, [*range(6)]) == [[n] for n in range(6)]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_shared_start_is_a_part_of_one(kind: str) -> None:
    mesh = view(make_mesh(data=8))
    one, shared = (group_of(m, ["data"]).latency[kind] for m in (mesh, mesh.where_start_is_shared(10)))
    assert shared == (round(one / 10) if kind == "all_reduce" else one)


def test_paths_of_many_that_start_together_take_kinds_that_are_combined() -> None:
    mesh, src, dst = view(make_mesh(data=8)), Placement({"data": P()}), Placement({"data": S(0)})
    kinds = [[s.kind for s in find_boxing((64,), 4, src, dst, m).steps] for m in (mesh, mesh.where_start_is_shared(20))]
    assert kinds == [["reduce_scatter"], ["all_reduce", "slice"]]
    assert find_boxing((64,), 4, src, src, mesh).seconds == 0
    assert Placement({"data": B}) == Placement()
