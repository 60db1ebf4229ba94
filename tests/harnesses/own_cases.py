"""Cases of our own, in the form of JAX's, for what those lack: control flow, remat, bits, parts of factorizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tests.harnesses.cases import Case

CASES: list[Case] = []


def define(group: str, name: str, fn: Callable[..., Any], *shapes: tuple[int, ...] | Callable[..., Any]) -> None:
    """A case whose arguments are normal float64 of these shapes, or what a function of the random state gives."""

    def make(rng: np.random.RandomState) -> list[Any]:
        return [s(rng) if callable(s) else rng.randn(*s) for s in shapes]

    CASES.append(Case(group, f"{group}_{name}", fn, make))


def whole_numbers(low: int, high: int, *shape: int, dtype: Any = np.int32) -> Callable[[np.random.RandomState], Any]:
    return lambda rng: np.asarray(rng.randint(low, high, shape), dtype)


def of_type(dtype: Any, *shape: int) -> Callable[[np.random.RandomState], Any]:
    return lambda rng: np.asarray(rng.randn(*shape)).astype(dtype)


# --- loops ---
def _rows(c, x):
    c = jnp.tanh(c + x)
    return c, c * 2


define("scan", "rows", lambda c, xs: lax.scan(_rows, c, xs), (6,), (8, 6))
define("scan", "rows_reversed", lambda c, xs: lax.scan(_rows, c, xs, reverse=True), (6,), (8, 6))
define("scan", "rows_unrolled", lambda c, xs: lax.scan(_rows, c, xs, unroll=3), (5,), (7, 5))
define("scan", "layers", lambda x, ws: lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum(0)), x, ws), (6, 4), (3, 4, 4))
define("scan", "only_sums", lambda xs: lax.scan(lambda c, x: (c + x, None), jnp.zeros(5), xs)[0], (9, 5))
define("scan", "no_rows", lambda c, xs: lax.scan(_rows, c, xs), (6,), (0, 6))
define("scan", "of_scans", lambda c, xs: lax.scan(lambda c, x: lax.scan(_rows, c, x), c, xs), (3,), (2, 5, 3))
define(
    "scan",
    "swapped_carries",
    lambda a, b: lax.scan(lambda c, _: ((c[1], c[0] * 2), c[0]), (a, b), None, 3)[0],
    (4, 8),
    (4, 8),
)
define("scan", "counted", lambda x: lax.scan(lambda c, x: ((c[0] + 1, c[1] * x), c[0]), (0, x[0]), x), (8, 3))
define(
    "scan",
    "gradient",
    jax.grad(lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum(), (0, 1)),
    (3, 4, 4),
    (6, 4),
)
define("scan", "associative", lambda xs: lax.associative_scan(jnp.add, xs), (9, 4))
define("scan", "map", lambda xs: lax.map(lambda x: jnp.outer(x, x), xs), (6, 3))

define("while", "doubling", lambda x: lax.while_loop(lambda c: jnp.abs(c).sum() < 99, lambda c: c * 2 + 0.1, x), (5, 4))
define("while", "rows", lambda x: lax.fori_loop(0, 4, lambda i, c: c.at[i].add(c[i + 1]), x), (6, 4))
define(
    "while",
    "pairs",
    lambda x, w: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)),
    (8, 4),
    (4, 4),
)
define("while", "never", lambda x: lax.while_loop(lambda c: c.sum() < -1e9, lambda c: c + 1, x), (7, 3))
define("while", "bound_given", lambda n, x: lax.fori_loop(0, n, lambda i, c: c + i * x, x), whole_numbers(0, 5), (6, 2))
define("while", "search", lambda xs, v: jnp.searchsorted(jnp.sort(xs), v), (13,), (6,))
define(
    "while",
    "batched",
    jax.vmap(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.abs(c) * 2 + 1, x)),
    (6, 3),
)

# --- branches ---
define("cond", "by_sum", lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w, lambda: x * 2), (8, 4), (4, 4))
define("cond", "by_argument", lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), whole_numbers(0, 2, dtype=bool), (6, 3))
define(
    "cond",
    "several",
    lambda i, x: lax.switch(i, [jnp.sin, lambda x: x.sum(0) + x, lambda x: x[::-1]], x),
    whole_numbers(-1, 4),
    (6, 3),
)
define("cond", "trees", lambda x: lax.cond(x[0, 0] > 0, lambda: (x.sum(0), x[0]), lambda: (x[0], x.max(0))), (6, 3))
define(
    "cond",
    "gradient",
    jax.grad(lambda x: lax.cond(x.sum() > 0, lambda: (x**2).sum(), lambda: jnp.sin(x).sum())),
    (6, 3),
)
define("cond", "batched", jax.vmap(lambda p, x: lax.cond(p > 0, jnp.sin, jnp.cos, x)), (8,), (8, 3))


# --- recomputation, and derivatives of one's own ---
def _mlp(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w).sum()


def _layers(w, x):
    return lax.scan(jax.checkpoint(lambda x, _: (jnp.tanh(x @ w), None)), x, None, 3)[0].sum()


define("remat", "forward", jax.checkpoint(_mlp), (4, 4), (8, 4))
define("remat", "gradient", jax.grad(jax.checkpoint(_mlp), (0, 1)), (4, 4), (8, 4))
define(
    "remat",
    "gradient_saving_dots",
    jax.grad(jax.checkpoint(_mlp, policy=jax.checkpoint_policies.dots_saveable), (0, 1)),
    (4, 4),
    (8, 4),
)
define("remat", "in_scan", jax.grad(_layers, (0, 1)), (4, 4), (8, 4))
define("custom_jvp", "relu6", jax.grad(lambda x: jax.nn.relu6(x).sum()), (8, 3))
define("custom_jvp", "logsumexp", jax.grad(lambda x: jax.nn.logsumexp(x, 1).sum()), (8, 5))
define("custom_vjp", "optimization_barrier", lambda x, y: lax.optimization_barrier((x * 2, y)), (8, 3), (5,))


@jax.custom_vjp
def _doubled_backward(x):
    return jnp.sin(x)


_doubled_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))
define("custom_vjp", "gradient", jax.grad(lambda x: _doubled_backward(x).sum()), (8, 3))


# --- random numbers ---
def _key(rng):
    return np.asarray(jax.random.key_data(jax.random.key(rng.randint(1000))))


def _keys(words):
    return jax.random.split(_wrap(words), 8)


_wrap = jax.random.wrap_key_data
for _shape in ((13,), (8, 6), (4, 3, 5)):
    for _bits in (np.uint8, np.uint32, np.uint64):
        _name = f"{np.dtype(_bits)}_{_shape}"
        define("random_bits", _name, lambda k, s=_shape, b=_bits: jax.random.bits(_wrap(k), s, b), _key)
    define("random_normal", f"{_shape}", lambda k, s=_shape: jax.random.normal(_wrap(k), s), _key)
    define(
        "random_dropout",
        f"{_shape}",
        lambda k, x: jnp.where(jax.random.bernoulli(_wrap(k), 0.5, x.shape), x, 0),
        _key,
        _shape,
    )
define("random_split", "of_argument", lambda k: jax.random.key_data(jax.random.split(_wrap(k), 5)), _key)
define(
    "random_split",
    "fold_in",
    lambda k, i: jax.random.key_data(jax.random.fold_in(_wrap(k), i)),
    _key,
    whole_numbers(0, 9),
)
define(
    "random_split",
    "batched",
    lambda k: jax.vmap(lambda k: jax.random.uniform(k, (3,)))(jax.random.split(_wrap(k), 8)),
    _key,
)
define("random_permutation", "rows", lambda k, x: jax.random.permutation(_wrap(k), x), _key, (11, 3))
define("random_gamma", "shape", lambda k, a: jax.random.gamma(_wrap(k), jnp.abs(a) + 0.5), _key, (8, 3))
define(
    "random_gamma",
    "one_key_for_each",
    lambda k, a: jax.vmap(jax.random.gamma)(_keys(k), jnp.abs(a) + 0.5),
    _key,
    (8, 3),
)
for _name in ("rbg", "unsafe_rbg", "threefry4x32"):
    define("random_bits", _name, lambda n=_name: jax.random.bits(jax.random.key(7, impl=n), (8, 6)))
    define(
        "random_bits",
        f"of_keys_of_{_name}",
        lambda n=_name: jax.vmap(jax.random.bits)(jax.random.split(jax.random.key(7, impl=n), 8)),
    )
    define(
        "random_split",
        f"of_{_name}",
        lambda n=_name: jax.random.key_data(jax.random.split(jax.random.fold_in(jax.random.key(7, impl=n), 3), (6, 2))),
    )
define("rng_bit_generator", "both", lambda: lax.rng_bit_generator(np.arange(4, dtype=np.uint32), (6, 5)))
define("random_uniform", "bounds", lambda k, x: jax.random.uniform(_wrap(k), (7, 3), minval=x, maxval=9), _key, (7, 1))
define("random_truncated", "normal", lambda k: jax.random.truncated_normal(_wrap(k), -1, 2, (5, 9)), _key)
define("random_categorical", "rows", lambda k, x: jax.random.categorical(_wrap(k), x, 1), _key, (9, 5))
define("random_permutation", "independent", lambda k, x: jax.random.permutation(_wrap(k), x, 1, True), _key, (6, 9))
define("random_choice", "of_rows", lambda k, x: jax.random.choice(_wrap(k), x, (5,), replace=False), _key, (8, 3))
define(
    "random_keys",
    "moved",
    lambda k, i: jax.random.key_data(jnp.where(i > 3, _keys(k)[::-1], _keys(k)[i])),
    _key,
    whole_numbers(0, 8, 8),
)
define(
    "random_keys",
    "carried",
    lambda k, x: lax.scan(lambda k, r: (jax.random.split(k)[0], jax.random.bits(k, r.shape)), _wrap(k), x)[1],
    _key,
    (6, 5),
)

# --- calls ---
define(
    "custom_linear_solve",
    "conjugate_gradient",
    lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a.T @ (a @ v) + 5 * v, b, maxiter=20)[0],
    (6, 6),
    (6, 3),
)
define(
    "custom_linear_solve",
    "gradient",
    jax.grad(lambda a, b: jnp.linalg.solve(a + 9 * jnp.eye(6), b).sum(), (0, 1)),
    (6, 6),
    (6, 3),
)
define("optimization_barrier", "three", lambda x, y: lax.optimization_barrier((x, y.T, x.sum(0))), (8, 3), (5, 4))
define("device_put", "tree", lambda x, y: jax.device_put({"x": x * 2, "y": y}), (8, 3), (5,))
define("scan", "map_of_batches", lambda xs: lax.map(lambda x: jnp.outer(x, x), xs, batch_size=4), (7, 3))


def _doubled(x):
    return np.asarray(x) * 2


define("pure_callback", "one", lambda x: jax.pure_callback(_doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), x), (8, 3))
define("io_callback", "sum", lambda x: io_callback(_doubled, jax.ShapeDtypeStruct((3,), x.dtype), x.sum(0)), (7, 3))
define(
    "pure_callback",
    "of_booleans",
    lambda x: jax.pure_callback(lambda v: np.asarray(v) > 0, jax.ShapeDtypeStruct(x.shape, bool), x) & (x < 1),
    (5, 4),
)

# --- operations ---
for _axis in (0, 1, 2):
    define("cumlogsumexp", f"axis_{_axis}", lambda x, a=_axis: lax.cumlogsumexp(x, a), (5, 8, 3))
    define("cumlogsumexp", f"axis_{_axis}_reversed", lambda x, a=_axis: lax.cumlogsumexp(x, a, reverse=True), (5, 8, 3))


def _groups_of(rows: int, groups: int) -> Callable[[np.random.RandomState], Any]:
    return lambda rng: np.bincount(rng.randint(0, groups, rows), minlength=groups).astype(np.int32)


define("ragged_dot", "rows", lax.ragged_dot, (12, 5), (3, 5, 4), _groups_of(12, 3))
define("ragged_dot", "rows_left_over", lax.ragged_dot, (12, 5), (3, 5, 4), _groups_of(9, 3))
define("ragged_dot", "f32", lax.ragged_dot, of_type(np.float32, 16, 8), of_type(np.float32, 4, 8, 8), _groups_of(16, 4))
define(
    "ragged_dot",
    "gradient",
    jax.grad(lambda a, b, n: (lax.ragged_dot(a, b, n) ** 2).sum(), (0, 1)),
    (12, 5),
    (3, 5, 4),
    _groups_of(12, 3),
)


def _symmetric(rng):
    a = rng.randn(4, 5, 5)
    return a + np.swapaxes(a, -1, -2)


define("schur", "square", lax.linalg.schur, (5, 5))
define("hessenberg", "batched", lax.linalg.hessenberg, (4, 5, 5))
define("tridiagonal", "batched", lax.linalg.tridiagonal, _symmetric)
define("householder_product", "batched", lax.linalg.householder_product, (4, 5, 3), (4, 3))
define(
    "symmetric_product",
    "added",
    lambda a, c: lax.linalg.symmetric_product(a, c, symmetrize_output=True),
    (5, 3),
    (5, 5),
)
define(
    "lu_pivots_to_permutation",
    "batched",
    lambda p: lax.linalg.lu_pivots_to_permutation(p, 5),
    whole_numbers(0, 5, 4, 3),
)
define("cholesky_update", "one", lax.linalg.cholesky_update, lambda rng: np.linalg.cholesky(5 * np.eye(4)).T, (4,))
define("clz", "int", lax.clz, whole_numbers(-9, 99, 8, 3))
define("dot_general", "einsum", lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y), (2, 5, 3, 4), (2, 6, 3, 4))
define("split", "uneven", lambda x: jnp.split(x, [3, 4], 0), (9, 5))
define("tile", "both", lambda x: jnp.tile(x, (2, 3)), (3, 4))
define("polygamma", "second", lambda n, x: lax.polygamma(n, jnp.abs(x) + 1), lambda rng: np.full((4, 3), 2.0), (4, 3))
define("zeta", "positive", lambda x, q: lax.zeta(jnp.abs(x) + 1.5, jnp.abs(q) + 0.5), (4, 3), (4, 3))
define("exp2", "both", lax.exp2, (8, 3))
define("erf_inv", "inside", lambda x: lax.erf_inv(jnp.tanh(x)), (8, 3))
define("reduce_precision", "half", lambda x: lax.reduce_precision(x, 5, 10), (8, 3))
define("fft", "real", lambda x: jnp.fft.rfft2(x), (4, 6, 5))
define(
    "conv_general_dilated",
    "gradient",
    jax.grad(lambda x, k: lax.conv(x, k, (1, 1), "SAME").sum() ** 2, (0, 1)),
    (4, 3, 8, 8),
    (2, 3, 3, 3),
)
IMAGES = ("NHWC", "HWIO", "NHWC")


def _square(y):
    return jnp.sum(y * y)


define(
    "conv_general_dilated",
    "gradient_strided",
    jax.grad(lambda x, k: _square(lax.conv_general_dilated(x, k, (2, 1), "SAME", dimension_numbers=IMAGES)), (0, 1)),
    (1, 16, 9, 2),
    (3, 5, 2, 3),
)
define(
    "conv_general_dilated",
    "gradient_dilated",
    jax.grad(lambda x, k: _square(lax.conv_general_dilated(x, k, (2,), ((3, 1),), (2,), (2,))), (0, 1)),
    (2, 2, 13),
    (3, 2, 4),
)
define(
    "conv_general_dilated",
    "gradient_depthwise",
    jax.grad(lambda x, k: _square(lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=4)), (0, 1)),
    (2, 4, 11),
    (8, 1, 3),
)
define(
    "select_and_scatter_add",
    "gradient_of_overlapping_maxima",
    jax.grad(lambda x: _square(lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 1), "SAME"))),
    lambda rng: np.round(rng.randn(15, 8) * 2),
)
define(
    "reduce_window_add",
    "gradient_strided",
    jax.grad(lambda x: _square(lax.reduce_window(x, 0.0, lax.add, (3, 2), (2, 2), "SAME"))),
    (15, 8),
)
define(
    "scatter_add",
    "unsorted_duplicates_of_rows",
    lambda x, i, u: x.at[i].add(u),
    (9, 4),
    whole_numbers(-3, 12, 7),
    (7, 4),
)
define("top_k", "ties", lambda x: lax.top_k(x, 3), whole_numbers(0, 4, 6, 11))
define(
    "sort", "ties_kept_in_order", lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), whole_numbers(0, 3, 12), (12,)
)
define("argsort", "columns", lambda x: jnp.argsort(x, 0), whole_numbers(0, 5, 9, 3))
