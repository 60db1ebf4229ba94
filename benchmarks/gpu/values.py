"""Section values: what a device computes under shardc, beside jax.jit on the same device and on the CPU.

Callbacks, random bits, donation, and sizes that no tile of a GPU divides. Products are of float32 in full precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import shardc
from benchmarks.gpu.batches import Draw
from benchmarks.gpu.child import describe, figure, verdict
from benchmarks.measure import report
from shardc import S

SEEN: list[float] = []
"""What callbacks were given."""


@dataclass(frozen=True)
class Check:
    """A function whose results are compared.

    Attributes:
      fn: of `args`.
      here: the largest difference from jax.jit on the same device, as a part of a result's largest value; 0: every bit.
      cpu: the same, from the CPU. None: the two need not agree, and the difference is a figure of the report alone.
      ordered: whether callbacks come in the order of the program.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    here: float = 0.0
    cpu: float | None = 1e-5
    ordered: bool = False


def note(x: Any) -> np.ndarray:
    SEEN.append(float(np.asarray(x, np.float64).sum()))
    return np.asarray(x) * 2


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def pure(x):
    return jax.pure_callback(note, like(x), x) + 1


def io(x):
    return io_callback(note, like(x), x) + 1


def debug(x):
    jax.debug.callback(note, x)
    return x * 2


def in_a_scan(x):
    def body(c, row):
        jax.debug.callback(note, row)
        return c + jax.pure_callback(note, like(row), row), row

    return lax.scan(body, jnp.zeros(x.shape[1]), x)


def in_order(x):
    for i in range(4):
        io_callback(lambda v: (note(v), None)[1], None, x + i, ordered=True)
    return lax.fori_loop(0, 3, lambda i, c: c + io_callback(note, like(i), i, ordered=True), x)


def in_a_gradient(x):
    return jax.grad(jax.checkpoint(lambda x: (jax.debug.callback(note, x), jnp.square(x).sum())[1]))(x)


def bits(impl, x):
    key = jax.random.key(7, impl=impl)
    return jax.random.bits(key, (129, 33)), jax.random.bits(jax.random.fold_in(key, 3), (1001,), "uint8")


def normals(impl, x):
    a, b = jax.random.split(jax.random.key(7, impl=impl))
    return jax.random.normal(a, (129, 33)), jax.random.permutation(b, 1001), jax.random.bernoulli(b, 0.3, (77,))


def products(x, w):
    return x @ w, jnp.einsum("ij,jk->ki", x, w), jax.grad(lambda w: jnp.square(x @ w).mean())(w)


def reductions(x):
    return x.sum(0), x.max(1), x.mean(), jax.nn.softmax(x, 0), jnp.cumsum(x, 0), x.argmax(0)


def moves(x):
    table = jnp.concatenate([x, x[:1]])
    return jnp.sort(x, 0), table[::3], jnp.take(x, jnp.asarray([2, 0, 2]), 0), jnp.pad(x, ((1, 2), (0, 3))), x[3:]


def convolutions(x, w):
    out = lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return out, lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def loops(x):
    def body(c):
        return c[0] + 1, jnp.sin(c[1]) + 0.1

    _, y = lax.while_loop(lambda c: c[0] < 5, body, (0, x))
    return y, lax.cond(x.sum() > 0, jnp.abs, jnp.negative, x), lax.scan(lambda c, r: (c + r, c * r), x[0], x)


def step(params, x, y):
    def loss(params):
        return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


DRAW = Draw()
X = np.arange(21, dtype=np.float32).reshape(7, 3)
UNEVEN = DRAW.normal(67, 13)
EMPTY = np.zeros((0, 5), np.float32)
PARAMS = {"up": DRAW.normal(13, 37), "down": DRAW.normal(37, 5)}
IMAGES = (DRAW.normal(5, 17, 11, 3), DRAW.normal(3, 3, 3, 7))

CHECKS: Mapping[str, Check] = {
    "pure_callback": Check(pure, (X,), cpu=0.0),
    "io_callback": Check(io, (X,), cpu=0.0),
    "debug.callback": Check(debug, (X,), cpu=0.0),
    "callbacks in a scan": Check(in_a_scan, (X,), cpu=0.0),
    "callbacks in order": Check(in_order, (X,), cpu=0.0, ordered=True),
    "callback in a gradient": Check(in_a_gradient, (X,), cpu=0.0),
    "threefry bits": Check(partial(bits, "threefry2x32"), (X,), cpu=0.0),
    "threefry numbers": Check(partial(normals, "threefry2x32"), (X,), here=1e-6),
    "rbg bits": Check(partial(bits, "rbg"), (X,), cpu=None),
    "rbg numbers": Check(partial(normals, "rbg"), (X,), here=1e-6, cpu=None),
    "unsafe_rbg bits": Check(partial(bits, "unsafe_rbg"), (X,), cpu=None),
    "products, uneven": Check(products, (UNEVEN, PARAMS["up"]), here=1e-5),
    "products of one row": Check(products, (UNEVEN[:1], PARAMS["up"]), here=1e-5),
    "reductions, uneven": Check(reductions, (UNEVEN,), here=1e-5),
    "moves, uneven": Check(moves, (UNEVEN,), cpu=0.0),
    "moves of integers": Check(moves, (np.arange(77, dtype=np.int32).reshape(11, 7) % 5,), cpu=0.0),
    "convolutions, uneven": Check(convolutions, IMAGES, here=1e-5),
    "loops, uneven": Check(loops, (UNEVEN,), here=1e-5),
    "no rows": Check(lambda x: (x * 2, x.sum(0), jnp.sort(x, 1)), (EMPTY,), cpu=0.0),
    "training step": Check(step, (PARAMS, UNEVEN, DRAW.normal(67, 5)), here=1e-5),
}
DONATION = "donation"


def seen_by(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[list[np.ndarray], list[float]]:
    """Results as leaves on the host, and what callbacks were given."""
    SEEN.clear()
    out = jax.block_until_ready(fn(*args))
    jax.effects_barrier()
    return [np.asarray(x) for x in jax.tree.leaves(out)], SEEN.copy()


def run(check: Check, mesh: Any, cpu: Any) -> dict[str, Any]:
    """What is wrong, and the differences from both."""
    rows = {"data": S(0)} if isinstance(check.args[0], np.ndarray) else None
    pins = (rows, *[None] * (len(check.args) - 1))
    ours, told = seen_by(shardc.function(check.fn, mesh=mesh, in_placements=pins), check.args)
    here, told_here = seen_by(jax.jit(check.fn), jax.device_put(check.args, mesh.devices.flat[0]))
    with jax.default_device(cpu):
        there, told_cpu = seen_by(jax.jit(check.fn), jax.device_put(check.args, cpu))
    order = list if check.ordered else sorted
    wrong: list[str] = []
    off_here, off_cpu = off(ours, here), off(ours, there)
    if off_here > check.here:
        wrong.append(f"differs from jax.jit on the same device by {off_here:.1e}, more than {check.here:.0e}")
    if check.cpu is not None and off_cpu > check.cpu:
        wrong.append(f"differs from the CPU by {off_cpu:.1e}, more than {check.cpu:.0e}")
    for name, other in (("jax.jit on the same device", told_here), ("the CPU", told_cpu)):
        if order(told) != order(other):
            wrong.append(f"callbacks were given {told}, under {name} {other}")
    return {"here": figure(off_here), "cpu": figure(off_cpu), "calls": len(told), **verdict(wrong)}


def off(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The largest difference of a float as a part of its array's largest value. Anything else: 0 if equal, else inf."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf")
        if np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
            continue
        if x.dtype.kind != "f" or not (np.isfinite(x).all() and np.isfinite(y).all()):
            return float("inf")
        worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)))
    return worst


def donated(mesh: Any, cpu: Any) -> dict[str, Any]:
    """Donated arguments are gone after a call, others are not, XLA reuses their memory, and three steps are those of
    the CPU."""
    args = CHECKS["training step"].args
    ours = shardc.function(step, mesh=mesh, donate_argnums=0)
    params, x, y = shardc.put(args, mesh, ours.plan(*args).in_placements)
    theirs = jax.device_put(args[0], cpu)
    first = params
    for _ in range(3):
        params, value = ours(params, x, y)
        with jax.default_device(cpu):
            theirs, other = jax.jit(step)(theirs, *jax.device_put(args[1:], cpu))
    leaves = [jax.tree.map(np.asarray, jax.tree.leaves(tree)) for tree in ((params, value), (theirs, other))]
    apart = off(*leaves)
    alias = ours.compile(*args).memory_stats().alias_size_in_bytes
    size = sum(w.nbytes for w in jax.tree.leaves(args[0]))
    wrong = [
        text
        for text, bad in (
            ("a donated argument is still there", not all(w.is_deleted() for w in jax.tree.leaves(first))),
            ("an argument that was not donated is gone", x.is_deleted() or y.is_deleted()),
            (f"XLA reuses {alias} bytes of {size} that were donated", alias < size),
            (f"differs from the CPU by {apart:.1e}, more than 1e-05", apart > 1e-5),
        )
        if bad
    ]
    return {"here": None, "cpu": figure(apart), "calls": 0, **verdict(wrong)}


def measure(job: str, options: argparse.Namespace) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh, cpu = shardc.make_mesh(data=1), jax.devices("cpu")[0]
    checks = {name: partial(run, check) for name, check in CHECKS.items()} | {DONATION: donated}
    for name, check in checks.items():
        try:
            report(check=name, **check(mesh, cpu))
        except Exception as error:  # noqa: BLE001  a row of the report; the other checks are run
            report(check=name, ok=False, error=describe(error))
