"""cuDNN's attention on CPU devices, in plain JAX, so that its pieces can be held against the whole.

Importing this makes `jax.nn.dot_product_attention(..., implementation="cudnn")` run on a CPU once it is traced
(`traced`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

from shardc import compat

traced = compat.cudnn_traced


def _scores(q: Any, k: Any, others: Any, params: Any) -> Any:
    """Scores of [batch, key heads, group, query, key] in float32, with -inf where nothing is looked at."""
    bias, q_len, kv_len = others[:3]
    s = jnp.einsum("btkgh,bskh->bkgts", q, k) * float(params["scale"])
    if params["variadic_args"][0]:
        rows = jnp.broadcast_to(bias.astype(s.dtype), (*bias.shape[:1], q.shape[2] * q.shape[3], *bias.shape[2:]))
        s += rows.reshape(rows.shape[0], *q.shape[2:4], *rows.shape[2:])
    t, u = jnp.arange(s.shape[3])[:, None], jnp.arange(s.shape[4])[None]
    mask, window = params["mask_type"].name, params["sliding_window_length"]
    seen = (u <= t) if "CAUSAL" in mask or window else jnp.ones((1, 1), bool)
    seen = seen & (t - u < window) if window else seen
    if "PADDING" in mask:
        seen = seen & (t < q_len[:, None, None]) & (u < kv_len[:, None, None])
        seen = seen[:, None, None]
    return jnp.where(seen, s, -1e30)


def _wide(x: Any, params: Any) -> Any:
    x = x.astype(jnp.float32)
    return x if params["layout"] == 0 else x.transpose(0, 2, 1, 3)


def _grouped(q: Any, k: Any) -> Any:
    return q.reshape(*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2], q.shape[3])


def _narrow(x: Any, like: Any, params: Any) -> Any:
    x = x if params["layout"] == 0 else x.transpose(0, 2, 1, 3)
    return x.astype(like.dtype)


def _forward(query: Any, key: Any, value: Any, *others: Any, **params: Any) -> Any:
    q, k, v = (_wide(x, params) for x in (query, key, value))
    s = _scores(_grouped(q, k), k, others, params)
    sums = jax.nn.logsumexp(s, -1)
    out = jnp.einsum("bkgts,bskh->btkgh", jnp.exp(s - sums[..., None]), v).reshape(q.shape)
    found = _narrow(out, query, params), sums.reshape(sums.shape[0], -1, sums.shape[-1]).astype(jnp.float32)
    return found if params["is_training"] else found[:1]


def _backward(query: Any, key: Any, value: Any, *others: Any, **params: Any) -> Any:
    q, k, v, out, g = (_wide(x, params) for x in (query, key, value, *others[8:10]))
    q, out, g = (_grouped(x, k) for x in (q, out, g))
    s = _scores(q, k, others, params)
    p = jnp.exp(s - others[7].reshape(*s.shape[:4])[..., None])
    d = p * (jnp.einsum("btkgh,bskh->bkgts", g, v) - jnp.einsum("btkgh,btkgh->bkgt", g, out)[..., None])
    dq = (jnp.einsum("bkgts,bskh->btkgh", d, k) * float(params["scale"])).reshape(*q.shape[:2], -1, q.shape[-1])
    dk = jnp.einsum("bkgts,btkgh->bskh", d, q) * float(params["scale"])
    dv = jnp.einsum("bkgts,btkgh->bskh", p, g)
    grads = [_narrow(dx, x, params) for dx, x in ((dq, query), (dk, key), (dv, value))]
    if params["variadic_args"][1]:
        bias = others[0]
        whole = d.reshape(d.shape[0], -1, *d.shape[3:])
        over = tuple(i for i in (0, 1) if bias.shape[i] == 1)
        grads.append(whole.sum(over, keepdims=True).astype(bias.dtype))
    return grads


for name, fn in (("fwd", _forward), ("bwd", _backward)):
    primitive = getattr(cudnn, f"_dot_product_attention_{name}_p")
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=True), platform="cpu")
