import threading
import time

from shardc.runtime.executor import Executor, ProcessShare, Task, Threads
from shardc.runtime.stalls import Stall
from tests.runtime.networks import build
from tests.runtime.watchdog import within


class Silent:
    """The port of an actor that never answers."""

    def message(self, run, message, value):
        pass

    def credit(self, run, channel):
        pass

    def stop(self, run, why):
        pass


def looks(watch, seconds=10):
    """The first look that finds something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := watch.look():
            return found
        time.sleep(0.01)
    raise AssertionError("no stall was found")


def test_who_waits_for_whom_and_since_when():
    net = build([[("0F0", "", "f.0"), ("0B0", "b.0", "")], [("1F0", "f.0", "b.0")]], {"f": (0, 1), "b": (1, 0)})
    share = ProcessShare([0], {1: Silent()})
    with Executor(net, {"0F0": Task(lambda _: [1]), "0B0": Task(lambda _: [])}, share=share) as executor:
        watch = executor.watch()
        assert watch.look() == []  # there is no run
        errors = []

        def run():
            try:
                executor.run()
            except Exception as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        (first,) = looks(watch)
        assert (first.actor, first.label, first.awaited) == (0, "0B0", (1,))
        time.sleep(0.05)
        (later,) = watch.look()
        assert later.seconds >= first.seconds + 0.05
        executor.mailboxes[0].message(1, (1, "0"), None)
        within(10, thread.join)
        assert errors == []
        assert watch.look() == watch.look() == []


def test_a_full_channel_and_several_actors_of_one_thread():
    actors = [
        [("give", "", "c.0"), ("more", "", "c.1")],
        [("take", "d.0", "")],
        [("x", "c.0", ""), ("y", "c.1", "d.0")],
    ]
    net = build(actors, {"c": (0, 2, 1), "d": (2, 1)})
    tasks = {"give": Task(lambda _: [1]), "more": Task(lambda _: [2]), "take": Task(lambda _: [])}
    share = ProcessShare([0, 1], {2: Silent()})
    with Executor(net, tasks, threads=Threads(1), share=share) as executor:
        watch = executor.watch()
        thread = threading.Thread(target=lambda: executor.run(), daemon=True)
        thread.start()
        found = [Stall(s.actor, s.label, s.awaited, 0) for s in looks(watch)]
        assert found == [Stall(0, "more", (2,), 0), Stall(1, "take", (2,), 0)]
        executor.mailboxes[0].credit(1, 0)
        executor.mailboxes[1].message(1, (1, "0"), None)
        within(10, thread.join)


def test_a_step_that_runs_long_is_no_stall():
    goes_on = threading.Event()
    net = build([[("long", "", "")]], {})
    with Executor(net, {"long": Task(lambda _: [goes_on.wait(10)][1:])}) as executor:
        watch = executor.watch()
        thread = threading.Thread(target=executor.run)
        thread.start()
        assert [watch.look() for _ in range(3)] == [[], [], []]
        goes_on.set()
        within(10, thread.join)
