"""A measured run as a timeline: its spans have to be those of the network."""

import pytest

from shardc.errors import PipelineError
from shardc.pipeline.schedule.methods import make_schedule
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.recorded import recorded
from shardc.pipeline.schedule.simulate import simulate


def test_a_simulated_run_recorded_is_the_same_run():
    net = network(make_schedule("1f1b", 3, 4))
    timeline = simulate(net, lambda action: 1.0)
    spans = [span._replace(start=span.start + 5, end=span.end + 5) for row in timeline.spans for span in row]
    found = recorded(net, spans, 5.0)
    assert (found.spans, found.makespan, found.peaks) == (timeline.spans, timeline.makespan, timeline.peaks)


def test_spans_that_are_not_those_of_the_network_are_refused():
    with pytest.raises(PipelineError, match="recorded: 0 spans of actor 0"):
        recorded(network(make_schedule("1f1b", 2, 2)), [], 0.0)
