"""The table of rules that `python -m shardc rules` prints: primitives, and how an example of each may be split."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from shardc import compat
from shardc.ir.walk import operation_of
from shardc.report.tables import Section, report_text
from shardc.sbp.signature import Factors, Rule, find_rule, rules

EXAMPLES: Final[Mapping[str, Callable[[jax.Array], Any]]] = {
    "approx_top_k": lambda x: lax.approx_max_k(x, 2),
    "argmax": lambda x: x.argmax(1),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, "int32"),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (3, 4, 6)),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "conv_general_dilated": lambda x: lax.conv(jnp.zeros((2, 4, 8, 8)), jnp.zeros((6, 4, 3, 3)), (1, 1), "SAME"),
    "convert_element_type": lambda x: x.astype("bfloat16"),
    "dot_general": lambda x: x @ x.T,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (x.argmax(), 0), (2, 6)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (x.argmax(), 0)),
    "fft": jnp.fft.fft,
    "gather": lambda x: x[jnp.arange(3)],
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "iota": lambda x: lax.broadcasted_iota("int32", x.shape, 1),
    "not": lambda x: ~(x > 0),
    "or": lambda x: (x > 0) | (x < 1),
    "pad": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))),
    "random_bits": lambda x: jax.random.bits(jax.random.key(0), x.shape),
    "random_split": lambda _: jax.random.split(jax.random.key(0), 4),
    "reduce_and": lambda x: (x > 0).all(1),
    "reduce_max": lambda x: x.max(1),
    "reduce_min": lambda x: x.min(1),
    "reduce_prod": lambda x: x.prod(1),
    "reduce_sum": lambda x: x.sum(1),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"),
    "reduce_window_min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
    "reshape": lambda x: x.reshape(24),
    "rev": lambda x: lax.rev(x, (1,)),
    "scatter-add": lambda x: x.at[jnp.arange(3)].add(1.0),
    "slice": lambda x: lax.slice(x, (0, 1), (4, 5)),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "top_k": lambda x: lax.top_k(x, 2),
    "transpose": jnp.transpose,
    "triangular_solve": lambda x: lax.linalg.triangular_solve(x[:, :4], x, left_side=True),
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
        row = listed, next(_formulas(names), ""), textwrap.shorten(words, 80, placeholder=" ...")
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
            except (TypeError, ValueError):  # it takes more arguments, or others
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
