"""Every signature of every rule, proved on a fake mesh."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardc.sbp import rules
from shardc.sbp.rules.elementwise import conversion_ops
from shardc.sbp.signature import Operation, bind_same, find_rule, rule_names, signatures
from tests.sbp.cases import CASES
from tests.sbp.harness import Equation, equation_of, placements_of, prove

assert rules  # imported for what it registers


@pytest.fixture(autouse=True)
def _exact_and_quick() -> Iterator[None]:
    """Float64, and a compiler that does not optimize what runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def _equation(name: str) -> Equation:
    fn, args, primitive = CASES[name]
    return equation_of(fn, *args, primitive=primitive)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


@pytest.mark.parametrize("name", CASES)
def test_rule_describes_its_operation(name: str) -> None:
    op = _equation(name).op
    rule = find_rule(op)
    sizes: dict[str, int] = {}
    for factors, aval in zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True):
        assert len(factors) == len(aval.shape)
        named = [f for f in factors if f]
        assert len(set(named)) == len(named), f"{factors} names a factor twice"
        for f, size in zip(factors, aval.shape, strict=True):
            if f and f not in rule.granule:
                assert sizes.setdefault(f, size) == size, f"factor {f} has sizes {sizes[f]} and {size}"
    assert not set(rule.reduced) & {f for fs in rule.results for f in fs}
    assert set(rule.neutral) <= set(range(len(op.operands)))


@pytest.mark.parametrize("name", CASES)
def test_signatures_of_one_axis(name: str) -> None:
    eqn, rng = _equation(name), _rng(name)
    for n in (2, 3):
        for s in signatures(find_rule(eqn.op), eqn.op):
            try:
                prove(eqn, {"a": (n, s)}, rng)
            except Exception as error:
                error.add_note(f"{name}, {n} devices: {s}")
                raise


@pytest.mark.parametrize("name", CASES)
def test_signatures_of_two_axes(name: str) -> None:
    eqn, rng = _equation(name), _rng(name)
    rule = find_rule(eqn.op)
    found = signatures(rule, eqn.op)[1:]
    pairs = [{"a": (2, s), "b": (n, t)} for s in found for t in found for n in (2, 3)]
    legal = [c for c in pairs if placements_of(rule, eqn.op, c)]
    own_piece = rule.local is not bind_same or rule.reduced
    for i in rng.permutation(len(legal))[: 4 if own_piece else 1]:
        try:
            assert prove(eqn, legal[i], rng, traced=True)
        except Exception as error:
            error.add_note(f"{name}: " + "; ".join(f"{a}={n}: {s}" for a, (n, s) in legal[i].items()))
            raise


def test_every_rule_has_a_case() -> None:
    covered = {_equation(name).op.name for name in CASES}
    assert set(rule_names()) - covered == UNTESTED


UNTESTED: set[str] = set()
