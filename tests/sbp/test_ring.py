"""Ring products: proved on a fake mesh, priced by hand."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.machine.mesh import MeshView
from shardc.machine.overlaps import FULL, NONE, Overlaps
from shardc.machine.topology import Fabric, Topology, lay_out
from shardc.sbp import rules
from shardc.sbp.cost import HIDING, RingWork, ring_time
from shardc.sbp.piece import internal_steps
from shardc.sbp.placement import B, Placement, S
from shardc.sbp.ring import Ring, ring_of, ring_signatures
from shardc.sbp.signature import Rule, Setting, Signature, find_rule, signatures
from tests.sbp import harness
from tests.sbp.harness import Combo, Equation, equation_of, placements_of, prove

assert rules  # imported for what it registers

RNG = np.random.default_rng(5)


def _array(*shape: int, dtype: str = "float64") -> np.ndarray:
    if dtype.startswith("int"):
        return RNG.integers(-9, 9, shape).astype(dtype)
    return np.asarray(jnp.asarray(RNG.normal(size=shape), dtype))


def _product(spec: str, *arrays: np.ndarray, **how: object) -> Equation:
    return equation_of(lambda x, w: jnp.einsum(spec, x, w, **how), *arrays, primitive="dot_general")


PRODUCTS = {
    "matrices": lambda: _product("mk,kn->mn", _array(6, 12), _array(12, 6)),
    "batched": lambda: _product("bmk,bkn->bmn", _array(6, 2, 6), _array(6, 6, 4)),
    "activations": lambda: _product("bsd,dhe->bshe", _array(2, 6, 4), _array(4, 6, 2)),
    "two summed": lambda: _product("bsd,bsf->df", _array(2, 6, 4), _array(2, 6, 6)),
    "bfloat16": lambda: _product("mk,kn->mn", _array(6, 12, dtype="bfloat16"), _array(12, 6, dtype="bfloat16")),
    "wider result": lambda: _product(
        "mk,kn->mn", _array(6, 6, dtype="bfloat16"), _array(6, 6, dtype="bfloat16"), preferred_element_type="float32"
    ),
    "integers": lambda: _product(
        "mk,kn->mn", _array(6, 6, dtype="int8"), _array(6, 6, dtype="int8"), preferred_element_type="int32"
    ),
    "uneven": lambda: _product("mk,kn->mn", _array(6, 5), _array(5, 7)),
    "empty": lambda: _product("mk,kn->mn", _array(6, 0), _array(0, 6)),
}  # fmt: skip


def _rings(eqn: Equation) -> tuple[Signature, ...]:
    return ring_signatures(find_rule(eqn.op), eqn.op)


@pytest.fixture(autouse=True, scope="module")
def _exact():
    with jax.enable_x64(True):
        yield


def _goes_around(ring: Ring, rule: Rule, setting: Setting) -> bool:
    """Whether the pieces of a ring are alike and contiguous: all of them are full, and no other axis cuts them
    further."""
    port = ring.port(rule)
    aval, placement = setting.port(port)
    dim = (*rule.operands, *rule.results)[port].index(ring.factor)
    axes = placement.axes_of(dim)
    return axes[-1] == ring.axis and aval.shape[dim] % math.prod(setting.sizes[a] for a in axes) == 0


def _legal(eqn: Equation, combo: Combo) -> bool:
    placed = placements_of(find_rule(eqn.op), eqn.op, combo)
    if placed is None:
        return False
    rule, setting = find_rule(eqn.op), Setting(eqn.op, *map(tuple, placed), {a: n for a, (n, _) in combo.items()})
    ring = ring_of(rule, setting)
    return ring is not None and _goes_around(ring, rule, setting)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_rings_of_one_axis(name: str) -> None:
    eqn = PRODUCTS[name]()
    proved = 0
    for n, s in itertools.product((2, 3, 6), _rings(eqn)):
        if _legal(eqn, {"a": (n, s)}):
            assert prove(eqn, {"a": (n, s)}, RNG, traced=n == 3), s
            proved += 1
    assert proved > 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["matrices", "batched", "two summed", "integers", "uneven"])
def test_rings_beside_another_axis(name: str) -> None:
    """Another axis may split the same dimension, on the outside."""
    eqn = PRODUCTS[name]()
    rule = find_rule(eqn.op)
    pairs = [{"b": (2, other), "a": (3, ring)} for ring in _rings(eqn) for other in signatures(rule, eqn.op)]
    legal = [combo for combo in pairs if _legal(eqn, combo)]
    assert len(legal) > 10
    for i in RNG.permutation(len(legal))[:12]:
        assert prove(eqn, legal[i], RNG), legal[i]


def test_rings_of_a_matrix_product() -> None:
    eqn = PRODUCTS["matrices"]()
    assert [(str(s), s.around) for s in _rings(eqn)] == [
        ("S(0), S(1) -> S(1)", "m0"), ("S(1), S(1) -> S(1)", "k0"),
        ("S(0), S(0) -> S(0)", "k0"), ("S(0), S(1) -> S(0)", "n1"),
        ("S(1), S(0) -> S(0)", "m0"), ("S(1), S(0) -> S(1)", "n1"),
    ]  # fmt: skip


def test_no_ring_is_taken_for_a_plain_signature() -> None:
    for product in PRODUCTS.values():
        eqn = product()
        rule = find_rule(eqn.op)
        for s, t in itertools.product(signatures(rule, eqn.op), repeat=2):
            placed = placements_of(rule, eqn.op, {"a": (2, s), "b": (3, t)})
            if placed is not None:
                assert ring_of(rule, Setting(eqn.op, *map(tuple, placed), {"a": 2, "b": 3})) is None


@pytest.mark.parametrize(
    ("rows", "axes", "fits"),
    [(12, ("b", "a"), True), (12, ("a", "b"), False), (10, ("b", "a"), False), (10, ("a",), True), (9, ("a",), False)],
)
def test_pieces_are_full_and_lie_one_after_the_other(rows: int, axes: tuple[str, ...], fits: bool) -> None:
    eqn = _product("mk,kn->mn", _array(rows, 4), _array(4, 6))
    rule, sizes = find_rule(eqn.op), {"a": 2, "b": 3}
    split = Placement([(a, S(0)) for a in axes])
    rest = Placement([(a, S(0)) for a in axes if a != "a"] + [("a", S(1))])
    setting = Setting(eqn.op, (split, Placement({"a": S(1)})), (rest,), sizes)
    ring = ring_of(rule, setting)
    assert ring == Ring("a", "m0", 0)
    assert _goes_around(ring, rule, setting) == fits


def test_terms_of_narrow_floats_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one device: beside 1 each of these terms alone is lost in bfloat16, but not all together."""
    monkeypatch.setattr(harness, "tolerance", lambda *_: 0.0)
    x, w = np.full((2, 8), 2.0**-9), np.ones((8, 8))
    x[:, 0] = 1.0
    eqn = _product("mk,kn->mn", *(np.asarray(jnp.asarray(a, "bfloat16")) for a in (x, w)))
    assert prove(eqn, {"a": (8, next(s for s in _rings(eqn) if s.around == "k0"))}, RNG)


# --- what they cost --------------------------------------------------------------------------------------------------


def _mesh(n: int, kind: str = "torus", ring: int = 1, overlaps: Overlaps = FULL) -> MeshView:
    fabric = Fabric(kind, 1e9, 0.0, ring=ring)
    machine = Topology("odd", 1e12, 1e15, 10**9, 0.0, (fabric,), shape=(n,), overlaps=overlaps)
    axes = (("a", n),)
    return MeshView(axes, Topology(**{**vars(machine), "layout": lay_out(machine, axes)}))


def _total(n: int, flops: float, **machine: object) -> float:
    """Milliseconds; a link passes a piece in one."""
    return float(ring_time(RingWork(10**6, flops, 0.0, 0.0), _mesh(n, **machine), "a", "float32").total) * 1e3


def test_what_the_links_do_is_hidden_behind_the_arithmetic() -> None:
    assert _total(8, 1e10) == pytest.approx(80 + HIDING * 4)  # 8 products of 10 ms, 4 steps of 1 ms
    assert _total(7, 1e10) == pytest.approx(70 + HIDING * 3)
    assert _total(2, 1e10) == pytest.approx(20 + HIDING * 1)


def test_what_the_arithmetic_does_is_hidden_behind_the_links() -> None:
    seven, five, one = (HIDING * k * 0.1 for k in (7, 5, 1))  # products that are hidden, of 0.1 ms
    assert _total(8, 1e8) == pytest.approx(4 + 0.1 + seven), "4 steps of 1 ms, both ways, and the last product"
    assert _total(7, 1e8) == pytest.approx(3 + 0.2 + five), "3 steps, and the last two"
    assert _total(8, 1e8, ring=0) == pytest.approx(3 * 2 + 1 + 0.1 + seven), "of a line all links are passed twice"
    assert _total(8, 1e8, kind="switch") == pytest.approx(3 * 2 + 1 + 0.1 + seven), "and so is the port to a switch"
    assert _total(2, 1e8) == pytest.approx(1 + 0.1 + one)


def test_a_ring_of_what_is_there_anyway_is_dearer_than_none() -> None:
    """A weight that every device holds whole is multiplied as it is, not in a ring, although the ring would be free."""
    x, w = jax.ShapeDtypeStruct((64, 2048, 8192), np.float32), jax.ShapeDtypeStruct((8192, 8192), np.float32)
    mesh = shardc.make_mesh(topology="v5p", data=8)
    rows = {"x": {"data": S(0)}, "w": {"data": B}, "m": {"data": S(1)}}
    plan = shardc.function(lambda x, w, m: (x @ w, w - m), mesh=mesh, in_placements=rows).plan(x, w, w)
    assert not [c for c in plan.collectives if c.kind == "permute"]


def test_where_nothing_overlaps_all_adds_up() -> None:
    assert _total(8, 1e10, overlaps=NONE) == pytest.approx(84)


def test_what__goes_around() -> None:
    eqn = PRODUCTS["matrices"]()
    rule = find_rule(eqn.op)
    at = (Placement({"a": S(0)}), Placement({"a": S(1)})), (Placement({"a": S(1)}),)
    steps = internal_steps(rule, Setting(eqn.op, *at, {"a": 3}))
    assert [(s.kind, s.axes, s.shape, s.operand) for s in steps] == [("permute", ("a",), (2, 12), 0)] * 2
