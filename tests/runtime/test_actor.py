import pytest

from shardc.runtime.actor import Actor, check_network
from tests.runtime.networks import build, looped, two_rates


def test_fires_when_messages_and_registers_are_there():
    net = build(
        [
            [("x", "", "out.0"), ("y", "in.0 in.1", "out.1"), ("z", "", "")],
            [("u", "", "in.1 in.0"), ("v", "out.0 out.1", "")],
        ],
        {"out": (0, 1, 1), "in": (1, 0)},
    )
    actor = Actor(net, 0, free=0)
    assert actor.ready()
    assert actor.fire() == ([], [0])
    assert actor.missing() == ([(1, "0"), (1, "1")], [0])
    actor.deliver((1, "1"), "b")
    assert not actor.ready()
    actor.deliver((1, "0"), "a")
    assert not actor.ready()
    assert actor.missing() == ([], [0])
    actor.credit(0, 7)
    assert actor.ready()
    assert actor.fire() == (["a", "b"], [7])
    assert actor.step.label == "z" and actor.ready()
    actor.fire()
    assert actor.step is None and not actor.ready() and actor.missing() == ([], [])


def test_registers_of_one_step_are_kept_while_others_are_missing():
    net = build([[("x", "", "c.0 c.1 d.0")], [("y", "c.0 c.1 d.0", "")]], {"c": (0, 1, 1), "d": (0, 1, 1)})
    actor = Actor(net, 0, free=0)
    assert not actor.ready() and actor.missing() == ([], [0])
    actor.credit(0, 5)
    assert actor.ready() and actor.ready()  # asking changes nothing
    assert actor.fire() == ([], [0, 5, 0])


def test_a_sound_network_has_nothing_wrong():
    assert check_network(build([[("x", "", "c.0")], [("y", "c.0", "")]], {"c": (0, 1, 1), "idle": (1, 0)})) == []


@pytest.mark.parametrize(
    ("actors", "channels", "wrong"),
    [
        ([[("x", "", "c.0")], []], {"c": (0, 1)}, ["actor 0, x, gives message '0' of \"c\", which no step takes."]),
        ([[], [("y", "c.0", "")]], {"c": (0, 1)}, ["actor 1, y, takes message '0' of \"c\", which no step gives."]),
        (
            [[("x", "", "c.0"), ("x2", "", "c.0")], [("y", "c.0", "")]],
            {"c": (0, 1)},
            ["actor 0, x2, gives message '0' of \"c\" a second time: actor 0, x, gives it already."],
        ),
        (
            [[("x", "", "c.0")], [("y", "c.0 c.0", "")]],
            {"c": (0, 1)},
            ["actor 1, y, takes message '0' of \"c\" a second time: actor 1, y, takes it already."],
        ),
        (
            [[("x", "c.0", "c.0")], []],
            {"c": (0, 1)},
            ["actor 0, x, takes message '0' of \"c\", whose taker is actor 1."],
        ),
        ([[]], {"c": (0, 0, 0)}, ['channel 0 "c" has 0 registers; it needs at least 1 (None: no bound).']),
        ([[]], {"c": (0, 3)}, ['channel 0 "c" is between actors 0 and 3; the network has 1.']),
    ],
)
def test_what_is_wrong_with_a_network(actors, channels, wrong):
    assert check_network(build(actors, channels)) == wrong


def test_a_channel_that_is_not_there():
    net = build([[("x", "", "c.0"), ("y", "c.0", "")]], {"c": (0, 0)})
    bare = type(net)(net.actors, ())
    assert check_network(bare) == [
        "actor 0, x, gives a message of channel 0; there are no channels.",
        "actor 0, y, takes a message of channel 0; there are no channels.",
    ]


def test_other_registers():
    net = build([[]], {"c": (0, 0, 1), "d": (0, 0)})
    assert [c.registers for c in net.with_registers([None, 4]).channels] == [None, 4]


# ---- rounds


@pytest.mark.parametrize(("delay", "first"), [(0, 0), (1, 1), (3, 3)])
def test_what_is_there_when_a_run_begins(delay, first):
    net = build([[("x", "", "c.0"), ("y", "c.0", "")]], {"c": (0, 0, 4, 0, delay)})
    assert net.first_messages() == [(0, "0")] * first
    actor = Actor(net, 0, free=0)
    assert len(actor.free_registers()) == 4 - first


def test_rates_of_two_and_three():
    net = two_rates(delay=2)
    assert check_network(net) == []
    assert net.first_messages() == [(0, "0")]  # in round 0 `t` takes what `g` gave in round -2; in round 3 nothing
    assert two_rates(delay=0).first_messages() == []
    late = build([[(f"t{r}", f"c.{r}", "", r) for r in range(3)], [(f"g{r}", "", f"c.{r}", r) for r in range(3)]],
                 {"c": (1, 0, 9, 0, 6)}, period=3)  # fmt: skip
    assert late.first_messages() == [(0, "0"), (0, "1"), (0, "2"), (0, "0"), (0, "1"), (0, "2")]
    assert late.first_messages(5) == [(0, "2"), (0, "0"), (0, "1"), (0, "2"), (0, "0"), (0, "1")]
    assert [net.first_messages(rounds) for rounds in (1, 4, 5, 6)] == [[], [], [(0, "0")], [(0, "0")]]


def test_an_actor_runs_rounds():
    actor = Actor(two_rates(delay=0), 0, free=None, rounds=9)
    seen = []
    while actor.step is not None:
        seen.append((actor.step.label, actor.round, actor.period, actor.position, actor.fired))
        for message in actor.step.takes:
            actor.deliver(message, None)
        actor.fire()
    assert seen == [("g0", 0, 0, 0, 0), ("g2", 2, 0, 1, 1), ("g4", 4, 0, 2, 2), ("g0", 6, 1, 0, 3), ("g2", 8, 1, 1, 4)]
    assert actor.round == actor.rounds == 9
    actor.run_until(11)
    assert (actor.step.label, actor.round) == ("g4", 10)
    actor.run_until(3)  # it is ahead
    assert actor.step is None


def test_messages_of_one_key_come_in_their_order():
    net = build([[("x", "", "c.0"), ("y", "c.0", "")]], {"c": (0, 0, None, 0, 3)})
    actor = Actor(net, 0, free=None, rounds=3)
    for value in "abc":
        actor.deliver((0, "0"), value)
    taken = []
    for given in "def":
        assert actor.fire() == ([], [])
        actor.deliver((0, "0"), given)
        taken += actor.fire()[0]
    assert taken == ["a", "b", "c"]
    assert actor.arrived() == {(0, "0"): ["d", "e", "f"]} and actor.step is None
    actor.drop()
    assert actor.arrived() == {}


def test_what_an_actor_is_owed_at_its_end():
    """After 5 rounds what was given in round 4 is not taken: `t` takes it in round 6."""
    actor = Actor(two_rates(delay=2), 1, free=None, rounds=5)
    actor.deliver((0, "0"), "of round -2")
    assert actor.fire() == (["of round -2"], []) and actor.fire() == ([], [])
    assert actor.step is None
    assert actor.owed() == [(0, "0")] and actor.missing() == ([(0, "0")], [])
    actor.deliver((0, "0"), "of round 4")
    assert actor.owed() == [] and actor.arrived() == {(0, "0"): ["of round 4"]}
    actor.run_until(3)
    actor.drop()
    assert actor.owed() == []


def test_a_step_is_taken_back():
    net = looped(2)
    actor = Actor(net, 0, free="free", rounds=5)
    for value in "ab":
        actor.deliver((0, "0"), value)
    assert actor.ready()
    fired = actor.fire()
    actor.take_back(*fired)
    assert (actor.period, actor.position, actor.fired, actor.round) == (0, 0, 0, 0)
    assert actor.arrived() == {(0, "0"): ["a", "b"]}
    assert actor.ready() and actor.fire() == fired == (["a"], ["free"])


@pytest.mark.parametrize(
    ("net", "wrong"),
    [
        (
            looped(2, registers=1),
            'channel 0 "c" has 1 registers, and 2 messages between two rounds: it needs at least 2.',
        ),
        (looped(-1, registers=1), 'channel 0 "c" has a delay of -1 rounds; it has to be 0 or more.'),
        (build([[]], {}, period=0), "the period is 0 rounds; it has to be at least 1."),
        (
            build([[("x", "", "", 1), ("y", "", "", 0)]], {}, period=2),
            "actor 0 has steps of rounds 0 to 1; they have to be in order, from 0 to 1.",
        ),
        (
            build([[("x", "", "", 2)]], {}, period=2, names=("learner",)),
            "learner has steps of rounds 2 to 2; they have to be in order, from 0 to 1.",
        ),
        (
            build([[("x", "", "c.0", 1)], [("y", "c.0", "", 0)]], {"c": (0, 1, 9, 0, 2)}, period=2),
            "message '0' of \"c\" is given in round 1 and taken in round 0 of 2; its channel has a delay of 2 rounds.",
        ),
        (  # it needs one register when a run begins, but three before round 1, where a run may end
            build(
                [[(f"x{k}", "", f"c.{k}", 0) for k in range(3)], [(f"y{k}", f"c.{k}", "", 1) for k in range(3)]],
                {"c": (0, 1, 2, 0, 1)},
                period=3,
            ),
            'channel 0 "c" has 2 registers, and 3 messages between two rounds: it needs at least 3.',
        ),
    ],
    ids=["too few registers", "delay", "period", "order", "round", "late", "within a period"],
)  # fmt: skip
def test_what_is_wrong_with_a_periodic_network(net, wrong):
    assert check_network(net) == [wrong]
