"""Goodput: the share of a run's time in steps that no loss has undone."""

import pytest

from shardc.launch.goodput import Goodput


def test_a_run_without_losses_says_nothing():
    goodput = Goodput(0.0)
    for i in range(10):
        goodput.see(i, i)
    assert goodput.text(10.0) == "" and goodput.seconds() == 9


@pytest.mark.parametrize(("again", "useful"), [(6, 3.0 + 4.0), (10, 7.0 + 4.0), (3, 0.0 + 4.0)])
def test_steps_after_the_checkpoint_are_lost(again, useful):
    goodput = Goodput(0.0)
    for i in range(8):
        goodput.see(10.0 + i, 2 + i)  # steps 2 to 9
    goodput.interrupt()
    for i in range(5):
        goodput.see(30.0 + i, again + i)
    assert goodput.seconds() == useful
    assert (
        goodput.text(40.0)
        == f"goodput {useful / 40:.0%}: {useful:.0f} of 40 s went into steps that counted; 1 interruption"
    )


def test_a_start_that_makes_no_step_counts_as_an_interruption():
    goodput = Goodput(0.0)
    goodput.see(1.0, 0)
    goodput.see(2.0, 1)
    for _ in range(2):
        goodput.interrupt()
    goodput.see(5.0, 1)
    goodput.see(6.0, 2)
    assert (goodput.losses, goodput.seconds()) == (2, 1.0)
