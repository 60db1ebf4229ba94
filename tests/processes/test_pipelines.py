"""Pipelines over processes: each test starts a run of `tests.processes.pipelines`, which compares with one device.

The parity of all of `OVER_PROCESSES`, of two and three ranks, runs in later turns; `make test` runs a few of two ranks.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.test_parity import OVER_PROCESSES

ROOT = Path(__file__).parents[2]
SECONDS = 400
"""Longest run."""


def run(names, processes=2, islands=None, module="tests.processes.pipelines", devices=2, words=()):
    """Run cases by name in several processes, under a watchdog. All that is started ends with it."""
    command = [
        sys.executable, "-m", "shardc", "run", "--processes", str(processes), "--islands", str(islands or processes),
        "--devices", str(devices), "--deadline", "90", *words, "-m", module, *names,
    ]  # fmt: skip
    made = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = made.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        made.send_signal(signal.SIGINT)  # the launcher ends its processes
        output, _ = made.communicate(timeout=30)
        raise AssertionError(f"no end after {SECONDS} s:\n{output}") from None
    finally:
        if made.poll() is None:
            os.killpg(made.pid, signal.SIGKILL)
    assert made.returncode == 0, output
    assert [line for line in output.splitlines() if line.startswith("ok ")] == [f"ok {n}" for n in names], output


def names_of(ranks):
    return [f"parity-{i}" for i, c in enumerate(OVER_PROCESSES) if c.ranks == ranks]


def cheapest(number):
    """The names of the parity cases of two ranks that compile least."""
    return sorted(names_of(2), key=lambda name: OVER_PROCESSES[int(name.partition("-")[2])].cost)[:number]


IN_TWO = [
    "an_argument_of_two_stages_and_results_elsewhere",
    "every_process_has_its_share_of_chunks",
    "pieces_with_padding",
    "random_keys_cross_and_come_back",
    "layers_of_a_scan_lie_on_their_stages",
    "one_program_wants_one_runtime",
    "results_at_other_placements_than_they_were_given_at",
    "a_rank_cannot_move_to_where_all_others_are",
    "a_call_is_shown_with_the_times_of_all_processes",
    "two_pipelines_take_turns",
    "other_data_in_one_process_is_an_error_in_both",
]


def test_two_processes_give_what_one_device_gives():
    run([*IN_TWO[:-1:4], *cheapest(1), IN_TWO[-1]])


@pytest.mark.sampled(0)
def test_more_of_two_processes():
    run([*(name for i, name in enumerate(IN_TWO[:-1]) if i % 4), *cheapest(2)[1:]])


@pytest.mark.sampled(0)
def test_a_rank_moves_to_another_process():
    run(["a_rank_moves_to_a_process_of_its_own", "a_rank_moves_within_its_process_and_then_to_another"], processes=3)


@pytest.mark.sampled(0)
def test_a_stage_of_two_processes():
    names = ["a_stage_of_two_hosts_is_an_island", "small_results_in_pieces_are_made_whole_by_all_that_hold_them"]
    run(names, processes=4, islands=2)


@pytest.mark.sampled(0)
def test_calls_of_a_stage_of_two_processes_that_are_stopped():
    run(["a_stop_leaves_no_process_of_a_stage_waiting"], processes=4, islands=2)


@pytest.mark.sampled(0)
def test_one_runtime():
    names = [
        "stages_of_one_runtime_in_two_processes",
        "rows_of_each_process_go_to_the_stages_without_a_copy",
        "stages_of_one_runtime_write_what_they_have",
    ]
    run(names, islands=1)
    run(["stages_of_the_same_processes_have_other_placements"], islands=1, devices=4)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("ranks", "name"), [(r, n) for r in (2, 3) for n in names_of(r)])
def test_parity(ranks, name):
    run([name], processes=ranks)
