"""The table of rules that `python -m shardc rules` prints: primitives, and how an example of each may be split."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import add_p
from jax.extend.random import threefry_prng_impl

from shardc import compat
from shardc.ir.ranges import conv_of_ranges_p, join_ranges_p
from shardc.ir.user_operation import signature
from shardc.ir.walk import operation_of
from shardc.report.tables import Section, report_text
from shardc.sbp.rules.in_order import in_order_p
from shardc.sbp.signature import Factors, Rule, find_rule, rules


def _pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")


def _attention(x: jax.Array) -> Any:
    heads = jnp.zeros((2, 4, 4, 8), "bfloat16") + x[0, 0].astype("bfloat16")
    with compat.cudnn_traced():
        return jax.nn.dot_product_attention(heads, heads, heads, implementation="cudnn")


EXAMPLES: Final[Mapping[str, Callable[[jax.Array], Any]]] = {
    "approx_top_k": lambda x: lax.approx_max_k(x, 2),
    "argmax": lambda x: x.argmax(1),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, "int32"),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (3, 4, 6)),
    "cholesky": lambda _: lax.linalg.cholesky(jnp.zeros((2, 4, 4))),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "conv_general_dilated": lambda x: lax.conv(jnp.zeros((2, 4, 8, 8)), jnp.zeros((6, 4, 3, 3)), (1, 1), "SAME"),
    "conv_of_ranges": lambda x: conv_of_ranges_p.bind(
        jnp.zeros((2, 4, 8, 8)),
        jnp.zeros((6, 4, 3, 3)),
        joined=((10, ((0, 0, 1), (1, 0, 8), (9, 7, 8))), (10, ((0, 0, 1), (1, 0, 8), (9, 7, 8)))),
        **jax.make_jaxpr(EXAMPLES["conv_general_dilated"])(x).eqns[-1].params | {"padding": ((0, 0), (0, 0))},
    ),
    "convert_element_type": lambda x: x.astype("bfloat16"),
    "dot_general": lambda x: x @ x.T,
    "dot_product_attention_fwd_wrapper": _attention,
    "dot_product_attention_bwd_wrapper": jax.grad(lambda x: _attention(x).astype("float32").sum()),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (x.argmax(), 0), (2, 6)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (x.argmax(), 0)),
    "empty": lambda x: lax.empty(x.shape, x.dtype),
    "fft": jnp.fft.fft,
    "gather": lambda x: x[jnp.arange(3)],
    "in_order": lambda x: in_order_p.bind(x, x, of=add_p, grain=8),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "iota": lambda x: lax.broadcasted_iota("int32", x.shape, 1),
    "iota_2x32_shape": lambda x: threefry_prng_impl.random_bits(jnp.zeros(2, "uint32"), 32, x.shape),
    "join_ranges": lambda x: join_ranges_p.bind(x, dim=1, size=6, ranges=((0, 3, 6), (3, 0, 3))),
    "lu_pivots_to_permutation": lambda _: lax.linalg.lu_pivots_to_permutation(jnp.zeros((2, 4), "int32"), 6),
    "not": lambda x: ~(x > 0),
    "or": lambda x: (x > 0) | (x < 1),
    "ormqr": lambda x: lax.linalg.ormqr(x, x[0, :4], x),
    "pad": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))),
    "polynomial": lambda x: lax.polynomial(x, [x, x]),
    "ragged_dot_general": lambda x: lax.ragged_dot(x, jnp.zeros((2, 6, 5)), jnp.array([2, 2])),
    "random_bits": lambda x: jax.random.bits(jax.random.key(0), x.shape),
    "random_clone": lambda _: jax.random.clone(jax.random.split(jax.random.key(0), 4)),
    "random_fold_in": lambda x: jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), x.argmax(1)),
    "random_gamma": lambda x: jax.random.gamma(jax.random.key(0), x),
    "random_seed": lambda x: jax.vmap(jax.random.key)(x.argmax(1)),
    "random_split": lambda _: jax.random.split(jax.random.key(0), 4),
    "random_unwrap": lambda _: jax.random.key_data(jax.random.split(jax.random.key(0), 4)),
    "random_wrap": lambda _: jax.random.wrap_key_data(jnp.zeros((4, 2), "uint32")),
    "reduce": lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a + b, (1,)),
    "reduce_and": lambda x: (x > 0).all(1),
    "reduce_max": lambda x: x.max(1),
    "reduce_min": lambda x: x.min(1),
    "reduce_prod": lambda x: x.prod(1),
    "reduce_sum": lambda x: x.sum(1),
    "reduce_window": lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b + a + b, (1, 2), (1, 2), "VALID"),
    "reduce_window_max": _pooled,
    "reduce_window_min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
    "reshape": lambda x: x.reshape(24),
    "rev": lambda x: lax.rev(x, (1,)),
    "scatter-add": lambda x: x.at[jnp.arange(3)].add(1.0),
    "scaled_dot": lambda x: lax.scaled_dot(
        x, x.T, lhs_scale=x[:, :3], rhs_scale=x.T[:3], dimension_numbers=(((1,), (0,)), ((), ()))
    ),
    "select_and_gather_add": lambda x: jax.jvp(_pooled, (x,), (x,)),
    "select_and_scatter_add": jax.grad(lambda x: _pooled(x).sum()),
    "select_n": lambda x: jnp.where(x > 0, x, x),
    "slice": lambda x: lax.slice(x, (0, 1), (4, 5)),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "symmetric_product": lambda x: lax.linalg.symmetric_product(x, x[:, :4]),
    "tile": lambda x: lax.tile(x, (1, 2)),
    "top_k": lambda x: lax.top_k(x, 2),
    "transpose": jnp.transpose,
    "triangular_solve": lambda x: lax.linalg.triangular_solve(x[:, :4], x, left_side=True),
    "user_operation": lambda x: signature("b s, s d -> b d")(jnp.dot)(x, x.T),
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x[:, 0], x[:, 0], x[:, 0], x),
}
"""For a primitive a call of an array of two dimensions that has it. Functions of `jax.lax` that take nothing but such
arrays need none."""

_ABOUT: Final = """\
A formula is that of one example call: dimensions that may be split, operands -> results; _ stays whole. Behind
it are the partial values that splits of summed dimensions leave, and the dimensions along which pieces communicate."""


def rules_text(width: int | None = None) -> str:
    """All rules: for each file a table of its primitives, the formula of an example, and the rule in words."""
    files: dict[str, list[tuple[str, str, str]]] = {}
    for fn, names in rules().items():
        file = Path(*fn.__module__.split(".")).with_suffix(".py").as_posix()
        words = (fn.__doc__ or "").partition("\n\n")[0]
        listed = textwrap.fill(", ".join(names), 48, break_on_hyphens=False)
        row = listed, next(_formulas(names), "not in this JAX"), textwrap.shorten(words, 80, placeholder=" ...")
        files.setdefault(file, []).append(row)
    tables = (Section(file, ("primitive", "formula", "rule"), rows) for file, rows in sorted(files.items()))
    return report_text([Section(_ABOUT), *tables], width)


def _formulas(names: list[str]) -> Iterator[str]:
    """The formulas of the primitives of a rule that have an example."""
    x = jax.ShapeDtypeStruct((4, 6), "float32")
    for name in names:
        plain = getattr(lax, name, None)
        calls = [(EXAMPLES[name], 1)] if name in EXAMPLES else [(plain, n) for n in (1, 2, 3)] if plain else []
        for call, count in calls:
            try:
                closed = jax.make_jaxpr(call)(*[x] * count)
            except (AttributeError, TypeError, ValueError):  # it takes other arguments, or JAX is older
                continue
            for eqn in _eqns(closed.jaxpr):
                if eqn.primitive.name == name:
                    yield _formula(find_rule(operation_of(eqn)))


def _eqns(jaxpr: Any) -> Iterator[compat.Eqn]:
    """The equations of a jaxpr, and of all that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.jaxprs_in(eqn.params.values()):
            yield from _eqns(getattr(inner, "jaxpr", inner))


def _formula(rule: Rule) -> str:
    """`m0 k0, k0 n1 -> m0 n1; k0: P(sum)`."""
    text = f"{', '.join(map(_words, rule.operands))} -> {', '.join(map(_words, rule.results))}".lstrip()
    partial = [f"{f}: P({op})" for f, op in rule.reduced.items() if op]
    across = [f"{f}: communicates" for f in rule.factors() if f in rule.crossing]
    return "; ".join([text, *partial, *across])


def _words(factors: Factors) -> str:
    return " ".join(f or "_" for f in factors) or "()"
