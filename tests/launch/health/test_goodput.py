"""Goodput: the share of a run's time in steps that no loss has undone."""

import pytest

from shardc.launch.health.goodput import Goodput


def test_a_run_without_losses_says_nothing():
    goodput = Goodput(0.0)
    for i in range(10):
        goodput.see(i, 0, i)
    assert goodput.text(10.0) == "" and goodput.seconds() == 9


@pytest.mark.parametrize(("again", "useful"), [(6, 3.0 + 4.0), (10, 7.0 + 4.0), (3, 0.0 + 4.0)])
def test_steps_after_the_checkpoint_are_lost(again, useful):
    goodput = Goodput(0.0)
    for i in range(8):
        goodput.see(10.0 + i, 0, 2 + i)  # steps 2 to 9
    goodput.begin(1)
    for i in range(5):
        goodput.see(30.0 + i, 1, again + i)
    assert goodput.seconds() == useful
    assert (
        goodput.text(40.0)
        == f"goodput {useful / 40:.0%}: {useful:.0f} of 40 s went into steps that counted; 1 interruption"
    )


def test_a_start_that_makes_no_step_is_no_interruption_of_its_own():
    goodput = Goodput(0.0)
    goodput.see(1.0, 0, 0)
    goodput.see(2.0, 0, 1)
    goodput.begin(1)
    goodput.begin(2)
    goodput.see(5.0, 2, 2)
    goodput.see(6.0, 2, 3)
    assert (goodput.losses, goodput.seconds()) == (1, 2.0)


@pytest.mark.parametrize("late", [[], [(6.0, 5)], [(6.0, 5), (30.0, 5), (65.0, 5)], [(6.0, 6)]])
def test_a_late_status_of_the_epoch_before_does_not_make_the_outage_useful(late):
    goodput = Goodput(0.0)
    for i in range(6):
        goodput.see(float(i), 0, i)
    goodput.begin(1)
    for now, step in late:
        goodput.see(now, 0, step)
    for k, step in enumerate(range(4, 10)):
        goodput.see(66.0 + k, 1, step)
    assert goodput.text(72.0) == "goodput 11%: 8 of 72 s went into steps that counted; 1 interruption"
