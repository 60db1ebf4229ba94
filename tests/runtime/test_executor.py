import gc
import os
import random
import signal
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from shardc.errors import PipelineError, PipelineTaskError, StepFailedError
from shardc.runtime import executor as executor_module
from shardc.runtime.actor import Network, Step
from shardc.runtime.executor import (
    Executor,
    LaunchLimit,
    ProcessShare,
    RoundsEnded,
    Task,
    Threads,
    _is_before,
)
from tests.runtime.networks import build, looped, two_rates
from tests.runtime.watchdog import actor_threads, within


@pytest.fixture(autouse=True)
def no_thread_outlives():
    yield
    gc.collect()
    assert not actor_threads()


def chain(stages, microbatches, registers=None):
    """Forward through all stages, then backward; each stage keeps a stash."""

    def row(s):
        inner, last = s > 0, s + 1 == stages
        for j in range(microbatches):
            yield f"{s}F{j}", f"f{s - 1}.{j}" * inner, f"s{s}.{j}" + f" f{s}.{j}" * (not last)
        for j in range(microbatches):
            yield f"{s}B{j}", f"s{s}.{j}" + f" b{s + 1}.{j}" * (not last), f"b{s}.{j}" * inner

    return build(
        [list(row(s)) for s in range(stages)],
        {
            **{f"f{s}": (s, s + 1, registers) for s in range(stages - 1)},
            **{f"s{s}": (s, s) for s in range(stages)},
            **{f"b{s}": (s, s - 1, registers) for s in range(1, stages)},
        },
    )


def steps(net):
    return {step.label: step for row in net.actors for step in row}


def tasks_for(net, run):
    """Tasks that call `run(label, values)`; if it returns None, the step gives its label with each key."""

    def task(step):
        def go(values):
            given = run(step.label, values)
            return [f"{step.label}>{key}" for _, key in step.gives] if given is None else given

        return Task(go, source=f"model.py:{len(str(step.label))}")

    return {label: task(step) for label, step in steps(net).items()}


# ---- what runs


def test_values_reach_their_takers_in_the_order_of_takes():
    net = build(
        [[("x", "", "c.0 c.1 d.0"), ("y", "", "c.2")], [("u", "c.2 d.0", ""), ("v", "c.1 c.0", "")]],
        {"c": (0, 1), "d": (0, 1)},
    )
    seen = {}
    give = {"x": ["x0", "x1", "xd"], "y": ["y2"]}

    def run(label, values):
        seen[label] = list(values)
        return give.get(label, [])

    with Executor(net, tasks_for(net, run)) as executor:
        within(5, executor.run)
    assert seen == {"x": [], "y": [], "u": ["y2", "xd"], "v": ["x1", "x0"]}


def test_a_transport_moves_what_is_given_before_the_next_step():
    net = build([[("x", "", "c.0 s.0"), ("y", "s.0", "")], [("u", "c.0", "")]], {"c": (0, 1), "s": (0, 0)})
    log = []

    def transport(channel):
        def move(value):
            log.append(("move", channel.name, threading.current_thread().name))
            return f"{value} at {channel.target}"

        return move

    tasks = tasks_for(net, lambda label, values: log.append((label, *values)))
    with Executor(net, tasks, transports=transport) as executor:
        within(5, executor.run)
    assert [e for e in log if e[0] != "u"] == [
        ("x",),
        ("move", "c", "pipeline: actor 0"),
        ("move", "s", "pipeline: actor 0"),
        ("y", "x>0 at 0"),
    ]
    assert ("u", "x>0 at 1") in log


def test_a_full_channel_holds_its_giver_back():
    net = build(
        [[(f"x{j}", "", f"c.{j}") for j in range(6)], [(f"y{j}", f"c.{j}", "") for j in range(6)]], {"c": (0, 1, 2)}
    )
    running, most = set(), []

    def run(label, values):
        if label[0] == "x":  # a register is taken when the giver starts, and free when the taker has ended
            running.add(label[1])
            most.append(len(running))
        else:
            time.sleep(0.005)
            running.discard(label[1])

    with Executor(net, tasks_for(net, run)) as executor:
        within(5, executor.run)
    assert max(most) == 2


def test_runs_again_with_the_same_threads():
    net = chain(3, 2, registers=1)
    count = []
    with Executor(net, tasks_for(net, lambda label, values: count.append(label))) as executor:
        threads = actor_threads()
        for _ in range(50):
            within(5, executor.run)
        assert actor_threads() == threads and len(threads) == 3
    assert len(count) == 50 * 12


def test_spans_only_if_asked():
    net = chain(2, 2)
    with Executor(net, tasks_for(net, lambda *_: time.sleep(0.002))) as executor:
        assert executor.run() == []
        spans = executor.run(record=True)
    assert [(s.actor, s.label) for s in spans] == [(a, s.label) for a, row in enumerate(net.actors) for s in row]
    assert all(0.002 <= s.end - s.start < 1 for s in spans)
    ends = {s.label: s.end for s in spans}
    assert all(s.start >= ends[f"0F{s.label[2]}"] for s in spans if s.label[:2] == "1F")


def test_host_work_of_all_actors_overlaps():
    """K actors with host work h each, for a chain of one microbatch, take at most 1.5 h, not K h."""
    actors, h = 4, 0.04
    net = chain(actors, 1)

    def task(label):
        step = steps(net)[label]
        return Task(lambda _: [None] * len(step.gives), prepare=lambda _: time.sleep(h / 2))

    took = []
    with Executor(net, task) as executor:
        for _ in range(5):
            begin = time.perf_counter()
            within(5, executor.run)
            took.append(time.perf_counter() - begin)
    assert min(took) <= 1.5 * h


def test_a_step_is_prepared_with_its_label_while_inputs_are_missing():
    net = build([[("x", "", "c.0")], [("y", "c.0", "")]], {"c": (0, 1)})
    prepared = threading.Event()
    seen = []

    def prepare(label):
        seen.append(label)
        prepared.set()

    tasks = {
        "x": Task(lambda _: [prepared.wait(5)]),  # gives only once y is prepared
        "y": Task(lambda values: seen.extend(values) or [], prepare=prepare),
    }
    with Executor(net, tasks) as executor:
        within(10, executor.run)
    assert seen == ["y", True]


# ---- what is kept


class Value:
    """A value that weak references can follow."""


def test_a_register_is_dropped_as_soon_as_its_taker_has_run():
    net = build([[("x", "", "c.0 s.0"), ("y", "s.0", "d.0"), ("z", "e.0", "")],
                 [("u", "c.0", ""), ("v", "d.0", "e.0")]],
                {"c": (0, 1), "s": (0, 0), "d": (0, 1), "e": (1, 0)})  # fmt: skip
    refs, alive = {}, {}

    def run(label, values):
        alive[label] = {name for name, ref in refs.items() if ref() is not None}
        given = [Value() for _ in steps(net)[label].gives]
        refs.update({f"{label}{i}": weakref.ref(v) for i, v in enumerate(given)})
        return given

    waits = []  # the window, too, holds no values
    with Executor(net, tasks_for(net, run), limit=LaunchLimit(10, waits.append)) as executor:
        within(5, executor.run)
        assert alive["z"] == {"v0"}  # x's and y's values are gone, v's is z's input
        assert {n for n, ref in refs.items() if ref() is not None} == set()
        assert waits == []


def test_what_was_taken_is_gone_before_what_is_given_is_moved():
    net = build([[("x", "", "c.0"), ("y", "c.0", "d.0")], [("z", "d.0", "")]], {"c": (0, 0), "d": (0, 1)})
    refs, alive = {}, []

    def run(label, values):
        given = [Value() for _ in steps(net)[label].gives]
        refs.update((label, weakref.ref(v)) for v in given)
        return given

    def transport(channel):
        return lambda value: (alive.append((channel.name, refs["x"]() is not None)), value)[1]

    with Executor(net, tasks_for(net, run), transports=transport) as executor:
        within(5, executor.run)
    assert alive == [("c", True), ("d", False)]


class Device:
    """A fake device: launched work takes `seconds`, one item after the other."""

    def __init__(self, seconds):
        self.seconds, self.free, self.most, self.pending = seconds, time.perf_counter(), 0, []

    def launch(self):
        self.free = max(self.free, time.perf_counter()) + self.seconds
        self.pending = [t for t in self.pending if t > time.perf_counter()] + [self.free]
        self.most = max(self.most, len(self.pending))
        value = Value()
        value.finished = self.free
        return value


def wait_for(values):
    time.sleep(max(0.0, max(v.finished for v in values) - time.perf_counter()))


@pytest.mark.parametrize("tokens", [False, True])
def test_no_more_steps_in_flight_than_the_window(tokens):
    """Without tokens only while the values live, which their taker ensures here; with tokens across runs too."""
    net = build([[(f"x{j}", "", f"c.{j}") for j in range(8)], [("y", " ".join(f"c.{j}" for j in range(8)), "")]],
                {"c": (0, 1)})  # fmt: skip
    for window in (1, 3):
        device = Device(0.002)

        def run(label, values, device=device):
            if label == "y":
                return []
            return [None, device.launch()] if tokens else [device.launch()]

        with Executor(net, tasks_for(net, run), limit=LaunchLimit(window, wait_for)) as executor:
            within(5, executor.run)
            if tokens:
                within(5, executor.run)
        assert device.most == window


def test_values_in_lists_are_waited_for():
    net = build([[("x", "", "c.0"), ("y", "", ""), ("z", "c.0", "")]], {"c": (0, 0)})
    first, second = np.zeros(2), np.ones(2)
    waited = []
    run = lambda label, values: [[first, (second, 3, None)]] if label == "x" else []  # noqa: E731
    with Executor(net, tasks_for(net, run), limit=LaunchLimit(1, waited.append)) as executor:
        within(5, executor.run)
    assert len(waited) == 1 and waited[0][0] is first and waited[0][1] is second and len(waited[0]) == 2


# ---- several actors in a thread


@pytest.mark.parametrize("threads", [1, 2, 7, None])
def test_actors_are_dealt_out_to_threads(threads):
    net = chain(3, 4, registers=1)
    where = {}
    run = lambda label, values: where.setdefault(label[0], set()).add(threading.current_thread().name)  # noqa: E731
    with Executor(net, tasks_for(net, run), threads=Threads(threads)) as executor:
        assert len(actor_threads()) == min(threads or 3, 3)
        for _ in range(3):
            within(5, executor.run)
    assert all(len(names) == 1 for names in where.values())
    assert len(set.union(*where.values())) == min(threads or 3, 3)


def test_what_one_actor_waits_for_holds_no_other_of_its_thread():
    """`done` waits for the launched steps of its actor; meanwhile the other actor launches all its steps."""
    net = build([[("x", "", ""), ("done", "", "")], [(f"y{j}", "", "") for j in range(4)]], {})
    device, log = Device(0.05), []

    def task(label):
        def run(_):
            log.append(label)
            return [device.launch()]

        return Task(run, settled=label == "done")

    with Executor(net, task, limit=LaunchLimit(9, wait_for), threads=Threads(1)) as executor:
        within(5, executor.run)
    assert log == ["x", "y0", "y1", "y2", "y3", "done"]


def test_the_step_that_was_launched_first_is_waited_for_first():
    net = build([[(f"x{j}", "", "") for j in range(4)], [(f"y{j}", "", "") for j in range(4)]], {})
    waited = []

    def task(label):
        return Task(lambda _: [label])

    with Executor(
        net, task, limit=LaunchLimit(2, lambda tokens: waited.extend(tokens)), threads=Threads(1)
    ) as executor:
        within(5, executor.run)
    assert waited == ["x0", "y0", "x1", "y1"]


def test_what_is_there_is_not_waited_for():
    net = build([[(f"x{j}", "", "") for j in range(6)], [("y", "", "")]], {})
    log = []

    def task(label):
        def run(_):
            log.append(label)
            return [label]

        return Task(run)

    with Executor(
        net, task, limit=LaunchLimit(1, lambda _: None, lambda label: label != "x3"), threads=Threads(1)
    ) as executor:
        within(5, executor.run)
    assert log == ["x0", "y", "x1", "x2", "x3", "x4", "x5"]
    with Executor(net, task, limit=LaunchLimit(1, lambda _: None), threads=Threads(1)) as executor:
        within(5, executor.run)


def test_a_failure_stops_the_other_actors_of_its_thread():
    net = build([[("bad", "", "")], [("y0", "", ""), ("y1", "", "")], [("z0", "", ""), ("z1", "", "")]], {})
    ran, failing = [], [True]

    def run(label, values):
        ran.append(label)
        if label == "bad" and failing[0]:
            raise ValueError("no")

    with Executor(net, tasks_for(net, run), threads=Threads(1)) as executor:
        with pytest.raises(PipelineTaskError, match="actor 0 failed in bad"):
            within(5, executor.run)
        assert ran == ["bad"]
        failing[0] = False
        within(5, executor.run)
    assert sorted(ran) == ["bad", "bad", "y0", "y1", "z0", "z1"]


# ---- what goes wrong


def test_any_task_may_fail_and_then_all_runs_again():
    net = chain(3, 2, registers=1)
    for bad in steps(net):
        failing = [True]

        def run(label, values, bad=bad, failing=failing):
            if label == bad and failing[0]:
                raise ValueError("no such luck")

        with Executor(net, tasks_for(net, run)) as executor:
            with pytest.raises(PipelineTaskError) as caught:
                within(5, executor.run)
            error = caught.value
            assert (error.actor, error.label, error.source) == (int(bad[0]), bad, "model.py:3")
            assert str(error) == (
                f"actor {bad[0]} failed in {bad} (model.py:3): ValueError: no such luck\n"
                "All actors of the pipeline have stopped; it can be run again."
            )
            assert isinstance(error, StepFailedError)
            assert isinstance(error.__cause__, ValueError)
            failing[0] = False
            for _ in range(3):
                within(5, executor.run)


def test_all_ways_to_fail():
    net = build([[("x", "", "c.0"), ("y", "", "")], [("u", "c.0", "")]], {"c": (0, 1)})

    def fails(*_):
        raise SystemExit(3)

    sound = tasks_for(net, lambda *_: None)
    cases = {
        "prepare": ({**sound, "u": Task(lambda _: [], prepare=fails)}, {}, "actor 1 failed in u: SystemExit: 3"),
        "run": ({**sound, "y": Task(fails)}, {}, "actor 0 failed in y: SystemExit: 3"),
        "transport": (sound, {"transports": lambda c: fails}, "actor 0 failed in x (model.py:1): SystemExit: 3"),
        "wait": (
            {**sound, "x": Task(lambda _: ["value", "token"], source="first.py:7")},
            {"limit": LaunchLimit(1, fails)},
            "actor 0 failed in x (first.py:7): SystemExit: 3",  # which is found out when y is to be launched
        ),
        "count": (
            {**sound, "x": Task(lambda _: [])},
            {},
            "actor 0 failed in x: ValueError: the task returned 0 values; the step gives 1.",
        ),
    }
    for tasks, options, message in cases.values():
        with Executor(net, tasks, **options) as executor:
            for _ in range(2):
                with pytest.raises(PipelineTaskError) as caught:
                    within(5, executor.run)
                assert str(caught.value).splitlines()[0] == message


def test_of_several_failures_the_first_is_raised():
    net = build([[("x", "", "")], [("y", "", "")]], {})
    both = threading.Barrier(2)

    def run(label, values):
        both.wait(5)
        if label == "x":
            time.sleep(0.05)
        raise KeyError(label)

    with Executor(net, tasks_for(net, run)) as executor, pytest.raises(PipelineTaskError) as caught:
        within(5, executor.run)
    assert caught.value.label == "y"
    assert caught.value.__notes__ == ["After it actor 0 failed in x (model.py:1): KeyError: 'x'"]


def test_a_failed_run_leaves_nothing_behind():
    """Received messages, messages in the mailbox and tokens are freed while the error is still held."""
    net = build(
        [
            [("x", "", "c.0 s.0"), ("x2", "", "c.1"), ("w", "s.0 e.0", "")],
            [("u", "c.0", ""), ("v", "c.1", "")],
            [("y", "", "d.0"), ("bad", "d.0", "e.0")],
        ],
        {"c": (0, 1), "s": (0, 0), "d": (2, 2), "e": (2, 0)},
    )
    refs = {}
    started, given_late, failed = threading.Event(), threading.Event(), threading.Event()

    def run(label, values):
        if label == "x2":  # c.1 comes while u runs, and stays in the mailbox
            started.wait(5)
            threading.Timer(0.02, given_late.set).start()
        if label == "u":
            started.set()
            failed.wait(5)
            time.sleep(0.02)
        if label == "bad":
            given_late.wait(5)
            failed.set()
            raise ValueError
        given = [Value() for _ in range(len(steps(net)[label].gives) + 1)]  # one token each
        refs.update({(label, i): weakref.ref(v) for i, v in enumerate(given)})
        return given

    with Executor(net, tasks_for(net, run), limit=LaunchLimit(5, lambda _: None)) as executor:
        with pytest.raises(PipelineTaskError) as caught:
            within(5, executor.run)
        assert {label for label, _ in refs} == {"x", "x2", "u", "y"}
        alive = {name for name, ref in refs.items() if ref() is not None}
        assert alive == {("y", 0)}  # the input of the failing task, in the frame of that
        assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_name == "go"
        del caught
        gc.collect()
        assert all(ref() is None for ref in refs.values())


def test_a_task_cannot_run_its_own_executor():
    net = build([[("x", "", "")]], {})
    executors = []
    with Executor(net, tasks_for(net, lambda *_: executors[0].run())) as executor:
        executors.append(executor)
        with pytest.raises(PipelineTaskError, match="it is already running") as caught:
            within(5, executor.run)
        assert isinstance(caught.value.__cause__, PipelineError)


def test_interrupt_stops_all_actors_and_the_executor_runs_again():
    net = chain(3, 4, registers=1)
    count, slow = [], [True]

    def run(label, values):
        count.append(label)
        if slow[0]:
            if label == "1F1":
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with Executor(net, tasks_for(net, run)) as executor:
        with pytest.raises(KeyboardInterrupt):
            executor.run()
        assert "1F1" in count and len(count) < 24
        stopped_at = len(count)
        time.sleep(0.05)
        assert len(count) == stopped_at
        slow[0] = False
        within(5, executor.run)
        assert len(count) == stopped_at + 24


def test_no_run_is_abandoned_by_another_call():
    net = build([[("x", "", "")]], {})
    begun, release, errors = threading.Event(), threading.Event(), []

    def run(label, values):
        begun.set()
        assert release.wait(5)
        return []

    with Executor(net, tasks_for(net, run)) as executor:
        first = threading.Thread(target=lambda: errors.append(executor.run()), daemon=True)
        first.start()
        assert begun.wait(5)
        executor.abandon(2, ValueError("a second call"))
        release.set()
        first.join(5)
        assert errors == [[]] and executor.runs == 1


def test_who_interrupts_twice_does_not_wait_for_a_task_that_hangs():
    net = build([[("x", "", "c.0")], [("y", "c.0", "")]], {"c": (0, 1)})
    release = threading.Event()
    count = []

    def run(label, values):
        count.append(label)
        if label == "y" and not release.is_set():
            threading.Thread(target=interrupt_twice).start()
            release.wait(10)

    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    with Executor(net, tasks_for(net, run)) as executor:
        begin = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            executor.run()
        assert time.perf_counter() - begin < 5
        release.set()
        within(5, executor.run)
        assert count == ["x", "y", "x", "y"]


def test_closing_stops_a_run_in_another_thread():
    net = chain(2, 20, registers=1)
    running = threading.Event()

    def run(label, values):
        running.set()
        time.sleep(0.01)

    executor = Executor(net, tasks_for(net, run))
    threading.Thread(target=lambda: (running.wait(5), executor.close()), daemon=True).start()
    with pytest.raises(PipelineError, match="was closed while it ran"):
        within(5, executor.run)
    with pytest.raises(PipelineError, match="the executor is closed"):
        executor.run()
    executor.close()


def test_closing_at_any_moment_ends_a_run():
    """Also between the check that it is open and the orders to the threads."""
    net = chain(2, 3, registers=1)
    outcomes = set()
    for i in range(200):
        executor = Executor(net, tasks_for(net, lambda *_: None))
        closer = threading.Timer(i * 5e-6, executor.close)
        closer.start()
        try:
            for _ in range(50):
                within(5, executor.run)
            outcomes.add("ended")
        except PipelineError as error:
            outcomes.add(str(error))
        closer.join()
    assert outcomes <= {"ended", "Executor.run: the executor is closed.",
                        "Executor.run: the executor was closed while it ran."}  # fmt: skip


def test_an_order_that_comes_after_the_end_is_answered():
    net = chain(2, 1)
    executor = Executor(net, tasks_for(net, lambda *_: None))
    for worker in executor._workers:
        worker.orders.put(None)
        worker.thread.join(5)
    with pytest.raises(PipelineError, match="one of its threads has ended"):
        within(5, executor.run)


def test_dropping_closes():
    net = chain(2, 2)
    executor = Executor(net, tasks_for(net, lambda *_: None))
    within(5, executor.run)
    assert len(actor_threads()) == 2
    del executor
    assert not actor_threads()


def test_refusals():
    net = build([[("x", "", "c.0")], [("y", "c.0", "")]], {"c": (0, 1)})
    task = Task(lambda _: [])
    with pytest.raises(PipelineError) as error:
        Executor(net, {})
    assert str(error.value) == "Executor: no task for these steps:\n  actor 0: x\n  actor 1: y"
    with pytest.raises(PipelineError, match="The pipeline deadlocks: actor 0 waits for itself"):
        Executor(build([[("x", "c.0", ""), ("y", "", "c.0")]], {"c": (0, 0)}), lambda _: task)
    with pytest.raises(PipelineError) as error:
        Executor(net, lambda _: task, share=ProcessShare([1]))
    assert str(error.value) == (
        "Executor: ProcessShare.ports needs a port for each actor of another process:\n"
        '  channel "c" joins actor 1, which runs here, and actor 0, which runs elsewhere without a port.'
    )
    with pytest.raises(PipelineError, match=r"mine has \[2\]; the network has actors 0 to 1"):
        Executor(net, lambda _: task, share=ProcessShare([0, 2]))
    with pytest.raises(PipelineError, match="LaunchLimit: steps=0; an actor needs at least 1"):
        LaunchLimit(0, print)


def test_a_function_that_gives_tasks_fails_as_it_fails():
    with pytest.raises(KeyError, match="mine"):
        Executor(build([[("x", "", "")]], {}), lambda label: {}["mine"])


def test_nothing_to_do():
    with Executor(Network((), ()), {}) as executor:
        assert within(5, executor.run) == []
    with Executor(Network(((), (Step("x"),)), ()), {"x": Task(lambda _: [])}) as executor:
        assert [s.label for s in within(5, lambda: executor.run(record=True))] == ["x"]


def test_overhead_of_an_action_is_under_100_microseconds():
    net = chain(4, 50, registers=2)
    with Executor(net, tasks_for(net, lambda *_: None)) as executor:
        took = []
        for _ in range(10):
            begin = time.perf_counter()
            executor.run()
            took.append(time.perf_counter() - begin)
    assert min(took) / 400 < 100e-6


def test_jitter_changes_no_value():
    """The order of actions is fixed, so the numbers do not depend on which actor is slow."""
    net = chain(3, 5)
    results = []
    for seed in range(3):
        rng = random.Random(seed)
        got = {}

        def run(label, values, rng=rng, got=got):
            time.sleep(rng.random() / 500)
            got[label] = sum(values) * 2 + int(label[2])
            return [got[label]] * len(steps(net)[label].gives)

        with Executor(net, tasks_for(net, run)) as executor:
            within(5, executor.run)
        results.append(got)
    assert results[0] == results[1] == results[2] and len(results[0]) == 30


# ---- rounds


def of_loop(log=None):
    """Tasks of `looped`: `a` doubles what it takes, `b` adds 1."""

    def run(label, values):
        if log is not None:
            log.append((label, values[0]))
        return [2 * values[0] if label == "a" else values[0] + 1]

    return run


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_delayed_value_is_that_of_rounds_ago(delay, threads):
    net, log = looped(delay), []
    first = list(range(10, 10 + delay))
    with Executor(net, tasks_for(net, of_loop(log)), threads=Threads(threads)) as executor:
        within(5, lambda: executor.run(rounds=8, first={(0, "0"): first}))
        taken = list(first)
        for _ in range(8):
            taken.append(2 * taken[-delay] + 1)
        assert [v for label, v in log if label == "a"] == taken[:8]
        assert executor.left == {(0, "0"): taken[8:]} and executor.rounds == 8
        within(5, lambda: executor.run(rounds=0, first=executor.left))
        assert executor.left == {(0, "0"): taken[8:]} and executor.rounds == 0


@pytest.mark.parametrize("delay", [1, 3])
def test_two_runs_are_one(delay):
    net, log = looped(delay), []
    first = {(0, "0"): list(range(delay))}
    with Executor(net, tasks_for(net, of_loop(log))) as executor:
        within(5, lambda: executor.run(rounds=20, first=first))
        at_once, left = list(log), executor.left
        log.clear()
        within(5, lambda: executor.run(rounds=10, first=first))
        within(5, lambda: executor.run(rounds=10, first=executor.left))
        assert [e for e in log if e[0] == "a"] == [e for e in at_once if e[0] == "a"]
        assert executor.left == left


def test_first_messages_that_no_round_takes_are_left():
    net = looped(3)
    with Executor(net, tasks_for(net, of_loop())) as executor:
        within(5, lambda: executor.run(rounds=2, first={(0, "0"): [1, 2, 3]}))
        assert executor.left == {(0, "0"): [3, 3, 5]}


def test_rates_and_spans():
    net, log = two_rates(delay=2), []
    made = iter(range(100, 200))

    def run(label, values):
        log.append((label, *values))
        return [next(made)] * len(steps(net)[label].gives) if label[0] == "g" else []

    with Executor(net, tasks_for(net, run), threads=Threads(1)) as executor:
        spans = within(5, lambda: executor.run(rounds=11, record=True, first={(0, "0"): ["first"]}))
        # round 4 gives to round 6; what round 10 gives would be taken in round 12
        assert [e for e in log if e[0][0] == "t"] == [("t0", "first"), ("t3",), ("t0", 102), ("t3",)]
        assert [(s.label, s.round) for s in spans if s.actor == 0] == [
            ("g0", 0), ("g2", 2), ("g4", 4), ("g0", 6), ("g2", 8), ("g4", 10)
        ]  # fmt: skip
        assert [(s.label, s.round) for s in spans if s.actor == 1] == [("t0", 0), ("t3", 3), ("t0", 6), ("t3", 9)]
        assert list(executor.left) == [(0, "0")]
        within(5, lambda: executor.run(rounds=3, first={(0, "0"): ["first"]}))
        assert executor.left == {}


def test_what_a_run_begins_with_is_asked_for():
    net = looped(2)
    with Executor(net, tasks_for(net, of_loop())) as executor:
        for first, count in ((None, 0), ({(0, "0"): [1]}, 1), ({(0, "0"): [1, 2, 3]}, 3)):
            with pytest.raises(PipelineError) as error:
                executor.run(rounds=2, first=first)
            assert f"first has {count} values of message '0' of \"c\"; a run begins with 2." in str(error.value)
        with pytest.raises(PipelineError, match="rounds=-1; it has to be 0 or more"):
            executor.run(rounds=-1, first={(0, "0"): [1, 2]})
        within(5, lambda: executor.run(rounds=2, first={(0, "0"): [1, 2]}))


@pytest.mark.parametrize("threads", [1, 2, None])
def test_a_source_ends_the_run(threads):
    """The reader ends before round 5; the logger, which needs nobody, is ahead or is not: it ends too."""
    net = build(
        [[("read", "s.0", "c.0 s.0")], [("train", "c.0 p.0", "p.0")], [("log", "", "")]],
        {"c": (0, 1, 2), "s": (0, 0, 2, 0, 1), "p": (1, 1, 2, 0, 1)},
    )
    counts, started = dict.fromkeys(("read", "train", "log"), 0), []

    def run(label, values):
        if label == "read":
            started.append(values[0])
            if values[0] == 5:
                raise RoundsEnded(5)
            return [10 * values[0], values[0] + 1]
        counts[label] += 1
        return [sum(values)] if label == "train" else []

    first = {(1, "0"): [0], (2, "0"): [1000]}
    with Executor(net, tasks_for(net, run), threads=Threads(threads)) as executor:
        within(5, lambda: executor.run(rounds=100_000, first=first))
        assert executor.rounds == 5 and counts["train"] == 5 and counts["log"] >= 5
        assert started == [0, 1, 2, 3, 4, 5]  # it is not asked again
        assert executor.left == {(1, "0"): [5], (2, "0"): [1100]}  # the reader's state is taken back
        within(5, lambda: executor.run(rounds=0, first=executor.left))
        assert executor.left == {(1, "0"): [5], (2, "0"): [1100]}


def test_a_source_ends_the_run_while_its_step_is_prepared():
    net, asked = looped(1), []

    def prepare(label):
        asked.append(label)
        if len(asked) == 7:
            raise RoundsEnded(6)

    def run(values):
        return [values[0] + 1]

    tasks = {"a": Task(run), "b": Task(run, prepare)}
    with Executor(net, tasks) as executor:
        within(5, lambda: executor.run(rounds=100, first={(0, "0"): [0]}))
        assert executor.rounds == 6 and len(asked) == 7


def test_what_an_actor_ahead_has_left():
    """The fast source is ahead by its registers when the slow one ends: it leaves what it had then, and no more."""
    net = build(
        [[("fast", "f.0", "c.0 f.0 e.0")], [("slow", "", "d.0")], [("join", "c.0 d.0", "")], [("watch", "e.0", "")]],
        {"c": (0, 2, 4), "f": (0, 0, 2, 0, 1), "d": (1, 2, 1), "e": (0, 3, 99, 0, 1)},
    )
    ahead = threading.Event()

    def run(label, values):
        if label == "fast":
            if values[0] == 3:
                ahead.set()
            return ["to join", values[0] + 1, f"state {values[0]}"]
        if label == "slow":
            ahead.wait(5)
            raise RoundsEnded(0)
        return []

    with Executor(net, tasks_for(net, run)) as executor:
        within(5, lambda: executor.run(rounds=50, first={(1, "0"): [0], (3, "0"): ["first"]}))
        assert executor.rounds == 0
        assert {m: len(values) for m, values in executor.left.items()} in (
            {(1, "0"): 1, (3, "0"): 1}, {(1, "0"): 1},  # `watch` is ahead or is not
        )  # fmt: skip
        assert executor.left[1, "0"] == [4]


def test_who_says_more_rounds_than_there_were():
    net = looped(1)

    def run(label, values):
        if label == "b" and values[0] > 10:
            raise RoundsEnded(1000)
        return of_loop()(label, values)

    with Executor(net, tasks_for(net, run)) as executor:
        within(5, lambda: executor.run(rounds=2000, first={(0, "0"): [1]}))
        assert executor.rounds == 2


def test_a_failure_in_round_7_says_so():
    net, seen = looped(1), []

    def run(label, values):
        if label == "b":
            seen.append(values)
            if len(seen) == 8:
                raise ValueError("broken")
        return of_loop()(label, values)

    first = {(0, "0"): [1]}
    with Executor(net, tasks_for(net, run)) as executor:
        with pytest.raises(PipelineTaskError) as caught:
            within(5, lambda: executor.run(rounds=10, first=first))
        assert str(caught.value) == (
            "learner failed in b of round 7 (model.py:1): ValueError: broken\n"
            "All actors of the flow have stopped; it can be run again."
        )
        error = caught.value
        assert (error.actor, error.label, error.source, error.round) == (1, "b", "model.py:1", 7)
        assert executor.left == {}
        within(5, lambda: executor.run(rounds=10, first=first))


def test_a_launched_step_that_fails_later_says_its_round():
    """The device reports the step of round 8 when that of round 10 is to be launched."""
    net, counts = two_rates(delay=0), dict.fromkeys(("g0", "g2", "g4", "t0", "t3"), 0)

    def wait(tokens):
        if tokens == ["g2", 2]:
            raise FloatingPointError("nan")

    def run(label, values):
        counts[label] += 1
        return [*(["x"] * len(steps(net)[label].gives)), label, counts[label]]

    with Executor(net, tasks_for(net, run), threads=Threads(1), limit=LaunchLimit(1, wait)) as executor:
        with pytest.raises(PipelineTaskError) as caught:
            within(5, lambda: executor.run(rounds=600))
        assert (caught.value.label, caught.value.round) == ("g2", 8)


def test_the_first_cause_of_several_rounds():
    """`a` of round 3 reads what `b` of round 2 gave, and is reported first."""
    net, failed = looped(1), threading.Event()

    def run(label, values):
        x = values[0]
        if label == "b" and x == 2:
            return [-1]  # a broken value, which the device has not noticed yet
        if label == "a" and x == -1:
            failed.set()
            raise ValueError("reads a broken value")
        return [x + 1 if label == "b" else x]

    def wait(values):
        if any(v == -1 for v in values):
            failed.wait(5)
            raise FloatingPointError("nan")

    tasks = {
        label: Task(lambda values, run=task.run: [*(given := run(values)), *given]) for label, task in
        tasks_for(net, run).items()
    }  # fmt: skip
    with Executor(net, tasks, limit=LaunchLimit(1, wait)) as executor:
        with pytest.raises(PipelineTaskError) as caught:
            within(5, lambda: executor.run(rounds=10, first={(0, "0"): [0]}))
        assert (caught.value.label, caught.value.round) == ("b", 2)
        assert caught.value.__notes__ == ["After it actor failed in a of round 3: ValueError: reads a broken value"]


@pytest.mark.parametrize(
    ("one", "other", "before"),
    [
        (("b", 2), ("a", 3), True),
        (("b", 3), ("a", 3), False),
        (("a", 3), ("b", 3), True),
        (("a", 3), ("a", 3), False),
        (("a", 0), ("b", 900), True),
        (("b", 900), ("a", 0), False),
    ],
)
def test_which_failure_comes_before_which(one, other, before):
    errors = [PipelineTaskError("", "ab".index(label), label, "", at) for label, at in (one, other)]
    assert _is_before(looped(1), *errors) == before


def test_which_failure_comes_before_which_with_rates():
    net = two_rates(delay=2)
    given = {at: PipelineTaskError("", 0, f"g{at % 6}", "", at) for at in (2, 4, 8, 10)}
    taken = PipelineTaskError("", 1, "t0", "", 6)  # takes what is given in round 4
    assert [at for at, error in given.items() if _is_before(net, error, taken)] == [2, 4]
    assert not any(_is_before(net, taken, error) for error in given.values())


class Number:
    """A number that can be watched."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("threads", [1, 2])
def test_values_of_rounds_are_let_go(threads):
    """No more values are alive than registers, the first ones included, whose caller has let them go too."""
    net, refs, most = looped(3), [], []

    def new(value):
        number = Number(value)
        refs.append(weakref.ref(number))
        return number

    def run(label, values):
        given = [new(values.pop().value + 1)]
        most.append(sum(r() is not None for r in refs))
        return given

    first = {(0, "0"): [new(i) for i in range(3)]}
    with Executor(net, tasks_for(net, run), threads=Threads(threads)) as executor:
        executor.left, first = first, None
        within(5, lambda: executor.run(rounds=50, first=executor.left))
        assert max(most) <= 5  # 4 registers in one channel, 1 in the other
        assert [r() is not None for r in refs].count(True) == 3 == len(executor.left[0, "0"])
        within(5, lambda: executor.run(rounds=50, first=executor.left))
        assert max(most) <= 5
        executor.left.clear()
        assert not any(r() for r in refs)


def test_what_nobody_takes_when_a_source_ends_is_let_go():
    net = build([[("x", "", "c.0")], [("y", "", "d.0")], [("z", "c.0 d.0", "")]], {"c": (0, 2, 5), "d": (1, 2)})
    refs, enough = [], threading.Event()

    def run(label, values):
        if label == "y":
            enough.wait(5)
            raise RoundsEnded(0)
        value = Value()
        refs.append(weakref.ref(value))
        if len(refs) == 5:
            enough.set()
        return [value]

    with Executor(net, tasks_for(net, run)) as executor:
        within(5, lambda: executor.run(rounds=9))
        assert len(refs) == 5 and not any(r() for r in refs)


def test_what_comes_when_its_taker_has_ended_is_let_go():
    net = build([[("x", "", "c.0")], [("y", "", "d.0")], [("z", "c.0 d.0", "")]], {"c": (0, 2, 5), "d": (1, 2)})
    refs, begun = [], threading.Event()

    def run(label, values):
        if label == "y":
            begun.wait(5)
            raise RoundsEnded(0)
        begun.set()
        while executor._workers[2].done < executor.runs:
            time.sleep(0.001)
        value = Value()
        refs.append(weakref.ref(value))
        return [value]

    with Executor(net, tasks_for(net, run)) as executor:
        within(5, lambda: executor.run(rounds=9))
        assert len(refs) == 1 and refs[0]() is None


def test_registers_of_a_delayed_channel_are_never_exceeded():
    net, used, most, lock = looped(2, registers=3), [2], [], threading.Lock()

    def run(label, values):
        with lock:
            used[0] += 1 if label == "b" else 0
            most.append(used[0])
        time.sleep(0.0005)
        with lock:
            used[0] -= 1 if label == "a" else 0
        return [0]

    with Executor(net, tasks_for(net, run)) as executor:
        within(5, lambda: executor.run(rounds=40, first={(0, "0"): [0, 0]}))
    assert max(most) <= 3 and used == [2]


@pytest.fixture
def log(monkeypatch):
    """The lines that executors log at once, and an event for the first of them."""
    texts, said = [], threading.Event()
    monkeypatch.setattr(executor_module, "_SOON", 0.05)
    warning = lambda text, *args: (texts.append(text % args), said.set())  # noqa: E731
    monkeypatch.setattr(executor_module, "_log", SimpleNamespace(warning=warning))
    return texts, said


def test_a_run_that_fails_says_what_it_waits_for(log):
    """A task that hangs keeps the error from coming out: it is logged at once."""
    texts, said = log
    net = build([[("x", "", "")], [("y", "", "")]], {})
    begun = threading.Event()

    def run(label, values):
        if label == "x":
            begun.wait(10)
            raise ValueError("bad")
        begun.set()
        assert said.wait(10)
        return []

    with Executor(net, tasks_for(net, run)) as executor, pytest.raises(PipelineTaskError, match="ValueError: bad"):
        within(10, executor.run)
    assert texts == [
        "actor 0 failed in x (model.py:1): ValueError: bad\n"
        "The run ends when what has begun has returned: rank 1 at y (model.py:1). Ctrl-C twice ends it at once."
    ]


def test_a_run_that_is_interrupted_says_what_it_waits_for(log):
    texts, said = log
    net = replace(build([[("x", "", "")], [("y", "", "")]], {}), names=("left", "right"))
    begun = threading.Event()

    def run(label, values):
        if label == "x":
            begun.wait(10)
            os.kill(os.getpid(), signal.SIGINT)
            return []
        begun.set()
        assert said.wait(10)
        return []

    with Executor(net, tasks_for(net, run)) as executor, pytest.raises(KeyboardInterrupt):
        executor.run()
    assert texts == [
        "the run was interrupted: KeyboardInterrupt().\n"
        "The run ends when what has begun has returned: y (model.py:1). Ctrl-C again ends it at once."
    ]


def test_a_run_that_ends_soon_says_nothing(log):
    net = chain(3, 4, registers=1)

    def run(label, values):
        if label == "1F1":
            raise ValueError("bad")

    with Executor(net, tasks_for(net, run)) as executor, pytest.raises(PipelineTaskError):
        within(10, executor.run)
    assert log[0] == []
