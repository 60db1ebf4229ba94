"""Host functions: in threads and processes of their own, late, dead, and at their end."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import RoundFailedError
from shardc.dataflow import host as host_module
from tests.runtime.watchdog import within

SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)
X = np.ones(4, np.float32)


@pytest.fixture(scope="module")
def add():
    return shardc.function(lambda w, x: w + x, mesh=shardc.make_mesh(data=2))


def flow_of(add, fn, **options):
    host = shardc.host(fn, gives=SHAPE, **options)

    @shardc.flow
    def train(w, x):
        seen = host(x)
        return add(w, seen), seen

    return train


def failed(flow, items=(X, X, X)):
    with pytest.raises(RoundFailedError) as caught:
        within(60, flow.run, X, items)
    flow.close()
    error = caught.value
    np.testing.assert_array_equal(error.state, X + sum(error.given, np.zeros(4)))  # what came before is not lost
    assert len(error.given) == error.rounds <= error.round
    return error


def text_of(flow, error, cause):
    """The text of an error of the host function's call, which stands behind its making."""
    line = flow.__wrapped__.__code__.co_firstlineno + 2
    return (
        f"{flow.where}: {error.node} failed in round {error.round}, called in test_host.py:{line}: {cause}\n"
        f"All actors have stopped; the state after {error.rounds} rounds is kept in `error.state`."
    )


def chain_of(error):
    """What people read: the error, its notes and its causes."""
    texts = []
    while error is not None:
        texts += [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


def divide(x):
    return x if x[0] < 5 else 1 // 0


def test_a_host_function_that_raises(add):
    flow = flow_of(add, divide)
    error = failed(flow, [X, X, 9 * X])
    assert str(error) == text_of(flow, error, "ZeroDivisionError: integer division or modulo by zero")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.round == 2
    assert "ipeline" not in chain_of(error)


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_host_function_that_hangs(add, where):
    flow = flow_of(add, sleep, where=where, deadline=0.5)
    error = failed(flow, [X, X, 99 * X])
    assert error.round == 2
    assert str(error) == text_of(
        flow, error, "FlowError: sleep has not returned within its deadline of 0.5 s, in round 2."
    )


def sleep(x):
    if x[0] > 9:
        time.sleep(20)
    return x


def test_a_process_that_hangs_shows_where_it_is(add, capfd):
    failed(flow_of(add, sleep, where="process", deadline=0.5), [X, 99 * X])
    assert re.search(r'File ".*test_host\.py", line \d+ in sleep\n', capfd.readouterr().err)


class Slow:
    """A function that hangs while another process gets it."""

    __name__ = "slow"

    def __call__(self, x):
        return x

    def __getstate__(self):
        return {"seconds": 20}

    def __setstate__(self, state):
        time.sleep(state["seconds"])


def test_a_process_that_hangs_while_it_starts(add, monkeypatch, capfd):
    monkeypatch.setattr(host_module, "START", 2.0)
    error = failed(flow_of(add, Slow(), where="process", deadline=0.5))
    assert error.round == 0 and " has no process yet: it has not started within 2 s, in round 0." in str(error)
    assert capfd.readouterr().err.count("in __setstate__") <= 1  # as far as it has come


STOPPED = """\
import os, signal, sys
import numpy as np
import jax.numpy as jnp
import shardc
from tests.dataflow.test_host import SHAPE, X


def stop(x):
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    host = shardc.host(stop, gives=SHAPE, where="process")
    work = host._work(stop, None, 0)
    helper = work._make(stop, "stop")
    helper._here.recv()
    helper._here.send((((X,), {}), None))
    print(helper._process.pid, flush=True)
    os.waitid(os.P_PID, helper._process.pid, os.WSTOPPED | os.WNOWAIT)
"""


@pytest.mark.sampled(0)
def test_a_script_ends_though_a_process_is_stopped(tmp_path):
    """Python asks children to end, and waits for them."""
    path = tmp_path / "script.py"
    path.write_text(STOPPED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_result_unlike_gives(add):
    flow = flow_of(add, cut)
    error = failed(flow)
    assert str(error) == text_of(
        flow, error, "FlowError: cut did not return what gives= says, in round 0:\n"
        "  the result: float32[4] is declared, float32[2] came.",
    )  # fmt: skip


def cut(x):
    return x[:2]


def test_a_function_that_no_process_can_get(add):
    flow = flow_of(add, lambda x: x, where="process")
    error = failed(flow)
    assert "<lambda> cannot be sent to a process of its own: " in str(error)
    assert 'Let it be a function of a module, or write where="thread".' in str(error)


def die_once(x):
    """Kills its process at the third item, once."""
    file = os.environ["SHARDC_TEST_DIED"]
    if x[0] == 3 and not os.path.exists(file):
        with open(file, "w"):
            os._exit(7)
    return 2 * x


def die(x):
    os._exit(7)


def test_a_process_that_dies_is_started_again(add, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDC_TEST_DIED", str(tmp_path / "died"))
    flow = flow_of(add, die_once, where="process")
    state, given = within(60, flow.run, X, [i * X for i in range(6)])
    flow.close()
    assert (tmp_path / "died").exists()
    np.testing.assert_array_equal(given, [2 * i * X for i in range(6)])
    np.testing.assert_array_equal(state, 31 * X)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray starts its processes by a fork
def test_an_actor_of_ray_that_dies_is_started_again(add, tmp_path):
    ray = importlib.import_module("ray")
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "SHARDC_TEST_DIED": str(tmp_path / "died")}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        flow = flow_of(add, die_once, where="ray")
        state, given = within(120, flow.run, X, [i * X for i in range(6)])
        flow.close()
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()
    np.testing.assert_array_equal(given, [2 * i * X for i in range(6)])
    np.testing.assert_array_equal(state, 31 * X)


def test_a_process_that_dies_again_and_again(add):
    flow = flow_of(add, die, where="process")
    error = failed(flow)
    assert str(error) == text_of(flow, error, "FlowError: die: its process has died 3 times in round 0: exit status 7.")


def test_an_error_in_a_process(add):
    flow = flow_of(add, divide, where="process")
    error = failed(flow, [9 * X])
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_no_process_outlives_its_flow(add):
    flow = flow_of(add, getpid, where="process")
    _, given = within(60, flow.run, X, [X])
    pid = int(given[0][0]) * 1000 + int(given[0][1])
    os.kill(pid, 0)
    flow.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def getpid(x):
    return np.array([os.getpid() // 1000, os.getpid() % 1000, 0, 0], np.float32)


LEFT = [X, X, X]


def few_batches():
    if not LEFT:
        raise StopIteration
    return LEFT.pop()


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_loader_elsewhere_ends_the_run(add, where):
    LEFT[:] = [X, X, X]
    load = shardc.host(few_batches, gives=SHAPE, where=where, deadline=30)

    @shardc.flow
    def train(w):
        return add(w, load()), None

    state, given = within(60, train.run, X)
    train.close()
    assert len(given) == 3
    np.testing.assert_array_equal(state, 4 * X)


def test_a_function_that_ends_where_it_cannot_end_the_run(add):
    left = [X, X]

    def few(x):
        if not left:
            raise StopIteration
        return left.pop()

    log = shardc.host(few, gives=SHAPE)

    @shardc.flow
    def train(w, x):
        w = add(w, x)
        return w, log(w)

    with pytest.raises(RoundFailedError) as caught:
        within(30, train.run, X, [X] * 5)
    assert "FlowError: few has no more in round 2, and it cannot end the run. The inputs can, and" in str(caught.value)


@pytest.mark.parametrize("credits", [1, 4])
def test_a_loader_is_ahead_by_its_credits(add, credits):
    """A register is taken when the loader begins, and free when its reader has ended: so many calls are begun and not
    used up."""
    begun, most, used = [0], [0], [0]

    def load():
        begun[0] += 1
        most[0] = max(most[0], begun[0] - used[0])
        return X

    def use(x):
        time.sleep(0.002)
        used[0] += 1
        return x

    loader = shardc.host(load, gives=SHAPE, credits=credits)
    user = shardc.host(use, gives=SHAPE, credits=1)

    @shardc.flow
    def train(w):
        return add(w, user(loader())), None

    _, given = within(30, lambda: train.run(X, rounds=30, record=True))
    assert most[0] <= credits + 1  # `used` is counted before the register is given back
    assert most[0] >= credits
    spans = {(str(s.label), s.round): s for s in given.spans}
    for r in range(credits, 30):
        assert spans["load", r].start >= spans["use", r - credits].start


def test_functions_run_in_threads_of_their_own(add):
    names = set()

    def name(x):
        names.add(threading.current_thread().name)
        return x

    flow = flow_of(add, name)
    flow.run(X, [X])
    assert all(n.startswith("train: actor") for n in names)


def test_keywords_and_trees_reach_a_host_function(add):
    def weigh(x, *, scale, more):
        assert isinstance(x, np.ndarray)
        return x * scale * more["a"][0]

    host = shardc.host(weigh, gives=SHAPE)

    @shardc.flow
    def train(w, x):
        return add(w, host(x, scale=2, more={"a": (w, "text")})), None

    np.testing.assert_array_equal(train.run(X, [X])[0], 3 * X)


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def subtract(x):
    x -= x.mean()
    return x


def sources(add):
    """Values of all kinds, for a host function that writes to what it is given: by name the value in a round of state w
    and item x, and where it lies in the round's arguments."""
    return {
        "an item": lambda w, x: x,
        "what another host function gives": lambda w, x: shardc.host(np.negative, gives=SHAPE)(x),
        "a late one": lambda w, x: shardc.late(shardc.host(np.negative, gives=SHAPE)(x), 1, first=X),
        "a late item": lambda w, x: shardc.late(x, 1, first=X),
        "the state": lambda w, x: w["kept"],
        "of a mesh": lambda w, x: add(w["sum"], x),
        "a constant": lambda w, x: X,
        "a fleet's": lambda w, x: shardc.host(lambda n, x: x[n], gives=SCALAR, copies=4)(x),
    }


@pytest.mark.parametrize("name", sources(None))
@pytest.mark.parametrize("options", [{}, {"deadline": 60.0}])
def test_a_host_function_cannot_write_to_what_it_is_given(add, name, options):
    value, write = sources(add)[name], shardc.host(subtract, gives=SHAPE, **options)

    @shardc.flow
    def train(w, x):
        return {"sum": add(w["sum"], x), "kept": w["kept"]}, write(value(w, x))

    state, items = {"sum": X + 0, "kept": X + 1}, [X + 0, X + 1]
    with pytest.raises(RoundFailedError) as caught:
        within(60, train.run, state, items)
    train.close()
    assert isinstance(cause := caught.value.__cause__, ValueError)
    assert str(cause) == "output array is read-only"
    assert traceback.extract_tb(cause.__traceback__)[-1].line == "x -= x.mean()"
    for mine, was in zip([*state.values(), *items], [X, X + 1, X, X + 1], strict=True):
        np.testing.assert_array_equal(mine, was)
        mine[:] = 0  # still the caller's


def test_a_process_cannot_write_to_what_it_is_given_either(add):
    error = failed(flow_of(add, subtract, where="process"))
    assert "output array is read-only" in str(error)


BUFFERS = {
    "an array": lambda _: np.zeros(4, np.float32),
    "a view": lambda _: np.zeros((2, 4), np.float32)[1],
    "a view of a file": lambda path: np.memmap(path, np.float32, "w+", shape=(2, 4))[0],
}
"""Memory that a reader fills again and again."""

RETURNS = {"itself": lambda x: x, "a view": lambda x: x[:], "read-only": lambda x: np.broadcast_to(x[:1], 4)}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("kind", ["host function", "inputs"])
def test_a_reader_that_fills_one_buffer(add, tmp_path, buffer, returned, kind):
    memory = BUFFERS[buffer](tmp_path / "x")

    def fill(i):
        memory[:] = i
        return RETURNS[returned](memory)

    read = shardc.host(fill, gives=SHAPE, credits=4) if kind == "host function" else lambda x: x
    slow = shardc.host(lambda x: (time.sleep(0.01), x.sum())[1], gives=SCALAR)

    @shardc.flow
    def train(w, i):
        x = read(i)
        late = shardc.late(x, 2, first=X - 1)
        return add(w, x), {"row": x, "sum": slow(x), "late": slow(late)}

    w, given = within(60, train.run, X, range(6) if kind == "host function" else map(fill, range(6)))
    train.close()
    np.testing.assert_array_equal([g["row"] for g in given], [[i] * 4 for i in range(6)])
    assert [float(g["sum"]) for g in given] == [4 * i for i in range(6)]
    assert [float(g["late"]) for g in given] == [0, 0, 0, 4, 8, 12]
    np.testing.assert_array_equal(w, X + 15)
    memory[:] = 7  # still its owner's


def test_an_array_that_is_read_only_is_not_copied(add):
    kept = []

    def read(x):
        kept.append(x * 2)
        kept[-1].flags.writeable = False
        return kept[-1]

    flow = flow_of(add, read)
    _, given = within(60, flow.run, X, [X, X])
    flow.close()
    assert [any(x is y for y in kept) for x in given] == [True, True]


def test_containers_are_not_shared(add):
    kept = {"a": X + 0, "rest": [X + 1]}

    def clear(d):
        d["rest"].clear()
        return d.pop("a").sum()

    def read(x):
        kept.update(a=x, rest=[x + 1])
        return kept

    gives = {"a": SHAPE, "rest": [SHAPE]}
    read, first, second = shardc.host(read, gives=gives), *(shardc.host(clear, gives=SCALAR) for _ in range(2))

    @shardc.flow
    def train(w, x):
        d = read(x)
        return add(w, x), {"first": first(d), "second": second(d), "item": first({"a": x, "rest": [x]}), "whole": d}

    _, given = within(60, train.run, X, [X, 2 * X])
    train.close()
    assert [[float(g[k]) for k in ("first", "second", "item")] for g in given] == [[4.0] * 3, [8.0] * 3]
    np.testing.assert_array_equal([g["whole"]["rest"][0] for g in given], [2 * X, 3 * X])


def test_constants_of_a_round_are_what_they_are_when_it_is_traced(add):
    table, first = X + 1, X + 2
    total = shardc.host(lambda x, late, table: x + late + table, gives=SHAPE)

    @shardc.flow
    def train(w, x):
        return add(w, table), total(x, shardc.late(x, 1, first=first), table)

    _, given = within(60, train.run, X, [X, X])
    table[:], first[:] = 100, 100
    w, again = within(60, train.run, X, [X, X])
    train.close()
    np.testing.assert_array_equal(w, X + 4)
    np.testing.assert_array_equal(again, given)
    np.testing.assert_array_equal(given, [X + 5, X + 3])
