"""Reductions that overlap with computation, in programs small enough to do by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardc.passes.estimate.overlap import late_values, overlapped_seconds

X = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def chain(f: Any, *args: Any) -> Any:
    return jax.make_jaxpr(f)(*args).jaxpr


def products(jaxpr: Any) -> set[int]:
    return {e for e in jaxpr.eqns if e.primitive.name == "dot_general"}


def test_late_is_what_no_product_depends_on() -> None:
    def f(x: Any, w: Any) -> Any:
        a = jnp.sin(x)
        b = a @ w
        c = jnp.cos(a)  # read by the result alone
        return jnp.tan(c) + b

    jaxpr = chain(f, X, X)
    names = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    heavy = products(jaxpr)
    assert sorted(names[v] for v in late_values(jaxpr, [True], heavy)) == ["add", "cos", "dot_general", "tan"]
    assert late_values(jaxpr, [False], heavy) == set()


def overlapped(seconds: float, results: list[bool] | None = None) -> float:
    """The overlap of a reduction (here: cos) that no heavy operation reads and whose operand is made first; three
    products of one second each follow."""

    def f(x: Any, w: Any) -> Any:
        a = jnp.sin(x)
        b = ((x @ w) @ w) @ w
        return jnp.cos(a), b

    jaxpr = chain(f, X, X)
    late = late_values(jaxpr, results or [True, True], products(jaxpr))
    reducing = {e: seconds for e in jaxpr.eqns if e.primitive.name == "cos"}
    return overlapped_seconds(jaxpr, late, reducing, dict.fromkeys(products(jaxpr), 1.0))


def test_a_reduction_hides_behind_what_follows_its_operand() -> None:
    assert overlapped(0.5) == 0.5
    assert overlapped(3.0) == 3.0
    assert overlapped(5.0) == 3.0  # two seconds are waited for
    assert overlapped(0.5, [False, True]) == 0.0  # somebody waits for it


def test_reductions_share_the_links_and_what_comes_before_hides_nothing() -> None:
    def f(x: Any, w: Any) -> Any:
        b = (x @ w) @ w
        return jnp.cos(b), jnp.sin(w)

    jaxpr = chain(f, X, X)
    heavy = products(jaxpr)
    reducing = {e: 1.5 for e in jaxpr.eqns if e not in heavy}
    found = overlapped_seconds(jaxpr, late_values(jaxpr, [True, True], heavy), reducing, dict.fromkeys(heavy, 1.0))
    assert found == 1.5  # that of w, which is there at once; that of b comes after all products
