"""The budget of restarts: so many in all, or within a time."""

import math

import pytest

from shardc.launch.restarts import RestartBudget


def test_so_many_in_all_without_a_pause():
    budget = RestartBudget(3)
    assert [budget.take(float(i)) for i in range(3)] == [0.0, 0.0, 0.0]
    assert (budget.left(1e9), budget.taken, budget.text(1e9)) == (0, 3, "0 restarts are left")
    assert RestartBudget(1).text(0.0) == "1 restart is left"


def test_within_a_time_the_pauses_double():
    budget = RestartBudget(4, 3600.0)
    assert [budget.take(float(i)) for i in range(4)] == [0.0, 1.0, 2.0, 4.0]
    assert (budget.left(3.0), budget.text(3.0)) == (0, "0 restarts of 4 within 3600 s are left")
    assert (budget.left(3601.5), budget.left(4000.0), budget.taken) == (2, 4, 4)
    assert budget.take(4000.0) == 0.0


@pytest.mark.parametrize("window, longest", [(1e9, 300.0), (math.inf, 0.0)])
def test_the_longest_pause(window, longest):
    budget = RestartBudget(100, window)
    assert max(budget.take(float(i)) for i in range(40)) == longest
