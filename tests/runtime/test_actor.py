import pytest

from shardc.runtime.actor import Actor, check_network
from tests.runtime.networks import build


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
