"""Reading collectives from HLO text: of CPU compiled here, of TPU and GPU in fixtures (whose first line says how)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as PS

from shardc.passes.audit.hlo import HloCollective, parse_collectives
from shardc.passes.audit.hlo_groups import axes_of_groups, read_groups

ALL = (tuple(range(8)),)
RING = tuple((i, (i + 1) % 8) for i in range(8))


def fixture(name: str) -> list[HloCollective]:
    return parse_collectives((Path(__file__).parent / "hlo" / f"{name}.txt").read_text())


def compiled(f, in_specs, out_specs, *args, mesh=(("x", 8),)) -> str:
    names, sizes = zip(*mesh, strict=True)
    m = Mesh(np.array(jax.devices()).reshape(sizes), names)
    mapped = jax.shard_map(f, mesh=m, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    avals = [jax.ShapeDtypeStruct(*a, sharding=NamedSharding(m, s)) for a, s in zip(args, in_specs, strict=True)]
    return jax.jit(mapped).lower(*avals).compile().as_text()


def rows(found):
    return sorted((c.kind, c.groups, [t[:3] for t in c.tensors], c.trips) for c in found)


F32 = ((64, 128), jnp.float32)
BF16 = ((64, 128), jnp.bfloat16)
X = PS("x")


@pytest.mark.parametrize(
    ("f", "spec", "expected"),
    [
        (lambda v: lax.psum(v, "x"), X, ("all_reduce", ALL, [("f32", (8, 128), 7 * 8 * 128)], 1)),
        (lambda v: lax.pmax(v, "x"), X, ("all_reduce", ALL, [("f32", (8, 128), 7 * 8 * 128)], 1)),
        (lambda v: lax.all_gather(v, "x", tiled=True), X, ("all_gather", ALL, [("f32", (64, 128), 28672)], 1)),
        (lambda v: lax.psum_scatter(v, "x", tiled=True), PS(), ("reduce_scatter", ALL, [("f32", (64, 128), 28672)], 1)),
        # XLA:CPU splits the operand of an all-to-all into one slice for each device.
        (lambda v: lax.all_to_all(v, "x", 1, 0, tiled=True), X, ("all_to_all", ALL, [("f32", (8, 8, 16), 3584)], 1)),
        (lambda v: lax.ppermute(v, "x", RING), X, ("permute", RING, [("f32", (8, 128), 4096)], 1)),
    ],
    ids=["psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_each_collective_on_cpu(f, spec, expected):
    assert rows(parse_collectives(compiled(f, (spec,), PS(None, None), F32))) == [expected]


def test_sources_are_lines_of_user_code():
    def reduces(v):
        return lax.psum(v, "x")

    (c,) = parse_collectives(compiled(reduces, (X,), PS(), F32))
    assert c.source == f"test_hlo.py:{reduces.__code__.co_firstlineno + 1} (reduces)"


def test_combined_collective_has_one_tensor_each_and_knows_which_was_promoted():
    def f(a, b, c):
        return lax.psum(a, "x"), lax.psum(b, "x"), lax.psum(c, "x")

    (c,) = parse_collectives(compiled(f, (X, X, X), (PS(), PS(), PS()), F32, ((32, 16), jnp.float32), BF16))
    assert sorted((t.dtype, t.shape, t.bytes, t.promoted) for t in c.tensors) == [
        ("f32", (4, 16), 448, False),
        ("f32", (8, 128), 7168, False),
        ("f32", (8, 128), 7168, True),
    ]
    assert c.bytes == 448 + 7168 + 7168
    assert c.promoted


@pytest.mark.parametrize(
    "f",
    [
        lambda v: lax.psum(v, "x"),
        lambda v: lax.all_gather(v, "x", tiled=True),
        lambda v: lax.all_to_all(v, "x", 1, 0, tiled=True),
        lambda v: lax.ppermute(v, "x", RING),
    ],
    ids=["psum", "all_gather", "all_to_all", "ppermute"],
)
def test_bf16_is_promoted_on_cpu(f):
    (c,) = parse_collectives(compiled(f, (X,), PS(None, None), BF16))
    assert (c.tensors[0].dtype, c.promoted) == ("f32", True)


def test_loops_multiply():
    def f(v):
        def outer(c, _):
            return lax.scan(lambda d, _: (jnp.tanh(lax.psum(d, "x")), None), c, None, length=3)[0], None

        return lax.ppermute(lax.scan(outer, v, None, length=5)[0], "x", RING)

    found = parse_collectives(compiled(f, (X,), X, F32))
    assert sorted((c.kind, c.trips) for c in found) == [("all_reduce", 15), ("permute", 1)]


def test_loop_that_ends_on_data_has_unknown_trips():
    def f(v):
        return lax.while_loop(lambda c: c[0, 0] < 10.0, lambda c: lax.psum(c, "x"), v)

    (c,) = parse_collectives(compiled(f, (X,), X, F32))
    assert c.trips is None


def test_both_branches_of_a_conditional_count():
    def f(v):
        return lax.cond(v[0, 0] > 0, lambda a: lax.psum(a, "x"), lambda a: lax.all_gather(a, "x", tiled=True)[:8], v)

    assert sorted(c.kind for c in parse_collectives(compiled(f, (X,), X, F32))) == ["all_gather", "all_reduce"]


def test_groups_of_one_device_are_left_out():
    mesh = (("x", 8), ("y", 1))
    assert "all-reduce" in (text := compiled(lambda v: lax.psum(v, "y"), (X,), X, F32, mesh=mesh))
    assert parse_collectives(text) == []


@pytest.mark.parametrize("axes", [("a",), ("b",), ("c", "a"), ("b", "c"), ("a", "b", "c")])
def test_groups_follow_their_axes_on_cpu(axes):
    mesh = {"a": 2, "b": 2, "c": 2}
    (c,) = parse_collectives(compiled(lambda v: lax.psum(v, axes), (PS(),), PS(), F32, mesh=tuple(mesh.items())))
    assert axes_of_groups(c.groups, mesh) == tuple(sorted(axes))


def test_partitioner_prints_groups_along_named_and_cut_axes():
    """The jit partitioner's own collectives come with `mesh['axis_0'=4,...], device_ids=(...) {'axis_0':(2)2}`."""
    m = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    aval = jax.ShapeDtypeStruct(*F32, sharding=NamedSharding(m, PS("a", "b")))
    text = jax.jit(lambda v: v * 2, out_shardings=NamedSharding(m, PS("b", "a"))).lower(aval).compile().as_text()
    assert "replica_groups=mesh[" in text
    exchange, permute = sorted(parse_collectives(text), key=lambda c: c.kind)
    assert {frozenset(g) for g in exchange.groups} == {frozenset(g) for g in ((0, 1), (2, 3), (4, 5), (6, 7))}
    assert axes_of_groups(exchange.groups, {"a": 2, "b": 4}) is None
    assert permute.bytes == 64 * 128 // 8 * 4


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=%add", ((0, 1), (2, 3))),
        ("replica_groups=[2,4]<=[8], x=1", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['axis_0'=1,'axis_2'=8] {'axis_2'}, x={1}", ALL),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'b'}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups={}, to_apply=%add", ALL),
        ("to_apply=%add", ALL),
    ],
)
def test_read_groups(text, groups):
    assert read_groups(text, 8) == groups


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("b",)),
        (((4, 0), (5, 1), (2, 6), (3, 7)), ("a",)),
        (ALL, ("a", "b")),
        (((0, 1), (2, 3), (4, 5), (6, 7)), None),  # half of b
        (((0, 4), (1, 6), (2, 5), (3, 7)), None),
        (((0, 4), (1, 5)), None),
    ],
)
def test_axes_of_groups(groups, axes):
    assert axes_of_groups(groups, {"a": 2, "one": 1, "b": 4}) == axes


SCAN = [
    ("all_gather", ALL, [("f32", (128, 128), 57344)], 4),
    ("all_reduce", ALL, [("f32", (8, 128), 7168)], 4),
    ("permute", ((0, 1),), [("f32", (8, 128), 4096)], 4),
]


def test_gpu_asynchronous_pairs_in_a_loop():
    assert rows(fixture("gpu_scan")) == SCAN


def test_tpu_loop_without_a_noted_trip_count_and_a_narrowed_gather():
    """XLA:TPU notes no trip count, and gathers what it will round to bf16 for the matrix unit as bf16."""
    found = fixture("tpu_scan")
    assert rows(found) == [("all_gather", ALL, [("bf16", (1, 128, 128), 28672)], 4), *SCAN[1:]]
    assert {c.source for c in found} == {"progs.py:43 (body)"}
    (nested,) = fixture("tpu_scan_nested")
    assert nested.trips == 15


def test_tpu_asynchronous_gather_is_one_that_fusions_go_on_with():
    """The gather stands in the fusion that starts it, in each product beside it, and in the one that waits."""
    found = fixture("tpu_async_gather")
    gathers = [("all_gather", ALL, [("bf16", shape, 29360128)], 3) for shape in ((1, 2048, 8192), (1, 8192, 2048))]
    assert rows(found) == gathers
    assert {c.source for c in found} == {"async.py:12 (step)", "async.py:13 (step)"}


def test_tpu_large_reduce_scatter_is_a_fusion_with_padding_and_a_permute():
    scatter, permute = fixture("tpu_reduce_scatter_large")
    assert (scatter.kind, scatter.trips, axes_of_groups(scatter.groups, {"a": 2, "b": 4})) == (
        "reduce_scatter",
        3,
        ("b",),
    )
    (tensor,) = scatter.tensors
    logical, padding = 3 * 4096 * 8192 * 4 // 4, 3 * 128 * 8192 * 4 // 4
    assert (tensor.shape, tensor.bytes, tensor.padding) == ((4096, 8192), logical + padding, padding)
    assert (permute.kind, permute.bytes, permute.added) == ("permute", 96 * 8192 * 4, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu_all_gather_combined", ("all_gather", ALL, [("f32", (64, 128), 28672), ("f32", (128, 4), 1792)], 1)),
        (
            "gpu_reduce_scatter_combined",
            ("reduce_scatter", ALL, [("f32", (64, 128), 28672), ("f32", (32, 16), 1792)], 1),
        ),
        ("gpu_all_reduce_combined", ("all_reduce", ALL, [("f32", (1088,), 7616)], 1)),
        ("gpu_all_to_all", ("all_to_all", ALL, [("f32", (8, 128), 3584)], 1)),
        (
            "tpu_all_to_all",
            ("all_to_all", ((0, 1, 4, 5), (2, 3, 6, 7)), [("f32", (4, 1, 512), 6144)], 1),
        ),
    ],
)
def test_forms_of_one_collective(name, expected):
    assert rows(fixture(name)) == [expected]


def test_tpu_conditional():
    assert sorted(c.kind for c in fixture("tpu_cond")) == ["all_gather", "all_reduce", "all_reduce"]


def test_forms_that_no_compiler_here_prints():
    """Iota groups, async-start around a computation, typed operands, source_line metadata, an outlined call."""
    listed = fixture("gpu_by_hand")
    found = {c.name: c for c in listed}
    assert [c.name for c in listed] == ["ars", "reduce-scatter.1", "psum", "promoted", "ragged"]
    assert [t[:3] for t in found["ars"].tensors] == [("f32", (64, 128), 57344), ("f32", (8, 128), 7168)]
    assert found["ars"].source == "jit(step)/psum"
    scatter = found["reduce-scatter.1"]
    assert (scatter.groups, scatter.bytes, scatter.source) == (((0, 1, 2, 3), (4, 5, 6, 7)), 24576, "step.py:12")
    assert found["psum"].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (found["promoted"].promoted, found["promoted"].groups, found["promoted"].bytes) == (True, ALL, 42)
    assert found["ragged"].kind == "ragged-all-to-all"


def test_text_that_is_not_hlo():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_collectives("module @jit_f {}")


def test_collectives_that_tpus_give_to_sparsecores():
    found = fixture("tpu_sparsecore")
    assert [(c.kind, c.groups, c.bytes) for c in found] == [
        ("all_gather", ALL, 57344),
        ("reduce_scatter", ALL, 57344),
    ]
