"""Waits of a process: what it says of them."""

from shardc.runtime.status import waits as waits_module
from shardc.runtime.status.waits import Wait, Waits, longest_text


def test_waits_last_as_long_as_their_contexts(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(waits_module, "monotonic", lambda: clock[0])
    waits = Waits()
    of_actor = Wait(((1, "f/1"),), "rank 0 before 2B3", 3.0, "f/0")
    waits.networks[15] = lambda: [of_actor]
    with waits.during([1, 2], "to open a link"), waits.during([0], "to give a ticket", "gang 0"):
        clock[0] = 14.0
        script, ticket = (
            Wait(((1, ""), (2, "")), "to open a link", 4.0),
            Wait(((0, ""),), "to give a ticket", 4.0, "gang 0"),
        )
        assert waits.now() == [script, ticket, of_actor]
        assert [Wait.from_json(w.to_json()) for w in waits.now()] == waits.now()
    assert waits.now() == [of_actor]


def test_the_longest_wait_for_others_is_shown():
    own = Wait(((0, "f/1"),), "rank 0 before 0B1", 9.0, "f/0")
    short = Wait(((1, ""),), "to open a link", 0.5)
    assert longest_text([], 0) == longest_text([own, short], 0) == ""
    two = Wait(((2, "f/2"), (1, "f/2"), (0, "f/1")), "rank 1 before 1B2", 3.6, "f/0")
    one = Wait(((2, "f/3"),), "rank 1 before 1B2", 2.0, "f/0")
    assert longest_text([own, short, one, two], 0) == "processes 1, 2 (rank 1 before 1B2, 4 s)"
