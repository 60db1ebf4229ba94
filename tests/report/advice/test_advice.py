"""What a report says of the largest costs of a plan: they add up to a call, and what it says that is saved is saved."""

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import S
from shardc.report.advice.advice import advice_on, call_pieces
from shardc.report.advice.pieces import by_cost, seconds_of
from shardc.report.tables import seconds_text
from tests.report import programs
from tests.report.test_explain import f32, mlp_params
from tests.report.test_explain_pipeline import MESH, i32, tied, tied_args

pytestmark = pytest.mark.plans_eagerly
V5P = "v5p:2x2x2"
SQUARE = (f32(8192, 4096), f32(4096, 4096))


def plan_of(fn, *args, mesh=None, **options):
    mesh = shardc.make_mesh(topology=V5P, **(mesh or {"data": 8}))
    return shardc.function(fn, mesh=mesh, **options).plan(*args)


def costs_of(plan, what):
    """The cost whose words have these, and its changes by their words."""
    (cost,) = (c for c in advice_on(plan).costs if what in c.what)
    return cost, {c.what: c for c in cost.changes}


def mlp(topology):
    mesh = shardc.make_mesh(topology=topology, data=4, model=2)
    pins = shardc.rules({"*/up": {"model": S(1)}, "*/down": {"model": S(0), "data": S(1)}})
    step = shardc.function(
        programs.mlp_step, mesh=mesh, in_placements={"params": pins, "batch": {"data": S(0)}}, donate_argnames="params"
    )
    return step.plan(mlp_params(1), {"x": f32(1024, 16), "y": f32(1024, 16)})


@pytest.mark.parametrize("topology", ["cpu", "h100:8"])
def test_the_costs_add_up_to_a_call(topology):
    """On a GPU a part of the collectives overlaps, and some start together."""
    plan = mlp(topology)
    pieces = call_pieces(plan)
    assert seconds_of(pieces) == pytest.approx(plan.seconds, rel=1e-9)
    hidden = sum(p.hidden for p in pieces)
    assert hidden == pytest.approx(plan.time.overlapped, rel=1e-9)
    groups = by_cost(pieces)
    assert sum(map(seconds_of, groups)) == pytest.approx(plan.seconds, rel=1e-9)
    assert [c.seconds for c in advice_on(plan).costs] == [seconds_of(g) for g in groups[:3]]


BOTH = pytest.mark.parametrize("float32_products", ["highest", "default"], indirect=True)


@pytest.fixture(autouse=True)
def float32_products(request):
    """Products read float32, as they are written; those of `BOTH` also the copies in bfloat16 that a TPU multiplies."""
    with jax.default_matmul_precision(getattr(request, "param", "highest")):
        yield


@BOTH
def test_a_pinned_argument_where_it_is_read_saves_what_a_plan_with_it_pinned_there_saves():
    def f(x, w):
        return jnp.tanh(x @ w).sum(0)

    pins = {"x": {"data": S(1)}, "w": {}}
    plan = plan_of(f, *SQUARE, in_placements=pins, out_placements={})
    cost, changes = costs_of(plan, ", of argument x")
    assert cost.why.endswith("dot_general reads it at {data: S(0)}. It is pinned there.")
    change = changes["x at {data: S(0)}, where it is read"]
    other = plan_of(f, *SQUARE, in_placements=pins | {"x": {"data": S(0)}}, out_placements={})
    assert change.bound == "at least"
    assert change.saves == pytest.approx(plan.seconds - other.seconds)
    assert change.memory == other.memory.peak - plan.memory.peak
    assert str(cost.changes[-1]) == "The best other placement, which plan.explain(why='x') searches for: unknown."


def test_a_pinned_result_and_a_constraint():
    def f(x, w, at=None):
        h = jnp.tanh(x @ w)
        return (shardc.constrain(h, at) @ w).sum(1) if at else h

    pins = {"in_placements": {"x": {"data": S(0)}, "w": {}}}
    plan, other = (plan_of(f, *SQUARE, out_placements={"data": S(i)}, **pins) for i in (1, 0))
    change = costs_of(plan, "of result")[1]["result at {data: S(0)}, where it is made"]
    assert change.saves == pytest.approx(plan.seconds - other.seconds)

    plan, other = (plan_of(lambda x, w, i=i: f(x, w, {"data": S(i)}), *SQUARE, **pins) for i in (1, 0))
    change = next(iter(costs_of(plan, "for the constraint")[1].values()))
    assert change.saves == pytest.approx(plan.seconds - other.seconds)  # readers follow it


@BOTH
def test_an_argument_that_is_donated_is_moved_with_the_result_that_takes_its_buffer():
    def step(w, x):
        return w * 0.9, jnp.tanh(x @ w)

    def planned(at):
        pins = {"in_placements": {"w": at, "x": {"data": S(0)}}, "out_placements": (shardc.AUTO, {"data": S(0)})}
        return plan_of(step, SQUARE[1], SQUARE[0], donate_argnames="w", **pins)

    plan, other = planned({"data": S(0)}), planned({})
    change = costs_of(plan, ", of argument w")[1]["w at B, where it is read"]
    assert change.saves == pytest.approx(plan.seconds - other.seconds)
    assert change.memory == other.memory.peak - plan.memory.peak


def test_an_operation_without_a_rule_costs_its_gather_and_the_work_of_all():
    pins = {"x": {"data": S(0)}, "w": {"model": S(1)}}
    plan = plan_of(programs.ruleless, *SQUARE, mesh={"data": 4, "model": 2}, in_placements=pins)
    cost, changes = costs_of(plan, "mystery at programs.py:26 (ruleless), all of which each of 8 devices computes")
    assert cost.why.startswith("It has no sharding rule, so its operands are gathered: all_gather over data")
    (change,) = changes.values()
    assert change.bound == "at most" and cost.seconds / 2 < change.saves < cost.seconds


def test_padding_repeated_work_and_types():
    def heads(x, w):
        return jnp.tanh(jnp.einsum("bd,dhk->bhk", x, w)).sum(0)

    plan = plan_of(heads, f32(8192, 1024), f32(1024, 12, 128), mesh={"model": 8}, in_placements=({}, {"model": S(1)}))
    cost, changes = costs_of(plan, "reading and writing memory")
    padded = changes["No padding in the dimension of 12 that model cuts into 8 pieces of 2 (16 takes as long)"]
    assert padded.saves == pytest.approx(cost.seconds / 4) and padded.bound == "at most"

    pins = {"in_placements": ({"data": S(0)}, {}), "out_placements": {"data": S(0)}}
    plan = plan_of(lambda x, w: x @ w, *SQUARE, mesh={"data": 4, "model": 2}, **pins)
    cost, changes = costs_of(plan, "work that the 2 devices along model repeat: dot_general at test_advice.py:")
    (change,) = changes.values()
    assert change.saves == pytest.approx(cost.seconds / 2)

    one = shardc.make_mesh(topology="h100:1", data=1)
    plan = shardc.function(lambda x, w: x @ w, mesh=one).plan(*SQUARE)
    cost, changes = costs_of(plan, "computing: dot_general")
    assert changes["Products in bfloat16 (docs/mixed-precision.md)"].saves == pytest.approx(cost.seconds / 2, rel=0.01)


def test_launches_and_the_bound_of_a_plan():
    plan = shardc.function(lambda x: x * 2, mesh=shardc.make_mesh(topology="cpu", data=8)).plan(f32(8))
    cost, _ = costs_of(plan, "launching the program from the host")
    assert cost.seconds == plan.time.launch and "2 arguments and results" in cost.why
    assert advice_on(plan).rest[0].startswith("With these pins, on this mesh, no placement ")
    nothing = plan_of(lambda x: x, f32(8))
    assert advice_on(nothing) is None and "Largest costs" not in nothing.explain()


def test_a_pipeline():
    plan = tied(MESH).plan(*tied_args(f32, i32))
    assert seconds_of(call_pieces(plan)) == pytest.approx(plan.seconds, rel=1e-9)
    advice = advice_on(plan)
    assert "on rank 1, which waits least" in advice.title
    cost, changes = costs_of(plan, "the bubble of 1f1b with 4 microbatches")
    longer = changes["8 microbatches of half the size, which compute in half the time"]
    assert cost.why == "Ranks are busy for 350 us to 550 us."
    assert longer.saves < 0  # each is launched, and launching is all that tasks of this size take
    saved = plan.seconds - plan.with_schedule("eager-1f1b").seconds
    (line,) = advice.rest
    assert line.startswith(
        f"The schedule eager-1f1b, plan.with_schedule('eager-1f1b'): {seconds_text(saved)} less a call"
    )


def test_the_page_says_it_too(tmp_path):
    plan = plan_of(lambda x: x.sum(0), SQUARE[0], in_placements={"x": {"data": S(0)}})
    plan.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    advice = advice_on(plan)
    assert page.count('<ol class="costs">') == 1 and all(f"<strong>{c.figure}</strong>" in page for c in advice.costs)
    assert advice.section.text() in plan.explain()
