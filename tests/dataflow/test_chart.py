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
        assert "learn\N{RIGHTWARDS ARROW}play, 2 late, 1 of 2" in texts and "learn\N{RIGHTWARDS ARROW}test" in texts


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
    ahead = type(ran)(ran, ran.pending, chart, more, ran.python)
    assert ahead.timeline() == ran.timeline()


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
