"""The rows at sizes of real models, in float32, for slices of v5p: planned, not compiled.

Blocks have a width of 8192 and sequences of 2048; products are of 16384 x 16384.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from benchmarks.gold import data, products, tensor, tokens
from benchmarks.gold.row import Row

TOPOLOGY = "v5p"
WIDE = {"T": 2048, "D": 8192}


def named(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    """By name and mesh: `fsdp_tensor_8x8`."""
    for row in rows:
        mesh = f"_{'x'.join(map(str, row.mesh.values()))}"
        name = row.name.replace(mesh, "") + mesh
        yield name, replace(row, name=name)


def blocks() -> Iterator[Row]:
    t, whole = tensor, tensor.WHOLE
    yield t.blocks("megatron", "8(t-1)/t·A", 8, whole, L=1, B=8, **WIDE)
    yield t.blocks("megatron_recompute", "12(t-1)/t·A", 12, whole, block=t.jax.checkpoint(t.block), L=2, B=8, **WIDE)
    yield t.blocks("megatron_sequence", "8(t-1)/t·A", 8, t.TOKENS_SPLIT, inner=t.sequence_split, L=1, B=8, **WIDE)
    yield t.blocks("parallel_block", "4(t-1)/t·A", 4, whole, block=t.parallel_block, L=1, B=8, **WIDE)
    yield from t.vocabulary(B=8, V=65536, **WIDE)
    yield t.whole_model(B=8, V=65536, **WIDE)


def batches() -> Iterator[Row]:
    yield data.tied_weights(rows=64, V=65536, **WIDE)
    yield data.accumulated(rows=64, **WIDE)
    yield from data.zero(rows=64, **WIDE)
    for d, t in ((2, 4), (8, 8), (32, 4)):
        yield data.data_and_tensor(d, t, rows=2 * d, **WIDE)
        yield data.fsdp_and_tensor(d, t, rows=2 * d, **WIDE)
    yield data.fsdp_and_tensor(d=8, t=8, r=4, rows=64, **WIDE)


def sequences() -> Iterator[Row]:
    long = {"K": 128, "T": 8192}
    yield tokens.experts(rows=64, T=1024, D=4096, F=16384)
    yield tokens.sequence(
        "ulysses", tokens.ULYSSES, lambda k: (4 + 4 * k) / 8, H=64, I=8, **long, inner=tokens.heads_exchanged
    )
    yield tokens.sequence(
        "gathered_keys", tokens.GATHERED, lambda k: 4 * k, H=4, I=1, **long, inner=tokens.keys_gathered
    )


def grids() -> Iterator[Row]:
    for n in (2, 4):
        yield from products.summa(n, 16384)
        yield from products.two_and_a_half(n, n, 16384)
        yield from products.three(n, 16384)


LARGE: dict[str, Row] = dict(named((*blocks(), *batches(), *sequences(), *grids())))
FASTER: dict[str, str] = {
    "fsdp_tensor_8x8": "1.015 of it is sent, in 0.83 of the time: pieces of products go around",
    "hybrid_tensor_4x8x8": "1.030 of it is sent, in 0.95 of the time: weights come along replica and data at once",
}
"""Rows whose plans, on both sides, send more than the formula, for the formula's plan is not the fastest: what is sent,
and in what part of the least time of all plans that do without, of which the formula's is one."""
