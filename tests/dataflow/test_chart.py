"""Flows as text, pictures and traces, planned and measured."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.errors import FlowError
from shardc.report.tables import seconds_text
from shardc.runtime.actor import Span
from tests.dataflow.flows import SECONDS, trained

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def train():
    with trained() as flow:
        yield flow


@pytest.fixture(scope="module")
def ran(train):
    return train.run(jnp.zeros(4), range(6), record=True)[1]


def test_the_timeline(train, golden):
    golden("timeline", train.plan(jnp.zeros(4), 0).timeline(100, rounds=6, seconds=SECONDS))


def test_the_trace_has_each_call_and_who_gave_what(train, tmp_path):
    plan = train.plan(jnp.zeros(4), 0)
    plan.trace(tmp_path / "plan.json", rounds=6, seconds=SECONDS)
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    learns = [e for e in events if e["ph"] == "X" and e["args"].get("node") == "learn"]
    assert [e["args"]["round"] for e in learns] == list(range(6))
    assert [e["name"] for e in learns] == [f"l{r}" for r in range(6)]
    tests = [e["args"]["round"] for e in events if e["ph"] == "X" and e["args"]["node"] == "test"]
    assert tests == [2, 5]
    arrows = [e for e in events if e["ph"] == "s" and e["name"] == "learn -> play, 2 late"]
    assert len(arrows) == 6 - 2  # what is taken in the first rounds, nobody gave
    begins = [e["ts"] for e in learns]
    assert all(any(b < a["ts"] <= b + learns[0]["dur"] for b in begins) for a in arrows)


def test_a_picture_has_actors_functions_and_channels(train, ran, tmp_path):
    train.plan(jnp.zeros(4), 0).draw(tmp_path / "plan.svg", seconds=SECONDS)
    ran.draw(tmp_path / "ran.svg")
    for name in ("plan", "ran"):
        root = ET.parse(tmp_path / f"{name}.svg").getroot()
        texts = {"".join(t.itertext()).strip() for t in root.iter(f"{SVG}text")}
        assert {"play", "play[1]", "learn", "test"} <= texts
        arrow = "\N{RIGHTWARDS ARROW}"
        assert {f"learn{arrow}play, made 2 rounds before, 1 of 2", f"learn{arrow}test"} <= texts


def test_a_recorded_run_is_drawn_below_its_plan(ran):
    planned, measured = ran.chart.tracks
    assert planned.note == "host functions as measured"
    assert planned.timeline.order() == measured.timeline.order()
    assert [len(row) for row in measured.timeline.spans] == [6, 6, 6, 6, 6, 2]
    assert planned.timeline.busy[-1] == pytest.approx(2 * ran.seconds["test"])
    assert "measured (every node waited for)" in ran.timeline()


def test_rounds_that_did_not_complete_are_left_out(train, ran):
    """A reader may be ahead when another one ends the run."""
    more = [*ran.spans, Span(1, ran.spans[0].label, ran.spans[-1].end, ran.spans[-1].end + 1, 6)]
    chart = train.plan(jnp.zeros(4), 0)
    assert len(chart.nodes) == 6
    ahead = type(ran)(ran, ran.pending, chart, more)
    assert ahead.timeline() == ran.timeline()


def test_rows_whose_times_are_unknown_are_hatched(train, tmp_path):
    """Nobody says how long the players and the test take, so their rows are not those of idle actors."""
    plan = train.plan(jnp.zeros(4), 0)
    assert {n.function for n in plan.unknown} == {"play", "test"}
    head = (
        "planned: at least {} for 8 rounds; learn is busiest of those that are known, 100% of it; the time of play, "
        "test is unknown"
    )
    text = plan.timeline(100)
    assert head.format(seconds_text(plan.simulate().makespan)) in text.splitlines()
    unknown = [line.split(" | ")[0].strip() for line in text.splitlines() if "????????" in line]
    assert unknown == ["play", "play[1]", "test"]
    assert text.splitlines()[-1].endswith("the number is the round, ? unknown time")
    said = plan.timeline(100, seconds=SECONDS)
    assert "?" not in said and "least" not in said
    some = plan.timeline(100, seconds={"play": 1e-3, "play[1]": 2e-3})
    assert "; the time of test is unknown" in some
    assert {line.split(" | ")[0].strip() for line in some.splitlines() if "????????" in line} == {"test"}
    plan.draw(tmp_path / "unknown.svg")
    plan.draw(tmp_path / "said.svg", seconds=SECONDS)
    assert "hatched: unknown time" in (tmp_path / "unknown.svg").read_text()
    assert "hatched" not in (tmp_path / "said.svg").read_text()


def test_functions_of_one_name_have_times_of_their_own(tmp_path):
    """Names are for people: two lambdas, one on the host, are told apart."""
    read = shardc.host(lambda i: np.float32(i), gives=jax.ShapeDtypeStruct((), jnp.float32))
    step = shardc.function(lambda w, x: w + x, mesh=shardc.make_mesh(data=1))
    flow = shardc.flow(lambda w, i: (step(w, step(w, read(i))), None))
    _, given = flow.run(jnp.zeros(()), range(6), record=True)
    plan = flow.plan(jnp.zeros(()), 0)
    assert [(n.name, n.function) for n in plan.nodes[1:]] == [
        ("<lambda>", "<lambda>"), ("<lambda>#2", "<lambda>#2"), ("<lambda>#2[1]", "<lambda>#2"),
    ]  # fmt: skip
    assert set(given.seconds) == {n.name for n in plan.nodes}
    planned, measured = given.chart.tracks
    rows = {plan.nodes[1]: 1, plan.nodes[2]: 2}
    assert planned.timeline.busy[rows[plan.nodes[1]]] == pytest.approx(6 * given.seconds["<lambda>"])
    assert planned.timeline.busy[rows[plan.nodes[2]]] == pytest.approx(2 * 6 * plan.nodes[2].work.seconds)
    assert len(measured.timeline.spans[2]) == 12
    assert given.timeline(80)
    given.draw(tmp_path / "run.svg")
    given.report(tmp_path / "run.html")
    longer = plan.seconds_of(10, seconds={"<lambda>": 1.0})
    assert 10 <= longer < 11  # the reader alone
    assert plan.seconds_of(10, seconds={"<lambda>#2": 1.0}) >= 20
    flow.close()


def test_calls_of_one_function_on_several_meshes_have_one_name():
    def grad(x):
        return x + 1

    devices = np.array(jax.devices())
    workers = [shardc.function(grad, mesh=jax.sharding.Mesh(devices[i : i + 1], ("data",))) for i in range(3)]

    @shardc.flow
    def train(x):
        for worker in workers:
            x = worker(x)
        return x, None

    plan = train.plan(jax.ShapeDtypeStruct((), np.float32))
    assert [n.name for n in plan.nodes[1:]] == ["grad", "grad[1]", "grad[2]"]
    assert {n.function for n in plan.nodes[1:]} == {"grad"}


def test_a_name_that_looks_like_the_number_of_a_call_is_no_key():
    def named(name):
        def fn(x):
            return np.asarray(x)

        fn.__name__ = name
        return shardc.host(fn, gives=jax.ShapeDtypeStruct((), jnp.float32))

    one, other, inputs = named("a"), named("a[1]"), named("inputs")
    flow = shardc.flow(lambda s, x: (s, (one(other(x)), one(x), inputs(x))))
    plan = flow.plan(jax.ShapeDtypeStruct((), np.float32), np.float32(0))
    assert [n.name for n in plan.nodes] == ["inputs", "a[1]", "a", "a[2]", "inputs#2"]
    assert [n.function for n in plan.nodes] == ["inputs", "a[1]", "a", "a", "inputs#2"]


def test_a_run_without_times_says_how_to_have_them(train):
    _, given = train.run(jnp.zeros(4), range(2))
    with pytest.raises(FlowError, match=r"no round was recorded; run\(\.\.\., record=True\) records them"):
        given.timeline()


def test_functions_of_one_letter_have_letters_of_their_own():
    mesh = shardc.make_mesh(data=1)

    def named(name):
        def fn(x):
            return x + 1

        fn.__name__ = name
        return shardc.function(fn, mesh=mesh)

    fns = [named(n) for n in ("add", "arm", "ask", "as_", "a")]

    @shardc.flow
    def chain(x):
        for f in fns:
            x = f(x)
        return x, None

    text = chain.plan(jax.ShapeDtypeStruct((), np.float32)).timeline(rounds=1)
    assert "a add, A arm, s ask, S as_, " not in text  # only the first letter has a capital
    assert "a add, A arm, s ask, b as_, c a, the number is the round" in text
    assert "inputs" not in text


FAR = """
import jax, numpy as np, shardc
from jax.sharding import Mesh

def near(x): return x * 2
def far(x): return x + 1

devices = shardc.devices()
meshes = [Mesh(np.array([d]), ("data",)) for d in (devices[0], devices[-1])]
first, second = (shardc.function(f, mesh=m) for f, m in zip((near, far), meshes))

@shardc.flow
def train(x):
    return second(first(x)), None

given = train.run(np.float32(1), rounds=4, record=True)[1]
print(sorted({str(s.label) for s in given.spans}), [len(row) for row in given.chart.tracks[1].timeline.spans])
"""


@pytest.mark.sampled(0)
def test_times_are_those_of_all_processes(tmp_path):
    (tmp_path / "far.py").write_text(FAR)
    command = [sys.executable, "-m", "shardc", "run", "--processes", "2", "--devices", "1", "--islands", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "far.py")], capture_output=True, text=True, timeout=120, check=False,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "['far', 'inputs', 'near'] [4, 4, 4]" in done.stdout
