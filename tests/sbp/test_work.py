"""The work of every primitive has a price: twice the size costs more, twice the side of a factorization much more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import shardc
from shardc import S
from shardc.ir.user_operation import user_p
from shardc.machine.mesh import make_mesh, view
from shardc.passes.estimate.plan_cost import whole_seconds
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp import rules
from shardc.sbp.signature import find_rule
from tests.sbp.cases import CASES, attention_gradients, primitive_of
from tests.sbp.harness import equation_of

assert rules  # imported for what it registers
MESH = view(make_mesh(topology="v5p:4x2x1", data=8))


def price(fn: Callable[..., Any], *args: Any) -> float:
    jaxpr, _ = canonicalize(jax.make_jaxpr(fn)(*args))
    return sum(whole_seconds(e, MESH) for e in jaxpr.eqns)


NO_OPERANDS = {name for name, (_, args, _) in CASES.items() if not args} | {"iota_2x32_shape"}
EMPTY = {n for n in CASES if "empty" in n or "nothing" in n or n in ("top_none", "reshape_(0, 3)_(3, 0)")}
UNBATCHED = {"ragged_inner_alike", "ragged_batched", "reduce", "reduce_window", "reduce_window_two"}
UNBATCHED |= {n for n in CASES if n.startswith("attention")}  # its empty operands have no batch
UNBATCHED |= {n for n in CASES if n.startswith(("in_order", "conv_of"))}  # passes put them in after all vmaps
"""Cases whose primitive has no batching rule for them."""


@pytest.mark.sampled(by=lambda name: {primitive_of(name)})
@pytest.mark.parametrize("name", [n for n in CASES if n not in NO_OPERANDS | EMPTY | UNBATCHED])
def test_twice_as_many_cost_more(name: str) -> None:
    fn, args, primitive = CASES[name]
    with jax.enable_x64(True):
        eqns = jax.make_jaxpr(fn)(*args).jaxpr.eqns
        eqn = next((e for e in eqns if e.primitive.name == primitive), eqns[-1])
        avals = [v.aval for v in eqn.invars]
        bind = jax.vmap(lambda *xs: eqn.primitive.bind(*xs, **eqn.params))
        once, twice = (price(bind, *(jax.ShapeDtypeStruct((n, *a.shape), a.dtype) for a in avals)) for n in (2, 4))
    assert twice > once > 0


def square(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


CUBIC: dict[str, Callable[[Any], Any]] = {
    "cholesky": jnp.linalg.cholesky,
    "solve": lambda a: jnp.linalg.solve(a, a),
    "inv": jnp.linalg.inv,
    "eigh": lambda a: jnp.linalg.eigh(a)[1],
    "svd": lambda a: jnp.linalg.svd(a)[0],
    "qr": lambda a: jnp.linalg.qr(a)[0],
    "slogdet's gradient": jax.grad(lambda a: jnp.linalg.slogdet(a)[1].sum()),
    "condition": lambda a: lax.cond(a[0, 0, 0] > 0, jnp.linalg.cholesky, lambda a: a, a),
    "solve of a triangle": lambda a: lax.linalg.triangular_solve(a, a, left_side=True),
    "hessenberg": lambda a: lax.linalg.hessenberg(a)[0],
    "tridiagonal": lambda a: lax.linalg.tridiagonal(a)[0],
}
LINEAR: dict[str, Callable[[Any], Any]] = {
    "fft": lambda a: jnp.fft.fft2(a),
    "sort": jnp.sort,
    "top_k": lambda a: lax.top_k(a, 16)[0],
    "approx_max_k": lambda a: lax.approx_max_k(a, 16)[0],
    "cumsum": lambda a: jnp.cumsum(a, 1),
    "reduce": lambda a: lax.reduce(a, np.float32(1), lambda x, y: x + 2 * y, (1,)),
    "reduce_window": lambda a: lax.reduce_window(
        a, np.float32(1), lambda x, y: x + 2 * y, (1, 2, 2), (1, 2, 2), "VALID"
    ),
    "pool": lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID"),
}


@pytest.mark.parametrize("name", [*CUBIC, *LINEAR])
def test_a_matrix_of_twice_the_side_costs_more(name: str) -> None:
    fn = {**CUBIC, **LINEAR}[name]
    small, large = (price(fn, square(16, n, n)) for n in (2**14, 2**15))
    assert large > (7.9 if name in CUBIC else 3.9) * small


@pytest.mark.parametrize("name", [*CUBIC, "fft", "sort"])
def test_matrices_that_arrive_everywhere_are_shared(name: str) -> None:
    """Regression: each device did all 16, as that cost nothing."""
    fn = {**CUBIC, **LINEAR}[name]
    free = shardc.function(fn, mesh=make_mesh(topology="v5p:4x2x1", data=8), in_placements=({},))
    plan = free.plan(square(16, 4096, 4096))
    assert plan.time.computing < price(fn, square(16, 4096, 4096)) / 2
    assert any(p.splits for p in plan.outputs)


FACTORS: dict[str, Callable[[Any], Any]] = {
    "cholesky": jnp.linalg.cholesky,
    "lu": lambda a: lax.linalg.lu(a)[0],
    "qr": lambda a: jnp.linalg.qr(a)[0],
    "eigh": lambda a: jnp.linalg.eigh(a)[1],
    "svd": lambda a: jnp.linalg.svd(a)[0],
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_that_have_to_be_whole_are_shared_and_gathered(name: str) -> None:
    """Each device did all 16: at the speed of a product that is faster than the gather, but no factorization has it."""
    share = shardc.function(
        FACTORS[name], mesh=make_mesh(topology="v5p:4x2x1", data=8), in_placements=({},), out_placements={}
    )
    plan = share.plan(square(16, 4096, 4096))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 7 * 2**27)]
    assert plan.seconds < price(FACTORS[name], square(16, 4096, 4096))
    assert not share.plan(square(16, 16, 16)).collectives


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_factors_of_uneven_batches(axes: Any) -> None:
    a = np.random.default_rng(0).normal(size=(13, 5, 5)).astype("f")
    spd = a @ a.swapaxes(1, 2) + 4 * np.eye(5, dtype="f")
    for fn in FACTORS.values():
        f = shardc.function(
            lambda a, fn=fn: shardc.constrain(fn(a), {"data": S(0)}),
            mesh=shardc.make_mesh(**axes), in_placements=({},), out_placements={},
        )  # fmt: skip
        assert f.compile(spd).audit().ok
        np.testing.assert_allclose(f(spd), jax.jit(fn)(spd), rtol=1e-4, atol=1e-4)


def test_an_operation_without_a_rule_and_one_of_the_users_have_a_price() -> None:
    def opaque(x: Any) -> Any:
        return jnp.fft.fft(x).real.astype(x.dtype)

    a, b = square(64, 256), square(64, 512)
    for make in (
        lambda x: shardc.signature("b _ -> b _")(opaque)(x),
        lambda x: shardc.signature("b _ -> b _", flops=lambda x: 1e6 * x.size)(opaque)(x),
        lambda x: user_p.bind(
            x, fn=lambda x: [x], text="b _ -> b _", linear=(), reduce="sum", flops=0.0, fused=False, kind=""
        )[0],
    ):
        assert price(make, b) > 1.9 * price(make, a)
    product = shardc.signature("b d, d f -> b f")(lambda x, w: x @ w)
    eqn = jax.make_jaxpr(product)(np.ones((4, 6)), np.ones((6, 5))).eqns[-1]
    assert eqn.params["flops"] == 2 * 4 * 6 * 5
    assert find_rule(equation_of(lambda x: x + 1, np.ones(3)).op).passes == 0


def test_what_is_found_for_an_operation_has_its_flops() -> None:
    cube_p = Primitive("sum_of_products")
    body = lambda x: [jnp.einsum("ij,jk,kl->il", x, x, x)] if x.ndim == 2 else [jax.vmap(lambda y: body(y)[0])(x)]  # noqa: E731
    cube_p.multiple_results = True
    cube_p.def_impl(body)
    cube_p.def_abstract_eval(lambda x: [jax.core.ShapedArray(x.shape, x.dtype)])
    mlir.register_lowering(cube_p, mlir.lower_fun(lambda x: body(x), multiple_results=True))
    batching.primitive_batchers[cube_p] = lambda xs, ds: (cube_p.bind(jnp.moveaxis(xs[0], ds[0], 0)), [0])
    fn = lambda x: cube_p.bind(x)[0]  # noqa: E731
    small, large = (price(fn, square(8, n, n)) for n in (64, 128))
    assert large > 3 * small
    f = shardc.function(fn, mesh=shardc.make_mesh(data=8), in_placements=({"data": S(0)},))
    np.testing.assert_allclose(f(np.ones((8, 4, 4), "f")), 16 * np.ones((8, 4, 4)))


def attention_flops(options: dict[str, Any], queries: int = 64, keys: int = 64) -> tuple[float, float]:
    q, k = (jax.ShapeDtypeStruct((2, n, 4, 16), jnp.bfloat16) for n in (queries, keys))
    fn = partial(attention_gradients, **options)
    return tuple(
        find_rule(equation.op).flops
        for name in ("fwd", "bwd")
        if (equation := equation_of(fn, *map(zeros, (q, k, k)), primitive=f"dot_product_attention_{name}_wrapper"))
    )


def zeros(like: Any) -> np.ndarray:
    return np.zeros(like.shape, like.dtype)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 64 * 64),
        ({"is_causal": True}, 64 * 65 // 2),
        ({"is_causal": True, "local_window_size": (7, 0)}, 8 * 9 // 2 + 56 * 8),
    ],
)
def test_attention_works_on_the_pairs_that_are_seen(options: dict[str, Any], pairs: int) -> None:
    forward, backward = attention_flops(options)
    assert forward == 2 * 2 * (2 * 4 * 16) * pairs and backward == 2.5 * forward


def test_attention_of_more_queries_than_keys_sees_all_of_them() -> None:
    assert attention_flops({"is_causal": True}, 96, 64)[0] == 4 * (2 * 4 * 16) * (64 * 65 // 2 + 32 * 64)
