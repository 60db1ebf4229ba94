"""Workers of flows that are killed while the others go on: runs of `tests.processes.replaced`."""

import pytest

from tests.processes.test_pipelines import run

CASES = [
    "asynchronous", "two_at_once", "stale", "bulk_synchronous", "simulators", "in_the_first_round",
    "after_the_last_round",
]  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", CASES)
def test_a_lost_worker_is_replaced_while_the_others_go_on(name):
    run([name], processes=4, devices=1, words=("--restarts", "3"), module="tests.processes.replaced")
