"""What processes decide together: one that fails makes all fail."""

from shardc.checkpoint.manifest import DamagedError
from shardc.checkpoint.writing_group import Group, group_of
from shardc.errors import CheckpointError, DisagreementError
from tests.checkpoint.peers import Fake, Run, all_processes


def test_alone_in_one_process():
    group = group_of(None)
    assert (group.me, group.processes, group.owners, group.owner) == (0, 1, 1, 0)
    assert group.gather("x", "y") == ["y"] and group.together("x", lambda: 3) == 3


def test_islands_are_owners():
    groups = [group_of(Fake(Run(6, 3), p)) for p in range(6)]
    assert [g.owner for g in groups] == [0, 0, 1, 1, 2, 2]
    assert [[*g.island] for g in groups[::2]] == [[0, 1], [2, 3], [4, 5]] and groups[3].islands == [
        (0, 1),
        (2, 3),
        (4, 5),
    ]
    assert Group(1, 2, 1, groups[0].gather).owner == 0


def test_together_gives_each_its_own_result():
    assert all_processes([lambda c, p=p: group_of(c).together("work", lambda: p) for p in range(3)]) == [0, 1, 2]


def test_all_get_what_the_first_makes():
    assert all_processes([lambda c, p=p: group_of(c).from_first("work", lambda: str(p)) for p in range(3)]) == ["0"] * 3


def test_facts_that_differ_are_an_error_in_all():
    def of(*every):
        return [lambda c, e=e: group_of(c).agree("how often", {"every": e}) for e in every]

    assert all_processes(of("2", "2")) == [None, None]
    errors = all_processes(of("1", "2"))
    assert {type(e) for e in errors} == {DisagreementError}
    assert {str(e).partition("\n")[2] for e in errors} == {"  every: process 0: 1; process 1: 2"}


def test_damage_is_damage_in_all_unless_something_else_failed():
    def damaged():
        raise DamagedError("1/d is not as it was written")

    def fail():
        raise CheckpointError("no such thing")

    both = [damaged, lambda: 0]
    errors = all_processes([lambda c, w=w: group_of(c).together("work", w) for w in both])
    assert [(type(e), str(e)) for e in errors] == [(DamagedError, "1/d is not as it was written")] * 2
    errors = all_processes([lambda c, w=w: group_of(c).together("work", w) for w in (*both, fail)])
    assert [type(e) for e in errors] == [CheckpointError] * 3
    assert list(map(str, errors)) == ["process 2: no such thing"] * 2 + ["no such thing"]


def test_one_that_fails_makes_all_fail():
    def fail():
        raise CheckpointError("no such thing")

    def full():
        raise OSError("disk full")

    works = [lambda: 0, fail, full]
    errors = all_processes([lambda c, w=w: group_of(c).together("work", w) for w in works])
    assert [type(e) for e in errors] == [CheckpointError] * 3
    assert list(map(str, errors)) == ["process 1: no such thing", "no such thing", "work: disk full"]
