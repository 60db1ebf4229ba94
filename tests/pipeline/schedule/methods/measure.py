"""A schedule's figures, as the simulator gives them."""

from typing import NamedTuple

from shardc.pipeline.schedule.check import check_schedule
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.simulate import peak_activations, simulate


class Figures(NamedTuple):
    makespan: float
    bubble: float
    span: float  # the worst rank's, first to last action
    peaks: tuple[int, ...]
    messages: int


def measure(schedule, costs=(1, 1, 1), latency=0.0):
    assert check_schedule(schedule) == []
    costs = StageCosts.read(costs, schedule.stages)
    timeline = simulate(network(schedule), costs, lambda channel: (latency, 0.0))
    peaks = peak_activations(schedule, timeline)
    return Figures(timeline.makespan, timeline.bubble, max(timeline.bubble_per_rank), peaks, timeline.messages)
