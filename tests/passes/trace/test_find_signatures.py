"""Operations without a rule: the signatures that are found for unknown primitives, and those that must not be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import shardc
from shardc import S
from shardc.passes.trace.find_signatures import BY_BATCHING

X = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
SPLIT = {"data": S(0), "model": S(1)}


def primitive(name, run, results=1):
    """A primitive whose definition JAX cannot see: its lowering is a function of its own."""
    p = Primitive(name)
    p.multiple_results = results > 1
    p.def_impl(run)

    def abstract(*avals, **params):
        made = jax.eval_shape(lambda *xs: run(*xs, **params), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        shaped = [jax.core.ShapedArray(y.shape, y.dtype) for y in jax.tree.leaves(made)]
        return shaped if results > 1 else shaped[0]

    p.def_abstract_eval(abstract)
    lowered = mlir.lower_fun(run, multiple_results=results > 1)
    mlir.register_lowering(p, lambda ctx, *xs, **params: lowered(ctx, *xs, **params))
    return p


def vectorized(p):
    batching.primitive_batchers[p] = lambda args, dims, **params: (p.bind(*args, **params), dims[0])
    return p


twist_p = vectorized(primitive("twist", lambda x, *, k: jnp.sin(x) * k))
plain_p = vectorized(primitive("plain", lambda x: jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), x)))
alone_p = primitive("alone", jnp.sin)
centre_p = primitive("centre", lambda x: x - x.mean())
jump_p = primitive("jump", lambda x: jnp.where(jnp.isnan(x).any(), 0.0, x))
count_p = primitive("count", lambda x: x + jax.lax.broadcasted_iota(jnp.float32, x.shape, x.ndim - 1))
rows_p = primitive("rows", lambda x: jnp.cumsum(x, -1))
batching.primitive_batchers[rows_p] = lambda args, dims: (rows_p.bind(jnp.moveaxis(args[0], dims[0], 0)), 0)
half_p = vectorized(primitive("half", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)))
ad.deflinear(half_p, lambda ct: [ct])
wrong_p = vectorized(primitive("wrong", lambda x: jnp.cumsum(x, 0) if x.size > 16 else x))
defined_p = Primitive("defined")
defined_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(defined_p, mlir.lower_fun(lambda x: x - jnp.max(x, -1, keepdims=True), multiple_results=False))


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def planned(mesh, fn, x=X, pins=SPLIT, **options):
    """A function, its plan; asserts that it computes what it does on one device, and moves what is planned."""
    f = shardc.function(fn, mesh=mesh, in_placements=(pins,), **options)
    compiled = f.compile(x)
    assert compiled.audit().ok, compiled.audit()
    np.testing.assert_allclose(np.asarray(f(x)), np.asarray(jax.jit(fn)(x)), rtol=1e-5, atol=1e-6)
    report = compiled.check(x)
    assert report.ok and report.signatures == sum(u.count for u in compiled.plan.found), str(report)
    return compiled.plan


def found(plan):
    return {u.primitive: (u.how, u.rule) for u in plan.found}


def test_the_batching_rule_splits_what_it_can_be_batched_over(mesh):
    plan = planned(mesh, lambda x: twist_p.bind(x, k=2.0))
    assert found(plan) == {"twist": (BY_BATCHING, '@shardc.signature("d0 d1 -> d0 d1")')}
    assert not plan.collectives and not plan.gathered
    plan = planned(mesh, rows_p.bind)
    assert found(plan) == {"rows": (BY_BATCHING, '@shardc.signature("d0 _ -> d0 _")')}
    assert {c.axes for c in plan.collectives} <= {("model",)}


@pytest.mark.parametrize("p", [centre_p, jump_p, count_p, alone_p], ids=str)
def test_what_has_no_batching_rule_is_replicated(mesh, p):
    plan = planned(mesh, p.bind)
    assert not plan.found and [g.primitive for g in plan.gathered] == [p.name]


def test_loops_are_looked_into(mesh):
    def fn(x):
        return jax.lax.scan(lambda c, _: (twist_p.bind(c, k=0.5) + plain_p.bind(c), None), x, None, length=3)[0]

    assert found(planned(mesh, fn)).keys() == {"twist", "plain"}


def test_partial_sums_do_not_pass(mesh):
    """Rounding to fewer bits is its own derivative, and is not linear."""
    w = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    plan = planned(mesh, lambda x: half_p.bind(x @ w), pins=SPLIT, out_placements={})
    assert len([c for c in plan.collectives if "model" in c.axes]) == 1


def test_a_definition_is_planned_in_place_of_the_operation(mesh):
    plan = planned(mesh, defined_p.bind)
    assert not plan.found and not plan.gathered
    assert "reduce_max" in {e.primitive.name for e in plan.boxed.jaxpr.eqns}


def test_hijax_primitives_are_planned_as_what_they_expand_to(mesh):
    edges = jnp.linspace(-2.0, 2.0, 9)
    for fn in (lambda x: jnp.searchsorted(edges, x), lambda x: jnp.digitize(x, edges),
               lambda x: jnp.interp(x, edges, edges**2)):  # fmt: skip
        plan = planned(mesh, fn)
        assert not plan.gathered and not plan.collectives


def test_what_was_found_can_be_refused(mesh):
    fn = lambda x: twist_p.bind(x, k=2.0) + plain_p.bind(x)  # noqa: E731
    assert found(planned(mesh, fn, replicate="twist")).keys() == {"plain"}
    plan = planned(mesh, fn, replicate="*")
    assert not plan.found and {g.primitive for g in plan.gathered} == {"twist", "plain"}


def test_a_check_of_values_names_the_primitive_and_how_to_refuse_it(mesh):
    """Its batching rule lies."""
    f = shardc.function(wrong_p.bind, mesh=mesh, in_placements=(SPLIT,))
    compiled = f.compile(X)
    with pytest.raises(shardc.SignatureError) as info:
        compiled.check(X)
    text = str(info.value)
    assert "signatures that were found for operations without a rule are wrong" in text
    assert "wrong: " in text and "result 0, f32[12,8] at {data: S(0), model: S(1)}" in text
    assert 'shardc.function(..., replicate=["wrong"])' in text
    refused = shardc.function(wrong_p.bind, mesh=mesh, in_placements=(SPLIT,), replicate=["wrong"])
    np.testing.assert_allclose(refused(X), np.cumsum(X, 0), rtol=1e-5)


def test_explain_names_what_was_found(mesh, golden):
    def fn(x):
        return twist_p.bind(x, k=2.0) * plain_p.bind(x)

    text = shardc.function(fn, mesh=mesh, in_placements=(SPLIT,)).plan(X).explain()
    begin = text.index("Signatures found")
    golden("found_signatures", text[begin : text.index("\n\n", begin)])


def test_uneven_pieces_and_gradients(mesh):
    ad.defjvp(twist_p, lambda t, x, *, k: t * k * jnp.cos(x))
    x = np.random.default_rng(2).normal(size=(7, 5)).astype(np.float32)
    planned(mesh, jax.grad(lambda x: (twist_p.bind(x, k=2.0) ** 2).sum()), x=x)


def test_a_plan_with_found_signatures_is_saved_and_replayed(mesh, tmp_path):
    fn = lambda x: twist_p.bind(x, k=2.0)  # noqa: E731
    plan = planned(mesh, fn)
    plan.save(tmp_path / "plan.json")
    again = shardc.function(fn, mesh=mesh, plan=tmp_path / "plan.json")
    np.testing.assert_allclose(again(X), jax.jit(fn)(X), rtol=1e-6)
