"""Every signature of every rule, proved on a fake mesh."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache, partial

import jax
import numpy as np
import pytest
from jax import lax

from shardc.passes.lower.lower_boxing import MeshWire
from shardc.sbp import rules
from shardc.sbp.piece import mask_padding
from shardc.sbp.placement import P, Placement, S
from shardc.sbp.signature import Site, bind_same, find_rule, rule_names, signatures
from tests.releases import IS_OLDEST
from tests.sbp.cases import CASES, INTO_ROWS, ROWS, TAME, primitive_of
from tests.sbp.harness import Equation, equation_of, placements_of, prove

assert rules  # imported for what it registers


@pytest.fixture(autouse=True)
def _exact_and_quick(compiled_fast: None) -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@cache
def _equation(name: str) -> Equation:
    fn, args, primitive = CASES[name]
    eqn = equation_of(fn, *args, primitive=primitive)
    for x in eqn.inputs:
        x.flags.writeable = False  # tests share it
    return eqn


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
            if f and f not in rule.granule and f not in rule.crossing:
                assert sizes.setdefault(f, size) == size, f"factor {f} has sizes {sizes[f]} and {size}"
    assert not any(all(f in fs for fs in rule.results) for f in rule.reduced)
    assert set(rule.neutral) <= set(range(len(op.operands)))


@pytest.mark.sampled(by=lambda name: {primitive_of(name)})
@pytest.mark.parametrize("name", CASES)
def test_signatures_of_one_axis(name: str) -> None:
    eqn, rng = _equation(name), _rng(name)
    rule = find_rule(eqn.op)
    own_piece = rule.local is not bind_same or bool(rule.reduced)
    for n in (2, 3) if own_piece else (3,):  # what is bound as it is looks at no number of devices
        for s in signatures(rule, eqn.op):
            try:
                prove(eqn, {"a": (n, s)}, rng)
            except Exception as error:
                error.add_note(f"{name}, {n} devices: {s}")
                raise


@pytest.mark.sampled(by=lambda name: {primitive_of(name)})
@pytest.mark.parametrize("name", CASES)
def test_signatures_of_two_axes(name: str) -> None:
    eqn, rng = _equation(name), _rng(name)
    rule = find_rule(eqn.op)
    found = signatures(rule, eqn.op)[1:]
    pairs = [{"a": (2, s), "b": (n, t)} for s in found for t in found for n in (2, 3)]
    legal = [c for c in pairs if placements_of(rule, eqn.op, c)]
    own_piece = rule.local is not bind_same or bool(rule.reduced)
    for i in rng.permutation(len(legal))[: 3 if own_piece else 1]:
        try:
            assert prove(eqn, legal[i], rng, traced=own_piece)
        except Exception as error:
            error.add_note(f"{name}: " + "; ".join(f"{a}={n}: {s}" for a, (n, s) in legal[i].items()))
            raise


def test_every_rule_has_a_case() -> None:
    cases = {_equation(name).op.name for name in CASES}
    assert cases <= set(rule_names()) and (IS_OLDEST or cases == set(rule_names()))  # it has not all primitives


REDUCTIONS = (lax.reduce_sum, lax.reduce_max)
ODD = {
    "scalars": lambda: [equation_of(f, np.float64(1), np.float64(2)) for f in (lax.add, lax.max, lax.div)],
    "scalar reshape": lambda: [equation_of(lambda x: lax.reshape(x, (1, 1)), np.float64(3))],
    "scalar cases": lambda: [equation_of(lax.select_n, np.bool_(1), np.float64(1), np.float64(2))],
    "scalar reductions": lambda: [equation_of(partial(f, axes=()), np.float64(1)) for f in REDUCTIONS],
    "empty": lambda: [equation_of(f, np.zeros((0, 3)), np.ones((0, 3))) for f in (lax.add, lax.mul)],
    "empty reductions": lambda: [equation_of(partial(f, axes=(0,)), np.zeros((0, 3))) for f in REDUCTIONS],
    "empty layouts": lambda: [
        equation_of(lambda x: lax.reshape(x, (3, 0, 2)), np.zeros((0, 6))),
        equation_of(lambda x: lax.transpose(x, (1, 0)), np.zeros((0, 6))),
        equation_of(lambda x: lax.concatenate([x, np.ones((2, 6))], 0), np.zeros((0, 6))),
        equation_of(lambda x: lax.pad(x, 1.0, ((1, 1, 0), (0, 0, 0))), np.zeros((0, 6))),
        equation_of(lambda x: lax.broadcast_in_dim(x, (0, 6, 2), (0, 1)), np.zeros((0, 6))),
        equation_of(lambda: lax.iota(np.int32, 0)),
    ],
    "ones": lambda: [
        equation_of(lambda x: lax.reshape(x, (1, 1, 1)), np.ones((1, 1))),
        equation_of(lambda x: lax.reduce_sum(x, (0,)), np.ones((1, 1))),
        equation_of(lambda x: lax.broadcast_in_dim(x, (1, 4), (0, 1)), np.ones((1, 1))),
        equation_of(lambda x: x @ x, np.ones((1, 1)), primitive="dot_general"),
        equation_of(lambda x: lax.cumsum(x, 0), np.ones((1, 1))),
        equation_of(lambda x, i: x.at[i].add(1.0), np.ones((1, 1)), np.zeros(1, int), primitive="scatter-add"),
    ],
    "empty table": lambda: [
        equation_of(lambda x, i: lax.gather(x, i, ROWS, (1, 0)), np.ones((3, 0)), np.ones((2, 3, 1), int)),
        equation_of(lambda x, i, u: lax.scatter_add(x, i, u, INTO_ROWS), np.ones((0, 4)), TAME, np.ones((2, 3, 4))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_shapes(kind: str) -> None:
    for eqn in ODD[kind]():
        for s in signatures(find_rule(eqn.op), eqn.op):
            assert prove(eqn, {"a": (2, s)}, _rng(kind)), f"{eqn.op.name}: {s}"


def test_gather_modes_other_than_the_three_have_no_rule() -> None:
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    fn = lambda x, i: lax.gather(x, i, numbers, (1, 4), mode=lax.GatherScatterMode.ONE_HOT)  # noqa: E731
    op = equation_of(fn, np.ones((5, 4)), np.zeros((2, 1), np.int32)).op
    assert len(signatures(find_rule(op), op)) == 1


def test_heavy_operations_count_their_work() -> None:
    assert find_rule(_equation("dot").op).flops == 2 * 3 * 5 * 4
    assert find_rule(_equation("dot_batch").op).flops == 2 * 3 * 2 * 4 * 5 * 2
    assert find_rule(_equation("conv").op).flops == 2 * (3 * 4 * 4) * 3 * 5
    assert find_rule(_equation("conv_depthwise").op).flops == 2 * (3 * 4 * 12) * 3
    assert find_rule(_equation("add").op).flops == 0


def test_padding_is_masked_only_where_a_reduced_factor_is_split_unevenly() -> None:
    eqn = _equation("reduce_sum_all")
    rule = find_rule(eqn.op)
    held = np.full((3, 3), 7.0)

    def masked(dim: int, n: int) -> np.ndarray:
        around = (Placement({"a": S(dim)}),), (Placement({"a": P()}),), {"a": n}
        site = Site(eqn.op, *around, lambda _: n - 1, eqn.bind, MeshWire({"a": n}))
        return np.asarray(mask_padding(site, rule, [held])[0])

    assert masked(0, 3) is not None and (masked(0, 3) == held).all()  # 3 rows on 3 devices: no padding
    assert (masked(1, 2) == np.array([7.0, 7.0, 0.0])).all()  # 5 columns in blocks of 3: the last has 2
