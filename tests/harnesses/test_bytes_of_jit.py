"""No plan sends more than `jax.jit` with the same pins: bytes of plans against the collectives that XLA's partitioner
puts into the compiled program.

Plans are made for a machine where only bytes take time: elsewhere one collective of more bytes may be faster than two
of fewer.
"""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from examples.zoo import MODELS
from shardc import S
from shardc.machine.topology import TOPOLOGIES
from shardc.passes.audit.hlo import parse_collectives
from shardc.sbp.placement import Placement, is_even
from tests.harnesses.cases import Case, choose
from tests.harnesses.draws import MESHES, mesh_of

pytestmark = pytest.mark.usefixtures("compiled_fast")

DEARER: Final = {
    "random_keys_carried": "a stack that is cut behind its loop counts as a microsecond more, and here as nothing sent",
    "reduce_gen_max_min_shape_int32_4_6_initvalue_3_nr_operands_2_dimensions_0_1_": "a reduction of several operands "
    "by a function of one's own is not divided",
}
"""Cases whose plans may send more, each with the reason. The fewer the better."""


def only_bytes(number: int) -> Any:
    """The mesh of this number, without devices, on a machine where only bytes take time."""
    return on_bytes_alone(**MESHES[number])


@functools.cache
def on_bytes_alone(**axes: int) -> Any:
    cpu = TOPOLOGIES["cpu"]
    fabrics = tuple(replace(f, latency=0.0) for f in cpu.fabrics)
    machine = replace(cpu, flops=1e24, memory_bandwidth=1e24, launch=0.0, fabrics=fabrics, vector=0.0, dispatch=0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.json")
        path.write_text(machine.to_json(), "utf-8")
        return shardc.make_mesh(topology=str(path), **axes)


def sent(fn: Callable[..., Any], args: Sequence[Any], ins: Any, outs: Any, number: int) -> tuple[float, int]:
    """Bytes that each device sends: in the plan, and in the program of jit. `ins` and `outs` are pytrees of placements
    beside the arguments and the results."""
    plan = shardc.function(fn, mesh=only_bytes(number), in_placements=tuple(ins), out_placements=outs).plan(*args)
    return plan.bytes_per_device, sent_by_jit(fn, args, ins, outs, mesh_of(number))


def sent_by_jit(fn: Callable[..., Any], args: Sequence[Any], ins: Any, outs: Any, mesh: Any) -> int:
    at = partial(jax.tree.map, lambda p: p.to_sharding(mesh), is_leaf=lambda p: isinstance(p, Placement))
    jitted = jax.jit(fn, in_shardings=at(tuple(ins)), out_shardings=at(outs))
    try:
        lowered = jitted.lower(*args)
    except NotImplementedError as error:
        pytest.skip(f"this JAX has no kernel for it: {error}")
    found = parse_collectives(lowered.compile().as_text())
    return sum(c.bytes * (c.trips or 1) for c in found)


def drawn(shape: Sequence[int], mesh: Any, rng: np.random.Generator) -> Placement:
    """A random placement that splits dimensions evenly."""
    rank = len(shape)
    for _ in range(8):
        dims = {axis: int(rng.integers(-1, rank)) for axis in mesh.shape}
        found = Placement({axis: S(d) for axis, d in dims.items() if d >= 0})
        if is_even(shape, found, mesh.shape):
            return found
    return Placement()


def _usable(case: Case) -> bool:
    """Whether jit compiles it: XLA's partitioner ends the process at some convolutions."""
    return not case.undefined and "conv" not in case.group


CASES: Final = {c.name: c for c in choose(limit=2) if _usable(c)}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", list(CASES))
def test_operations_send_no_more_than_under_jit(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(zlib.crc32(name.encode()))
    number = int(rng.integers(len(MESHES)))
    mesh = mesh_of(number)
    with jax.enable_x64(True):
        args = case.arguments(0)
        ins = [jax.tree.map(lambda x: drawn(np.shape(x), mesh, rng), a) for a in args]
        outs = jax.tree.map(lambda x: drawn(x.shape, mesh, rng), jax.eval_shape(case.fn, *args))
        ours, theirs = sent(case.fn, args, ins, outs, number)
    assert ours <= theirs or name in DEARER, f"{ours} bytes, jit {theirs}; {mesh.shape}, {ins} -> {outs}"


# -- steps of training


ROWS, TOKENS = {"a": S(0)}, {"a": S(0), "b": S(1)}


def flattened_loss(w, x, y):
    logits = x.reshape(-1, x.shape[-1]) @ w
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y.reshape(-1, 1), 1).mean()


def grouped(w, x, y):
    """GShard's groups: experts of each group of rows take the tokens of which they have most weight."""
    groups = x.reshape(4, -1, x.shape[-1])
    gates = jax.nn.softmax(groups @ w[:, :4])
    return ((jnp.einsum("gse,gsd->ged", gates, groups) @ w).reshape(4, 4, -1) ** 2).mean()


def attention(w, x, y):
    q, k, v = jnp.split(x @ jnp.concatenate([w, w, w], 1), 3, -1)
    q, k, v = (z.reshape(*z.shape[:2], 4, -1) for z in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return (jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) ** 2).mean()


def layers(w, x, y):
    return (jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0] ** 2).mean()


def nearest(w, x, y):
    points = x.reshape(-1, x.shape[-1])
    return ((points[:, None] - w[None]) ** 2).sum(-1).min(1).mean()


def neighbours(w, x, y):
    return ((x - jnp.roll(x, 1, 1)) @ w).var()


def group_norms(w, x, y):
    return (jnp.linalg.norm((x @ w).reshape(4, -1, w.shape[1]), axis=(1, 2)) ** 3).sum()


def halves(w, x, y):
    z, half = jnp.tanh(x @ w), x.shape[0] // 2
    return (z[:half] * z[half:]).mean()


def six_groups(w, x, y):
    z = (x[:, :12] @ w).reshape(6, -1, w.shape[1])
    return (jnp.tanh(z - z.mean(1, keepdims=True)) ** 2).sum()


FOREIGN: Final = [
    flattened_loss, grouped, attention, layers, nearest, neighbours, group_norms, halves, six_groups,
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("axes", "w", "x"),
    [({"a": 8}, {}, ROWS), ({"a": 4, "b": 2}, {}, TOKENS), ({"a": 2, "b": 4}, {"b": S(1)}, ROWS)],
    ids=["rows", "tokens", "columns"],
)
@pytest.mark.parametrize("loss", FOREIGN)
def test_steps_send_no_more_than_under_jit(loss, axes, w, x) -> None:
    rng = np.random.default_rng(0)
    args = [
        rng.normal(size=(16, 16)).astype("float32"), rng.normal(size=(8, 16, 16)).astype("float32"),
        rng.integers(0, 16, (8, 16)).astype("int32"),
    ]  # fmt: skip
    w, x = Placement(w), Placement(x)
    ins, outs, step = (w, x, x), (Placement(), w), jax.value_and_grad(loss)
    ours = shardc.function(step, mesh=on_bytes_alone(**axes), in_placements=ins, out_placements=outs).plan(*args)
    theirs = sent_by_jit(step, args, ins, outs, shardc.make_mesh(**axes))
    assert ours.bytes_per_device <= theirs, f"jit sends {theirs}\n{ours.explain()}"


ZOO: Final = [
    ("mlp", "test", "data_tensor", {"data": 4, "model": 2}),
    ("dlrm", "tiny", "tables", {"data": 4, "model": 2}),
    ("gpt2", "test", "tensor", {"model": 8}),
]
"""Models, of sizes that jit can split: it takes even pieces alone."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "size", "plan", "axes"), ZOO)
def test_models_send_no_more_than_under_jit(name, size, plan, axes) -> None:
    model = MODELS[name]
    cfg = model.configs[size]
    init, step = model.make_step(cfg)
    args = [*jax.eval_shape(init, jax.random.key(0)), next(model.batches(cfg, model.rows, 0))]
    ours = shardc.function(step, mesh=on_bytes_alone(**axes), **model.plans[plan]()).plan(*args)
    theirs = sent_by_jit(step, args, ours.in_placements, ours.out_placements, shardc.make_mesh(**axes))
    assert ours.bytes_per_device <= theirs, f"jit sends {theirs}\n{ours.explain()}"
