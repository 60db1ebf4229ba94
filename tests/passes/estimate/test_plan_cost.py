"""The seconds of a plan: their parts, and the reductions that overlap with computation."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
import shardc.machine.topology
from examples.zoo import MODELS
from shardc import AUTO, B, P, Placement, S
from shardc.ir.walk import itemsize_of
from shardc.machine.overlaps import FULL
from shardc.passes.estimate.plan_cost import Time, equation_costs, undivided_seconds
from shardc.passes.estimate.traffic import fused_groups
from shardc.plan.borders import problem_of
from shardc.plans import Plan
from shardc.report.tables import seconds_text
from shardc.sbp.boxing import find_boxing
from shardc.sbp.cost import COLLECTIVES

N = 1024
ONE = 4 * N * N
"""Bytes of an (N, N) of float32."""
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def gradient_of_two(w: Any, x: Any) -> Any:
    h = jnp.sin(x @ w["a"])
    return jnp.cos(h @ w["b"]).sum()


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
    """Chips whose compiler does not combine reductions."""
    known = shardc.machine.topology.TOPOLOGIES
    apart = {**known, "v5p": replace(known["v5p"], combined=(), overlaps=FULL)}
    monkeypatch.setattr(shardc.machine.topology, "TOPOLOGIES", apart)


@pytest.mark.usefixtures("not_combined")
def test_gradients_hide_behind_the_backward_pass() -> None:
    plan = planned(batch=2**16)
    assert [c.kind for c in plan.collectives if c.bytes > 100] == ["all_reduce"] * 2
    # that of b comes first and hides behind the products of the other; that of a has nothing behind it
    one = find_boxing((256, 256), 4, Placement({"data": P()}), Placement(), plan.mesh).seconds
    assert one <= plan.time.overlapped < plan.time.all_reduce
    assert plan.time.all_reduce - plan.time.overlapped >= one * (1 - 1e-9)
    assert plan.time.overlapped_reductions == plan.time.overlapped


def test_gradients_that_are_combined_wait_for_the_last() -> None:
    assert planned(batch=2**16).time.overlapped == 0


def test_time_is_the_sum_of_its_parts() -> None:
    plan = planned()
    time = plan.time
    assert plan.seconds == pytest.approx(
        time.compute + time.memory + sum(getattr(time, k) for k in COLLECTIVES) - time.overlapped, rel=1e-12
    )
    assert plan.compute_seconds == time.computing
    assert {k for k in COLLECTIVES if getattr(time, k)} == {c.kind for c in plan.collectives}
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
    plan = planned(batch=2**16)
    time = plan.time
    assert [time.compute, time.all_gather, time.wait] == [0, 0, 0]  # which are left out
    assert plan.explain().splitlines()[2:6] == [
        "Time:",
        f"  {seconds_text(time.memory)} reading and writing memory",
        f"  {seconds_text(time.all_reduce)} all_reduce",
        f"  less {seconds_text(time.overlapped)} of reductions that overlap with computation",
    ]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_time_says_how_much_is_recomputed(checkpoint: bool) -> None:
    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w) @ w)

    def loss(w: Any, x: Any) -> Any:
        f = jax.checkpoint(layer) if checkpoint else layer
        return jax.lax.scan(lambda x, w: (f(x, w), None), x, w)[0].sum()

    mesh = shardc.make_mesh(topology="v5p", data=8)
    f = shardc.function(jax.grad(loss), mesh=mesh, in_placements={"w": {}, "x": {"data": S(0)}})
    w, x = jax.ShapeDtypeStruct((4, N, N), jnp.float32), jax.ShapeDtypeStruct((32 * N, N), jnp.float32)
    plan = f.plan(w, x)
    # of 8 products of a layer 2 run again
    assert plan.time.recompute == pytest.approx(plan.time.compute / 4 if checkpoint else 0)
    assert (f" computing, {seconds_text(plan.time.recompute)} of it to recompute" in plan.explain()) is checkpoint


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "rel"), [("mlp", 1e-9), ("resnet", 1e-9), ("unet", 1e-9), ("vit", 1e-9), ("gpt2", 0.03), ("t5", 0.03)]
)
def test_the_search_and_the_plan_count_what_light_operations_move_alike(name, rel, monkeypatch):
    """All of it on one device, where it can be no boxing's; but for tables of which rows are read."""
    counted: list[float] = []

    def count(*args: Any) -> Any:
        groups = fused_groups(*args)
        counted.append(sum(g.bytes for g in groups))
        return groups

    monkeypatch.setattr(sys.modules["shardc.passes.estimate.plan_cost"], "fused_groups", count)
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
    assert plan.seconds  # is counted when it is asked for: once for the program as written, once if it is rewritten
    assert 1 <= len(counted) <= 1 + len(plan.trials)  # no loops
    assert searched == pytest.approx(counted[0], rel=rel)


@pytest.mark.parametrize("kind", ["v5p", "cpu"])
def test_an_update_is_split_where_that_sends_no_more(kind):
    """Though two collectives take longer to start than an all-reduce: each device updates its part (Xu et al. 2020,
    "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training")."""

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
    assert {c.kind for c in plan.collectives} == {"reduce_scatter", "all_gather"}
    assert plan.bytes_per_device == 2 * 7 * ONE // 8


def test_the_costs_of_equations_add_up_to_that_of_the_program() -> None:
    plan = planned()
    each = equation_costs(plan.boxed, plan.mesh)
    found = sum((cost.time for cost in each.values()), Time())
    for kind in ("compute", "memory", *COLLECTIVES):
        assert getattr(found, kind) == pytest.approx(getattr(plan.time, kind))
    assert [c for cost in each.values() for c in cost.collectives] == list(plan.collectives)


def test_the_undivided_seconds_of_equations_add_up_to_the_plan_of_one_device() -> None:
    """Also where a loop has bodies, and where light operations are fused."""

    def f(w: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, _: (jnp.sin(h @ w["a"]) + 1, None), x, None, 3)
        return gradient_of_two(w, jnp.tanh(h) * 2)

    weights = {k: jax.ShapeDtypeStruct((256, 256), jnp.float32) for k in "ab"}
    plan = shardc.function(f, mesh=shardc.make_mesh(topology="v5p", data=1)).plan(weights, weights["a"])
    each = undivided_seconds(plan.program.jaxpr, plan.mesh)
    assert list(each) == plan.program.jaxpr.eqns
    assert all(each.values()) or {e.primitive.name for e, t in each.items() if not t} == {"convert_element_type"}
    assert sum(each.values()) == pytest.approx(plan.time.computing)


def slow_machine(**changes: Any) -> shardc.machine.topology.Topology:
    return replace(shardc.machine.topology.TOPOLOGIES["cpu"], **changes)


def test_the_launch_of_a_program_counts_on_fake_devices_alone() -> None:
    def add(xs: Any) -> Any:
        return [x + 1 for x in xs]

    xs = [jax.ShapeDtypeStruct((8,), jnp.float32)] * 5
    for kind, each in (("cpu", 1.0), ("v5p", 0.0)):
        mesh = shardc.make_mesh(topology=kind, data=8)
        machine = shardc.machine.topology.TOPOLOGIES[kind]
        plan = shardc.function(add, mesh=mesh).plan(xs)
        wanted = each * (machine.dispatch + 10 * 8 * machine.dispatch_array)
        assert plan.time.launch == pytest.approx(wanted)
        assert plan.seconds == pytest.approx(plan.time.computing + wanted)
        assert (" launching" in plan.explain()) == bool(wanted)


def test_light_operations_take_the_longer_of_memory_and_vector_arithmetic() -> None:
    """A sine counts as `special` operations, an element of a sum as one."""
    x = jax.ShapeDtypeStruct((800, 64), jnp.float32)
    memory = (100 * 64 + 100) * 4
    for vector, special in ((0.0, 1.0), (1e15, 1.0), (1e6, 1.0), (1e6, 9.0)):
        machine = replace(slow_machine(), vector=vector, special=special)
        mesh = shardc.make_mesh(topology=machine.to_json(), data=8)
        plan = shardc.function(lambda x: jnp.sin(x).sum(1), mesh=mesh, in_placements={"x": {"data": S(0)}}).plan(x)
        computed = (special + 1) * 100 * 64 / vector / machine.reached if vector else 0.0
        assert plan.time.memory == pytest.approx(max(memory / machine.memory_rate, computed))


def pairs(x: Any, sines: int) -> Any:
    d = ((x[:, None] - x[None]) ** 2).sum(-1)
    for _ in range(sines):
        d = jnp.sin(d)
    return d.sum(1)


@pytest.mark.parametrize("topology", ["cpu", "v5p", "h100:8"])
def test_arithmetic_of_light_operations_is_split(topology: str) -> None:
    """All pairs, and a chain of sines, are computed by all devices, each its part, though the result is gathered."""
    mesh = shardc.make_mesh(topology=topology, data=8)
    f = shardc.function(partial(pairs, sines=30), mesh=mesh, in_placements=({},), out_placements={})
    plan = f.plan(jax.ShapeDtypeStruct((16384, 3), jnp.float32))
    alone = shardc.function(partial(pairs, sines=30), mesh=shardc.make_mesh(topology=topology, data=1))
    assert plan.gap == 0 and [c.kind for c in plan.collectives] == ["all_gather"]
    assert plan.time.computing < alone.plan(jax.ShapeDtypeStruct((16384, 3), jnp.float32)).time.computing / 7


def test_thin_products_reach_a_share() -> None:
    times = []
    for width in (16, 64):
        x = jax.ShapeDtypeStruct((8, 64, width), jnp.float32)
        mesh = shardc.make_mesh(topology=slow_machine(shares=(("thin", 0.5),), memory_bandwidth=1e15).to_json(), data=8)
        ours = shardc.function(
            lambda x: jnp.einsum("bmk,bnk->bmn", x, x), mesh=mesh, in_placements={"x": {"data": S(0)}}
        )
        times.append(ours.plan(x).time.compute)
    assert times[1] == pytest.approx(2 * times[0])  # of four times the operations


def test_a_convolution_takes_time_to_start() -> None:
    x, w = jax.ShapeDtypeStruct((8, 3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 3, 3, 3), jnp.float32)
    times = []
    for seconds in (1e-9, 1.0):
        mesh = shardc.make_mesh(topology=slow_machine(starts=(("convolution", seconds),)).to_json(), data=8)
        ours = shardc.function(
            lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"), mesh=mesh, in_placements={"x": {"data": S(0)}}
        )
        times.append(ours.plan(x, w).seconds)
    assert times[1] - times[0] == pytest.approx(1.0)
