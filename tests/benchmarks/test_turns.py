"""The benchmark of turns runs, and simulates what arithmetic says. No time is looked at."""

import pytest

from benchmarks.turns import SECONDS, links, rounds_of, server


def test_a_server_is_simulated_and_run():
    simulated, measured, busiest = rounds_of(server, 3, 4, 1, 0.1, {})
    change, work = 0.1 * SECONDS["change"], 0.1 * SECONDS["work"]
    assert 3 * change <= simulated <= 3 * change + work
    assert busiest == "device 7" and measured > 0


@pytest.mark.parametrize("n", [1, 4])
def test_links_are_bytes_over_bandwidth(n):
    simulated, exact = links(n)
    assert simulated == pytest.approx(exact, rel=5e-3)
