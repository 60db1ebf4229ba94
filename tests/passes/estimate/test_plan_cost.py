"""Where a plan's time goes: what light operations read and write together, which reductions hide behind computing."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
import shardc.machine.topology
from examples.zoo import MODELS
from shardc import AUTO, B, P, Placement, S
from shardc.ir.collective import KINDS
from shardc.ir.walk import itemsize_of
from shardc.passes.estimate.overlap import hidden_seconds, late_values
from shardc.passes.estimate.plan_cost import Time
from shardc.passes.estimate.traffic import fused_bytes
from shardc.plan.borders import problem_of
from shardc.plans import Plan
from shardc.sbp.boxing import find_boxing

N = 1024
ONE = 4 * N * N
"""Bytes of an (N, N) of float32."""
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def traffic(f: Any, *args: Any) -> int:
    """Bytes, on one device; products are heavy."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    light = {id(e) for e in jaxpr.eqns if e.primitive.name != "dot_general"}
    same = {id(e) for e in jaxpr.eqns if e.primitive.name == "copy"}
    held = {v: 4 * v.aval.size for v in (*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))}
    return fused_bytes(jaxpr, light, same, held)


def gradient_of_two(w: Any, x: Any) -> Any:
    h = jnp.sin(x @ w["a"])
    return jnp.cos(h @ w["b"]).sum()


@pytest.mark.parametrize(
    ("f", "arguments", "expected"),
    [
        (lambda x: jnp.exp(jnp.sin(x) + 1) * 2, 1, 2 * ONE),  # a chain: read once, written once
        (lambda x, y: x * y + x, 2, 3 * ONE),  # a value read twice is read once
        (lambda x: (jnp.sin(x), jnp.cos(x)), 1, 3 * ONE),
        (lambda x, y: x @ y, 2, 0),  # heavy alone
        (lambda x, y: jnp.sin(x @ y), 2, 2 * ONE),  # its result is read, and a light one written
        (lambda x, y: jnp.sin(x) @ y, 2, 2 * ONE),  # what a heavy one reads is written; its reading is its own
        (lambda x: x.sum(), 1, ONE + 4),
        (lambda x: x[:2] * 2, 1, 2 * 4 * 2 * N),  # of what is sliced a part is read
        (lambda x: jax.lax.dynamic_update_slice(x, jnp.sin(x[:2]), (0, 0)), 1, 2 * 4 * 2 * N),  # in place
        (lambda x, y: jnp.copy(x) @ y, 2, 0),  # the same value by another name
    ],
)
def test_what_fused_operations_read_and_write(f: Any, arguments: int, expected: int) -> None:
    assert traffic(f, *(X,) * arguments) == expected


def chain(f: Any, *args: Any) -> Any:
    return jax.make_jaxpr(f)(*args).jaxpr


def products(jaxpr: Any) -> set[int]:
    return {id(e) for e in jaxpr.eqns if e.primitive.name == "dot_general"}


def test_late_is_what_no_product_depends_on() -> None:
    def f(x: Any, w: Any) -> Any:
        a = jnp.sin(x)
        b = a @ w
        c = jnp.cos(a)  # read by the result alone
        return jnp.tan(c) + b

    jaxpr = chain(f, X, X)
    names = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    heavy = products(jaxpr)
    assert sorted(names[v] for v in late_values(jaxpr, [True], heavy)) == ["add", "cos", "dot_general", "tan"]
    assert late_values(jaxpr, [False], heavy) == set()


def hidden(seconds: float, results: list[bool] | None = None) -> float:
    """Of a reduction (here: cos) that is read by nothing heavy and whose operand is made first; three products of a
    second each follow."""

    def f(x: Any, w: Any) -> Any:
        a = jnp.sin(x)
        b = ((x @ w) @ w) @ w
        return jnp.cos(a), b

    jaxpr = chain(f, X, X)
    late = late_values(jaxpr, results or [True, True], products(jaxpr))
    reducing = {id(e): seconds for e in jaxpr.eqns if e.primitive.name == "cos"}
    return hidden_seconds(jaxpr, late, reducing, dict.fromkeys(products(jaxpr), 1.0))


def test_a_reduction_hides_behind_what_follows_its_operand() -> None:
    assert hidden(0.5) == 0.5
    assert hidden(3.0) == 3.0
    assert hidden(5.0) == 3.0  # two seconds are waited for
    assert hidden(0.5, [False, True]) == 0.0  # somebody waits for it


def test_reductions_share_the_links_and_what_comes_before_hides_nothing() -> None:
    def f(x: Any, w: Any) -> Any:
        b = (x @ w) @ w
        return jnp.cos(b), jnp.sin(w)

    jaxpr = chain(f, X, X)
    heavy = products(jaxpr)
    reducing = {id(e): 1.5 for e in jaxpr.eqns if id(e) not in heavy}
    found = hidden_seconds(jaxpr, late_values(jaxpr, [True, True], heavy), reducing, dict.fromkeys(heavy, 1.0))
    assert found == 1.5  # that of w, which is there at once; that of b comes after all products


def planned(batch: int = 64) -> Plan:
    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(gradient_of_two)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    mesh = shardc.make_mesh(topology="v5p", data=8)
    shape = jax.ShapeDtypeStruct((batch, 256), jnp.float32)
    weights = {k: jax.ShapeDtypeStruct((256, 256), jnp.float32) for k in "ab"}
    pins = {"w": {}, "x": {"data": S(0)}}
    return shardc.function(step, mesh=mesh, in_placements=pins, out_placements=({}, {})).plan(weights, shape)


@pytest.fixture
def not_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chips whose compiler makes each reduction on its own."""
    known = shardc.machine.topology.TOPOLOGIES
    apart = {**known, "v5p": replace(known["v5p"], combined=())}
    monkeypatch.setattr(shardc.topology, "TOPOLOGIES", apart)


@pytest.mark.usefixtures("not_combined")
def test_gradients_hide_behind_the_backward_pass() -> None:
    plan = planned(batch=2**16)
    assert [c.kind for c in plan.collectives if c.bytes > 100] == ["all_reduce"] * 2
    # that of b comes first and hides behind the products of the other; that of a has nothing behind it
    one = find_boxing((256, 256), 4, Placement({"data": P()}), Placement(), plan.mesh).seconds
    assert one <= plan.time.hidden < plan.time.all_reduce
    assert plan.time.all_reduce - plan.time.hidden >= one * (1 - 1e-9)


def test_gradients_that_are_combined_wait_for_the_last() -> None:
    assert planned(batch=2**16).time.hidden == 0


def test_time_is_the_sum_of_its_parts() -> None:
    plan = planned()
    time = plan.time
    assert plan.seconds == pytest.approx(
        time.compute + time.memory + sum(getattr(time, k) for k in KINDS) - time.hidden, rel=1e-12
    )
    assert plan.compute_seconds == time.computing
    assert {k for k in KINDS if getattr(time, k)} == {c.kind for c in plan.collectives}
    assert time + Time() == time
    assert (time * 2).total == pytest.approx(2 * plan.seconds)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def layers(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, p: (jnp.sin(h @ p), None), x, w)[0]

    mesh = shardc.make_mesh(topology="v5p", data=8)
    f = shardc.function(layers, mesh=mesh, in_placements={"x": {"data": S(0)}, "w": {}})
    times = []
    for n in (1, 6):
        shapes = (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((n, 256, 256), jnp.float32))
        times.append(f.plan(*shapes).time)
    assert times[1].computing == pytest.approx(6 * times[0].computing, rel=0.2)


def test_a_cond_takes_as_long_as_its_longer_branch() -> None:
    def f(x: Any, w: Any, chosen: Any) -> Any:
        return jax.lax.cond(chosen, lambda: (x @ w) @ w, lambda: x @ w)

    def long(x: Any, w: Any, chosen: Any) -> Any:
        return (x @ w) @ w

    mesh = shardc.make_mesh(topology="v5p", data=8)
    args = (X, X, jax.ShapeDtypeStruct((), np.bool_))
    pins = {"x": {"data": S(0)}, "w": {}}
    branches, whole = (shardc.function(g, mesh=mesh, in_placements=pins).plan(*args).time for g in (f, long))
    assert branches.compute == pytest.approx(whole.compute)


@pytest.mark.usefixtures("not_combined")
def test_explain_says_where_the_time_goes() -> None:
    line = planned(batch=2**16).explain().splitlines()[2]
    assert line.startswith("Time: ")
    assert " computing, " in line
    assert " reading and writing memory, " in line
    assert " all_reduce; " in line
    assert line.endswith(" of the reductions overlap with computation.")


@pytest.mark.parametrize(
    ("name", "rel"), [("mlp", 1e-9), ("resnet", 1e-9), ("unet", 1e-9), ("vit", 1e-9), ("gpt2", 0.03), ("t5", 0.03)]
)
def test_the_search_and_the_plan_count_what_light_operations_move_alike(name, rel, monkeypatch):
    """All of it on one device, where it can be no boxing's; but for tables of which rows are read."""
    counted: list[int] = []
    monkeypatch.setattr(
        sys.modules["shardc.passes.estimate.plan_cost"], "fused_bytes",
        lambda *args: counted.append(fused_bytes(*args)) or counted[-1],
    )  # fmt: skip
    zoo = MODELS[name]
    cfg = zoo.configs["test"]
    init_fn, step_fn = zoo.make_step(cfg, lambda fn: fn)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    mesh = shardc.make_mesh(topology="v5p", data=1)
    plan = shardc.function(mesh=mesh)(step_fn).plan(*state, next(zoo.batches(cfg, 16, 0)))
    problem = problem_of(plan.request, plan.ties)
    searched = 0.0
    for n in problem.nodes:
        for port, share in n.traffic:
            value = (*n.operands, *n.results)[port]
            searched += n.weight * share * math.prod(value.shape) * itemsize_of(value.aval) if value else 0.0
    assert plan.seconds  # is counted when it is asked for
    (once,) = counted  # no loops
    assert searched == pytest.approx(once, rel=rel)


@pytest.mark.parametrize(("kind", "sent"), [("v5p", {"reduce_scatter", "all_gather"}), ("cpu", {"all_reduce"})])
def test_an_update_is_split_where_that_sends_no_more(kind, sent):
    """Though two collectives take longer to start than an all-reduce: each device updates its part (Xu et al. 2020,
    "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training"). Unless caches serve the update."""

    def step(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
        m = 0.9 * m + g
        return w - 0.1 * m, m

    x, whole = jax.ShapeDtypeStruct((8 * N, N), jnp.float32), {"data": B}
    ours = shardc.function(
        step, mesh=shardc.make_mesh(topology=kind, data=8), in_placements={"w": whole, "x": {"data": S(0)}},
        out_placements=(whole, AUTO),
    )  # fmt: skip
    plan = ours.plan(X, X, x)
    assert {c.kind for c in plan.collectives} == sent
    assert plan.bytes_per_device == 2 * 7 * ONE // 8
