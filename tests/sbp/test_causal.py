"""Causal attention of split queries: pieces of float32, held against the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardc.ir.walk import operation_of
from shardc.passes.lower.lower_boxing import MeshWire
from shardc.sbp import rules
from shardc.sbp.causal import zigzag_routes
from shardc.sbp.piece import run_piece
from shardc.sbp.placement import Placement
from shardc.sbp.signature import Operation, Site, find_rule, signatures
from tests.attention_on_cpu import traced
from tests.sbp.harness import Equation, placements_of

assert rules  # imported for what it registers

WINDOW: Final[dict[str, Any]] = {"local_window_size": (4, 0)}
JUNK: Final = 1e4


@pytest.fixture(autouse=True)
def _quick(compiled_fast: None) -> Iterator[None]:
    yield


def equations(tokens: int, heads: int, keys: int, layout: str = "BTNH", **options: Any) -> tuple[Equation, Equation]:
    """The attention and its gradients. JAX traces neither of float32, though the primitives take it."""
    rng = np.random.default_rng(0)

    def rows(n: int) -> tuple[int, ...]:
        return (2, tokens, n, 8)

    def loss(*qkv: Any) -> Any:
        return jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="cudnn", **options).sum()

    half = [jnp.zeros(rows(n), jnp.float16) for n in (heads, keys, keys)]
    with traced():
        eqns: Any = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*half).jaxpr.eqns
    forward, backward = (next(e for e in eqns if e.primitive.name.endswith(f"{k}_wrapper")) for k in ("fwd", "bwd"))
    if layout == "BNTH":
        for e in (forward, backward):
            e.params["layout"] = 1
    given = [rng.normal(size=rows(n)).astype(np.float32) for n in (heads, keys, keys, heads)]
    if layout == "BNTH":
        given = [x.swapaxes(1, 2) for x in given]
    empty = [np.zeros(a.shape, a.dtype) for a in operation_of(forward).operands[3:]]
    first = _equation(forward, (*given[:3], *empty))
    result, sums = first.bind(*first.inputs)
    return first, _equation(backward, (*first.inputs, np.asarray(sums), np.asarray(result), given[3]))


def _equation(eqn: Any, inputs: tuple[np.ndarray, ...]) -> Equation:
    def bind(*xs: Any, **overrides: Any) -> list[Any]:
        return list(eqn.primitive.bind(*map(jnp.asarray, xs), **{**eqn.params, **overrides}))

    operands, results = (
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in side) for side in (inputs, bind(*inputs))
    )
    return Equation(Operation(eqn.primitive.name, operands, results, eqn.params), inputs, bind)


def split(eqn: Equation, sizes: dict[str, int], around: bool, *inputs: Any) -> list[Any]:
    """The results of an equation whose tokens are split over the axes of a mesh of CPUs, put together again."""
    found = find_rule(eqn.op)
    (tokens,) = (s for s in signatures(found, eqn.op) if s.split == "t" and bool(s.around) == around)
    placed = placements_of(found, eqn.op, {a: (n, tokens) for a, n in sizes.items()})
    assert placed is not None
    operands, results = map(tuple, placed)
    n, axes = math.prod(sizes.values()), tuple(sizes)

    def piece(*xs: Any) -> list[Any]:
        site = Site(eqn.op, operands, results, sizes, jax.lax.axis_index, eqn.bind, MeshWire(sizes))
        made = run_piece(site, found, xs)
        return [jax.lax.psum(y, axes) if p.partial_op else y for y, p in zip(made, results, strict=True)]

    def specs(placements: Sequence[Placement]) -> tuple[Any, ...]:
        return tuple(
            jax.P(*([None] * d), axes) if (d := next(iter(p.splits), None)) is not None else jax.P() for p in placements
        )

    def padded(x: Any, p: Placement) -> Any:
        widths = [(0, -size % n) if d in p.splits else (0, 0) for d, size in enumerate(x.shape)]
        return jnp.pad(x, widths, constant_values=JUNK) if any(sum(w) for w in widths) else x

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:n]).reshape(tuple(sizes.values())), axes)
    over = jax.shard_map(piece, mesh=mesh, in_specs=specs(operands), out_specs=list(specs(results)), check_vma=False)
    made = over(*map(padded, inputs, operands))
    return [y[tuple(map(slice, a.shape))] for y, a in zip(made, eqn.op.results, strict=True)]


def check(
    equations: tuple[Equation, Equation], sizes: dict[str, int], scale: float = 1.0, around: bool = False
) -> tuple[Any, ...]:
    """Holds split attention and its gradients against the whole; returns the results."""
    forward, backward = equations

    def run(*given: Any, whole: bool) -> tuple[Any, ...]:
        *qkv, dy = given
        run = (lambda e, *xs: e.bind(*xs)) if whole else lambda e, *xs: split(e, sizes, around, *xs)
        shared = (*qkv, *forward.inputs[3:])
        result, sums = run(forward, *shared)
        return result, sums, *run(backward, *shared, sums, result, dy)

    q, k, v = forward.inputs[:3]
    given = q, scale * k, v, backward.inputs[-1]
    got, want = (jax.jit(partial(run, whole=w))(*given) for w in (False, True))
    within = 2e-5 * max(1.0, abs(scale) / 100)  # float32 scores have fewer digits behind the point
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=within, atol=within * float(jnp.abs(y).max()))
    return got


@pytest.mark.parametrize(("heads", "sizes"), [((4, 2), {"a": 3}), ((2, 1), {"a": 2, "b": 4})], ids=str)
def test_halves_of_queries_meet_all_keys_before_them(heads: tuple[int, int], sizes: dict[str, int]) -> None:
    check(equations(48, *heads), sizes)


def test_keys_go_around_the_devices() -> None:
    """Six go three steps one way and two the other. With two and three, and without a mask: test_rules.py."""
    check(equations(24, 4, 2), {"a": 2, "b": 3}, around=True)


@pytest.mark.parametrize("options", [{}, WINDOW], ids=str)
def test_heads_may_come_before_tokens(options: dict[str, Any]) -> None:
    check(equations(12, 4, 2, "BNTH", **options), {"a": 3})


@pytest.mark.parametrize(("tokens", "sizes"), [(24, {"a": 2, "b": 4}), (14, {"a": 8}), (10, {"a": 4})], ids=str)
def test_a_window_reads_the_keys_before_a_block_of_any_size(tokens: int, sizes: dict[str, int]) -> None:
    check(equations(tokens, 4, 2, local_window_size=(4 if tokens > 10 else 30, 0)), sizes)


def test_scores_far_below_zero_stay_finite() -> None:
    """In front of the first token is nothing that a score of 0 would make infinite."""
    first = equations(12, 2, 1, **WINDOW)
    first[0].inputs[0][...] = np.abs(first[0].inputs[0])
    first[0].inputs[1][...] = np.abs(first[0].inputs[1])
    result = check(first, {"a": 3}, -300.0)
    assert result[1].max() < -100 and all(bool(jnp.isfinite(x).all()) for x in result)


def test_tokens_of_unlike_halves_are_not_split() -> None:
    for eqn in equations(26, 2, 1):
        assert find_rule(eqn.op).granule["t"] % 4


@pytest.mark.parametrize("n", [2, 3, 8])
def test_every_device_gets_an_early_and_a_late_half(n: int) -> None:
    got: dict[int, list[int]] = {}
    for first, route in enumerate(zigzag_routes(n)):
        for source, target in route:
            got.setdefault(target, []).append(2 * source + first)
    assert all(set(halves) == {d, 2 * n - 1 - d} for d, halves in got.items()) and len(got) == n


@pytest.mark.parametrize("options", [{}, WINDOW], ids=str)
def test_lengths_and_biases_keep_queries_whole(options: dict[str, Any]) -> None:
    lengths = np.asarray([3, 4], np.int32)
    for eqn in equations(8, 2, 1, query_seq_lengths=lengths, **options):
        assert "t" not in find_rule(eqn.op).factors()
