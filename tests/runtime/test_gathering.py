"""Gatherings: what members send each other in rounds, in any order of arrival."""

import random

import pytest

from shardc.errors import DisagreementError
from shardc.runtime.gathering import Gathering


def begin(members, text, me):
    return Gathering(("calls", 0), members, me, text(me), "test")


def deliver(calls, rng, sent=None, early=False):
    """Deliver all messages that are due, and those that follow from them, in a random order."""
    on_way = [m for c in calls.values() for m in c.due(calls.__contains__, early).items()]
    while on_way:
        peer, texts = on_way.pop(rng.randrange(len(on_way)))
        if sent is not None:
            sent.append(texts)
        calls[peer].add(texts)
        on_way += calls[peer].due(calls.__contains__).items()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 100])
def test_all_get_all_in_log_n_messages_of_each(n):
    rng = random.Random(n)
    members = sorted(rng.sample(range(3 * n), n))
    calls, sent = {p: begin(members, str, p) for p in members}, []
    deliver(calls, rng, sent)
    rounds = (n - 1).bit_length()
    assert len(sent) == n * rounds
    for call in calls.values():
        assert call.is_complete and not call.missing
        assert list(call.texts.items()) == [(p, str(p)) for p in members]
        assert len(call.neighbours) <= 2 * rounds
        assert not any(map(call.owes, members))


def test_equal_texts_travel_once():
    calls, sent = {p: begin(range(64), lambda p: "same", p) for p in range(64)}, []
    deliver(calls, random.Random(0), sent)
    assert {len(texts) for texts in sent} == {1}
    assert not calls[3].differs and set(calls[3].texts.values()) == {"same"}


@pytest.mark.parametrize("n", [3, 8, 20])
def test_who_is_late_is_known_to_all_who_share_early(n):
    rng = random.Random(n)
    late = rng.randrange(n)
    calls = {p: begin(range(n), str, p) for p in range(n) if p != late}
    deliver(calls, rng)
    for _ in range(n.bit_length()):
        deliver(calls, rng, early=True)
    assert all(call.missing == [late] for call in calls.values())
    assert {p for p, call in calls.items() if call.owes(late)} == {p for p in calls if late in calls[p].neighbours and (
        (p - late) % n).bit_count() == 1}  # fmt: skip
    calls[late] = begin(range(n), str, late)
    deliver(calls, rng)
    assert all(call.is_complete for call in calls.values())


def test_what_was_sent_is_not_sent_again():
    call = begin(range(4), str, 0)
    assert call.due(lambda p: p == 1) == {1: {"0": 1}}
    assert call.due(lambda p: True) == {}  # the second round wants the text of the first
    call.add({"3": 8})
    assert call.due(lambda p: True) == {2: {"0": 1, "3": 8}}
    call.add({"3": 8})
    assert call.due(lambda p: True, early=True) == {1: {"3": 8}}
    assert call.due(lambda p: True, early=True) == {}


def test_the_verdict_is_about_those_that_have_come():
    def refuse(texts):
        raise DisagreementError(str(texts))

    call = Gathering(("calls", 0), range(3), 1, "b", "test", refuse)
    call.judge()  # one text alone is right
    call.add({"a": 1})
    with pytest.raises(DisagreementError, match=r"\{0: 'a', 1: 'b'\}"):
        call.judge()
