"""`shardc.progress` as a loop uses it."""

import csv
import re
import sys
from time import monotonic, sleep
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.live import meter
from shardc.runtime.status.loop import LoopStatus

X = np.ones((16, 8), np.float32)
W = np.ones((8, 8), np.float32)


def step(w, x):
    loss, g = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return w - 0.1 * g, loss


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class Slow:
    """An array that is computed when `there` says so."""

    size, shape = 1, ()

    def __init__(self):
        self.there = False

    def is_ready(self):
        return self.there

    def __array__(self, dtype=None, copy=None):
        self.there = True
        return np.asarray(7.0)


def test_lines_are_those_of_the_first_each_tenth_and_the_last_step(capsys):
    with shardc.progress(total=25, items=100) as p:
        for i in range(25):
            p(loss=i / 8)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:24] for line in lines] == [
        "step  1/25 | loss 0.0000", "step 10/25 | loss 1.1250", "step 20/25 | loss 2.3750", "step 25/25 | loss 3.0000",
    ]  # fmt: skip
    assert ["tokens/s" in line for line in lines] == [False, True, True, True]


def test_a_loop_of_unknown_length_shows_its_last_step(capsys):
    with shardc.progress(every=4) as p:
        for i in range(6):
            p(loss=i)
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["step 1 |", "step 4 |", "step 6 |"]


def test_a_function_shows_its_plan_beside_the_measured_step(tmp_path, capsys):
    f = shardc.function(step, mesh=shardc.make_mesh(data=8), in_placements={"x": {"data": S(0)}})
    w = W
    with shardc.progress(f, total=4, every=2, items=16, unit="rows", csv=tmp_path / "log.csv") as p:
        for _ in range(4):
            w, loss = f(w, X)
            p(loss=loss, lr=0.1)
    plan, (first, *others) = f.plan(w, X), rows(tmp_path / "log.csv")
    assert (first["step"], first["rows_per_second"], [r["step"] for r in others]) == ("1", "", ["2", "4"])
    for row in others:
        seconds = float(row["step_seconds"])
        assert float(row["planned_seconds"]) == plan.seconds
        assert float(row["rows_per_second"]) == pytest.approx(16 / seconds)
        assert float(row["tflops"]) == pytest.approx(2 * 2 * 16 * 8 * 8 / seconds / 1e12)
        assert int(row["planned_memory_bytes"]) == plan.memory.peak
    assert float(others[-1]["loss"]) == pytest.approx(float(loss))
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"loss 1\.0000 \| lr 0\.1000 \| .* rows/s \| .*s a step, planned .*s \| .* TFLOP/s \| mem", last)
    assert last.endswith("bytes, planned")


def test_no_call_waits_for_a_value(capsys):
    slow = Slow()
    with shardc.progress(every=1) as p:
        for _ in range(3):
            p(loss=slow)
            assert not slow.there and capsys.readouterr().out == ""
        slow.there = True
        p(loss=1.0)
        assert len(capsys.readouterr().out.splitlines()) == 4
        slow.there = False
        p(loss=slow)
    assert slow.there and "step 5 | loss 7.0000" in capsys.readouterr().out


class Timed(Slow):
    """An array that is computed at a given time."""

    def __init__(self, at):
        self.at = at

    def is_ready(self):
        return monotonic() >= self.at

    def __array__(self, dtype=None, copy=None):
        sleep(max(0, self.at - monotonic()))
        return np.asarray(7.0)


@pytest.mark.parametrize("stop", [2, 9])
@pytest.mark.parametrize("every", [3, 10])
def test_steps_are_timed_while_the_loop_waits_for_something_else(stop, every, tmp_path):
    with shardc.progress(total=30, every=every, csv=tmp_path / "log.csv") as p:
        free = monotonic()
        for i in range(30):
            free = max(free, monotonic()) + 0.01
            p(loss=Timed(free))
            if i % 10 == stop:
                sleep(free - monotonic())
    seconds = [float(text) for r in rows(tmp_path / "log.csv") if (text := r["step_seconds"])]
    assert min(seconds) > 0.0099 and np.median(seconds) < 0.02, seconds


def test_rows_that_one_look_finds_have_one_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(meter, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    with shardc.progress(total=20, every=5, csv=tmp_path / "log.csv") as p:
        p(loss=1)
        free = monotonic()
        for _ in range(18):
            p(loss=Timed(free := free + 0.01))
        sleep(free - monotonic())
        p(loss=Timed(free + 0.01))
    *late, last = [float(r["step_seconds"]) for r in rows(tmp_path / "log.csv")[1:]]
    assert len(late) == 3 and len(set(late)) == 1 and late[0] >= 0.01 and last >= 0.0099


def test_a_step_that_fails_is_an_error_of_the_loop():
    def fail(x):
        raise KeyError("no such batch")

    def f(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), "float32"), x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="no such batch"), shardc.progress() as p:
        for _ in range(3):
            p(loss=jax.jit(f)(1.0))


def test_a_loop_that_fails_waits_for_nothing(capsys):
    slow = Slow()
    with pytest.raises(KeyError), shardc.progress() as p:
        p(loss=slow)
        raise KeyError
    assert not slow.there and capsys.readouterr().out == ""


def test_a_result_that_is_not_finite_is_shown_with_the_first_step_that_had_it(capsys):
    with shardc.progress(total=40) as p:
        for i in range(40):
            p(loss=np.nan if 12 <= i < 33 else 1.0, norm=jnp.inf if i == 36 else 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "***" in line] == ["*** step 13: loss is nan ***"]
    assert [line[:21] for line in lines if "nan" in line] == [
        "*** step 13: loss is ", "step 20/40 | loss nan", "step 30/40 | loss nan",
    ]  # fmt: skip


def test_a_result_that_was_donated_is_left_out(caplog, capsys):
    gone = jnp.ones(())
    gone.delete()
    with shardc.progress() as p:
        p(loss=1.0, lr=gone)
    assert capsys.readouterr().out == "step 1 | loss 1.0000\n"
    assert "lr was donated to a later step before it was read; give a copy." in caplog.text


def test_a_resumed_loop_goes_on_with_its_file(tmp_path):
    path = tmp_path / "runs" / "log.csv"
    for start, end in ((0, 6), (4, 8)):
        with shardc.progress(start=start, every=2, csv=path) as p:
            for i in range(start, end):
                p(loss=i, **({"test": 0.5} if i == 7 else {}))
    assert [(r["step"], r["loss"], r["test"]) for r in rows(path)] == [
        ("1", "0.0", ""), ("2", "1.0", ""), ("4", "3.0", ""), ("5", "4.0", ""), ("6", "5.0", ""), ("8", "7.0", "0.5"),
    ]  # fmt: skip
    with shardc.progress(csv=path) as p:
        p(loss=3)
    assert [r["loss"] for r in rows(path)] == ["3.0"]


@pytest.mark.parametrize("start", [0, 1])
def test_files_stay_as_they_are_until_the_first_row(start, tmp_path, monkeypatch):
    made = []
    events = SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)
    library = SimpleNamespace(SummaryWriter=lambda folder: made.append(folder) or events)
    monkeypatch.setitem(sys.modules, "tensorboardX", library)
    path = tmp_path / "log.csv"
    path.write_text(before := "step,loss\n1,3.0\n2,2.0\n")
    with shardc.progress(start=start, csv=path, tensorboard="runs") as p:
        assert path.read_text() == before and not made
        p(loss=1)
        assert len(rows(path)) == start + 1 and made == ["runs"]
    with pytest.raises(KeyError), shardc.progress(csv=tmp_path / "new" / "log.csv"):
        raise KeyError
    assert not (tmp_path / "new").exists()


def test_another_logger_gets_the_rows_and_their_steps():
    said = []
    with shardc.progress(total=20, items=8, log=lambda figures, step: said.append((step, figures))) as p:
        for i in range(20):
            p(loss=i / 2)
    assert [(step, figures["loss"]) for step, figures in said] == [(1, 0.0), (10, 4.5), (20, 9.5)]
    assert "tokens_per_second" in said[-1][1] and "step" not in said[-1][1]


class Cluster:
    """A process of a run."""

    def __init__(self, me):
        self.me, self.loop = me, LoopStatus()


@pytest.mark.parametrize("me", [0, 1])
def test_one_process_speaks_and_tells_the_status_line(me, monkeypatch, capsys, tmp_path):
    cluster = Cluster(me)
    monkeypatch.setattr(meter, "current", lambda: cluster)
    with shardc.progress(items=5, every=1, csv=tmp_path / "log.csv") as p:
        p(loss=2.0)
        first = cluster.loop.facts
        p(loss=3.0)
    assert ((tmp_path / "log.csv").exists(), bool(capsys.readouterr().out)) == (
        (True, True) if me == 0 else (False,) * 2
    )
    last = dict(cluster.loop.facts)
    if me == 0:
        assert first == {"step": 1, "loss": 2.0}
        assert last.pop("tokens") > 0
    assert last == ({"step": 2, "loss": 3.0} if me == 0 else {})


def test_a_pipeline_says_which_rank_waits(capsys):
    def train(w, x):
        def loss(w, x):
            return (shardc.stage_boundary(jnp.tanh(x @ w["a"])) @ w["b"]).mean()

        return jax.value_and_grad(shardc.accumulate(loss, microbatches=2))(w, x)

    f = shardc.function(train, mesh=shardc.make_mesh(pipe=2, data=4), pipeline=shardc.Pipeline())
    weights = {"a": W, "b": W}
    assert f.plan(weights, X).flops == shardc.function(train, mesh=shardc.make_mesh(data=8)).plan(weights, X).flops
    with shardc.progress(f) as p:
        p(loss=f(weights, X)[0])
    assert re.search(r"memory .*, planned \| rank \d waits \d+%, planned$", capsys.readouterr().out.strip())
    compiled = f.compile(weights, X)
    with shardc.progress(compiled) as p:
        p(loss=compiled.measure(weights, X)[0])
    assert re.search(r"\| rank \d waits \d+%$", capsys.readouterr().out.strip())


def test_a_flow_is_shown_from_one_of_its_host_functions(capsys):
    f = shardc.function(step, mesh=shardc.make_mesh(data=8))

    @shardc.flow
    def train(state, x):
        w, loss = f(state, x)
        show(loss)
        return w, loss

    with shardc.progress(train, every=2) as p:
        show = shardc.host(lambda loss: p(loss=loss), gives=None)
        train.run(W, [X] * 4)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == ["step 1 |", "step 2 |", "step 4 |"]
    assert "planned" in lines[-1]


@pytest.mark.parametrize("face", ["flax", "equinox"])
def test_functions_of_modules(face, capsys):
    pytest.importorskip(face)
    f = __import__(f"shardc.{face}", fromlist=["function"]).function(step, mesh=shardc.make_mesh(data=8))
    with shardc.progress(f) as p:
        p(loss=f(W, X)[1])
    assert "planned" in capsys.readouterr().out


def test_a_plain_function_has_no_plan(capsys):
    line = step.__code__.co_firstlineno
    with pytest.warns(shardc.ShardcWarning) as told, shardc.progress(jax.jit(step)) as p:
        p(loss=1)
    assert [str(w.message) for w in told] == [
        f"shardc.progress: step (test_meter.py:{line}) is no function of shardc, so its planned time, operations and "
        "MFU are unknown; give the shardc.function that the loop calls, or none."
    ]
    assert told[0].filename == __file__
    assert "planned" not in capsys.readouterr().out


def test_it_is_used_in_a_with():
    p = shardc.progress()
    with pytest.raises(shardc.ArgumentError, match="use it inside of `with"):
        p(loss=1.0)


def test_arguments_that_do_not_fit():
    with pytest.raises(shardc.ArgumentError) as error:
        shardc.progress(1000, total=10.0, every=0, start=True, items=0)
    assert str(error.value).splitlines() == [
        "shardc.progress: arguments that do not fit",
        "  start=True: a whole number of 0 or more is needed.",
        "  every=0: a whole number of 1 or more is needed.",
        "  total=10.0: a whole number of 0 or more is needed.",
        "  items=0: a positive number is needed, or None.",
        "  step=1000: give the function that the loop calls; the number of steps is total=.",
    ]


def test_more_arguments_that_do_not_fit():
    with pytest.raises(shardc.ArgumentError) as error:
        shardc.progress(total=3, start=5, items=float("nan"), unit=3, csv=3, tensorboard=b"runs", log="wandb")
    assert str(error.value).splitlines()[1:] == [
        "  start=5: more than total=3, which counts the steps before start too.",
        "  items=nan: a positive number is needed, or None.",
        "  unit=3: a text is needed.",
        "  csv=3: a path is needed, or None.",
        "  tensorboard=b'runs': a path is needed, or None.",
        "  log='wandb': a function is needed that takes figures and step=, as wandb.log.",
    ]


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_numbers_of_numpy(kind, capsys):
    with shardc.progress(total=kind(3), start=kind(1), every=kind(1), items=kind(64)) as p:
        for _ in range(2):
            p(loss=np.float32(1))
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["step 2/3", "step 3/3"]


@pytest.mark.parametrize("x", [1.0, {"loss": 1.0}])
def test_results_have_names(x):
    with shardc.progress() as p, pytest.raises(shardc.ArgumentError, match=r"give results by name: p\(loss=loss\)"):
        p(x)


@pytest.mark.parametrize("x", [np.complex64(1), jnp.ones((), "complex64"), np.array("a")])
def test_results_are_real_numbers(x):
    with shardc.progress() as p, pytest.raises(shardc.ArgumentError, match=r"loss is .*; give a real number\."):
        p(loss=x)


def test_results_that_cannot_be_shown():
    with shardc.progress() as p:
        with pytest.raises(shardc.ArgumentError) as error:
            p(loss=jnp.ones(3), grads={"a": 1}, step=3, tokens_per_second=1)
        assert str(error.value).splitlines() == [
            "shardc.progress: results that cannot be shown",
            "  loss is float32[3]; give one number, as its mean.",
            "  grads is dict {'a': 1}; give one number, as its mean.",
            "  step is the name of a figure that is there already; give another name.",
            "  tokens_per_second is the name of a figure that is there already; give another name.",
        ]
        with pytest.raises(shardc.ArgumentError, match="loss is traced: the call stands in a function that JAX traces"):
            jax.jit(lambda x: p(loss=x))(1.0)


def test_files_that_cannot_be_used(tmp_path, monkeypatch):
    with (
        pytest.raises(shardc.ArgumentError, match=r"csv='.*' cannot be used: IsADirectoryError"),
        shardc.progress(csv=tmp_path),
    ):
        pass
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with (
        pytest.raises(shardc.ArgumentError, match="cannot be used: KeyError"),
        shardc.progress(csv=tmp_path / "a.csv", start=3),
    ):
        pass
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with (
        pytest.raises(shardc.ArgumentError, match=r'pip install "shardc\[tensorboard\]"'),
        shardc.progress(tensorboard=tmp_path),
    ):
        pass
