"""Experts that drop no token: rows go to the devices of their experts, with one device's numbers in both branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import S
from shardc.errors import ArgumentError
from shardc.passes.rewrite.experts.routes import Grid

pytestmark = pytest.mark.usefixtures("compiled_fast")

WIDTH, HIDDEN, EXPERTS, CHOSEN = 4, 6, 16, 2
ROWS = 250  # no multiple of eight

MESHES = {
    "8": shardc.make_mesh(e=8),
    "2 x 4": shardc.make_mesh(data=2, e=4),
}
TOKENS = {"8": {"e": S(0)}, "2 x 4": {"data": S(0), "e": S(0)}}


def experts(xs: Any, sizes: Any, w: Any) -> Any:
    gate, up, down = w
    return lax.ragged_dot(jax.nn.silu(lax.ragged_dot(xs, gate, sizes)) * lax.ragged_dot(xs, up, sizes), down, sizes)


def top_1(x: Any, scores: Any, w: Any) -> Any:
    """Sorted, computed, written back."""
    chosen = jnp.argmax(scores, -1)
    order = jnp.argsort(chosen)
    ys = experts(x[order], jnp.bincount(chosen, length=EXPERTS), w)
    return jnp.zeros_like(x).at[order].set(ys) * jnp.max(jax.nn.softmax(scores), -1, keepdims=True)


def top_k(x: Any, scores: Any, w: Any) -> Any:
    """As MaxText does it: rows are repeated, sorted, computed, brought back into their order and added up."""
    weights, chosen = lax.top_k(jax.nn.softmax(scores), CHOSEN)
    order = jnp.argsort(chosen.reshape(-1))
    xs = jnp.take(jnp.repeat(x, CHOSEN, axis=0), order, axis=0)
    ys = experts(xs, jnp.bincount(chosen.reshape(-1), length=EXPERTS), w)
    ys = jnp.take(ys, jnp.argsort(order), axis=0).reshape(*chosen.shape, -1)
    return jnp.einsum("tkd,tk->td", ys, weights)


def added(x: Any, scores: Any, w: Any) -> Any:
    """Results are weighted while they are sorted, and added to the tokens."""
    weights, chosen = lax.top_k(jax.nn.softmax(scores), CHOSEN)
    order = jnp.argsort(chosen.reshape(-1))
    token = order // CHOSEN
    ys = experts(x[token], jnp.bincount(chosen.reshape(-1), length=EXPERTS), w)
    return x + jnp.zeros_like(x).at[token].add(ys * weights.reshape(-1)[order][:, None])


def biased(x: Any, scores: Any, w: Any) -> Any:
    """Each expert has a bias, and rows are normed."""
    weights, chosen = lax.top_k(jax.nn.softmax(scores), CHOSEN)
    order = jnp.argsort(chosen.reshape(-1))
    expert, token = chosen.reshape(-1)[order], order // CHOSEN
    ys = experts(x[token], jnp.bincount(chosen.reshape(-1), length=EXPERTS), w) + w[1][:, :, 0][expert]
    ys = ys / (1e-3 + jnp.linalg.norm(ys, axis=-1, keepdims=True))
    return jax.ops.segment_sum(ys * weights.reshape(-1)[order][:, None], token, num_segments=x.shape[0])


def expert_choice(x: Any, scores: Any, w: Any) -> Any:
    """Each expert takes as many tokens."""
    weights, token = lax.top_k(jax.nn.softmax(scores).T, x.shape[0] * CHOSEN // EXPERTS)
    ys = experts(x[token.reshape(-1)], jnp.full(EXPERTS, token.shape[1], np.int32), w)
    return jnp.zeros_like(x).at[token.reshape(-1)].add(ys * weights.reshape(-1)[:, None])


def with_shared(x: Any, scores: Any, w: Any) -> Any:
    """DeepSeek: an expert that all tokens go to, and a residual."""
    return x + top_k(jnp.tanh(x), scores, w) + jax.nn.silu(x @ w[0][0]) @ w[2][0]


def two_layers(x: Any, scores: Any, w: Any) -> Any:
    def layer(x: Any, scale: Any) -> Any:
        return x + added(x, scores * scale, w), None

    return lax.scan(jax.checkpoint(layer), x, jnp.array([1.0, -1.0], x.dtype))[0]


def one_after_the_other(x: Any, scores: Any, w: Any) -> Any:
    return added(top_1(x, scores, w), -scores, w)


FORMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (top_1, top_k, added, biased, expert_choice, with_shared, two_layers, one_after_the_other)
}  # fmt: skip


def inputs(rows: int = ROWS) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    shapes = [(EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    w = [rng.normal(size=s).astype(np.float32) for s in shapes]
    return rng.normal(size=(rows, WIDTH)).astype(np.float32), rng.normal(size=(rows, EXPERTS)).astype(np.float32), w


def skewed(scores: Any, busy: int = 2) -> Any:
    """All tokens like the same experts best, so that a device overflows and other experts are empty."""
    return scores + np.where(np.arange(EXPERTS) < busy, 100.0, 0.0).astype(np.float32)


def gradient(form: Callable[..., Any]) -> Callable[..., Any]:
    def step(x: Any, scores: Any, w: Any) -> Any:
        return jax.grad(lambda x, scores, w: jnp.sum(form(x, scores, w) ** 2), (0, 1, 2))(x, scores, w)

    return step


@pytest.fixture
def always(monkeypatch):
    """Whatever can be exchanged is: small rows are cheaper to gather."""
    monkeypatch.setattr("shardc.plan.make._is_cheaper", lambda found, other: True)


def run(fn: Callable[..., Any], mesh: str, out: Any, **options: Any) -> Any:
    places = (TOKENS[mesh], TOKENS[mesh], [{"e": S(0)}] * 3)
    ends = places if out is None else out
    return shardc.function(fn, mesh=MESHES[mesh], in_placements=places, out_placements=ends, **options)


def check(placed: Any, fn: Callable[..., Any], x: Any, scores: Any, w: Any) -> None:
    for s in (scores, skewed(scores)):
        got, want = placed(x, s, w), fn(x, s, w)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-3, atol=1e-4 * max(1.0, np.abs(b).max()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("form", list(FORMS))
def test_both_branches_have_the_numbers_of_one_device(form, mesh, always):
    given = inputs()
    placed = run(FORMS[form], mesh, TOKENS[mesh])
    assert "exchange_rows" in {name for name, _ in placed.plan(*given).program.passed}
    check(placed, FORMS[form], *given)
    assert "planned = found" in str(placed.compile(*given).audit())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("form", list(FORMS))
def test_gradients_go_through_the_exchange(form, mesh, always):
    given = inputs()
    placed = run(gradient(FORMS[form]), mesh, None)
    assert "exchange_rows" in {name for name, _ in placed.plan(*given).program.passed}
    check(placed, gradient(FORMS[form]), *given)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [16, 33])
def test_few_rows(rows, always):
    given = inputs(rows)
    check(run(added, "8", TOKENS["8"]), added, *given)


@pytest.mark.sampled(0)
def test_stages_of_a_pipeline_exchange_rows_forwards_and_backwards(monkeypatch):
    monkeypatch.setattr("shardc.pipeline.place_stages._StageCandidate.is_cheaper", lambda found, other: True)
    x, scores, w = inputs(128)

    def loss(w: Any, x: Any, scores: Any) -> Any:
        return jnp.sum(added(shardc.stage_boundary(added(x, scores, w[0])), -scores, w[1]) ** 2)

    def step(w: Any, x: Any, scores: Any) -> Any:
        return shardc.accumulate(jax.value_and_grad(loss), microbatches=2)(w, x, scores)

    placed = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2, e=4), pipeline=shardc.Pipeline(),
        in_placements=([[{"e": S(0)}] * 3] * 2, {"e": S(0)}, {"e": S(0)}),
    )  # fmt: skip
    plan = placed.plan([w, w], x, scores)
    assert all("exchange_rows" in {name for name, _ in stage.plan.program.passed} for stage in plan.stages)
    got, want = placed([w, w], x, scores), jax.jit(step)([w, w], x, scores)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-3, atol=1e-4 * max(1.0, np.abs(b).max()))


def large(tokens: int, width: int, hidden: int, count: int, chosen: int, topology: str) -> Any:
    """The plan of a layer on 64 devices that are not there."""

    def layer(x: Any, expert: Any, up: Any, down: Any) -> Any:
        order = jnp.argsort(expert.reshape(-1))
        sizes = jnp.bincount(expert.reshape(-1), length=count)
        ys = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(x[order // chosen], up, sizes)), down, sizes)
        return jnp.zeros_like(x).at[order // chosen].add(ys)

    mesh = shardc.make_mesh(e=64, topology=topology)
    placed = shardc.function(layer, mesh=mesh, in_placements=({"e": S(0)},) * 4, out_placements={"e": S(0)})
    shapes = [((tokens, width), jnp.bfloat16), ((tokens, chosen), np.int32),
              ((count, width, hidden), jnp.bfloat16), ((count, hidden, width), jnp.bfloat16)]  # fmt: skip
    return placed.plan(*(jax.ShapeDtypeStruct(*s) for s in shapes))


def test_experts_on_64_devices_send_their_rows_and_nothing_else():
    plan = large(65_536, 4096, 8192, 64, 1, "gb200:64")
    balanced = 2 * 65_536 // 64 * 4096 * 2 * 63 // 64
    assert plan.bytes_per_device < 3 * balanced
    assert plan.worst_bytes_per_device > 30 * balanced
    text = str(plan.explain())
    assert "if sorted rows fit their exchange, else" in text
    assert "exchange_rows for imbalance=1.25 taken" in text


def test_top_8_of_256_is_near_what_balanced_rows_take():
    plan = large(65_536, 7168, 2048, 256, 8, "h100:8x8")
    assert plan.bytes_per_device < 1.5 * 2 * 8 * 65_536 // 64 * 7168 * 2 * 63 // 64


def test_a_saved_plan_is_the_same_exchange(tmp_path):
    given = inputs(512)
    plan = run(added, "8", TOKENS["8"], imbalance=2).plan(*given)
    assert f"[1,8,{Grid(1, 8, EXPERTS, 512 * CHOSEN, 2).capacity},{WIDTH}]" in str(plan.program.jaxpr)
    assert "Rows fit: no device gets more than 2 times the mean (imbalance=)" in str(plan.explain())
    plan.save(tmp_path / "plan.json")
    again = run(added, "8", TOKENS["8"], plan=tmp_path / "plan.json")
    assert again.plan(*given).collectives == plan.collectives


@pytest.mark.parametrize("imbalance", [0.9, True, "2", float("nan"), float("inf")])
def test_an_imbalance_is_a_number_of_at_least_1(imbalance):
    with pytest.raises(ArgumentError, match=r"imbalance=.*a number of 1 or more, as imbalance=1.25"):
        run(added, "8", None, imbalance=imbalance)


def test_an_offset_of_groups_is_jaxs_own_error():
    def offset(x: Any, scores: Any, w: Any) -> Any:
        return lax.ragged_dot(x, w[0], jnp.full(EXPERTS, 2, np.int32), group_offset=0)

    given = inputs(32)
    for fn in (jax.jit(offset), run(offset, "8", TOKENS["8"])):
        with pytest.raises(NotImplementedError, match="Unimplemented group_offset support"):
            fn(*given)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, scores, w: experts(x, jnp.full(EXPERTS, x.shape[0] // EXPERTS, np.int32), w),  # as they come
        lambda x, scores, w: x @ w[0][0] @ w[2][0],
    ],
)
def test_rows_that_nothing_sorts_stay_as_they_are(fn, always):
    plan = run(fn, "8", TOKENS["8"]).plan(*inputs(256))
    assert all(not c.branch for c in plan.collectives)
