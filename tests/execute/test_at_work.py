"""The line on a terminal while a plan is made or a program compiled."""

import io
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.execute import at_work
from shardc.execute.at_work import line_if_long

CLEAR = "\r\033[K"
X = np.ones((8, 8), np.float32)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[Terminal, io.StringIO])
def stderr(monkeypatch, request):
    monkeypatch.setattr(at_work, "AFTER", 0.05)
    monkeypatch.setattr(at_work, "sys", SimpleNamespace(stderr=request.param()))
    return at_work.sys.stderr


def lines(stderr):
    return stderr.getvalue().split(CLEAR)


def test_it_is_shown_if_it_takes_long_and_cleared_at_the_end(stderr):
    with line_if_long("counting"):
        pass
    assert stderr.getvalue() == ""
    for _ in range(2):
        with pytest.raises(KeyError), line_if_long("counting"), line_if_long("more"):
            time.sleep(0.2)
            raise KeyError
    shown = f"{CLEAR}shardc: counting, 0 s{CLEAR}" * 2
    assert stderr.getvalue() == (shown if stderr.isatty() else "")
    with line_if_long(""):
        time.sleep(0.2)
    assert stderr.getvalue() == (shown if stderr.isatty() else "")


def test_a_plan_and_a_compilation(stderr, monkeypatch):
    def step(w, x):
        time.sleep(0.2)
        return jnp.tanh(x @ w).sum()

    step_ = shardc.function(step, mesh=shardc.make_mesh(data=8))
    step_.plan(X, X)
    planning = rf"shardc: planning step \(test_at_work\.py:{step.__code__.co_firstlineno}\), \d s"
    assert (re.fullmatch(planning, lines(stderr)[1]) is not None) if stderr.isatty() else stderr.getvalue() == ""
    monkeypatch.setattr(at_work, "AFTER", 0.0)
    step_(X, X)
    assert ("shardc: compiling step, 0 s" in lines(stderr)) == stderr.isatty()
    known = stderr.getvalue()
    step_(X, X)
    assert stderr.getvalue() == known


def test_the_programs_of_a_pipeline(stderr, monkeypatch):
    def step(w, x):
        def loss(w, x):
            return (shardc.stage_boundary(jnp.tanh(x @ w["a"])) @ w["b"]).sum()

        return jax.value_and_grad(shardc.accumulate(loss, microbatches=2))(w, x)

    monkeypatch.setattr(at_work, "AFTER", 0.0)
    mesh = shardc.make_mesh(pipe=2, data=4)
    shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline()).compile({"a": X, "b": X}, X)
    shown = [text for text in lines(stderr) if re.fullmatch(r"shardc: compiling the \d+ programs of step, \d+ s", text)]
    assert bool(shown) == stderr.isatty()


def test_a_search_for_a_mesh_traces_first(stderr):
    def step(w, x):
        time.sleep(0.2)
        return jnp.tanh(x @ w).sum()

    shardc.tune(step, X, X, devices=2, axes=("data",), tries=1)
    assert any(text.startswith("shardc: tracing step (test_at_work.py:") for text in lines(stderr)) == stderr.isatty()
