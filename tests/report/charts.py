"""Charts of schedules, with runs that look measured."""

import random

from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import make_schedule
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.recorded import recorded
from shardc.pipeline.schedule.simulate import simulate
from shardc.report.chart import Chart, Track

SECONDS = {"F": 1.0e-3, "B": 2.0e-3, "I": 1.1e-3, "W": 0.9e-3}
ZERO = 100.0
"""When the measured runs begin on their clock."""


def cost(label):
    return SECONDS[label.kind]


def link(channel):
    return 1e-4, 0.0


def chart(name, ranks, microbatches, slower=None, chunks=None):
    """The chart of a schedule; with `slower` beside a run that takes about so many times as long."""
    schedule = make_schedule(name, ranks, microbatches, chunks)
    net = network(schedule)
    net = net.with_registers(auto_credits(net, cost, link))
    tracks = [Track("planned", simulate(net, cost, link))]
    if slower:
        luck = random.Random(0)
        ran = simulate(net, lambda label: cost(label) * slower * luck.uniform(0.8, 1.4), link)
        spans = [s._replace(start=s.start + ZERO, end=s.end + ZERO) for row in ran.spans for s in row]
        tracks.append(Track("measured", recorded(net, spans, ZERO), "every task waited for"))
    return Chart(f"step: {schedule.name}", tuple(tracks), schedule.rank_of)
