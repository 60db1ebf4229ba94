"""Who is late, by what the processes of a run say of their waits and calls."""

import json

import pytest

from shardc.launch.lateness import Lateness, last_calls
from shardc.runtime.status.waits import Wait

DEADLINE = 10.0


class Clock:
    """Looks of a run: each process says the same again, one second after the other, until somebody is late."""

    def __init__(self, deadline=DEADLINE):
        self.lateness, self.now, self.deadline = Lateness(deadline), 100.0, deadline
        self.began = {}

    def look(self, said, epoch=0, ended=(), paused=False):
        return self.lateness.look(self.now, epoch, said, ended, paused)

    def late(self, said, seconds=2 * DEADLINE, **more):
        """What the first look finds that finds something, and the seconds until then."""
        begin = self.now
        while self.now <= begin + seconds:
            texts = {p: text(self.now - begin) for p, text in said.items()}
            found = self.look(texts, **more)
            if found is not None:
                return found.processes, found.why, self.now - begin
            self.now += 1
        return None


def status(*waits, epoch=0, **calls):
    """A sign of life, as a function of the seconds since its waits began."""

    def text(seconds):
        run = {"calls": {n.replace("_", ","): c for n, c in calls.items()}}
        run["waits"] = [Wait(w.awaited, w.why, w.seconds + seconds, w.who).to_json() for w in waits]
        return json.dumps({"epoch": epoch, "run": run})

    return text


def at(number, members="0,1"):
    return [members, number, f"at step, call {number}"]


def script(*processes, why="to say x"):
    return Wait(tuple((p, "") for p in processes), why, 0.0)


def actor(who, *awaited, why="rank 0 before 0B0"):
    return Wait(tuple(awaited), why, 0.0, who)


def test_who_has_made_fewer_calls_is_late_after_the_deadline():
    said = {0: status(g=at(4)), 1: status(g=at(3))}
    assert Clock().late(said) == ((1,), "process 0 waits for it at step, call 4", DEADLINE)
    said = {p: status(g=at(4, "0-3")) for p in (0, 1, 3)} | {2: status(g=at(3, "0-3"))}
    assert Clock().late(said) == ((2,), "processes 0, 1, 3 wait for it at step, call 4", DEADLINE)
    said = {p: status(g=at(4 - p % 2, "0-3")) for p in range(4)}
    assert Clock().late(said) == ((1, 3), "processes 0, 2 wait for them at step, call 4", DEADLINE)


def test_who_has_made_no_call_is_late_too_and_who_says_nothing():
    assert Clock().late({0: status(g=at(0)), 1: status()})[:2] == ((1,), "process 0 waits for it at step, call 0")
    assert Clock().late({0: status(g=at(0))})[0] == (1,)
    assert Clock().late({0: status(g=at(0)), 1: lambda _: "KeyError: 'x'"})[0] == (1,)


def test_equal_calls_are_no_wait():
    assert Clock().late({p: status(g=at(4)) for p in (0, 1)}) is None


def test_who_moves_is_not_late():
    clock = Clock()
    for i in range(40):
        found = clock.look({0: status(g=at(2 + i // 4))(0), 1: status(g=at(1 + i // 4))(0)})
        assert found is None
        clock.now += 2


def test_a_script_that_has_ended_is_not_late():
    said = {0: status(g=at(4, "0-2")), 1: status(g=at(3, "0-2")), 2: status(g=at(4, "0-2"))}
    assert Clock().late(said, ended={1}) is None
    assert Clock().late(said, ended={0, 1, 2}) is None


def test_a_loop_of_waits_ends_at_who_waits_for_nobody():
    said = {0: status(script(1)), 1: status(script(2)), 2: status()}
    assert Clock().late(said) == ((2,), "process 1 waits for it to say x", DEADLINE)


def test_who_waits_itself_is_not_late_however_short():
    """Process 1 has kept process 0 waiting, and now waits for process 2, which came a moment ago."""
    clock, long = Clock(), script(1)
    assert clock.late({0: status(long), 1: status(), 2: status()}, seconds=DEADLINE - 2) is None
    for i in range(5):
        texts = {0: status(long)(DEADLINE + i), 1: status(script(2))(i), 2: status()(0)}
        assert clock.look(texts) is None
        clock.now += 1
    assert clock.late({0: status(long), 1: status(script(2)), 2: status()})[0] == (2,)


def test_a_wait_that_begins_anew_does_not_count_on():
    clock = Clock()
    for _ in range(4):
        assert clock.late({0: status(script(1)), 1: status()}, seconds=DEADLINE - 3) is None


def test_the_time_in_which_the_caller_was_paused_does_not_count():
    clock, said = Clock(), {0: status(g=at(4)), 1: status(g=at(3))}
    assert clock.late(said, seconds=5) is None
    clock.now += 100
    assert clock.look({p: text(0) for p, text in said.items()}, paused=True) is None
    assert clock.late(said)[2] == DEADLINE


def test_all_waits_begin_anew_when_a_process_has_joined():
    clock, said = Clock(), {0: status(g=at(4)), 1: status(g=at(3)), 2: status(script(1))}
    assert clock.late(said, seconds=DEADLINE - 2) is None
    clock.lateness.begin()
    assert clock.late(said)[2] == DEADLINE


def test_what_processes_say_of_another_epoch_does_not_count():
    clock = Clock()
    assert clock.late({0: status(g=at(4)), 1: status(g=at(3))}, seconds=DEADLINE - 2) is None
    new = {0: status(g=at(4), epoch=1), 1: status(g=at(9))}
    assert clock.late(new, epoch=1) == ((1,), "process 0 waits for it at step, call 4", DEADLINE)


# -- networks


def test_of_actors_the_one_that_does_not_wait_is_late_though_its_process_has_others_that_do():
    said = {
        0: status(actor("f/0", (1, "f/1"), why="learn before 3")),
        1: status(actor("f/2", (0, "f/0"), why="show before 3")),
    }
    assert Clock().late(said) == ((1,), "process 0 waits for it (learn before 3)", DEADLINE)


def test_who_waits_is_another_process():
    """Process 0 waits for an actor of process 1 that waits for one beside it."""
    said = {
        0: status(actor("f/2", (1, "f/1"), why="update before 3")),
        1: status(actor("f/1", (1, "f/0"), why="learn before 3")),
    }
    assert Clock().late(said) == ((1,), "process 0 waits for it (update before 3)", DEADLINE)


def test_an_actor_whose_process_has_not_begun_the_run_waits_as_its_script_does():
    said = {0: status(actor("f/0", (1, "f/1"))), 1: status(script(2)), 2: status()}
    assert Clock().late(said)[0] == (2,)
    said = {0: status(actor("f/0", (1, "f/1"))), 1: status()}
    assert Clock().late(said) == ((1,), "process 0 waits for it (rank 0 before 0B0)", DEADLINE)


def test_an_actor_in_a_collective_waits_for_who_has_made_fewer_calls():
    """Ranks of two processes: process 1 does not come to the call in which process 0 waits, inside of a task."""
    said = {
        0: status(actor("f/4", (2, "f/1")), g=at(4, "0-3")),
        1: status(g=at(3, "0-3")),
        2: status(actor("f/1", (0, "f/0"), (1, "f/0")), g=at(4, "0-3")),
        3: status(actor("f/1", (0, "f/0"), (1, "f/0")), g=at(4, "0-3")),
    }
    assert Clock().late(said)[0] == (1,)


def test_who_has_fewer_calls_as_its_own_run_waits_for_another_process_is_not_late():
    said = {
        0: status(g=at(4, "0-2")),
        1: status(actor("f/1", (2, "f/2")), g=at(3, "0-2")),
        2: status(g=at(3, "0-2")),
    }
    assert Clock().late(said)[0] == (2,)


def test_a_slow_actor_for_which_only_its_own_process_waits_is_nobodys_business():
    assert Clock().late({0: status(actor("f/0", (0, "f/1"))), 1: status()}) is None


def test_who_waits_for_a_ticket_is_not_held_up_by_it():
    """A client of process 1 waits for a ticket, as it should; another one does not come."""
    ticket = Wait(((0, ""),), "to give a ticket", 0.0, "gang 0")
    assert Clock().late({0: status(g=at(4)), 1: status(ticket, g=at(3))})[0] == (1,)
    assert Clock().late({0: status(), 1: status(ticket)}) == ((0,), "process 1 waits for it to give a ticket", DEADLINE)


def test_all_wait_for_one_another():
    said = {0: status(script(1, why="to say x")), 1: status(script(0, why="to say y"))}
    found = Clock().late(said)
    assert found == ((), "processes 0, 1 wait for one another: to say x; to say y", DEADLINE)


@pytest.mark.parametrize("waits", ["process 1 (at x, 4 s)", ""])
def test_where_processes_are(waits):
    text = status(h=at(2), g=at(4))(0)
    shown = json.dumps({**json.loads(text), **({"waits": waits} if waits else {})})
    lines = last_calls({0: shown, 1: text, 2: text, 3: "no JSON"}, range(5))
    end = f"; waits for {waits}" if waits else ""
    first = [f"process 0: its last call: step, call 4{end}", "processes 1,2: its last call: step, call 4"]
    if not waits:
        first = ["processes 0-2: its last call: step, call 4"]
    assert lines == [*first, "processes 3,4: no call yet"]
