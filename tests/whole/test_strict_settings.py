"""shardc's own code under the strict settings of JAX that users set for theirs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH = shardc.make_mesh(a=3)
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
V = X[:, 0]
AT = np.random.default_rng(1).permutation(16).astype(np.int32)
IMAGE = np.random.default_rng(2).normal(size=(1, 16, 3, 2)).astype(np.float32)
KERNEL = np.random.default_rng(3).normal(size=(3, 1, 2, 2)).astype(np.float32)
NHWC = ("NHWC", "HWIO", "NHWC")


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


OPERATIONS = {
    "scatter min": (lambda x: x.at[AT[::-1]].min(jnp.float32(0)), V),
    "scatter add": (lambda x, i: x.at[i].add(x), V, AT),
    "scatter windows": (lambda x, i: lax.dynamic_update_slice(x, x[:3], (i[0], i[1])), X, AT),
    "gather": (lambda x, i: x[i], X, AT),
    "gather fill": (lambda x, i: x.at[i + 3].get(mode="fill", fill_value=0), X, AT),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (5, 2)), X, AT),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x, i, 16), X, AT),
    "sort": (lambda x: lax.sort(x, dimension=0), X),
    "argsort": (jnp.argsort, V),
    "top k": (lambda x: lax.top_k(x, 3), V),
    "argmax": (lambda x: jnp.argmax(x, 0), X),
    "cumsum": (lambda x: jnp.cumsum(x, 0), X),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), X),
    "convolution": (lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NHWC), IMAGE, KERNEL),
    "max pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"), X),
    "softmax": (lambda x: jax.nn.softmax(x, 0), X),
    "product": (lambda x: x @ x.T, X),
    "pad": (lambda x: jnp.pad(x, ((2, 1), (0, 0))), X),
    "roll": (lambda x: jnp.roll(x, 1, 0), X),
    "random": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), X),
    "scan": (lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x), X),
    "map": (lambda x: lax.map(lambda r: jnp.cumsum(r), x), X),
    "accumulate": (lambda x: shardc.accumulate(jax.grad(loss), microbatches=2)(jnp.ones((4,), "float32"), x), X),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), X),
}


SOME = ("scatter min", "gather", "cumsum", "scan", "accumulate")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "setting",
    [
        ("jax_numpy_rank_promotion", "raise"), ("jax_numpy_dtype_promotion", "strict"), ("jax_enable_checks", True),
        ("jax_check_tracer_leaks", True),
    ],
    ids=lambda s: s[0],
)  # fmt: skip
def test_operations_split_unevenly(setting):
    name, value = setting
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        some = name not in ("jax_numpy_rank_promotion", "jax_numpy_dtype_promotion")  # the others are dear
        for fn, *arrays in [OPERATIONS[n] for n in (SOME if some else OPERATIONS)]:
            args = list(map(jnp.asarray, arrays))
            rows = [{"a": S(1)} if np.ndim(x) == 4 and len(x) == 1 else {"a": S(0)} for x in args]
            got, want = shardc.function(fn, mesh=MESH, in_placements=tuple(rows))(*args), fn(*args)
            jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)
    finally:
        jax.config.update(name, before)
