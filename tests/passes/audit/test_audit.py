"""The audit: plans that hold, plans that do not, on programs compiled here and on text of other backends."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as PS

from shardc.ir.collective import Collective
from shardc.passes.audit.audit import audit, audit_all

MESH = {"a": 2, "b": 4}
X = {"x": 8}
W = 64 * 128 * 4  # bytes of f32[64,128]


def compiled(f, in_specs, out_specs, *args) -> str:
    m = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    mapped = jax.shard_map(f, mesh=m, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    avals = [jax.ShapeDtypeStruct(*a, sharding=NamedSharding(m, s)) for a, s in zip(args, in_specs, strict=True)]
    return jax.jit(mapped).lower(*avals).compile().as_text()


def fixture(name: str) -> str:
    return (Path(__file__).parent / "hlo" / f"{name}.txt").read_text()


def plan(kind, axes, each, value, count=1):
    return Collective(kind, axes, each * count, count, "model.py:7 (step)", value)


F32 = ((64, 128), jnp.float32)
BF16 = ((64, 128), jnp.bfloat16)
SUM_B = plan("all_reduce", ("b",), 2 * 3 * W // 4 // 4, "f32[16,128]")


def sum_b(v):
    return lax.psum(v, "b")


@pytest.mark.parametrize(
    ("f", "spec", "args", "planned"),
    [
        (sum_b, PS("b"), F32, SUM_B),
        (lambda v: lax.psum(v, ("b", "a")), PS(), F32, plan("all_reduce", ("b", "a"), 2 * 7 * W // 8, "f32[64,128]")),
        (
            lambda v: lax.all_gather(v, "b", axis=1, tiled=True),
            PS(None, "b"),
            F32,
            plan("all_gather", ("b",), 3 * W // 4, "f32[64,128]"),
        ),
        (
            lambda v: lax.psum_scatter(v, "a", tiled=True),
            PS(),
            F32,
            plan("reduce_scatter", ("a",), W // 2, "f32[64,128]"),
        ),
        (
            lambda v: lax.all_to_all(v, "b", 1, 0, tiled=True),
            PS("b"),
            F32,
            plan("all_to_all", ("b",), 3 * W // 16, "f32[64,128]"),
        ),
        (
            lambda v: lax.ppermute(v, "b", [(0, 1), (1, 0)]),
            PS("b"),
            F32,
            plan("permute", ("b",), W // 4, "f32[64,128]"),
        ),
        (sum_b, PS("b"), BF16, plan("all_reduce", ("b",), 2 * 3 * W // 4 // 4 // 2, "bf16[16,128]")),
        # The matmul's result is f32 on XLA:CPU: nothing in the HLO tells that this gather would be of bf16.
        (
            lambda v: lax.all_gather(v @ v.T, "b", tiled=True),
            PS("b"),
            BF16,
            plan("all_gather", ("b",), 3 * 16 * 16 * 2, "bf16[64,16]"),
        ),
        (lambda v: lax.psum(v.sum(), "b"), PS("b"), BF16, plan("all_reduce", ("b",), 3, "bf16[]")),
    ],
    ids=["psum", "two axes", "gather", "scatter", "exchange", "permute", "bf16", "bf16 unmarked", "bf16 scalar"],
)
def test_plan_is_what_is_compiled(f, spec, args, planned):
    text = compiled(f, (spec,), PS(), args)
    found = audit([planned], text, MESH)
    assert found.ok, str(found)
    assert not found.missing
    # ... and nothing else is: not twice the bytes, nor another kind or group, nor fewer executions.
    other_kind = "all_gather" if planned.kind != "all_gather" else "all_reduce"
    for wrong in (replace(planned, bytes=planned.bytes * 4), replace(planned, kind=other_kind)):
        assert not audit([wrong], text, MESH).ok
    if planned.kind != "permute":
        assert not audit([replace(planned, axes=("a",) if planned.axes != ("a",) else ("b",))], text, MESH).ok
    assert not audit([], text, MESH).ok


def test_report_when_the_plan_holds():
    text = compiled(sum_b, (PS("b"),), PS(), F32)
    assert str(audit([SUM_B], text, MESH)) == "audit: planned = found (1 collective, 12.0 KiB)"
    more = audit([SUM_B, replace(SUM_B, bytes=64)], text, MESH)
    assert more.missing == (replace(SUM_B, bytes=64),)
    assert str(more) == "audit: found within plan (2 collectives, 12.1 KiB; XLA removed 1 collective, 64 B)"


def test_report_when_it_does_not():
    text = compiled(sum_b, (PS("b"),), PS(), F32)
    line = sum_b.__code__.co_firstlineno + 1
    report = audit([plan("all_gather", ("a",), 512, "bf16[16]")], text, MESH)
    name = report.found[0].name
    assert str(report).splitlines() == [
        "audit: 1 collective, 12.0 KiB not in the plan of 1 collective, 512 B",
        f"  not planned  all_reduce  b  f32[16,128]  12.0 KiB  x1  test_audit.py:{line} (sum_b)  {name}",
        "  not found    all_gather  a  bf16[16]     512 B     x1  model.py:7 (step)",
    ]


def test_combined_collectives_are_compared_by_tensor():
    def f(u, v):
        return lax.psum(u, "b"), lax.psum(v, "b")

    text = compiled(f, (PS("b"), PS("b")), (PS(), PS()), F32, ((32, 16), jnp.float32))
    small = plan("all_reduce", ("b",), 2 * 3 * 8 * 16, "f32[8,16]")
    assert text.count(" all-reduce(") == 1
    assert audit([SUM_B, small], text, MESH).ok
    assert [f.value for f in audit([SUM_B], text, MESH).surprises] == ["f32[8,16]"]


def test_executions_in_loops_are_counted():
    def f(v):
        return lax.scan(lambda c, _: (jnp.tanh(lax.psum(c, "b")), None), v, None, length=6)[0]

    text = compiled(f, (PS("b"),), PS("b"), F32)
    assert audit([replace(SUM_B, bytes=6 * SUM_B.bytes, count=6)], text, MESH).ok
    assert audit([SUM_B] * 6, text, MESH).ok, "the same, planned unrolled"
    (extra,) = audit([SUM_B] * 4, text, MESH).surprises
    assert (extra.count, extra.bytes) == (2, 2 * SUM_B.bytes)


def counted_while(v):
    """Five rounds, as XLA can tell."""
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(lax.psum(c[1], "b"))), (0, v))[1]


ROUND = replace(SUM_B, per_iteration=True)


def test_a_while_is_planned_for_one_iteration_and_counted_as_it_runs():
    text = compiled(counted_while, (PS("b"),), PS("b"), F32)
    assert '"known_trip_count":{"n":"5"}' in text
    report = audit([ROUND], text, MESH)
    assert report.ok and not report.missing, str(report)
    assert [(f.count, f.bytes) for f in report.found] == [(5, 5 * SUM_B.bytes)]
    assert [(f.count, f.bytes) for f in report.iterated] == [(4, 4 * SUM_B.bytes)]
    assert str(report) == (
        "audit: planned = found (1 collective, 12.0 KiB), 1 collective, 48.0 KiB more in further iterations of `while`"
    )


@pytest.mark.parametrize(
    "planned",
    [SUM_B, replace(ROUND, bytes=SUM_B.bytes // 2), replace(ROUND, axes=("a",)), replace(ROUND, kind="all_gather")],
    ids=["not in a while", "other bytes", "other axes", "other kind"],
)
def test_an_iteration_pays_for_what_is_like_it(planned):
    text = compiled(counted_while, (PS("b"),), PS("b"), F32)
    report = audit([planned], text, MESH)
    assert not report.ok and not report.iterated, str(report)


def test_an_iteration_pays_for_nothing_outside_of_loops():
    def f(v):
        return lax.psum(jnp.sin(lax.psum(jnp.tanh(lax.psum(v, "b")), "b")), "b")

    text = compiled(f, (PS("b"),), PS("b"), F32)
    assert sum(s.count for s in audit([ROUND], text, MESH).surprises) == 2


def test_equal_gathers_may_be_merged():
    def f(v):
        return lax.all_gather(v, "b", tiled=True) + jnp.flip(lax.all_gather(v, "b", tiled=True))

    text = compiled(f, (PS("b"),), PS(), F32)
    gather = plan("all_gather", ("b",), 3 * W // 4, "f32[64,128]")
    found = audit([gather, gather], text, MESH)
    assert found.ok
    assert found.missing == (gather,)


def test_one_large_collective_for_several_small_ones():
    text = compiled(sum_b, (PS("b"),), PS(), F32)
    halves = replace(SUM_B, count=2)
    assert audit([halves], text, MESH).ok
    assert audit([replace(SUM_B, bytes=SUM_B.bytes // 4)] * 4, text, MESH).ok
    assert not audit([replace(SUM_B, bytes=SUM_B.bytes // 4)] * 3, text, MESH).ok


def test_small_collectives_do_not_hide_behind_rounding():
    text = compiled(lambda v: lax.psum(v.sum(), "b"), (PS("b"),), PS(), F32)
    assert not audit([replace(SUM_B, bytes=n) for n in range(1000, 1020)], text, MESH).ok


def test_the_partitioners_all_reduce_for_a_reduce_scatter_is_a_surprise():
    m = Mesh(np.array(jax.devices()), ("x",))
    aval = jax.ShapeDtypeStruct((64, 128, 8), jnp.float32, sharding=NamedSharding(m, PS(None, None, "x")))
    jitted = jax.jit(lambda v: v.sum(2), out_shardings=NamedSharding(m, PS("x")))
    found = audit(
        [plan("reduce_scatter", ("x",), 7 * W // 8, "f32[64,128]")], jitted.lower(aval).compile().as_text(), X
    )
    assert [(s.kind, s.axes, s.bytes) for s in found.surprises] == [("all_reduce", ("x",), 2 * 7 * W // 8)]


def test_groups_along_no_axes_are_a_surprise():
    m = Mesh(np.array(jax.devices()), ("x",))
    mapped = jax.shard_map(
        lambda v: lax.psum(v, "x", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
        mesh=m, in_specs=PS("x"), out_specs=PS("x"), check_vma=False,
    )  # fmt: skip
    aval = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(m, PS("x")))
    text = jax.jit(mapped).lower(aval).compile().as_text()
    planned = plan("all_reduce", ("x",), 2 * 3 * 128, "f32[1,128]")
    report = audit([planned], text, X)
    assert report.surprises[0].axes is None
    assert "(not along axes)" in str(report)


SCAN = [
    plan("all_gather", ("x",), 57344, "f32[128,128]", 4),
    plan("all_reduce", ("x",), 7168, "f32[8,128]", 4),
    plan("permute", ("x",), 4096, "f32[8,128]", 4),
]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_other_backends(platform):
    report = audit(SCAN, fixture(f"{platform}_scan"), X, platform)
    assert report.ok and not report.missing and not report.compiler_added, str(report)
    for i in range(3):
        assert len(audit(SCAN[:i] + SCAN[i + 1 :], fixture(f"{platform}_scan"), X, platform).surprises) == 1


def test_narrower_elements_than_planned_are_less_not_other():
    """XLA:TPU gathers f32 as bf16 where only the matrix unit reads it; wider ones would not be in the plan."""
    assert audit(SCAN, fixture("tpu_scan"), X).ok
    as_bf16 = replace(SCAN[0], bytes=SCAN[0].bytes // 4, value="f16[64,128]")
    assert not audit([as_bf16, *SCAN[1:]], fixture("tpu_scan"), X).ok


def test_planned_collectives_of_no_bytes_are_not_missed():
    empty = Collective("all_gather", ("one",), 0, 1, "model.py:7 (step)", "f32[8]")
    text = compiled(sum_b, (PS("b"),), PS(), F32)
    assert audit([SUM_B, empty], text, {**MESH, "one": 1}).missing == ()


SCATTER = 3 * 4096 * 8192 * 4 // 4


def test_tpu_reduce_scatter_fusion_adds_a_permute_and_padding():
    planned = plan("reduce_scatter", ("b",), SCATTER, "f32[4096,8192]", 3)
    report = audit([planned], fixture("tpu_reduce_scatter_large"), MESH, "tpu")
    assert report.ok and not report.missing, str(report)
    assert sorted((c.kind, c.bytes) for c in report.compiler_added) == [
        ("permute", 3 * 96 * 8192 * 4),
        ("reduce_scatter", 3 * 3 * 128 * 8192),
    ]
    assert str(report) == (
        "audit: planned = found (1 collective, 288.0 MiB), 2 collectives, 18.0 MiB added by the compiler"
    )
    assert {c.kind for c in audit([], fixture("tpu_reduce_scatter_large"), MESH, "tpu").surprises} == {"reduce_scatter"}
    assert not audit([planned], fixture("tpu_reduce_scatter_large"), MESH, "cpu").ok


def test_tpu_runs_a_reduce_scatter_over_the_whole_mesh_as_an_all_reduce():
    planned = [
        plan("reduce_scatter", ("x",), 28672, "f32[64,128]"),
        plan("reduce_scatter", ("x",), 1792, "f32[32,16]"),
    ]
    report = audit(planned, fixture("tpu_reduce_scatter_all_axes"), X, "tpu")
    assert report.ok and not report.missing, str(report)
    assert [(c.kind, c.bytes) for c in report.compiler_added] == [("all_reduce", 28672), ("all_reduce", 1792)]
    assert not audit(planned, fixture("tpu_reduce_scatter_all_axes"), X, "cpu").ok
    assert len(audit(planned[1:], fixture("tpu_reduce_scatter_all_axes"), X, "tpu").surprises) == 1


def test_tpu_gathers_pieces_that_fill_no_tile_by_an_all_reduce():
    """Each device adds its 33 numbers to zeros, on v5e."""
    planned = plan("all_gather", ("x",), 924, "f32[1,257]")
    report = audit([planned], fixture("tpu_gather_as_all_reduce"), X, "tpu")
    assert report.ok and not report.missing, str(report)
    assert [(c.kind, c.bytes) for c in report.compiler_added] == [("all_reduce", 924)]
    assert not audit([planned], fixture("tpu_gather_as_all_reduce"), X, "cpu").ok
    assert not audit([replace(planned, bytes=800)], fixture("tpu_gather_as_all_reduce"), X, "tpu").ok


def test_gpu_glues_the_operands_of_all_reduces():
    planned = [plan("all_reduce", ("x",), 7168, "f32[8,128]"), plan("all_reduce", ("x",), 448, "f32[4,16]")]
    text = fixture("gpu_all_reduce_combined")
    assert audit(planned, text, X, "gpu").ok
    dropped = [*planned, plan("all_reduce", ("x",), 896, "f32[8,16]")]
    assert audit(dropped, text, X, "gpu").ok
    assert not audit(dropped, text, X, "cpu").ok
    assert not audit(planned[:1], text, X, "gpu").ok


def test_unknown_kinds_are_surprises():
    assert "ragged-all-to-all" in {s.kind for s in audit([], fixture("gpu_by_hand"), X, "gpu").surprises}


def test_bytes_between_meshes_are_compared():
    found = replace(audit_all([]), crossed=2048, planned_crossed=2048)
    assert found.ok and str(found).endswith("; 2.0 KiB sent from mesh to mesh, as planned")
    found = replace(found, planned_crossed=1024)
    assert not found.ok and str(found).endswith("; 2.0 KiB sent from mesh to mesh, 1.0 KiB planned")
