"""Merging reshapes that sink: the numbers of one device, nothing merged where nothing needs it, no bytes for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core as jex

import shardc
from shardc import S, compat
from shardc.ir.walk import all_eqns
from shardc.passes.rewrite import in_factors
from shardc.passes.rewrite.factors import is_plain, reshaped
from shardc.passes.rewrite.sink_merges import sunk
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp import rules

assert rules
pytestmark = pytest.mark.usefixtures("compiled_fast")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 8)).astype("float32")
W = RNG.normal(size=(8, 8)).astype("float32")
I = RNG.integers(0, 8, size=(4, 6))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def mlp(x: Any, w: Any) -> Any:
    return (jnp.tanh(flat(x) @ w) @ w.T).reshape(x.shape)


def norm(x: Any) -> Any:
    f = flat(x)
    return ((f - f.mean(-1, keepdims=True)) * lax.rsqrt(f.var(-1, keepdims=True) + 1e-5)).reshape(x.shape)


def one_hot_loss(x: Any, i: Any) -> Any:
    return -(jax.nn.log_softmax(flat(x)) * jax.nn.one_hot(i.reshape(-1), x.shape[-1])).sum(-1).mean()


def loss(x: Any, i: Any) -> Any:
    return cross_entropy(flat(x), i.reshape(-1)).mean()


def covariance(x: Any) -> Any:
    f = flat(x)
    f = f - f.mean(0)
    return f.T @ f / f.shape[0]


def windows(x: Any, w: Any, n: int = 2) -> Any:
    """Attention in windows of n x n of an image (b, h, w, c), as Swin does."""
    b, h, _, c = x.shape
    cut = (b, h // n, n, -1, n, c)
    v = x.reshape(cut).transpose(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
    scores = jax.nn.softmax(jnp.einsum("wic,wjc->wij", v @ w, v), -1)
    made = jnp.einsum("wij,wjc->wic", scores, v).reshape(b, h // n, -1, n, n, c)
    return made.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)


def quantized(x: Any, n: int = 4) -> Any:
    """Blocks of a flat array, each with a scale, as 8-bit optimizers keep their state."""
    blocks = x.ravel().reshape(-1, n)
    scale = jnp.abs(blocks).max(1, keepdims=True)
    return (jnp.round(blocks / scale * 127).astype("int8").astype("float32") * scale / 127).ravel().reshape(x.shape)


def layers(x: Any, w: Any) -> Any:
    def layer(h: Any, scale: Any) -> Any:
        return h + mlp(h * scale, w), flat(h).sum(-1)

    h, sums = lax.scan(jax.checkpoint(layer), x, jnp.arange(1.0, 4.0))
    return jnp.sum(h**2) + sums.max()


def flat_carry(x: Any) -> Any:
    def step(c: Any, row: Any) -> Any:
        return c * 0.5 + row, c

    last, before = lax.scan(step, jnp.zeros((24, 8)), jnp.stack([flat(x), flat(x) + 1, flat(x) * 2]))
    return last.reshape(x.shape), before.sum((1, 2))


def while_flat(x: Any) -> Any:
    f = flat(x)
    return lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: c * 0.5 + 0.0 * f, f).reshape(x.shape)


def branches(x: Any) -> Any:
    f = flat(x)
    return lax.cond(x[0, 0, 0] > 0, jnp.sin, lambda f: jnp.zeros_like(f) + 1, f).reshape(x.shape)


def beams(x: Any) -> Any:
    return lax.top_k(x.reshape(x.shape[0], -1), 2)


def router(x: Any, w: Any) -> Any:
    values, found = lax.top_k(jax.nn.softmax(flat(x) @ w), 2)
    return values.reshape(*x.shape[:-1], 2), found.reshape(*x.shape[:-1], 2)


def scattered(x: Any, i: Any) -> Any:
    return jnp.zeros((8, 8)).at[i.reshape(-1)].add(flat(x))


def ties(x: Any) -> Any:
    return jnp.argmax(jnp.round(x)), jnp.argmin(jnp.round(x)), jnp.argmax(x > 0), lax.top_k(jnp.round(x).ravel(), 7)


def with_nan(x: Any) -> Any:
    return jnp.argmax(x.at[1, 2, 3].set(jnp.nan)), jnp.argmin(x.at[2, 2, 3].set(jnp.nan))


def keys(x: Any) -> Any:
    made = jax.random.split(jax.random.key(0), x.shape[:2]).reshape(-1)
    return jax.random.key_data(made.reshape(x.shape[:2])), x.sum()


def grouped(x: Any, w: Any) -> Any:
    """Heads that share keys, repeated."""
    q = (x @ w).reshape(4, 6, 4, 2)
    k = jnp.repeat(x[..., :4].reshape(4, 6, 2, 2), 2, 2)
    return jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), -1).sum((2, 3))


def block(x: Any, w: Any) -> Any:
    """Attention over tokens that stay flat but for the attention itself."""
    f = flat(x)
    q, k, v = ((f @ m).reshape(*x.shape[:2], 2, -1) for m in (w, w.T, w * 0.5))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)
    return (f + mixed.reshape(f.shape) @ w).reshape(x.shape)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "loss": (loss, (X, I)),
    "gradient of a loss": (jax.grad(loss), (X, I)),
    "one-hot loss": (one_hot_loss, (X, I)),
    "gradient of a one-hot loss": (jax.grad(one_hot_loss), (X, I)),
    "labels given flat": (lambda x, i: cross_entropy(flat(x), i).mean(), (X, I.reshape(-1))),
    "mlp": (mlp, (X, W)),
    "gradient of an mlp": (jax.grad(lambda x, w: jnp.sum(mlp(x, w) ** 2), (0, 1)), (X, W)),
    "layers": (layers, (X, W)),
    "gradient of layers": (jax.grad(layers, (0, 1)), (X, W)),
    "norm": (norm, (X,)),
    "gradient of a norm": (jax.grad(lambda x: jnp.sum(norm(x) ** 3)), (X,)),
    "vdot": (lambda x: jnp.vdot(x, x + 1), (X,)),
    "argmax": (lambda x: (jnp.argmax(x), jnp.argmin(x)), (X,)),
    "ties": (ties, (X,)),
    "nan": (with_nan, (X,)),
    "ravel, max": (lambda x: jnp.abs(x).ravel().max(), (X,)),
    "std": (lambda x: x.reshape(-1).std(), (X,)),
    "logsumexp": (lambda x: jax.nn.logsumexp(x.ravel()), (X,)),
    "booleans": (lambda x: ((x.ravel() > 1).any(), (x.ravel() > -9).all(), jnp.count_nonzero(x.ravel() > 0)), (X,)),
    "top_k of all": (lambda x: lax.top_k(x.ravel(), 2), (X,)),
    "more than a row": (lambda x: lax.top_k(x.ravel(), 30), (X,)),
    "beams": (beams, (X,)),
    "cg": (lambda x: jax.scipy.sparse.linalg.cg(lambda v: v * (1 + x**2), x, maxiter=3)[0], (X,)),
    "blocks": (quantized, (X,)),
    "windows": (windows, (RNG.normal(size=(2, 8, 4, 8)).astype("float32"), W)),
    "gradient of windows": (
        jax.grad(lambda x, w: jnp.sum(windows(x, w) ** 2), (0, 1)),
        (RNG.normal(size=(2, 8, 4, 8)).astype("float32"), W),
    ),
    "covariance": (covariance, (X,)),
    "lookup": (lambda w, i: w[i.reshape(-1)].reshape(*i.shape, -1), (W, I)),
    "gradient of a lookup": (jax.grad(lambda w, i: jnp.sum(w[i.reshape(-1)] ** 2)), (W, I)),
    "scatter": (scattered, (X, I)),
    "accuracy": (lambda x, i: (flat(x).argmax(-1) == i.reshape(-1)).mean(), (X, I)),
    "router": (router, (X, W)),
    "flat carry": (flat_carry, (X,)),
    "while": (while_flat, (X,)),
    "branches": (branches, (X,)),
    "keys": (keys, (X,)),
    "grouped": (grouped, (X, W)),
    "block": (block, (X, W)),
    "gradient of a block": (jax.grad(lambda x, w: jnp.sum(block(x, w) ** 2), (0, 1)), (X, W)),
    "empty": (lambda x: (x.reshape(0, 8).sum(0), x.reshape(0, 4, 2) * 2), (X[:0],)),
    "sort and sums": (lambda x: jnp.cumsum(jnp.sort(flat(x), -1), -1)[:, ::-1].sum(0), (X,)),
    "pad and slices": (
        lambda x: jnp.pad(flat(x), ((0, 0), (1, 2)))[:, 2:].at[:, 1].set(0).reshape(4, 6, -1),
        (X,),
    ),
    "two ways to merge": (lambda x: (x.reshape(4, -1).sum(), x.reshape(24, 8).max(0)), (X,)),
    "merged again": (lambda x: (flat(x) * 2).ravel().sum(), (X,)),
    "split elsewhere": (lambda x: (flat(x) + 1).reshape(8, 3, 8).sum((1, 2)), (X,)),
    "concatenate": (lambda x: jnp.concatenate([flat(x), flat(x) ** 2, jnp.ones((24, 1))], 1).reshape(4, 6, 17), (X,)),
    "weak types": (lambda x: jnp.where(flat(x) > 0, flat(x), 0.0).reshape(x.shape), (X,)),
    "ones": (lambda x: (x[None, :, :, None].reshape(24, 1, 8) * 2).reshape(1, 4, 6, 8), (X,)),
}
STAY = ("split elsewhere", "more than a row")


def merges(jaxpr: Any) -> int:
    """The bytes that reshapes in a jaxpr merge."""
    found = 0
    for eqn in all_eqns(jaxpr):
        if eqn.primitive.name == "reshape" and 0 not in eqn.outvars[0].aval.shape:
            factors = reshaped(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
            if factors is None or not is_plain(factors):
                found += eqn.outvars[0].aval.size * eqn.outvars[0].aval.dtype.itemsize
    return found


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device's numbers, and no reshape merges what nothing needs."""
    monkeypatch.setattr(in_factors, "START", 0)
    fn, args = CASES[name]
    jaxpr, captured = canonicalize(jax.make_jaxpr(fn)(*args))
    made = sunk(jaxpr)
    assert merges(made) < merges(jaxpr) or name in STAY or not merges(jaxpr), made
    assert [v.aval for v in made.outvars] == [v.aval for v in jaxpr.outvars]
    got = jax.jit(jex.jaxpr_as_fun(compat.close(made)))(*args, *captured)
    for a, b in zip(got, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


MESHES = [shardc.make_mesh(data=2, space=4), shardc.make_mesh(data=8), shardc.make_mesh(a=2, b=2, c=2)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_on_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device's numbers wherever the arguments are split, evenly or not, and what was planned is found."""
    monkeypatch.setattr(in_factors, "START", 0)
    fn, args = CASES[name]
    rng = np.random.default_rng(len(name))
    mesh = MESHES[rng.integers(len(MESHES))]
    pins = tuple({a: S(int(rng.integers(x.ndim))) for a in mesh.axis_names if rng.random() < 0.75} for x in args)
    f = shardc.function(fn, mesh=mesh, in_placements=pins)
    assert f.compile(*args).audit().ok
    for a, b in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-4)


TOKENS = {"data": S(0), "space": S(1)}
ROWS, COLUMNS = {"model": S(0)}, {"model": S(1)}
F32, I32, BF16 = "float32", "int32", "bfloat16"
LOGITS, LABELS = ((8, 8192, 32768), F32), ((8, 8192), I32)
HIDDEN, UP = ((8, 8192, 4096), BF16), ((4096, 4096), BF16)
WEIGHT, IMAGE = ((4096, 8192), F32), ((2, 448, 448, 128), F32)
BYTES: dict[str, tuple[Callable[..., Any], Any, Any, list[Any], int]] = {
    "loss": (loss, (TOKENS, TOKENS), None, [LOGITS, LABELS], 2**10),
    "gradient of a loss": (jax.grad(loss), (TOKENS, TOKENS), TOKENS, [LOGITS, LABELS], 2**10),
    "one-hot loss": (one_hot_loss, (TOKENS, TOKENS), None, [LOGITS, LABELS], 2**17),
    "labels given flat": (CASES["labels given flat"][0], (TOKENS, {}), None, [LOGITS, ((65536,), I32)], 2**10),
    "accuracy": (CASES["accuracy"][0], (TOKENS, TOKENS), None, [LOGITS, LABELS], 2**16),
    "mlp": (mlp, (TOKENS, {}), TOKENS, [HIDDEN, UP], 0),
    "gradient of an mlp": (CASES["gradient of an mlp"][0], (TOKENS, {}), (TOKENS, {}), [HIDDEN, UP], 80 * 2**20),
    "block": (block, ({"data": S(0), "space": S(1)}, {}), TOKENS, [HIDDEN, UP], 384 * 2**20),
    "norm": (norm, (TOKENS,), TOKENS, [HIDDEN], 0),
    "router": (router, (TOKENS, {}), TOKENS, [HIDDEN, ((4096, 64), BF16)], 0),
    "lookup": (CASES["lookup"][0], ({}, TOKENS), TOKENS, [((32768, 1024), F32), LABELS], 0),
    "vdot": (jnp.vdot, (COLUMNS, COLUMNS), None, [WEIGHT, WEIGHT], 2**10),
    "argmax": (jnp.argmax, (COLUMNS,), None, [WEIGHT], 2**10),
    "ravel, max": (CASES["ravel, max"][0], (COLUMNS,), None, [WEIGHT], 2**10),
    "std": (CASES["std"][0], (COLUMNS,), None, [WEIGHT], 2**10),
    "logsumexp": (CASES["logsumexp"][0], (COLUMNS,), None, [WEIGHT], 2**10),
    "top_k of all": (CASES["top_k of all"][0], (COLUMNS,), None, [WEIGHT], 2**20),
    "beams": (beams, ({"model": S(2)},), None, [((64, 8, 32768), F32)], 2**18),
    "cg": (CASES["cg"][0], (COLUMNS,), COLUMNS, [WEIGHT], 2**10),
    "blocks": (lambda x: quantized(x, 256), (COLUMNS,), COLUMNS, [WEIGHT], 0),
    "windows": (lambda x, w: windows(x, w, 7), (COLUMNS, {}), COLUMNS, [IMAGE, ((128, 128), F32)], 0),
    "gradient of windows": (
        jax.grad(lambda x, w: jnp.sum(windows(x, w, 7) ** 2), (0, 1)),
        (COLUMNS, {}),
        (COLUMNS, {}),
        [IMAGE, ((128, 128), F32)],
        2**17,
    ),
    "covariance": (covariance, (COLUMNS,), {}, [IMAGE], 2**17),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name: str) -> None:
    """Plans send what the same programs send that merge nothing."""
    fn, pins, out, shapes, most = BYTES[name]
    axes = {"model": 8} if any("model" in p for p in pins) else {"data": 2, "space": 4}
    mesh = shardc.make_mesh(topology="v5p:4x2x1", **axes)
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    if isinstance(out, dict) and name == "router":
        out = (out, out)
    made: Any = {} if out is None else {"out_placements": out}
    plan = shardc.function(fn, mesh=mesh, in_placements=pins, **made).plan(*args)
    assert plan.bytes_per_device <= most
