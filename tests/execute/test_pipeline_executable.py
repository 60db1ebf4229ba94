"""The pictures and traces of a pipeline's last call, and of a measured one."""

import gc
import json
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import shardc
from shardc.errors import PipelineError
from shardc.execute.pipeline_executable import PipelineExecutable
from tests.report.test_explain_pipeline import tied, tied_args


def zeros(*shape):
    return np.zeros(shape, np.float32)


def ints(n):
    return np.arange(n, dtype=np.int32)


@pytest.fixture(scope="module")
def exe():
    f = tied(shardc.make_mesh(pipe=3, data=2))
    made = f.compile(*tied_args(zeros, ints))
    yield made
    made.executable.close()


def slices_of(path):
    events = json.loads(path.read_text())["traceEvents"]
    pids = {e["args"]["name"].split(" ")[0]: e["pid"] for e in events if e["name"] == "process_name"}
    return {name: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for name, pid in pids.items()}


def test_the_last_call_beside_the_plan(exe, tmp_path):
    with pytest.raises(PipelineError, match=r"there was no call yet; call it, or measure"):
        exe.trace(tmp_path / "step.json")
    exe(*tied_args(zeros, ints))
    exe.trace(tmp_path / "step.json")
    shown = slices_of(tmp_path / "step.json")
    assert [(e["tid"], e["name"]) for e in shown["planned"]] == [(e["tid"], e["name"]) for e in shown["measured"]]
    assert all(e["ts"] > 0 for e in shown["measured"])
    assert "measured (launches by the host): " in exe.timeline()


def test_measuring_waits_for_every_task_and_gives_what_the_call_gives(exe, tmp_path):
    plain = exe(*tied_args(zeros, ints))
    measured = exe.measure(*tied_args(zeros, ints))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), plain, measured)
    assert "measured (every task waited for): " in exe.timeline()
    exe.draw(tmp_path / "step.svg")
    assert "every task waited for" in (tmp_path / "step.svg").read_text()
    exe(*tied_args(zeros, ints))
    assert "launches by the host" in exe.timeline()


def test_measured_registers_are_never_more_than_the_credits(exe):
    last = []
    for call in [exe, exe.measure, exe]:
        call(*tied_args(zeros, ints))
        recording = exe.executable._last
        last.append(recording.timeline(exe.plan.network))
    for timeline in last:
        assert timeline.order() == exe.plan.simulate().order()
        for channel, peak in zip(exe.plan.network.channels, timeline.peaks, strict=True):
            assert channel.registers is None or peak <= channel.registers


def test_measuring_another_call_is_refused(exe):
    params, state, batch = tied_args(zeros, ints)
    with pytest.raises(shardc.errors.ShardcError, match="not the call that was compiled"):
        exe.measure(params, state, {k: v[:8] for k, v in batch.items()})


def test_an_executable_that_is_dropped_goes_at_once(exe):
    """What it has of other processes is closed when it goes: not in a thread that happens to collect garbage."""
    made = PipelineExecutable(exe.plan, exe.executable._ranks, exe.executable._executables)
    made.places = SimpleNamespace(are_several=True)
    assert made.agreement is not None
    ref = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert ref() is None
    finally:
        gc.enable()


def test_what_is_no_pipeline_says_so(tmp_path):
    f = shardc.function(lambda x: x * 2, mesh=shardc.make_mesh(data=2))
    compiled, plan = f.compile(zeros(4)), f.plan(zeros(4))
    for look in (
        lambda: compiled.timeline(),
        lambda: compiled.trace(tmp_path / "x.json"),
        lambda: compiled.measure(zeros(4)),
        lambda: compiled.draw(tmp_path / "x.svg"),
        lambda: plan.timeline(),
        lambda: plan.trace(tmp_path / "x.json"),
        lambda: plan.simulate(),
    ):
        with pytest.raises(PipelineError) as caught:
            look()
        assert str(caught.value) == (
            "<lambda> is one program, no pipeline: there are no actors to show; jax.profiler.trace(...) shows what is "
            "in it."
        )
    for of, kind in ((plan, "Plan"), (compiled, "Compiled")):
        with pytest.raises(AttributeError, match=f"^'{kind}' object has no attribute 'drow'$"):
            _ = of.drow
