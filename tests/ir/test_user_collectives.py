"""Collectives in a user's shard_map: each is listed with its bytes, or said to be unknown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import core
from jax._src.lax import parallel  # the table has to know every collective, public or not
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as Spec

import shardc
from shardc import ForbiddenMoveError, S
from shardc.commands.plans import figures_of
from shardc.ir import user_collectives
from shardc.ir.user_collectives import SENT, STILL, user_moves
from shardc.ir.user_shard_map import UNTYPED
from shardc.passes.audit.audit import audit

LINE = shardc.make_mesh(a=8)
X = np.ones((64, 4), np.float32)
RING = [(i, (i + 1) % 8) for i in range(8)]
A = ("a",)


ROWS = Spec("a")


def unit(body, checked=False, outs=ROWS):
    """A shard_map over rows: a piece is f32[8,4], 128 bytes."""
    return jax.shard_map(body, mesh=LINE, in_specs=ROWS, out_specs=outs, check_vma=checked)


def ragged(x):
    def body(x):
        i, one = jnp.arange(8), jnp.ones(8, jnp.int32)
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), i, one, i, one, axis_name="a")

    return unit(body)(x)


def sent_and_received(x):
    def body(x):
        token = parallel.psend(x, "a", [(0, 1)])
        return parallel.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "a", [(0, 1)])

    return unit(body)(x)


def gathered_reduced(x):
    return unit(lambda x: lax.pcast(lax.all_gather(x, "a", to="reduced"), "a", to="varying")[0], checked=True)(x)


def done(future):
    """What a start gives; of an untyped sum JAX 0.12 makes no future."""
    return future.done() if hasattr(future, "done") else future


def unreduced(of):
    return lambda x: of(lax.pcast(x, "a", to="unreduced"))


PROGRAMS: dict[str, tuple[Callable[..., Any], str, int]] = {
    "psum": (unit(lambda x: lax.psum(x, "a")), "all_reduce", 224),
    "psum_invariant": (unit(lambda x: parallel.psum_start(x, "a").done(), True, Spec()), "all_reduce", 224),
    "pmax": (unit(lambda x: lax.pmax(x, "a")), "all_reduce", 224),
    "pmin": (unit(lambda x: lax.pmin(x, "a")), "all_reduce", 224),
    "unreduced_psum": (unit(unreduced(lambda x: lax.psum(x, "a")), True, Spec()), "all_reduce", 224),
    "all_gather": (unit(lambda x: lax.all_gather(x, "a")[0]), "all_gather", 896),
    "all_gather_reduced": (gathered_reduced, "all_gather", 896),
    "reduce_scatter": (unit(lambda x: lax.psum_scatter(x, "a", tiled=True)), "reduce_scatter", 112),
    "unreduced_reduce_scatter": (
        unit(unreduced(lambda x: lax.psum_scatter(x, "a", tiled=True)), True), "reduce_scatter", 112,
    ),
    "all_to_all": (unit(lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True)), "all_to_all", 112),
    "ragged_all_to_all": (ragged, "all_to_all", 128),
    "ppermute": (unit(lambda x: lax.ppermute(x, "a", RING)), "permute", 128),
    "pbroadcast": (unit(lambda x: lax.pbroadcast(x, A, 0)), "permute", 128),
    "pbroadcast_dynamic": (
        unit(lambda x: parallel.pbroadcast_dynamic_p.bind(x, jnp.int32(1), axis_name=A)), "permute", 128,
    ),
    "psend": (sent_and_received, "permute", 128),
}  # fmt: skip
"""For each entry of the table a program, the kind, and the bytes that a device sends."""
WITHOUT_A_WAY: dict[str, tuple[str, int]] = {
    "unreduced_pmax": ("all_reduce", 224),
    "unreduced_pmin": ("all_reduce", 224),
}
"""Entries for which JAX has a primitive and no public way to its operand."""
HERE = [name for name in PROGRAMS if hasattr(parallel, f"{name}_p")]
STARTS: dict[str, tuple[Callable[..., Any], str, int]] = {
    "all_gather_start": (lambda x: parallel.all_gather_start(x, "a").done()[0], "all_gather", 896),
    "psum_start": (lambda x: done(parallel.psum_start(x, "a")), "all_reduce", 224),
    "psum_scatter_start": (lambda x: parallel.psum_scatter_start(x, "a", tiled=True).done(), "reduce_scatter", 112),
    "all_to_all_start": (lambda x: parallel.all_to_all_start(x, "a", 0, 0, tiled=True).done(), "all_to_all", 112),
    "ppermute_start": (lambda x: parallel.ppermute_start(x, "a", RING).done(), "permute", 128),
    "pbroadcast_start": (lambda x: parallel.pbroadcast_start(x, A, 0).done(), "permute", 128),
}


def plan_of(fn, **more):
    return shardc.function(fn, mesh=LINE, in_placements=({"a": S(0)},), **more).plan(X)


def sent(plan):
    return [(c.kind, c.axes, c.bytes, c.count) for c in plan.collectives]


def test_the_tables_know_every_collective_of_jax():
    names = {p.name for p in vars(parallel).values() if isinstance(p, Primitive)}
    names |= {core.pvary_p.name, core.reduced_vary_cast_p.name}
    starts = {n for n in names if not n.endswith("_done")}
    assert {n.removesuffix("_start") for n in starts} <= set(SENT) | STILL | set(UNTYPED)
    assert set(PROGRAMS) | set(WITHOUT_A_WAY) == set(SENT)
    assert len(HERE) >= 13


@pytest.mark.parametrize("name", HERE)
def test_each_is_listed_with_its_bytes(name):
    fn, kind, size = PROGRAMS[name]
    plan = plan_of(fn)
    assert sent(plan) == [(kind, A, size, 1)]
    assert [c.at_most for c in plan.collectives] == [name == "ragged_all_to_all"]
    assert plan.bytes_per_device == size and getattr(plan.time, kind) > 0


@pytest.mark.parametrize("name", [n for n in STARTS if hasattr(parallel, n)])
def test_what_a_start_sends_is_what_the_whole_sends(name):
    fn, kind, size = STARTS[name]
    assert sent(plan_of(unit(fn))) == [(kind, A, size, 1)]


@pytest.mark.parametrize("name", WITHOUT_A_WAY)
def test_those_without_a_public_way(name):
    x = SimpleNamespace(aval=jax.core.ShapedArray((8, 4), np.dtype("float32")))
    eqn: Any = SimpleNamespace(primitive=SimpleNamespace(name=name), invars=[x], outvars=[x], params={"axes": A})
    eqn.source_info = jax.make_jaxpr(jnp.sin)(1.0).eqns[0].source_info
    view = shardc.function(jnp.sin, mesh=LINE)._view
    assert [(c.kind, c.bytes) for c in user_moves(eqn, 1, view).collectives] == [WITHOUT_A_WAY[name]]


@pytest.mark.parametrize("name", HERE)
def test_one_that_the_table_lacks_is_unknown(name, monkeypatch):
    monkeypatch.setattr(user_collectives, "SENT", {k: v for k, v in SENT.items() if k != name})
    plan = plan_of(PROGRAMS[name][0])
    ((kind, axes, size, count),) = sent(plan)
    assert (kind, axes, count) == ("unknown", A, 1) and math.isnan(size) and math.isnan(plan.bytes_per_device)
    head = plan.explain().splitlines()[1]
    assert head.startswith("Each device sends an unknown number of bytes in ") and "; at least " in head
    assert head.endswith(" but for what is unknown.")
    with pytest.raises(ForbiddenMoveError, match="of which shardc does not know what it moves, over a"):
        plan_of(PROGRAMS[name][0], forbid={"a": "all_gather"})


# -- what no table can know

strange_p = Primitive("strange")
strange_p.def_impl(lambda x, *, axis_name: x)
strange_p.def_abstract_eval(lambda x, *, axis_name: x)
mlir.register_lowering(strange_p, lambda ctx, x, *, axis_name: [x])
batching.defvectorized(strange_p)


def strange(x):
    return strange_p.bind(x, axis_name="a")


def copied(x, remote):
    def kernel(i, o, s, r):
        if remote:
            to = ((lax.axis_index("a") + 1) % 8,)
            copy = pltpu.make_async_remote_copy(src_ref=i, dst_ref=o, send_sem=s, recv_sem=r, device_id=to)
        else:
            copy = pltpu.make_async_copy(i, o, s)
        copy.start()
        copy.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    scratch = [pltpu.SemaphoreType.DMA] * 2
    return pl.pallas_call(kernel, out_shape=shape, in_specs=[anywhere], out_specs=anywhere, scratch_shapes=scratch)(x)


def signalled(x):
    def kernel(i, o):
        pl.semaphore_signal(pltpu.get_barrier_semaphore(), device_id=((lax.axis_index("a") + 1) % 8,))
        o[...] = i[...]

    params = pltpu.CompilerParams(collective_id=0)
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=params)(x)


def foreign(x):
    return jax.ffi.ffi_call("somebodys_own", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@jax.custom_vjp
def with_own_gradient(x):
    return strange(x)


with_own_gradient.defvjp(lambda x: (strange(x), None), lambda _, g: (g,))

UNKNOWN = {
    "a primitive": (strange, "strange", 1),
    "in a scan": (lambda x: lax.scan(lambda c, _: (strange(c), None), x, None, length=3)[0], "strange", 3),
    "in a cond": (lambda x: lax.cond(x[0, 0] > 0, strange, jnp.sin, x), "strange", 1),
    "in a while": (lambda x: lax.while_loop(lambda c: c[0, 0] < 2, lambda c: strange(c) + 1, x), "strange", 1),
    "in a custom_vjp": (with_own_gradient, "strange", 1),
    "a remote copy": (lambda x: copied(x, remote=True), "pallas_call", 1),
    "a remote signal": (signalled, "pallas_call", 1),
    "foreign code": (foreign, "ffi_call", 1),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_no_table_knows_is_unknown(what):
    body, name, count = UNKNOWN[what]
    plan = plan_of(unit(body))
    ((kind, axes, size, times),) = sent(plan)
    assert (kind, axes, times, plan.collectives[0].value) == ("unknown", A, count, name) and math.isnan(size)
    with pytest.raises(ForbiddenMoveError, match=f"{name} at test_user_collectives.py:.* does not know what it moves"):
        plan_of(unit(body), forbid="a")


def test_what_is_known_to_stay_at_home():
    declared = shardc.signature("a b -> a b")(foreign)
    for body in (lambda x: copied(x, remote=False), declared, lambda x: x + lax.axis_index("a")):
        assert not plan_of(unit(body)).collectives
    assert [c.kind for c in plan_of(foreign).collectives] == ["all_gather"]  # outside of it, it is one device's code


def test_a_kernel_outside_of_a_shard_map_is_looked_into():
    assert [c.kind for c in plan_of(lambda x: copied(x, remote=False)).collectives] == ["all_gather"]
    eqn = jax.make_jaxpr(unit(lambda x: copied(x, remote=True)))(X).eqns[0].params["jaxpr"].eqns[0]
    view = shardc.function(jnp.sin, mesh=LINE)._view
    assert [(c.kind, c.axes, c.count) for c in user_collectives.kernel_moves(eqn, 2, view)] == [("unknown", A, 2)]


# -- what is said of it


def with_both(x):
    return unit(lambda x: lax.psum(strange(x), "a"), outs=Spec())(x * 2)


def without_numbers(plan):
    return re.sub(r"\.py:\d+", ".py", plan.explain())


def test_reports_say_it(golden, tmp_path):
    plan = plan_of(with_both)
    golden("unknown", without_numbers(plan))
    golden("at_most", without_numbers(plan_of(ragged)))
    assert "unknown per device" in repr(plan)
    assert json.loads(json.dumps(figures_of(plan), allow_nan=False))["bytes_per_device"] is None
    plan.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text("utf-8")
    assert "unknown: strange at test_user_collectives.py" in page and "at least " in page and "NaN," not in page
    plan.draw(tmp_path / "plan.svg")
    assert "unknown" in plan.diff(plan_of(lambda x: x * 2))
    assert "Nothing moves" not in plan.explain(why="result")


def test_an_audit_counts_what_is_found_there_as_the_unknown():
    (unknown,) = plan_of(unit(strange)).collectives
    hlo = """HloModule m, num_partitions=8

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add, metadata={op_name="LINE"}
}
"""
    found = audit([unknown], hlo.replace("LINE", unknown.source), {"a": 8})
    assert found.ok and str(found).startswith("audit: planned = found (1 collective, 0 B and what is unknown in 1)")
    assert not audit([unknown], hlo.replace("LINE", "elsewhere"), {"a": 8}).ok


def test_a_ragged_exchange_is_found_within_the_plan():
    hlo = """HloModule m, num_partitions=8

ENTRY %main (x: f32[8,4], o: f32[8,4], i: s32[8]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %o = f32[8,4]{1,0} parameter(1)
  %i = s32[8]{0} parameter(2)
  ROOT %r = f32[8,4]{1,0} ragged-all-to-all(%x, %o, %i, %i, %i, %i), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}
}
"""
    found = audit(plan_of(ragged).collectives, hlo, {"a": 8}, platform="gpu")
    assert found.ok and not found.missing
    broadcast = hlo.replace("ragged-all-to-all(%x, %o, %i, %i, %i, %i)", "collective-broadcast(%x)")
    found = audit(plan_of(PROGRAMS["pbroadcast"][0]).collectives, broadcast, {"a": 8}, platform="gpu")
    assert found.ok and not found.missing
    send = hlo.replace("ragged-all-to-all(%x, %o, %i, %i, %i, %i)", "send(%x, %o)").replace(
        "replica_groups={{0,1,2,3,4,5,6,7}}", "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}"
    )
    assert [(c.kind, c.bytes) for c in audit([], send, {"a": 8}, platform="gpu").surprises] == [("permute", 128)]
