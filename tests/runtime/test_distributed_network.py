"""Networks over several processes, here threads with real sockets: messages, credits, values, stops and losses."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from shardc.errors import ClusterError, PeerLostError, PipelineError, PipelineTaskError, ShardcError
from shardc.runtime.actor import Channel, Network, Step
from shardc.runtime.executor import RoundsEnded, Task
from shardc.runtime.transport.connection import Frame, FrameKind
from tests.runtime.codec import Codec
from tests.runtime.peers import Side, link_pair, links_of, sides_of, together, until
from tests.runtime.roles import chain
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")


def packed(text):
    return text.encode(), ()


def one_way(count, registers=1):
    give = tuple(Step(f"give{j}", (), ((0, j),)) for j in range(count))
    take = tuple(Step(f"take{j}", ((0, j),)) for j in range(count))
    return Network((give, take), (Channel("c", 0, 1, registers),))


def tasks_of(net, run):
    """Tasks that call `run(label, values)`; what it returns is given in each message, None: the sum plus 1."""
    counts = {s.label: len(s.gives) for steps in net.actors for s in steps}

    def task(label):
        def go(values):
            found = run(label, values)
            return [sum(values, np.ones(3)) if found is None else found] * counts[label]

        return Task(go, source="model.py:1")

    return lambda process: task


@pytest.mark.parametrize("ready", [True, False])
def test_values_arrive(ready):
    net, seen = one_way(5), []

    def run(label, values):
        if label.startswith("take"):
            seen.append((label, values[0].tolist()))
        return np.arange(3) * int(label[-1])

    with sides_of(net, [[0], [1]], tasks_of(net, run), codec=Codec(ready)) as sides:
        together(*(lambda s=s: s.run(10) for s in sides))
        assert [s.error for s in sides] == [None, None]
    assert seen == [(f"take{j}", [0, j, 2 * j]) for j in range(5)] * 10
    assert sides[0].spread.mine == [0] and list(sides[0].spread.ports) == [1]


def test_registers_bound_what_is_under_way():
    net, given, taken, most = one_way(30, registers=2), [], [], []

    def run(label, values):
        if label.startswith("take"):
            most.append(len(given) - len(taken))
            time.sleep(0.002)
            taken.append(label)
        else:
            given.append(label)
        return np.ones(1)

    with sides_of(net, [[0], [1]], tasks_of(net, run)) as sides:
        together(*(s.run for s in sides))
    assert max(most) == 2


def test_tokens_carry_no_value():
    net, seen = one_way(3), []
    tasks = lambda process: lambda label: Task(lambda values: seen.append(values) or [None])  # noqa: E731
    with sides_of(net, [[0], [1]], tasks) as sides:
        together(*(s.run for s in sides))
    assert sorted(seen) == [[]] * 3 + [[None]] * 3


def test_values_are_let_go():
    net, refs = one_way(4), []

    class Weak(np.ndarray):
        pass

    def run(label, values):
        if label.startswith("give"):
            x = np.ones(1000).view(Weak)
            refs.append(weakref.ref(x))
            return x
        refs.append(weakref.ref(values[0].base))
        return np.ones(1)

    with sides_of(net, [[0], [1]], tasks_of(net, run), codec=Codec(ready=False)) as sides:
        together(*(s.run for s in sides))
        gc.collect()
        assert [s.error for s in sides] == [None, None]
        until(lambda: all(r() is None for r in refs))
        assert len(refs) == 8


# ---- actors of several processes


def rows_of(part):
    return np.full((2, 3), float(part))


@pytest.mark.parametrize(
    "places",
    [
        [[0, 1], [2]], [[0], [1, 2]], [[0, 1], [2, 3]], [[0, 1, 2], [3, 4]],
        [[0, 1], [0]], [[0], [0, 1]], [[0, 1], [0, 1]], [[0, 1], [1, 2]],
    ],
    ids=[
        "two give", "two take", "two to two", "three to two",
        "two to one of them", "one of two to both", "two to themselves", "two to two with one in both",
    ],
)  # fmt: skip
@pytest.mark.parametrize("ready", [True, False])
def test_an_island_gives_and_takes_together(places, ready):
    """Each giver sends its part; each taker gets all, in the order of processes; a register waits for all takers."""
    net, seen, running = one_way(12, registers=1), {}, {}
    lock = threading.Lock()

    def tasks(process):
        def task(label):
            j = int(label[4:])

            def go(values):
                if label.startswith("give"):
                    with lock:  # a register is free only when all have taken what was in it
                        assert j == 0 or all(running.get((p, j - 1)) for p in places[1])
                    time.sleep(0.001 * (process % 2))
                    return [rows_of(10 * j + process)]
                with lock:
                    running[process, j] = True
                    seen[process, j] = values[0]
                return []

            return Task(go)

        return task

    with sides_of(net, places, tasks, crossing=[0], codec=Codec(ready)) as sides:
        for _ in range(3):
            running.clear()
            together(*(s.run for s in sides))
            assert [s.error for s in sides] == [None] * len(sides)
            assert not any(s.spread._parts for s in sides)
            for side in sides:
                side.spread.forget(side.executor.runs)
                assert not side.spread._credits
    assert seen.keys() == {(p, j) for p in places[1] for j in range(12)}
    for (_, j), value in seen.items():
        np.testing.assert_array_equal(value, np.concatenate([rows_of(10 * j + p) for p in places[0]]))


def test_a_failure_in_an_island_reaches_the_processes_of_the_same_actor():
    net = one_way(4)
    failing = [True]

    def tasks(process):
        def task(label):
            def go(values):
                if failing[0] and process == 1 and label == "give2":
                    raise ValueError("broken")
                return [np.ones(2)] if label.startswith("give") else []

            return Task(go)

        return task

    with sides_of(net, [[0, 1], [2]], tasks) as sides:
        together(*(s.run for s in sides))
        assert isinstance(sides[1].error, PipelineTaskError)
        for p in (0, 2):
            assert str(sides[p].error).startswith("process 1: actor 0 failed in give2: ValueError: broken")
        failing[0] = False
        together(*(lambda s=s: s.run(3) for s in sides))
        assert [s.error for s in sides] == [None] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_a_step_is_taken_in_all_processes_of_its_actor_or_in_none(failing):
    """What one of them launches, the other one launches too, whenever the run stops."""
    net, taken = one_way(20, registers=3), []
    sides = []

    def tasks(process):
        def task(label):
            def go(values):
                if label.startswith("give"):
                    if failing == process and len(taken) > 9:
                        raise ValueError("broken")
                    return [np.ones(2)]
                sides[process].spread.together(sides[process].executor.runs, 1)
                taken.append((process, label))
                time.sleep(0.001 * process)
                return []

            return Task(go)

        return task

    with sides_of(net, [[failing], [0, 1]], tasks) as found:
        sides += found
        for _ in range(3):
            taken.clear()
            together(*(s.run for s in sides))
            assert all(s.error is not None for s in sides)
            assert {label for p, label in taken if p == 0} == {label for p, label in taken if p == 1}
            assert len(taken) > 9


def test_one_process_alone():
    net, seen = one_way(3), []
    with sides_of(net, [[0], [0]], tasks_of(net, lambda label, values: seen.append(label))) as sides:
        within(5, sides[0].run, 2)
        assert sides[0].error is None and sides[0].spread.mine == [0, 1]
    assert len(seen) == 12


# ---- opening


def test_who_opens_first_waits():
    net = one_way(2)
    with links_of(2) as links:
        sides = [Side(net, 3, [[0], [1]], links[p], tasks_of(net, lambda *_: None)(p)) for p in (0, 1)]
        first = threading.Thread(target=sides[0].open)
        first.start()
        time.sleep(0.2)
        assert first.is_alive()
        within(5, sides[1].open)
        first.join(5)
        assert not first.is_alive()
        together(*(s.run for s in sides))
        assert [s.error for s in sides] == [None, None]
        for s in sides:
            s.close()


def test_one_that_does_not_open():
    net = chain(3, 2)
    with links_of(3) as links:
        side = Side(net, 3, [[0], [1], [2]], links[0], tasks_of(net, lambda *_: None)(0))
        with pytest.raises(
            ClusterError, match=r"processes 1, 2 did not open the pipeline within 0\.2 s\. Each process"
        ):
            within(5, side.open, 0.2)
        side.close()


def test_one_that_is_lost_before_it_opens():
    net = one_way(2)
    with links_of(2) as links:
        side = Side(net, 3, [[0], [1]], links[0], tasks_of(net, lambda *_: None)(0))
        opening = threading.Timer(0.1, links[1][0].close)
        opening.start()
        with pytest.raises(PeerLostError, match="process 1 is lost: it has left the run"):
            within(5, side.open, 60.0)
        opening.join()
        side.close()


def test_frames_of_a_closed_network_do_not_reach_the_next():
    net, seen = one_way(3), []
    run = lambda label, values: seen.append((label, [v.tolist() for v in values]))  # noqa: E731
    with links_of(2) as links:
        for number in (1, 2, 3):
            sides = [Side(net, number, [[0], [1]], links[p], tasks_of(net, run)(p)) for p in (0, 1)]
            together(*(s.open for s in sides))
            if number > 1:  # of a peer that is late
                links[0][1].send(Frame(FrameKind.MESSAGE, number - 1, 1, 0, 0, *Codec().pack(0, 1, np.zeros(3))))
                links[1][0].send(Frame(FrameKind.CREDIT, number - 1, 1, 0))
            together(*(s.run for s in sides))
            assert [s.error for s in sides] == [None, None]
            for s in sides:
                s.close()
    assert [s for s in seen if s[0][:4] == "take"] == [(f"take{j}", [[1.0, 1.0, 1.0]]) for j in range(3)] * 3


# ---- errors


def test_closing_while_a_frame_is_taken_is_no_failure_of_the_others():
    class Closing(Codec):
        def unpack(self, channel, parts):
            sides[1].spread.close()
            return super().unpack(channel, parts)

    net = one_way(1)
    with sides_of(net, [[0], [1]], tasks_of(net, lambda *_: None), codec=Closing()) as sides:
        together(sides[0].run)  # it only gives
        until(lambda: sides[1].spread._closed and not sides[1].spread._mailboxes)
        sides[1].spread.links[0].send_tagged("after it")
        within(5, sides[0].spread.links[1].receive_tagged, "after it", 5.0)
        assert not sides[0].spread._stopped and not sides[1].spread._reported


def test_an_error_reaches_all_with_its_text_and_the_next_run_works():
    net, failing = chain(3, 3), [True]

    def run(label, values):
        if failing[0] and label == "1F1":
            raise ValueError("broken")

    with sides_of(net, [[0], [1], [2]], tasks_of(net, run)) as sides:
        for _ in range(3):
            failing[0] = True
            together(*(s.run for s in sides))
            assert isinstance(sides[1].error, PipelineTaskError) and sides[1].error.label == "1F1"
            for p in (0, 2):
                assert type(sides[p].error) is PipelineError
                head, *waits = str(sides[p].error).split("\n  waited: ")
                assert head.startswith("process 1: actor 1 failed in 1F1 (model.py:1): ValueError: broken")
                assert len(waits) == 1 and waits[0].startswith(f"rank {p} at {p}")
            failing[0] = False
            together(*(lambda s=s: s.run(2) for s in sides))
            assert [s.error for s in sides] == [None] * 3


def test_a_process_that_is_behind_finishes_the_run_before_the_one_that_failed():
    """Its updates of that run are made in all processes or in none."""
    steps = (Step("give", (), ((0, 0),)),), (Step("take", ((0, 0),)), Step("update"))
    net, failed, calls = Network(steps, (Channel("c", 0, 1, None),)), threading.Event(), []

    def tasks(process):
        def give(_):
            calls.append("give")
            if calls.count("give") == 2:
                raise ValueError("a bad batch")
            return [np.ones(2)]

        def take(_):
            assert failed.wait(10)
            until(lambda: sides[1].spread._reported)
            return []

        def update(_):
            calls.append("update")
            return []

        return {"give": Task(give), "take": Task(take), "update": Task(update)}

    with sides_of(net, [[0], [1]], tasks) as sides:

        def ahead():
            sides[0].run()
            assert sides[0].error is None
            sides[0].run()
            failed.set()

        together(ahead, sides[1].run)
        assert sides[1].error is None and calls.count("update") == 1
        assert "a bad batch" in str(sides[0].error)
        together(sides[1].run)
        assert "process 0: actor 0 failed in give: ValueError: a bad batch" in str(sides[1].error)
        together(*(s.run for s in sides))
        assert [s.error for s in sides] == [None, None] and calls.count("update") == 2


@pytest.mark.parametrize("error", [ValueError("no room"), KeyboardInterrupt()])
def test_a_run_that_a_process_cannot_begin(error):
    """The others are told, also before they begin, and all count it: the next run works."""
    net = one_way(3)
    with sides_of(net, [[0], [1]], tasks_of(net, lambda *_: None)) as sides:
        for a, b in (sides, sides[::-1]):
            begun = threading.Thread(target=b.run, daemon=True)
            a.executor.abandon(a.executor.runs + 1, error)
            begun.start()
            begun.join(10)
            assert not begun.is_alive() and repr(error).split("(")[0] in str(b.error)
            assert a.executor.runs == b.executor.runs
            together(*(s.run for s in sides))
            assert [s.error for s in sides] == [None, None]


def test_an_error_reaches_a_process_without_a_link():
    net, failing = chain(4, 2), [True]

    def run(label, values):
        if failing[0] and label == "3F1":
            raise ValueError("broken")

    without = [(0, 2), (0, 3), (1, 3)]
    with sides_of(net, [[p] for p in range(4)], tasks_of(net, run), without=without) as sides:
        assert [sorted(s.spread.ports) for s in sides] == [[1], [0, 2], [1, 3], [2]]
        together(*(s.run for s in sides))
        assert all(str(s.error).startswith("process 3: actor 3 failed in 3F1") for s in sides[:3])
        failing[0] = False
        together(*(lambda s=s: s.run(2) for s in sides))
        assert [s.error for s in sides] == [None] * 4


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("what", ["pack", "unpack"])
def test_an_error_of_the_codec_is_one_of_the_run(what, ready):
    net, failing = one_way(3), [True]

    class Broken(Codec):
        def pack(self, *args):
            if failing[0] and what == "pack":
                raise ValueError("of the device")
            return super().pack(*args)

        def unpack(self, *args):
            if failing[0] and what == "unpack":
                raise ValueError("of the device")
            return super().unpack(*args)

    with sides_of(net, [[0], [1]], tasks_of(net, lambda *_: None), codec=Broken(ready)) as sides:
        together(*(s.run for s in sides))
        # process 0 may have launched its last step before: then it learns it in the next run, or never
        assert "ValueError: of the device" in str(sides[1].error)
        assert sides[0].error is None or "ValueError: of the device" in str(sides[0].error)
        failing[0] = False
        together(*(lambda s=s: s.run(2) for s in sides))
        assert [s.error for s in sides] == [None, None]


def test_closing_an_executor_stops_the_others():
    net, begun = one_way(3), threading.Event()

    def run(label, values):
        if label == "give1":
            begun.set()
            time.sleep(0.3)

    with sides_of(net, [[0], [1]], tasks_of(net, run)) as sides:

        def close():
            begun.wait(5)
            sides[0].executor.close()

        together(sides[0].run, sides[1].run, close)
        assert "the executor was closed while it ran" in str(sides[0].error)
        assert str(sides[1].error).startswith("process 0: Executor.run: the executor was closed while it ran.")


def test_patience():
    """A process that does not make the same call is an error in the others, and names who waits for what."""
    net = one_way(3)
    with sides_of(net, [[0], [1]], tasks_of(net, lambda *_: None), patience=0.5) as sides:
        begin = time.monotonic()
        within(10, sides[1].run)
        assert 0.5 <= time.monotonic() - begin < 3
        assert str(sides[1].error) == (
            "nothing came from the other processes for 0.5 s, though they are alive.\n"
            '  waited: rank 1 at take0 for message 0 of "c"'
        )
        within(5, sides[0].run)  # its own run was stopped before it began
        assert str(sides[0].error).startswith("process 1: nothing came from the other processes for 0.5 s")
        together(*(s.run for s in sides))
        assert [s.error for s in sides] == [None, None]


# ---- losses


def test_who_waited_for_what_is_in_the_error():
    net = chain(3, 2)

    def run(label, values):
        if label == "2F0":
            time.sleep(1.0)

    with sides_of(net, [[0], [1], [2]], tasks_of(net, run)) as sides:

        def lose():
            time.sleep(0.3)
            links, sides[2].spread.links = sides[2].spread.links, {}  # who is dead tells nobody
            for link in links.values():
                link._sock.shutdown(2)

        begin = time.monotonic()
        together(*(s.run for s in sides), lose)
        for p in (0, 1):
            error = sides[p].error
            assert isinstance(error, PeerLostError) and error.process == 2
            assert str(error).startswith("process 2 is lost: ")
        assert str(sides[0].error).endswith('\n  waited: rank 0 at 0B0 for message 0 of "back 1->0"')
        assert str(sides[1].error).endswith('\n  waited: rank 1 at 1B0 for message 0 of "back 2->1"')
        assert time.monotonic() - begin < 3
        within(5, sides[0].run)
        assert isinstance(sides[0].error, PeerLostError)  # and so is every later run


def test_a_loss_reaches_a_process_without_a_link():
    net = chain(3, 2)

    def run(label, values):
        if label == "2F0":
            time.sleep(0.6)

    with sides_of(net, [[0], [1], [2]], tasks_of(net, run), without=[(0, 2)]) as sides:
        threading.Timer(0.2, lambda: sides[2].spread.links[1]._sock.shutdown(2)).start()
        together(*(s.run for s in sides))
        assert [s.error.process for s in sides[:2]] == [2, 2]
        assert "process 2 is lost" in str(sides[0].error)


def test_one_that_leaves_after_its_part_is_no_loss_for_the_run():
    """The first stage of a network that goes one way ends its program before the last one has taken what it sent."""
    net, seen = one_way(20, registers=None), []

    def run(label, values):
        if label.startswith("take"):
            time.sleep(0.005)
            seen.append(label)

    with sides_of(net, [[0], [1]], tasks_of(net, run)) as sides:
        value, other = sides[1].spread.expect(1, 5, peer=0), sides[1].spread.expect(1, 6, peer=0)

        def first():
            sides[0].run()
            sides[0].spread.send_value(*value_args(1, 5, 1, b"5"))
            sides[0].close()
            sides[0].spread.links[1].close()

        together(first, sides[1].run)
        assert sides[0].error is None and sides[1].error is None
        assert seen == [f"take{j}" for j in range(20)]
        assert value.get(5.0)[0] == b"5"
        with pytest.raises(PeerLostError, match="process 0 is lost: it has left the run"):
            within(5, other.get)
        within(5, sides[1].run)  # it cannot come any more
        assert isinstance(sides[1].error, PeerLostError) and sides[1].error.process == 0
        assert str(sides[1].error).endswith('\n  waited: rank 1 at take0 for message 0 of "c"')


def test_one_that_leaves_is_a_loss_for_who_waits_for_it_and_for_who_waits_for_that_one():
    net = chain(3, 4)

    def run(label, values):
        if label == "1F2":
            time.sleep(0.3)

    with sides_of(net, [[0], [1], [2]], tasks_of(net, run)) as sides:

        def leave():
            time.sleep(0.1)
            sides[2].executor.close()
            for link in list(sides[2].spread.links.values()):
                link.close()

        together(sides[0].run, sides[1].run, leave)
        assert [s.error.process for s in sides[:2]] == [2, 2]


# ---- values besides the network


def value_args(run, number, peer, about):
    """The arguments of `send_value`."""
    return run, number, peer, lambda: (about, ())


@pytest.fixture
def two():
    net = one_way(1)
    with sides_of(net, [[0], [1]], tasks_of(net, lambda *_: None)) as sides:
        yield sides[0].spread, sides[1].spread


def test_values_early_and_late(two):
    a, b = two
    a.send_value(*value_args(1, 0, 1, b"early"))
    until(lambda: b._values)
    early, late = b.expect(1, 0), b.expect(1, 1)
    assert early.is_there and not late.is_there
    a.send_value(*value_args(1, 1, 1, b"late"))
    assert [v.get(5.0)[0] for v in (early, late)] == [b"early", b"late"]


def test_values_that_nobody_wants_are_forgotten(two):
    a, b = two
    kept = b.expect(2, 0)
    dropped = b.expect(1, 9)
    del dropped
    for run in (1, 2, 3):
        a.send_value(*value_args(run, 0, 1, b"x"))
    a.send_value(*value_args(1, 9, 1, b"x"))
    until(lambda: len(b._values) == 3)
    b.forget(2)
    assert set(b._values) == {(3, 0)} and kept.get(5.0)[0] == b"x"
    del kept
    gc.collect()
    assert not b._awaited


def test_a_value_that_does_not_come(two):
    _, b = two
    with pytest.raises(ClusterError, match=r"a value of another process did not come for 0\.1 s"):
        within(5, b.expect(1, 0).get, 0.1)


def test_a_value_of_a_run_that_failed(two):
    """It never comes; those of earlier runs do."""
    a, b = two
    before, value, next_run = (b.expect(run, 0) for run in (1, 2, 3))
    a.fail(2, ValueError("broken"))
    with pytest.raises(PipelineError, match="process 0: ValueError: broken"):
        within(5, value.get, 60.0)
    with pytest.raises(PipelineError, match="broken"):
        within(5, b.expect(2, 1).get, 60.0)
    for run in (1, 3):
        a.send_value(*value_args(run, 0, 1, b"x"))
    assert before.get(5.0)[0] == next_run.get(5.0)[0] == b"x"


def test_values_of_a_lost_process(two):
    a, b = two
    there, value = b.expect(1, 0), b.expect(1, 1)
    a.send_value(*value_args(1, 0, 1, b"x"))
    there.get(5.0)
    a.links[1]._sock.shutdown(2)
    with pytest.raises(PeerLostError, match="process 0 is lost"):
        within(5, value.get, 60.0)
    with pytest.raises(PeerLostError):
        within(5, b.expect(2, 0).get, 60.0)
    assert there.get(5.0)[0] == b"x"


def test_values_of_a_closed_network(two):
    """Those that somebody waits for arrive all the same: the other process may be behind."""
    a, b = two
    value = b.expect(1, 0)
    b.close()
    a.send_value(*value_args(1, 0, 1, b"late"))
    assert within(5, value.get, 60.0)[0] == b"late"
    until(lambda: not b.links[0]._receivers)


def test_values_of_a_closed_network_that_do_not_come(two):
    a, b = two
    values = [b.expect(run, 0) for run in (1, 2)]
    b.close()
    a.fail(1, ValueError("broken"))
    with pytest.raises(PipelineError, match="process 0: ValueError: broken"):
        within(5, values[0].get, 60.0)
    assert not values[1].is_there and b.links[0]._receivers  # that run goes on
    a.fail(2, ValueError("broken too"))
    with pytest.raises(PipelineError, match="broken too"):
        within(5, values[1].get, 60.0)
    until(lambda: not b.links[0]._receivers)


def test_nothing_is_sent_twice_about_one_failure():
    net = chain(3, 2)
    with sides_of(net, [[0], [1], [2]], tasks_of(net, lambda *_: None)) as sides:
        before = [s.spread.links[(p + 1) % 3].control for p, s in enumerate(sides)]
        for _ in range(5):
            sides[0].spread.fail(1, ValueError("broken"))
        until(lambda: all(s.spread._reported == {1} for s in sides))
        time.sleep(0.1)
        after = [s.spread.links[(p + 1) % 3].control for p, s in enumerate(sides)]
        assert all(60 < y - x < 150 for x, y in zip(before, after, strict=True))


def test_a_link_of_its_own():
    with link_pair() as (a, b):
        net = one_way(1)
        sides = [
            Side(net, 1, [[0], [1]], {link.peer: link}, tasks_of(net, lambda *_: None)(link.me)) for link in (a, b)
        ]
        together(*(s.open for s in sides))
        together(*(s.run for s in sides))
        for s in sides:
            s.close()
        assert not a._receivers and not b._receivers


# ---- rounds


def loop_of(delay, registers=4):
    """`a` takes what `b` gave some rounds ago; `b` takes what `a` gives in its round."""
    return Network(
        ((Step("a", ((0, 0),), ((1, 0),)),), (Step("b", ((1, 0),), ((0, 0),)),)),
        (Channel("c", 1, 0, registers, delay=delay), Channel("d", 0, 1, registers)),
    )


def ones(*values):
    return [np.full(3, float(v)) for v in values]


def run_rounds(sides, rounds, firsts):
    together(*(lambda s=s, f=f: s.executor.run(rounds=rounds, first=f) for s, f in zip(sides, firsts, strict=True)))


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("delay", [1, 3])
def test_rounds_of_a_delayed_channel(delay, ready):
    """Each process has what its own actors begin with and leave; a run goes on from that."""
    net, seen = loop_of(delay), []

    def run(label, values):
        if label == "a":
            seen.append(values[0][0])
        return 2 * values[0] if label == "a" else values[0] + 1

    taken = [float(i) for i in range(delay)]
    for _ in range(24):
        taken.append(2 * taken[-delay] + 1)
    first = {(0, 0): ones(*range(delay))}
    with sides_of(net, [[0], [1]], tasks_of(net, run), codec=Codec(ready)) as sides:
        run_rounds(sides, 8, [first, first])  # what is not for its actors is ignored
        run_rounds(sides, 16, [sides[0].executor.left, {}])
        assert seen == taken[:24]
        assert [v[0] for v in sides[0].executor.left[0, 0]] == taken[24 : 24 + delay]
        assert sides[1].executor.left == {}
        for s in sides:
            s.spread.forget(2)
            assert not s.spread._parts and not s.spread._credits and not s.spread._joining


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_left_comes_after_the_taker_has_run_its_rounds(ready):
    net, ended, both = loop_of(2), [], {(0, 0): ones(1, 2)}

    def run(label, values):
        if label == "b" and len(ended) == 3:
            time.sleep(0.3)
        if label == "a":
            ended.append(time.monotonic())
        return values[0] + 10

    with sides_of(net, [[0], [1]], tasks_of(net, run), codec=Codec(ready)) as sides:
        run_rounds(sides, 3, [both, {}])
        assert time.monotonic() - ended[-1] > 0.25
        assert [v[0] for v in sides[0].executor.left[0, 0]] == [22, 21 + 20]


def test_who_waits_for_what_is_left_says_so():
    net = Network(
        ((Step("a", ((0, 0),)),), (Step("b", (), ((0, 0),)),)), (Channel("c", 1, 0, 4, delay=1),), names=("old", "new")
    )
    with sides_of(net, [[0], [1]], tasks_of(net, lambda *_: None), patience=0.3) as sides:
        with pytest.raises(PipelineError) as error:
            within(10, lambda: sides[0].executor.run(rounds=1, first={(0, 0): ones(1)}))
        assert str(error.value).endswith('\n  waited: old at its end for message 0 of "c"')


def test_a_failure_reaches_who_waits_for_what_is_left():
    net = Network(
        ((Step("a", ((0, 0),)),), (Step("b", (), ((0, 0),)),)), (Channel("c", 1, 0, 4, delay=2),), names=("old", "new")
    )
    turns = []

    def run(label, values):
        if label == "b":
            turns.append(time.sleep(0.1))
            if len(turns) == 2:
                raise ValueError("broken")
        return np.ones(3)

    with sides_of(net, [[0], [1]], tasks_of(net, run)) as sides:
        errors = []

        def go(side, first):
            with pytest.raises(ShardcError) as error:
                side.executor.run(rounds=2, first=first)
            errors.append(str(error.value))

        together(lambda: go(sides[0], {(0, 0): ones(1, 2)}), lambda: go(sides[1], {}))
        assert all("new failed in b of round 1 (model.py:1): ValueError: broken" in e for e in errors)
        run_rounds(sides, 2, [{(0, 0): ones(1, 2)}, {}])


class Slow(Codec):
    """The first value of each four is not ready, and takes long to pack."""

    def is_ready(self, value):
        return value[0] % 4 != 0

    def pack(self, channel, peer, value):
        if not self.is_ready(value):
            time.sleep(0.02)
        return super().pack(channel, peer, value)


def test_what_is_ready_does_not_overtake_earlier_rounds():
    net = Network(((Step("give", (), ((0, 5),)),), (Step("take", ((0, 5),)),)), (Channel("c", 0, 1, 6),))
    given, taken = [], []

    def run(label, values):
        if label == "take":
            taken.append(values[0][0])
            return None
        given.append(len(given))
        return np.full(3, float(given[-1]))

    with sides_of(net, [[0], [1]], tasks_of(net, run), codec=Slow()) as sides:
        run_rounds(sides, 24, [{}, {}])
        assert taken == given == list(range(24))
        until(lambda: not any(link._unpacked for s in sides for link in s.spread.links.values()))


@pytest.mark.parametrize("places", [[[0, 1], [2]], [[0, 1, 2], [3, 4]], [[0], [1, 2]]])
def test_an_island_gives_and_takes_rounds(places):
    """Several messages of one key are on the way at once, and each process is at its own one."""
    net = Network(((Step("give", (), ((0, 0),)),), (Step("take", ((0, 0),)),)), (Channel("c", 0, 1, 5, delay=2),))
    seen, most = {p: [] for p in places[1]}, []
    givers = places[0]
    first = {(0, 0): [np.zeros((2 * len(givers), 3))] * 2}

    def tasks(process):
        count = iter(range(100))

        def run(values):
            if process in seen:
                time.sleep(0.001 * (process % 2))
                seen[process].append(values[0][:, 0].tolist())
                return []
            time.sleep(0.002 * (process % 2))
            if process == 0:
                most.append(max(len(q) for s in sides for parts in s.spread._parts.values() for q in parts.values())
                            if any(s.spread._parts for s in sides) else 0)  # fmt: skip
            return [rows_of(10 * next(count) + process)]

        return lambda label: Task(run)

    with sides_of(net, places, tasks) as sides:
        run_rounds(sides, 30, [first if p in seen else {} for p in range(len(sides))])
        right = [[10.0 * j + p for p in givers for _ in range(2)] for j in range(30)]
        zeros = [[0.0] * 2 * len(givers)] * 2
        for p, values in seen.items():
            assert values == zeros + right[:28]
            assert [v[:, 0].tolist() for v in sides[p].executor.left[0, 0]] == right[28:]
        assert not any(s.spread._parts or s.spread._joining for s in sides)
    assert len(givers) == 1 or max(most) > 1


def test_parts_are_joined_in_order():
    """The second message is complete in another thread while the first one is unpacked."""
    net = Network(((Step("give", (), ((0, 0),)),), (Step("take", ((0, 0),)),)), (Channel("c", 0, 1, 5),))
    first, second = threading.Event(), threading.Event()

    class Waits(Codec):
        def unpack(self, channel, parts):
            value = super().unpack(channel, parts)
            if value[0] == 0:
                first.set()
                second.wait(5)
            return value

    def part(j):
        return Frame(FrameKind.MESSAGE, 7, 1, 0, 0, *Codec().pack(0, 2, np.full(3, float(j))))

    seen = []
    tasks = lambda process: lambda label: Task(lambda values: seen.append(values[0][0]) or [])  # noqa: E731
    with sides_of(net, [[0, 1], [2]], tasks, codec=Waits()) as sides:
        spread = sides[2].spread

        def of_one():
            spread.receive(0, part(0))

        def of_other():
            assert first.wait(5)
            spread.receive(0, part(1))
            spread.receive(1, part(1))
            second.set()

        spread.receive(1, part(0))
        together(of_one, of_other, lambda: sides[2].executor.run(rounds=2))
    assert seen == [0.0, 1.0]


@pytest.mark.parametrize("without", [(), ((0, 2),)], ids=["all links", "one by one"])
def test_a_source_ends_the_run_in_all_processes(without):
    """The source in process 0, who takes from it in 1, and one in 2 that needs nobody."""
    net = Network(
        ((Step("read", (), ((0, 0),)),), (Step("train", ((0, 0), (1, 0)), ((1, 0),)),), (Step("log"),)),
        (Channel("c", 0, 1, 2), Channel("state", 1, 1, 2, delay=1)),
    )
    counts = dict.fromkeys(("read", "train", "log"), 0)

    def run(label, values):
        if label == "read" and counts["read"] == 5:
            raise RoundsEnded(5)
        if label == "log":
            time.sleep(0.001)
        counts[label] += 1
        return sum(values, np.ones(3))

    with sides_of(net, [[0], [1], [2]], tasks_of(net, run), without=without) as sides:
        run_rounds(sides, 10_000, [{}, {(1, 0): ones(0)}, {}])
        assert [s.executor.rounds for s in sides] == [5, 5, 5]
        assert counts["read"] == counts["train"] == 5 and counts["log"] < 5000
        assert [v[0] for v in sides[1].executor.left[1, 0]] == [10.0]
        counts["read"] = 0
        run_rounds(sides, 3, [{}, sides[1].executor.left, {}])
        assert [s.executor.rounds for s in sides] == [3, 3, 3]
        assert [v[0] for v in sides[1].executor.left[1, 0]] == [16.0]
        for s in sides:
            assert s.spread._ends == {1: 5}
            s.spread.forget(2)
            assert s.spread._ends == {}


def test_several_sources_of_which_one_ends():
    """The second source is ahead in its process: what it gave to rounds that are not run is let go."""
    net = Network(
        ((Step("x", (), ((0, 0),)),), (Step("y", (), ((1, 0),)),), (Step("join", ((0, 0), (1, 0)), ((2, 0),)),),
         (Step("end", ((2, 0),)),)),
        (Channel("c", 0, 2, 2), Channel("d", 1, 2, 6), Channel("late", 2, 3, 4, delay=1)),
    )  # fmt: skip
    counts, refs, enough = dict.fromkeys("xyje", 0), [], threading.Event()

    class Weak(np.ndarray):
        pass

    def run(label, values):
        if label == "x" and counts["x"] == 4:
            enough.wait(5)
            raise RoundsEnded(4)
        counts[label[0]] += 1
        value = np.ones(3).view(Weak)
        if label == "y":
            refs.append(weakref.ref(value))
            if counts["y"] == 10:
                enough.set()
        return value

    with sides_of(net, [[0], [1], [2], [3]], tasks_of(net, run)) as sides:
        for _ in range(2):
            counts.update(x=0, y=0)
            enough.clear()
            run_rounds(sides, 1000, [{}, {}, {}, {(2, 0): ones(5)}])
            assert [s.executor.rounds for s in sides] == [4] * 4
            assert len(sides[3].executor.left.get((2, 0), [])) <= 1  # it is ahead if it was quicker than the end
        gc.collect()
        until(lambda: not any(r() is not None for r in refs))
