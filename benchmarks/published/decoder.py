"""The training step of a published run: a decoder in plain JAX, placed as Megatron and FSDP place it.

Sizes: B rows, T and S positions, D width, G groups of heads that share keys and values, R heads in a group, K width of
a head, F hidden, V vocabulary.

Weights and activations are pinned, so that a plan has the collectives of the published run: tensor parallelism over
`model` (Shoeybi et al. 2019; with sequence parallelism Korthikanti et al. 2022), rows over `data` and `fsdp`, weights
over `fsdp`, stages over `pipe`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import shardc
from benchmarks.published.runs import Run
from shardc import AUTO, P, S

WIDE, HALF = jnp.float32, jnp.bfloat16


# --- what is pinned --------------------------------------------------------------------------------------------------


def placed(run: Run, **dims: int | None) -> dict[Any, Any]:
    """A placement of the axes that the mesh has."""
    return {axis: S(d) for axis, d in dims.items() if d is not None and axis in run.mesh}


def rows(run: Run, model: int | None = None) -> dict[Any, Any]:
    return placed(run, data=0, fsdp=0, model=model)


def partly(run: Run) -> dict[Any, Any]:
    return rows(run) | ({"model": P} if run.tensor > 1 else {})


def pinned(x: Any, at: dict[Any, Any], back: dict[Any, Any] | None = None) -> Any:
    """`x` at a placement, and its cotangent at another, or the same."""

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return shardc.constrain(x, at)

    def backward(_: None, ct: Any) -> Any:
        return (shardc.constrain(ct, at if back is None else back),)

    identity.defvjp(lambda x: (shardc.constrain(x, at), None), backward)
    return identity(x)


def between(run: Run, x_BTD: Any) -> Any:
    """The residual stream, where norms read it."""
    return pinned(x_BTD, rows(run, 1 if run.sequence_parallel else None))


def copied(run: Run, x_BTD: Any) -> Any:
    """What products read whose columns lie over `model`: Megatron's f."""
    return pinned(x_BTD, rows(run), partly(run))


def summed(run: Run, x_BTD: Any) -> Any:
    """What products make whose rows lie over `model`: Megatron's g."""
    return between(run, pinned(x_BTD, partly(run), rows(run)))


# --- parameters ------------------------------------------------------------------------------------------------------

Leaf = tuple[tuple[int, ...], int | None, int | None]
"""Of a parameter: shape, and the dimensions, from the last, that lie over `model` and `fsdp`."""


def layer_leaves(run: Run) -> dict[str, Leaf]:
    D, F, G, K = run.hidden, run.ffn, run.kv_heads, run.head_dim
    R = run.heads // G
    found: dict[str, Leaf] = {
        "norm_1": ((D,), None, None), "norm_2": ((D,), None, None),
        "q": ((D, G, R, K), -3, -4), "k": ((D, G, K), -2, -3), "v": ((D, G, K), -2, -3), "out": ((G, R, K, D), -4, -1),
        "up": ((D, F), -1, -2), "down": ((F, D), -2, -1),
    }  # fmt: skip
    return found | ({"gate": ((D, F), -1, -2)} if run.gated else {})


def leaves(run: Run) -> dict[str, Any]:
    """All parameters: of each stage its layers, stacked. A pipeline's head is its own, as Megatron's copy is."""
    V, D = run.vocab, run.hidden
    stacked = [{k: ((n, *s), m, f) for k, (s, m, f) in layer_leaves(run).items()} for n in run.stages]
    found: dict[str, Any] = {"stages": stacked, "words": ((V, D), -2, -1), "norm": ((D,), None, None)}
    if not run.gated:
        found["positions"] = ((run.seq, D), None, -1)
    if run.gated or run.pipe > 1:
        found["head"] = ((V, D), -2, -1)
    return found


def over(run: Run, make: Callable[[tuple[int, ...], dict[Any, Any]], Any]) -> Any:
    """`make` of the shape and the placement of each parameter."""

    def one(leaf: Leaf) -> Any:
        shape, *dims = leaf
        model, fsdp = (None if d is None else len(shape) + d for d in dims)
        return make(shape, placed(run, model=model, fsdp=fsdp))

    return jax.tree.map(one, leaves(run), is_leaf=lambda x: isinstance(x, tuple))


# --- products and attention ------------------------------------------------------------------------------------------


def dot(run: Run, equation: str, x: Any, w: Any) -> Any:
    """A product, in the run's narrow type if it has one: forward and backward."""
    if not run.narrow:
        return jnp.einsum(equation, x, w)
    return narrow_dot(equation, run.narrow, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def narrow_dot(equation: str, dtype: str, x: Any, w: Any) -> Any:
    small = (a.astype(dtype) for a in (x, w))
    return jnp.einsum(equation, *small, preferred_element_type=HALF)


def _narrow_forward(equation: str, dtype: str, x: Any, w: Any) -> Any:
    return narrow_dot(equation, dtype, x, w), (x, w)


def _narrow_backward(equation: str, dtype: str, kept: Any, ct: Any) -> Any:
    (x, w), (a, b, c) = kept, re.split("->|,", equation)
    return narrow_dot(f"{c},{b}->{a}", dtype, ct, w), narrow_dot(f"{a},{c}->{b}", dtype, x, ct)


narrow_dot.defvjp(_narrow_forward, _narrow_backward)


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention whose scores are materialized."""
    T, K = q.shape[1], q.shape[-1]
    scores_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q, k) / math.sqrt(K)
    causal_TS = jnp.tril(jnp.ones((T, T), bool))
    weights_BGRTS = jax.nn.softmax(jnp.where(causal_TS, scores_BGRTS.astype(WIDE), -jnp.inf)).astype(q.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", weights_BGRTS, v)


def causal_flops(q: Any, *_: Any) -> float:
    """Operations of the two products of attention that looks back only (Dao 2023, "FlashAttention-2")."""
    B, T, G, R, K = q.shape
    return 2.0 * B * G * R * T * T * K


def _with_sums(q: Any, k: Any, v: Any) -> Any:
    return plain_attention(q, k, v), jnp.zeros((q.shape[0], *q.shape[2:4], q.shape[1]), WIDE)


FORWARD = "b _ g r _, b _ g _, b _ g _"
_flash = shardc.signature(f"{FORWARD} -> b _ g r _, b g r _", flops=causal_flops, kind="attention")(_with_sums)
_flash_back = shardc.signature(
    f"{FORWARD}, b _ g r _, b g r _, b _ g r _ -> b _ g r _, b _ g _, b _ g _",
    flops=lambda *xs: 2.5 * causal_flops(*xs),
    kind="attention",
)(lambda q, k, v, out, sums, ct: (q, k, v))


@jax.custom_vjp
def flash_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention as one kernel forward and one backward, as a plan sees it: shapes and arithmetic."""
    return _flash(q, k, v)[0]


def _flash_forward(q: Any, k: Any, v: Any) -> Any:
    out, sums = (checkpoint_name(x, "attn") for x in _flash(q, k, v))
    return out, (q, k, v, out, sums)


flash_attention.defvjp(_flash_forward, lambda kept, ct: tuple(_flash_back(*kept, ct)))


# --- the model -------------------------------------------------------------------------------------------------------


def norm(x: Any, scale: Any) -> Any:
    wide = x.astype(WIDE)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def layer(run: Run, w: Mapping[str, Any], x_BTD: Any) -> Any:
    def named(equation: str, x: Any, name: str) -> Any:
        return checkpoint_name(pinned(dot(run, equation, x, w[name]), rows(run, 2)), name)

    y_BTD = copied(run, norm(x_BTD, w["norm_1"]))
    q = named("btd,dgrk->btgrk", y_BTD, "q")
    k, v = (named("btd,dgk->btgk", y_BTD, name) for name in ("k", "v"))
    a = pinned((flash_attention if run.flash else plain_attention)(q, k, v), rows(run, 2))
    x_BTD = x_BTD + checkpoint_name(summed(run, dot(run, "btgrk,grkd->btd", a, w["out"])), "out")
    y_BTD = copied(run, norm(x_BTD, w["norm_2"]))
    h_BTF = named("btd,df->btf", y_BTD, "up")
    h_BTF = jax.nn.silu(named("btd,df->btf", y_BTD, "gate")) * h_BTF if run.gated else jax.nn.gelu(h_BTF)
    return between(run, x_BTD + checkpoint_name(summed(run, dot(run, "btf,fd->btd", h_BTF, w["down"])), "down"))


def whole_layers_anew(body: Callable[..., Any]) -> Callable[..., Any]:
    """Layers that keep their inputs only, and run whole once more in the backward pass, as Megatron's do. (Of
    `jax.checkpoint` the compiler drops what no gradient reads, such as the last product.)"""

    @jax.custom_vjp
    def run_all(ws: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (body(w, x), None), x, ws)[0]

    def forward(ws: Any, x: Any) -> Any:
        y, inputs = lax.scan(lambda x, w: (body(w, x), x), x, ws)
        return y, (ws, inputs)

    def backward(kept: Any, ct: Any) -> Any:
        def back(ct: Any, of: Any) -> Any:
            y, pull = jax.vjp(body, *of)
            dw, dx = pull(ct)
            return lax.optimization_barrier((dx, y))[0], dw

        dx, dws = lax.scan(back, ct, kept, reverse=True)
        return dws, dx

    run_all.defvjp(forward, backward)
    return run_all


PRODUCTS = ("q", "k", "v", "out", "gate", "up", "down")


def kept_names(run: Run) -> tuple[str, ...]:
    """What the layers keep for the backward pass, besides their inputs. Offloaded to the host counts as kept."""
    match run.recompute.split()[:1]:
        case ["selective"] if run.flash:  # torchtitan's "op": attention and every second product
            return "q", "v", "attn", "gate"
        case ["custom:" | "same" | "qkv_proj_offloaded"]:  # tpu-recipes: as they name it
            return "q", "k", "v", *(["out"] if run.kv_heads == 8 and run.layers == 32 else [])
        case ["selective" | "minimal" | "minimal_offloaded"]:  # all products, and attention anew
            return PRODUCTS
        case _:  # not published, or nothing recomputed
            return *PRODUCTS, "attn"


def layers_of(run: Run) -> Callable[..., Any]:
    """The layers of a stage, with what the run recomputes."""
    body = partial(layer, run)
    if run.recompute in ("full", "custom: decoder_layer_input offloaded"):
        return whole_layers_anew(body)
    policy = jax.checkpoint_policies.save_only_these_names(*kept_names(run))
    again = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return lambda ws, x: lax.scan(lambda x, w: (again(w, x), None), x, ws)[0]


def loss(run: Run, params: Any, batch: Any) -> Any:
    x = summed(run, params["words"][batch["inputs"]])
    if "positions" in params:
        x = between(run, x + params["positions"])
    layers = layers_of(run)
    for i, ws in enumerate(params["stages"]):
        x = layers(ws, shardc.stage_boundary(x) if i else x)
    x = copied(run, norm(x, params["norm"]))
    logits = pinned(jnp.einsum("btd,vd->btv", x, params.get("head", params["words"])), rows(run, 2)).astype(WIDE)
    found = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - found)


def step_of(run: Run) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The training step of a run, the shapes of its arguments, and the keywords of `shardc.function`.

    Parameters are float32 masters under AdamW; a step makes 16-bit copies once, and gathers those. Gradients are added
    up in 16 bits in Megatron with fp16, else in 32.
    """
    total = HALF if run.name.startswith("vtrain") else WIDE

    def grads_of(halves: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(partial(loss, run))(halves, batch)
        return value, jax.tree.map(lambda g: g.astype(total), grads) if run.microbatches > 1 else grads

    def step(params: Any, moments: Any, batch: Any) -> Any:
        halves = jax.tree.map(lambda p: p.astype(HALF), params)
        many = shardc.accumulate(grads_of, microbatches=run.microbatches, reduce="mean")
        value, grads = (many if run.microbatches > 1 else grads_of)(halves, batch)
        done = jax.tree.map(adamw, params, moments["mean"], moments["square"], grads)
        params, mean, square = (jax.tree.map(lambda _, d, i=i: d[i], params, done) for i in range(3))
        return params, {"mean": mean, "square": square}, value

    params = over(run, lambda shape, _: jax.ShapeDtypeStruct(shape, WIDE))
    split = {"data": AUTO} if run.name.startswith("nemo") and run.data > 1 else {}  # a distributed optimizer
    weights = over(run, lambda _, at: at | split)
    words = jax.ShapeDtypeStruct((run.batch, run.seq), jnp.int32)
    pins = {"params": weights, "moments": {"mean": weights, "square": weights}, "batch": rows(run)}
    return step, (params, {"mean": params, "square": params}, {"inputs": words, "targets": words}), {
        "in_placements": pins, "donate_argnames": ("params", "moments"),
    }  # fmt: skip


def adamw(p: Any, m: Any, v: Any, g: Any) -> Any:
    g = g.astype(WIDE)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return p - 3e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v
