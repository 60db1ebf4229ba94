import random

import pytest

from shardc.errors import PipelineError
from shardc.runtime.deadlock import find_deadlock, run_without_time
from tests.runtime.networks import build, looped, random_network, where_it_stops


def test_two_orders_that_contradict_each_other():
    net = build(
        [
            [("0F0", "", "act.0"), ("0B0", "grad.0", ""), ("0F1", "", "act.1"), ("0B1", "grad.1", "")],
            [("1F0", "act.0", ""), ("1F1", "act.1", ""), ("1B0", "", "grad.0"), ("1B1", "", "grad.1")],
        ],
        {"act": (0, 1, 2), "grad": (1, 0)},
    )
    deadlock = find_deadlock(net)
    assert deadlock.positions == (1, 1)
    assert str(deadlock) == (
        "The pipeline deadlocks: actors 0 and 1 wait for each other; 2 of 2 actors never end.\n"
        "  actor 0 is at 0B0 and waits for message '0' of \"grad\", which actor 1 gives in 1B0, 1 step after 1F1.\n"
        "  actor 1 is at 1F1 and waits for message '1' of \"act\", which actor 0 gives in 0F1, 1 step after 0B0.\n"
        "Order of the actions; [brackets] mark the stuck ones, actions before them are done:\n"
        "  actor 0 |  0F0  [0B0]  0F1   0B1\n"
        "  actor 1 |  1F0  [1F1]  1B0   1B1\n"
        "No number of registers helps: change the order, so that the awaited messages come first."
    )


def test_too_few_credits():
    net = build(
        [
            [
                *[("F0", "", "s.0"), ("F1", "", "s.1 t.1"), ("F2", "", "s.2 t.2")],
                *[("B0", "s.0", ""), ("B1", "s.1 t.1", ""), ("B2", "s.2 t.2", "")],
            ],
            [("idle", "", "")],
        ],
        {"s": (0, 0, 2), "t": (0, 0, 1)},
    )
    deadlock = find_deadlock(net)
    assert str(deadlock) == (
        "The pipeline deadlocks: actor 0 waits for itself; 1 of 2 actors never end.\n"
        "  actor 0 is at F2 and waits for a register of \"s\": its 2 hold messages '0', '1'; "
        "actor 0 takes the first in B0, 1 step after F2.\n"
        "Order of the actions; [brackets] mark the stuck ones, actions before them are done:\n"
        "  actor 0 |  F0    F1   [F2]   B0    B1    B2\n"
        "  actor 1 |       idle  (end)\n"
        'It ends if you give more registers: 3 to "s" (now 2), 2 to "t" (now 1). '
        "Or change the order so that they are free earlier."
    )


def test_registers_and_order_both_wrong():
    """A register stops it, but with more registers the order would stop it."""
    net = build(
        [[("x", "", "c.0"), ("y", "", "c.1"), ("z", "d.0", "e.0")], [("u", "e.0", ""), ("v", "c.0 c.1", "d.0")]],
        {"c": (0, 1, 1), "d": (1, 0), "e": (0, 1)},
    )
    text = str(find_deadlock(net))
    assert "actor 0 is at y and waits for a register of \"c\": its only one holds message '0'; actor 1 takes" in text
    assert text.endswith(
        "More registers do not help: the order itself contradicts the data. Without any bound:\n"
        "  actor 0 is at z and waits for message '0' of \"d\", which actor 1 gives in v, 1 step after u.\n"
        "  actor 1 is at u and waits for message '0' of \"e\", which actor 0 gives in z, where it is stuck."
    )


def test_more_messages_at_once_than_registers():
    net = build([[("x", "", "c.0 c.1")], [("y", "c.0", ""), ("z", "c.1", "")]], {"c": (0, 1, 1)})
    assert (
        'actor 0 is at x and waits for a register of "c": it gives 2 messages at once, and the channel has 1.'
        in str(find_deadlock(net))
    )


def test_long_rows_are_cut_around_what_is_stuck():
    row = [(f"s{i}", "", "") for i in range(30)] + [("stuck", "c.0", ""), ("later", "", "c.0")]
    rows = [row + [(f"t{i}", "", "") for i in range(30)], [("done", "", "")]]
    grid = str(find_deadlock(build(rows, {"c": (0, 0)}))).splitlines()[3:5]
    assert grid[0].split()[3:9] == ["...", "s26", "s27", "s28", "s29", "[stuck]"]
    assert grid[0].split()[-2:] == ["t6", "..."]
    assert grid[1].split() == ["actor", "1", "|", "done", "(end)"]


def test_no_network():
    net = build([[("x", "", "c.0"), ("y", "c.1", "")]], {"c": (0, 0)})
    with pytest.raises(PipelineError) as error:
        find_deadlock(net)
    assert str(error.value) == (
        "Invalid network: each message must be given once and taken once.\n"
        "  actor 0, y, takes message '1' of \"c\", which no step gives.\n"
        "  actor 0, x, gives message '0' of \"c\", which no step takes."
    )


# ---- rounds


@pytest.mark.parametrize("rounds", [None, 1, 2, 10, 1000])
def test_a_loop_with_a_delay_goes_on(rounds):
    for delay in (1, 3):
        net = looped(delay)
        assert find_deadlock(net) is None
        assert [a.fired for a in run_without_time(net, rounds)] == [rounds or 1] * 2


def test_a_loop_without_a_delay_is_told_with_names():
    deadlock = find_deadlock(looped(0))
    assert str(deadlock) == (
        "The flow deadlocks: actor and learner wait for each other; 2 of 2 actors never end.\n"
        "  actor is at a and waits for message '0' of \"c\", which learner gives in b, where it is stuck.\n"
        "  learner is at b and waits for message '0' of \"d\", which actor gives in a, where it is stuck.\n"
        "Order of the actions; [brackets] mark the stuck ones, actions before them are done:\n"
        "  actor   | [a]\n"
        "  learner | [b]\n"
        "No number of registers helps: change the order, so that the awaited messages come first."
    )


def test_a_register_that_holds_a_message_of_the_next_period():
    """The reader gets ahead by its own copy of round -1; the only register then holds that of round 0."""
    net = build(
        [[("read", "", "c.0"), ("go", "", "e.0")], [("wait", "e.0", ""), ("take", "c.0", "")]],
        {"c": (0, 1, 1, 0, 1), "e": (0, 1, 1)},
        names=("reader", "trainer"),
    )
    assert (
        "reader is at read and waits for a register of \"c\": its only one holds message '0'; "
        "trainer takes the first in take, 1 step after wait."
    ) in str(find_deadlock(net))
    assert find_deadlock(net.with_registers([2, 1])) is None


def test_one_name_that_waits_for_itself():
    net = build([[("x", "", "c.0 c.1"), ("y", "c.0 c.1", "")]], {"c": (0, 0, 1)}, names=("server",), kind="flow")
    assert str(find_deadlock(net)).startswith("The flow deadlocks: server waits for itself; 1 of 1 actors never end.")


def test_too_few_registers_for_a_delay():
    with pytest.raises(PipelineError, match="has 2 registers, and 3 messages between two rounds: it needs at least 3"):
        find_deadlock(looped(3, registers=2))


def check_against_brute_force(seed, **size):
    """Check the verdict against all interleavings, and the cycle. Returns whether it deadlocks."""
    net = random_network(random.Random(seed), **size)
    deadlock = find_deadlock(net)
    positions = tuple(map(len, net.actors)) if deadlock is None else deadlock.positions
    assert where_it_stops(net) == {positions}, seed
    if deadlock is None:
        return False
    assert positions != tuple(map(len, net.actors))
    done = [s for steps, n in zip(net.actors, positions, strict=True) for s in steps[:n]]
    given = [m for s in done for m in s.gives]
    taken = [m for s in done for m in s.takes]
    for wait, further in zip(deadlock.cycle, deadlock.cycle[1:] + deadlock.cycle[:1], strict=True):
        channel = net.channels[wait.channel]
        step = net.actors[wait.actor][positions[wait.actor]]
        assert wait.label == step.label and wait.on == further.actor
        if wait.message is not None:
            assert wait.message in step.takes and wait.message not in given and wait.on == channel.source
        else:
            used = sum(m[0] == wait.channel for m in given) - sum(m[0] == wait.channel for m in taken)
            wanted = sum(m[0] == wait.channel for m in step.gives)
            assert used + wanted > channel.registers and wait.on == channel.target
    assert str(deadlock)
    return True


def test_verdict_is_that_of_brute_force():
    verdicts = [check_against_brute_force(seed) for seed in range(1000)]
    assert 250 < sum(verdicts) < 750  # both happen


@pytest.mark.sampled(0)
def test_verdict_is_that_of_brute_force_on_many():
    verdicts = [check_against_brute_force(seed, actors=5, steps=14) for seed in range(10_000, 20_000)]
    assert 2500 < sum(verdicts) < 8500
