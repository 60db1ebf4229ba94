"""Boxings on devices: exact values from pieces whose padding is poisoned; and one collective in the HLO per step."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardc.machine.mesh import make_mesh, view
from shardc.passes.lower.lower_boxing import emit_step, permute_pairs
from shardc.sbp.boxing import all_placements, find_boxing
from shardc.sbp.cost import BoxingStep
from shardc.sbp.placement import Placement, ReduceOp
from shardc.sbp.signature import neutral_value
from tests.sbp.simulate import Pieces, devices, place, read

pytestmark = pytest.mark.usefixtures("compiled_fast")

Pair = tuple[Placement, Placement]
POISON = 77
"""What stands in the padding where the dtype has no NaN."""


def compile_boxings(pairs: Sequence[Pair], shape: tuple[int, ...], axes: dict[str, int], dtype: Any) -> Any:
    """One program for all `pairs`: the stacked pieces of each source to the stacked pieces of each target."""
    mesh, itemsize = make_mesh(**axes), np.dtype(dtype).itemsize
    spec = PartitionSpec(tuple(axes))

    def body(sources: dict[str, jax.Array]) -> list[jax.Array]:
        found: list[jax.Array] = []
        for src, dst in pairs:
            piece = sources[str(src)][0]
            for step in find_boxing(shape, itemsize, src, dst, view(mesh)).steps:
                piece = emit_step(step, piece, shape, axes, jax.lax.axis_index)
            found.append(piece[None])
        return found

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})  # half the compile time
    return program, NamedSharding(mesh, spec)


def stack(pieces: Pieces, dtype: Any) -> np.ndarray:
    stacked = np.stack(list(pieces.values()))
    if np.dtype(dtype) == np.bool_:
        stacked = np.clip(stacked, 0, 1)
    if not jnp.issubdtype(dtype, np.floating):
        stacked = np.nan_to_num(stacked, nan=POISON)
    return stacked.astype(dtype)


def check(
    pairs: Sequence[Pair],
    shape: tuple[int, ...],
    axes: dict[str, int],
    dtype: Any = np.float32,
    values: range = range(-50, 50),
) -> None:
    """The value is the same after each boxing, on every device that holds any of it."""
    rng = np.random.default_rng(0)
    x = rng.choice(values, shape)
    for some in (pairs[i : i + 50] for i in range(0, len(pairs), 50)):
        program, sharding = compile_boxings(some, shape, axes, dtype)
        sources = {str(src): stack(place(x.astype(float), src, axes, rng), dtype) for src, _ in some}
        for (src, dst), got in zip(some, program(jax.device_put(sources, sharding)), strict=True):
            assert got.dtype == dtype, f"{src} -> {dst} gives {got.dtype}"
            pieces = dict(zip(devices(axes), np.asarray(got).astype(float), strict=True))
            for copy in read(pieces, dst, shape, axes):
                np.testing.assert_array_equal(copy, x, err_msg=f"{src} -> {dst}, {shape} on {axes}")


def all_pairs(rank: int, axes: dict[str, int], op: ReduceOp = "sum") -> list[Pair]:
    pairs = itertools.product(all_placements(rank, tuple(axes), op), repeat=2)
    return [(p, q) for p, q in pairs if op == "sum" or p.partial_op or q.partial_op]


def sample(pairs: Sequence[Pair], n: int, seed: int = 0) -> list[Pair]:
    return [pairs[i] for i in sorted(np.random.default_rng(seed).choice(len(pairs), n, replace=False))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("shape", [(16, 8), (5, 7), (1, 3), (0, 8)], ids=str)
def test_all_boxings_on_one_axis(shape: tuple[int, ...], op: ReduceOp) -> None:
    check(all_pairs(2, {"a": 8}, op), shape, {"a": 8})


TWO_AXES = [{"a": 4, "b": 2}, {"a": 2, "b": 4}]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("shape", [(16, 8), (5, 7)], ids=str)
@pytest.mark.parametrize("axes", TWO_AXES, ids=str)
def test_all_boxings_on_two_axes(shape: tuple[int, ...], axes: dict[str, int], op: ReduceOp) -> None:
    check(all_pairs(2, axes, op), shape, axes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", TWO_AXES, ids=str)
@pytest.mark.parametrize("shape", [(13, 1), (8, 16)], ids=str)
def test_some_boxings_on_two_axes(shape: tuple[int, ...], axes: dict[str, int]) -> None:
    check(sample(all_pairs(2, axes), 50), shape, axes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(8, 4, 8), (5, 7, 3)], ids=str)
def test_some_boxings_on_three_axes(shape: tuple[int, ...]) -> None:
    axes = {"a": 2, "b": 2, "c": 2}
    check(sample(all_pairs(3, axes), 100), shape, axes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (np.int8, "max"), (np.int32, "sum"), (np.int32, "min"), (np.uint8, "max"),
        (jnp.bfloat16, "sum"), (jnp.bfloat16, "min"), (np.float16, "max"),
    ],
    ids=lambda p: p if isinstance(p, str) else np.dtype(p).name,
)  # fmt: skip
def test_some_boxings_of_other_dtypes(dtype: Any, op: ReduceOp) -> None:
    axes = {"a": 4, "b": 2}
    values = range(9, 50) if dtype == np.uint8 else range(-50, 50)  # parts of a maximum go down to 9 below it
    check(sample(all_pairs(2, axes, op), 25), (5, 7), axes, dtype, values)


@pytest.mark.parametrize("op", ["max", "min"])
def test_boxings_of_booleans(op: ReduceOp) -> None:
    axes = {"a": 4, "b": 2}
    check(sample(all_pairs(2, axes, op), 25), (5, 7), axes, np.bool_, range(2))


def test_booleans_pass_through_a_fill_of_false() -> None:
    """Filled and summed is cheaper here than gathered and sent, though no value may be a P(sum) of booleans."""
    axes, shape = {"a": 4, "b": 2}, (1, 8)
    pairs = [p for p in all_pairs(2, axes) if not p[0].partial_op and not p[1].partial_op]
    kinds = [{s.kind for s in find_boxing(shape, 1, *p, view(make_mesh(**axes))).steps} for p in pairs]
    summed = [(p, k) for p, k in zip(pairs, kinds, strict=True) if k & {"reduce_scatter", "all_reduce"}]
    assert set.union(*(k for _, k in summed)) >= {"fill", "reduce_scatter", "all_reduce"}
    check([p for p, _ in summed][:40], shape, axes, np.bool_, range(2))


def test_boxings_from_one_partial_op_to_another() -> None:
    axes, parse = {"a": 4, "b": 2}, Placement.parse
    pairs = [
        (parse("{a: P(sum)}"), parse("{a: P(max)}")),
        (parse("{a: P(max), b: P(max)}"), parse("{b: P(sum)}")),
        (parse("{a: P(min), b: S(0)}"), parse("{a: S(1), b: P(max)}")),
    ]
    check(pairs, (5, 7), axes)


COLLECTIVES = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}


def collectives_in(hlo: str) -> Counter[str]:
    """How often each kind of collective stands in compiled HLO."""
    found = re.findall(rf"\s({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo)
    return Counter(COLLECTIVES[name] for name in found)


@pytest.mark.sampled(by=lambda shape, axes, src, dst: {(src, dst), (str(axes), shape)})
@pytest.mark.parametrize("shape", [(16, 8), (5, 7)], ids=str)
@pytest.mark.parametrize(
    ("axes", "src", "dst"),
    [
        ({"a": 8}, "{a: S(0)}", "{}"),
        ({"a": 8}, "{a: P(sum)}", "{}"),
        ({"a": 8}, "{a: P(max)}", "{a: S(1)}"),
        ({"a": 8}, "{a: S(0)}", "{a: S(1)}"),
        ({"a": 8}, "{a: S(0)}", "{a: P(sum)}"),
        ({"a": 4, "b": 2}, "{a: P(sum), b: P(sum)}", "{}"),
        ({"a": 4, "b": 2}, "{a: P(sum), b: S(0)}", "{a: S(0), b: S(1)}"),
        ({"a": 4, "b": 2}, "{a: S(0), b: S(0)}", "{b: S(0), a: S(0)}"),
        ({"a": 4, "b": 2}, "{a: P(sum)}", "{}"),
        ({"a": 4, "b": 2}, "{b: P(max), a: S(1)}", "{b: P(sum)}"),
        ({"a": 2, "b": 4}, "{a: S(1), b: S(0)}", "{a: S(0), b: P(sum)}"),
    ],
)
def test_compiled_collectives_are_the_steps(axes: dict[str, int], src: str, dst: str, shape: tuple[int, ...]) -> None:
    pair = (Placement.parse(src), Placement.parse(dst))
    program, sharding = compile_boxings([pair], shape, axes, np.float32)
    sources = {str(pair[0]): stack(place(np.zeros(shape), pair[0], axes, np.random.default_rng(0)), np.float32)}
    hlo = program.lower(jax.device_put(sources, sharding)).compile().as_text()
    steps = find_boxing(shape, 4, *pair, view(make_mesh(**axes))).steps
    assert collectives_in(hlo) == Counter(s.kind for s in steps if s.is_collective)


def test_nothing_moves_of_a_value_without_elements() -> None:
    axes, pair = {"a": 8}, (Placement.parse("{a: P(sum)}"), Placement.parse("{a: S(0)}"))
    program, _ = compile_boxings([pair], (0, 8), axes, np.float32)
    assert not collectives_in(program.lower({"{a: P(sum)}": np.zeros((8, 0, 8), np.float32)}).compile().as_text())


def test_hlo_counter_sees_each_syntax() -> None:
    hlo = """
      %all-reduce.1 = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}
      %ag = (f32[1], f32[8]) all-gather-start(%all-reduce.1), dimensions={0}
      %agd = f32[8] all-gather-done(%ag)
      ROOT %p = f32[8] collective-permute(%agd), source_target_pairs={{0,1}}
    """
    assert collectives_in(hlo) == {"all_reduce": 1, "all_gather": 1, "permute": 1}


def test_neutral_elements() -> None:
    for dtype in (np.int8, np.uint16, np.int32, np.float32, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn, np.bool_):
        values = np.asarray([0, 1, 1, 0], dtype)
        for kind, reduce in (("lowest", np.maximum), ("highest", np.minimum)):
            neutral = neutral_value(kind, np.dtype(dtype))
            assert neutral.dtype == dtype and neutral.shape == ()
            np.testing.assert_array_equal(reduce(values, neutral), values)
        assert neutral_value("zero", np.dtype(dtype)) == 0
    assert neutral_value("lowest", np.dtype(np.float32)) == -np.inf
    assert neutral_value("highest", np.dtype(np.int8)) == 127
    # the smallest and the largest there are, where there is no infinity
    assert neutral_value("lowest", np.dtype(jnp.float8_e4m3fn)) == jnp.finfo(jnp.float8_e4m3fn).min


def test_a_permute_leaves_alone_what_is_in_place() -> None:
    sizes = {"a": 2, "b": 2}
    src, dst = Placement.parse("{a: S(0), b: S(0)}"), Placement.parse("{b: S(0), a: S(0)}")
    pairs = permute_pairs(BoxingStep("permute", ("a", "b"), src, dst), (8,), sizes)
    assert pairs == [(0, 0), (2, 1), (1, 2), (3, 3)]
