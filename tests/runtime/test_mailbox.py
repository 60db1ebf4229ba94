"""Several processes: each runs its own actors, and only bytes pass between them."""

import pickle
import threading
import weakref
from queue import SimpleQueue

import numpy as np

from shardc.errors import PipelineError, PipelineTaskError
from shardc.runtime.actor import Actor
from shardc.runtime.executor import Executor, ProcessShare, Task
from shardc.runtime.mailbox import ALL_RUNS, Mailbox
from tests.runtime.networks import build
from tests.runtime.watchdog import within


class Wire:
    """A port that writes posts as bytes; a thread at the other end reads them."""

    def __init__(self):
        self._bytes = SimpleQueue()

    def message(self, run, message, value):
        self._bytes.put(pickle.dumps(("message", run, message, value)))

    def credit(self, run, channel):
        self._bytes.put(pickle.dumps(("credit", run, channel)))

    def stop(self, run, why):
        self._bytes.put(pickle.dumps(("stop", run, why)))

    def serve(self, mailbox):
        def read():
            while (data := self._bytes.get()) is not None:
                what, *rest = pickle.loads(data)
                getattr(mailbox, what)(*rest)

        self._thread = threading.Thread(target=read, daemon=True)
        self._thread.start()

    def close(self):
        self._bytes.put(None)
        self._thread.join()


NET = build(
    [
        [(f"x{j}", "", f"c.{j}") for j in range(6)] + [("end", "d.0", "")],
        [(f"y{j}", f"c.{j}", "") for j in range(6)] + [("back", "", "d.0")],
    ],
    {"c": (0, 1, 1), "d": (1, 0)},
)


def two_executors(run):
    """One executor for each actor; `run(label, values)` does all steps."""
    wires = {0: Wire(), 1: Wire()}
    tasks = lambda label: Task(lambda values: run(label, values))  # noqa: E731
    here = [Executor(NET, tasks, share=ProcessShare([a], {1 - a: wires[1 - a]})) for a in (0, 1)]
    for a, executor in enumerate(here):
        wires[a].serve(executor.mailboxes[a])
    return here, wires


def both(executors, runs=1):
    """The error of each executor, or None."""
    raised = [None, None]

    def go(a):
        try:
            for _ in range(runs):
                executors[a].run()
        except PipelineError as error:
            raised[a] = error
        except PipelineTaskError as error:
            raised[a] = error

    threads = [threading.Thread(target=go, args=(a,), daemon=True) for a in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(5)
        assert not t.is_alive()
    return raised


def test_two_processes_run_their_actors():
    total = []

    def run(label, values):
        if label[0] == "x":
            return [np.full(3, int(label[1]))]
        if label[0] == "y":
            total.append(int(values[0].sum()))
        return ["done"] if label == "back" else []

    executors, wires = two_executors(run)
    assert both(executors, runs=20) == [None, None]  # one of them is often a run ahead
    assert total == [0, 3, 6, 9, 12, 15] * 20
    for e, w in zip(executors, wires.values(), strict=True):
        e.close()
        w.close()


def test_a_failure_stops_the_others_and_they_run_again():
    failing = [True]

    def run(label, values):
        if label == "y3" and failing[0]:
            raise ValueError("broken")
        return ["v"] if label[0] in "xb" else []

    executors, wires = two_executors(run)
    raised = both(executors)
    assert str(raised[0]).startswith("actor 1 failed in y3: ValueError: broken")
    assert "\n  waited: rank 0 at " in str(raised[0])
    assert isinstance(raised[1], PipelineTaskError) and raised[1].label == "y3"
    failing[0] = False
    assert both(executors, runs=3) == [None, None]
    for e, w in zip(executors, wires.values(), strict=True):
        e.close()
        w.close()


def test_what_comes_late_is_dropped():
    mailbox = Mailbox()
    mailbox.message(1, (0, "0"), "of a run that failed")
    actor = Actor(NET, 1, None)
    mailbox.open(2, actor)
    mailbox.message(1, (0, "0"), "of that run too")
    mailbox.stop(1, PipelineError("stop"))
    for _ in range(2):
        within(5, mailbox.feed, 2, actor)
    assert not actor.ready() and mailbox.why_stopped(2) is None
    mailbox.message(2, (0, "0"), "of this run")
    within(5, mailbox.feed, 2, actor)
    assert actor.ready() and actor.fire() == (["of this run"], [])


def test_what_comes_early_waits():
    mailbox = Mailbox()
    mailbox.credit(2, 0)
    mailbox.message(1, (0, "0"), "of this run")
    net = build([[("x", "", "c.0 c.1"), ("y", "c.0 c.1", "")]], {"c": (0, 0, 1)})
    actor = Actor(net, 0, None)
    assert not actor.ready()
    mailbox.open(1, actor)
    assert not actor.ready()
    mailbox.clear(1)
    actor = Actor(net, 0, None)
    assert not actor.ready()
    mailbox.open(2, actor)
    assert actor.ready()


def test_clearing_holds_no_value_of_what_is_over():
    class Value:
        pass

    mailbox = Mailbox()
    values = [Value(), Value()]
    refs = [weakref.ref(v) for v in values]
    mailbox.message(1, (0, "0"), values.pop(0))
    mailbox.message(2, (0, "0"), values.pop(0))
    mailbox.clear(1)
    assert refs[0]() is None and refs[1]() is not None


def test_a_stop_holds_for_its_run_alone():
    mailbox = Mailbox()
    mailbox.stop(2, PipelineError("first"))
    mailbox.stop(2, PipelineError("second"))
    assert [str(mailbox.why_stopped(run)) for run in (1, 2, 3)] == ["None", "first", "None"]
    mailbox.open(2, Actor(NET, 1, None))
    assert str(mailbox.why_stopped(2)) == "first"
    mailbox.open(3, Actor(NET, 1, None))
    assert mailbox.why_stopped(2) is None  # nobody asks again


def test_a_stop_of_all_runs_comes_first():
    mailbox = Mailbox()
    mailbox.stop(1, PipelineError("one"))
    mailbox.stop(ALL_RUNS, PipelineError("all"))
    for run in (1, 2, 9):
        mailbox.open(run, Actor(NET, 1, None))
        assert str(mailbox.why_stopped(run)) == "all"


def test_stops_of_several_threads_at_once():
    for _ in range(200):
        mailbox = Mailbox()
        begin = threading.Barrier(4)

        def stop(run, mailbox=mailbox, begin=begin):
            begin.wait()
            mailbox.stop(run, PipelineError(str(run)))

        threads = [threading.Thread(target=stop, args=(run,)) for run in (3, 9, 5, 7)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(5)
        assert [str(mailbox.why_stopped(run)) for run in (3, 4, 5, 7, 9)] == ["3", "None", "5", "7", "9"]


def test_the_end_of_an_actor_wakes_the_reader_and_stops_nothing():
    mailbox, actor = Mailbox(), Actor(NET, 1, None)
    mailbox.message(1, (0, "0"), "before")
    mailbox.leave(0, PipelineError("it has left"))
    mailbox.open(1, actor)
    assert actor.ready() and mailbox.why_stopped(1) is None
    mailbox.leave(0, PipelineError("it has left"))
    within(5, mailbox.feed, 1, actor)
    assert str(mailbox.gone[0]) == "it has left"
