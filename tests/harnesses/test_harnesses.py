"""A few of JAX's cases of each group at random placements; `make harnesses` runs them all. And that it sees faults."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import AUTO, B, P, S
from tests.harnesses import __main__ as command
from tests.harnesses import beside_jit, run
from tests.harnesses.cases import Case, all_cases, choose
from tests.harnesses.compare import difference
from tests.harnesses.draws import MESHES, Draw, draw_for, is_pin
from tests.harnesses.jax_cases import harnesses
from tests.harnesses.report import BAD, told
from tests.harnesses.run import Outcome, run_case
from tests.harnesses.surprises import SURPRISES
from tests.harnesses.undefined import UNDEFINED
from tests.releases import IS_OLDEST

GROUPS = sorted({case.group for case in all_cases()})
FEW = 3
HOW = ("placed", "pinned")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("group", GROUPS)
def test_a_few_cases_equal_one_device(group):
    results = [run_case(case, seed=0, draws=1) for case in choose([group], limit=FEW)]
    bad = [told(r.case, r.worst) for r in results if r.worst.state in BAD]
    assert not bad, "\n".join(bad)


def test_the_cases_are_all_there():
    assert len(harnesses()) == (7526 if IS_OLDEST else 7426)
    assert {"scan", "while", "cond", "remat", "random_bits", "cumlogsumexp", "ragged_dot"} <= set(GROUPS)
    parts = [{c.name for c in choose(part=(i, 3))} for i in (1, 2, 3)]
    assert set.union(*parts) == {c.name for c in all_cases()}
    assert sum(map(len, parts)) == len(all_cases())


def test_what_is_left_out_is_what_breaks_its_promise():
    assert set(UNDEFINED) == {h.fullname for h in harnesses() if h.group_name.startswith("scatter") and _meets_twice(h)}


def _meets_twice(h):
    """Whether a scatter says that its indices are unique, and two of its updates meet."""
    p, numbers = h.params, h.params["dimension_numbers"]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    along = [d for d in range(len(p["shape"])) if d not in inserted]
    indices, seen = np.asarray(p["scatter_indices"]), set()
    for at in itertools.product(*map(range, p["update_shape"])):
        row = tuple(k for d, k in enumerate(at) if d not in numbers.update_window_dims)
        place = [0] * len(p["shape"])
        for d, u in zip(along, numbers.update_window_dims, strict=True):
            place[d] += at[u]
        for d, k in zip(numbers.scatter_dims_to_operand_dims, indices[row], strict=True):
            place[d] += int(k)
        for d, k in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
            place[d] += row[k]
        seen.add(tuple(place))
    return p["unique_indices"] and len(seen) < np.prod(p["update_shape"])


def test_draws_are_those_of_the_seed_and_reach_everything():
    case = Case("mul", "mul", lambda x: x * 2, lambda rng: [rng.randn(5, 3)])
    args = case.arguments(0)
    draws = [draw_for(case, args, args[0], 0, k) for k in range(200)]
    assert draws == [draw_for(case, case.arguments(0), args[0], 0, k) for k in range(200)]
    assert draws != [draw_for(case, args, args[0], 1, k) for k in range(200)]
    assert {d.mesh for d in draws} == set(range(len(MESHES)))
    drawn = [d.outs for d in draws]
    assert AUTO in drawn
    reached = {"B", "S(0)", "S(1)", "P(sum)", "P(max)", "P(min)"}
    assert {str(s) for pin in drawn if isinstance(pin, dict) for s in pin.values()} == reached
    infinite = [draw_for(case, [np.array([np.inf])], np.array([1j]), 0, k) for k in range(200)]
    for at, reached in (("ins", {"B", "S(0)", "P(max)", "P(min)"}), ("outs", {"B", "S(0)", "P(sum)"})):
        pins = [jax.tree.leaves(getattr(d, at), is_leaf=is_pin)[0] for d in infinite]
        assert {str(s) for pin in pins if isinstance(pin, dict) for s in pin.values()} == reached


def test_partial_maxima_are_pinned_inside():
    x = np.arange(6.0)
    draw = Draw(0, ({"a": P("max")}, {"a": S(0)}), {"a": P("min")})
    f = run.placed(jnp.add, draw)
    assert draw.at_border() == ((AUTO, {"a": S(0)}), AUTO)
    pins = [e.params["pin"].placement for e in f.plan(x, x).program.jaxpr.eqns if e.primitive.name == "constrain"]
    assert list(map(str, pins)) == ["{a: P(max)}", "{a: P(min)}"]
    np.testing.assert_array_equal(f(x, x), x + x)


X = np.random.default_rng(0).normal(size=(4, 3))
U, SIGMA, V = np.linalg.svd(X, full_matrices=False)
Q, R = np.linalg.qr(X)
W, VECTORS = np.linalg.eig(X[:3])


@pytest.mark.parametrize(
    ("group", "x", "got", "want"),
    [
        ("add", X, [X * (1 + 1e-15)], [X]),
        ("add", X, [np.float32([np.nan, np.inf])], [np.float32([np.nan, np.inf])]),
        ("svd", X, [SIGMA, -U, -V], [SIGMA, U, V]),
        ("qr", X, [-Q, -R], [Q, R]),
        ("eig", X[:3], [W, -VECTORS], [W, VECTORS]),
    ],
)
def test_equal_results_are_called_equal(group, x, got, want):
    assert difference(group, [x], got, want) == ""


@pytest.mark.parametrize(
    ("group", "x", "got", "want"),
    [
        ("add", X, [X * (1 + 1e-12)], [X]),
        ("slice", X, [X * (1 + 1e-15)], [X]),
        ("add", X, [np.float32([np.nan, 1])], [np.float32([0, 1])]),
        ("add", X, [np.float32([1, np.inf])], [np.float32([1, -np.inf])]),
        ("add", X, [np.int8([1, 2])], [np.int8([1, 3])]),
        ("add", X, [np.float32([1])], [np.float64([1])]),
        ("svd", X, [SIGMA, U, -V], [SIGMA, U, V]),
        ("qr", X, [2 * Q, R / 2], [Q, R]),
        ("eig", X[:3], [W, VECTORS[:, ::-1]], [W, VECTORS]),
        ("eig", X[:3], [W[::-1], VECTORS], [W, VECTORS]),
    ],
)
def test_unequal_results_are_told(group, x, got, want):
    assert difference(group, [x], got, want)


def test_a_case_is_what_its_worst_draw_is(monkeypatch):
    case = Case("neg", "neg", jnp.negative, lambda rng: [rng.randn(3)])
    states = iter(["passed", "wrong", "refused"])
    monkeypatch.setattr(run, "_compare", lambda case, args, want, draw: Outcome(next(states), draw=draw))
    assert run_case(case, seed=0, draws=3).worst.state == "wrong"


def test_cases_that_jax_cannot_run_are_skipped():
    result = run_case(Case("add", "add", jnp.add, lambda rng: [rng.randn(3), rng.randn(4)]), seed=0, draws=2)
    assert [o.state for o in result.outcomes] == ["skipped"]


@pytest.mark.parametrize(("wrong", "code", "state"), [(0, 0, "passed"), (1, 1, "wrong")])
def test_the_command_prints_a_table_and_fails_on_wrong_values(wrong, code, state, monkeypatch, capsys):
    right = run.placed
    monkeypatch.setattr(run, "placed", lambda fn, draw: right(lambda *xs: fn(*xs) + wrong, draw))
    monkeypatch.setattr("sys.argv", ["harnesses", "--groups", "neg", "--only", "shape_int32", "--draws", "1"])
    assert command.main() == code
    head, _, row, _, _ = [line.split() for line in capsys.readouterr().out.splitlines()][-5:]
    assert dict(zip(head, row, strict=True))[state] == "1"


def test_a_surprise_fails_unless_its_group_has_a_reason(monkeypatch):
    right = run.placed

    def overlooked(fn, draw):
        function = right(lambda x: fn(x), Draw(0, ({"a": S(0)},), {"a": B}))
        plan = function.plan(np.ones(8))
        vars(plan)["cost"] = replace(plan.cost, collectives=())  # a plan that lists nothing
        return function

    monkeypatch.setattr(run, "placed", overlooked)
    case = Case("neg", "neg", jnp.negative, lambda rng: [rng.randn(8)])
    assert run_case(case, seed=0, draws=1).worst.state == "surprised"
    monkeypatch.setitem(SURPRISES, "neg", "a plan without what it sends")
    result = run_case(case, seed=0, draws=1)
    assert (result.worst.state, result.audited) == ("passed", False)


def test_an_unknown_group_is_refused_with_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["harnesses", "--groups", "scater"])
    assert command.main() == 2
    assert "scatter" in capsys.readouterr().err


def test_a_function_beside_jit(monkeypatch):
    """A call of JAX's tests is compared at its arguments' placements and at pins; what jit refuses may fail."""
    for name, empty in (("COUNTS", Counter()), ("WRONG", [])):
        monkeypatch.setattr(beside_jit, name, empty)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))):
        x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.P("x"))
        beside_jit.Beside(lambda x: x * (2 if jax.typeof(x).sharding.spec[0] == "x" else 3))(x)
        with pytest.raises(TypeError):
            beside_jit.Beside(lambda x: x + "a")(x)
        each = dict.fromkeys([f"{how}: {what}" for how in HOW for what in ("the same", "errors, as jit")], 1)
        assert each == beside_jit.COUNTS
        monkeypatch.setattr(shardc, "function", lambda fn, **_: lambda x: fn(x) + 1)
        beside_jit.Beside(lambda x: x * 2)(x)
    assert [text.partition("differ")[0] for text in beside_jit.WRONG] == [f", {how}: values " for how in HOW]
