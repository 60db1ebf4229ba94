"""Bubble, activations and messages against the papers: anchors/pipeline.md, 5.1 to 5.3."""

import pytest

from shardc.pipeline.schedule.methods import METHODS, make_schedule
from tests.pipeline.schedule.methods.measure import measure

COSTS = [(1, 1, 1), (1, 2, 0), (1, 1.2, 0.8), (2, 3, 1), (3, 1, 1), (0.5, 2, 1.5)]
SIZES = [(p, p * k) for p in (2, 4, 8) for k in (1, 2, 4)]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m"), SIZES)
class TestClosedForms:
    def check(self, schedule, p, m, costs, bubble, peaks, v=1):
        got = measure(schedule, costs)
        assert got.bubble == pytest.approx(bubble)
        assert got.peaks == tuple(peaks)
        assert got.messages == 2 * m * (v * p - 1)

    def test_gpipe(self, p, m, costs):
        self.check(make_schedule("gpipe", p, m), p, m, costs, (p - 1) * sum(costs), [m] * p)

    def test_1f1b(self, p, m, costs):
        peaks = [min(m, p - r) for r in range(p)]
        self.check(make_schedule("1f1b", p, m), p, m, costs, (p - 1) * sum(costs), peaks)

    def test_eager_1f1b(self, p, m, costs):
        peaks = [min(m, 2 * (p - r) - 1) for r in range(p)]
        self.check(make_schedule("eager-1f1b", p, m), p, m, costs, (p - 1) * sum(costs), peaks)

    @pytest.mark.parametrize("v", [2, 4])
    def test_interleaved(self, p, m, costs, v):
        peaks = [min(v * m, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p)]
        self.check(make_schedule("interleaved", p, m, v), p, m, costs, (p - 1) * sum(costs), peaks, v)

    @pytest.mark.parametrize("v", [2, 4])
    def test_breadth_first(self, p, m, costs, v):
        self.check(make_schedule("breadth-first", p, m, v), p, m, costs, (p - 1) * sum(costs), [v * m] * p, v)

    def test_zb_h1(self, p, m, costs):
        f, b, w = costs
        bubble = (p - 1) * (
            f + b - min(costs)
        )  # the paper's F+B-W where W is the least: none with p activations beats it
        self.check(make_schedule("zb-h1", p, m, costs=costs), p, m, costs, bubble, [p] * p)
        assert w > min(costs) or bubble == pytest.approx((p - 1) * (f + b - w))

    def test_zb_h2_waits_only_for_its_start(self, p, m, costs):
        if len(set(costs)) > 1 or m < 2 * p:
            return
        got = measure(make_schedule("zb-h2", p, m))
        assert (got.bubble, got.span, max(got.peaks)) == (p - 1, 0, 2 * p - 1)
        assert got.messages == 2 * m * (p - 1)


@pytest.mark.parametrize(
    ("name", "p", "m", "bubble", "span", "peak"),
    [  # anchors/pipeline.md 5.2, at F=B=W=1: no worse than what others' schedules give
        ("gpipe", 4, 8, 9, 9, 8),
        ("1f1b", 4, 8, 9, 9, 4),
        ("eager-1f1b", 4, 8, 9, 9, 7),
        ("interleaved", 4, 8, 9, 9, 11),
        ("breadth-first", 4, 8, 9, 9, 16),
        ("zb-h1", 4, 8, 3, 3, 4),
        ("zb-h2", 4, 8, 3, 0, 8),
        ("zb-v", 4, 8, 3, 0, 8),
        ("dualpipe-v", 4, 8, 3, 3, 9),
        ("v-half", 4, 8, 5, 5, 6),
        ("v-min", 4, 8, 11, 11, 4),
        ("zb-v", 8, 16, 7, 1, 16),
        ("dualpipe-v", 8, 16, 7, 7, 17),
        ("v-half", 8, 16, 17, 17, 10),
        ("v-half", 8, 32, 17, 17, 10),
        ("v-min", 8, 16, 23, 23, 8),  # 27 in the published schedules
        ("v-min", 8, 32, 23, 23, 8),
        ("pipedream-2bw", 4, 8, 9, 9, 4),
    ],
)
def test_measured_figures(name, p, m, bubble, span, peak):
    got = measure(make_schedule(name, p, m))
    assert got.bubble <= bubble
    assert got.span <= span
    assert max(got.peaks) <= peak
    chunks = METHODS[name].chunks
    hops = 2 * (p - 1) if METHODS[name].placement == "v" else chunks * p - 1
    assert got.messages == 2 * m * hops


def test_peaks_rank_by_rank():
    assert measure(make_schedule("interleaved", 4, 8)).peaks == (11, 9, 7, 5)
    assert measure(make_schedule("zb-h1", 4, 8)).peaks == (4, 4, 4, 4)


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@pytest.mark.parametrize("p", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("m", [1, 4, 13])
def test_memory_of_the_v_is_even_and_as_promised(name, p, m):
    held = {"zb-v": 2 * p, "v-half": p + 2, "v-min": 2 * ((p + 4) // 3)}[name]
    assert max(measure(make_schedule(name, p, m)).peaks) <= held


@pytest.mark.parametrize("latency", [0, 0.25, 0.5, 1])
def test_latency_is_hidden_by_going_ahead(latency):
    """5.3, with F=1, B+W=2, p=4, m=16."""
    costs = (1, 1, 1)
    eager = {0: 9, 0.25: 10.5, 0.5: 12, 1: 15}[latency]
    for name in ("eager-1f1b", "gpipe"):
        assert measure(make_schedule(name, 4, 16), costs, latency).bubble == eager
    assert measure(make_schedule("1f1b", 4, 16), costs, latency).bubble == {0: 9, 0.25: 16, 0.5: 23, 1: 37}[latency]
    halves = (0.5, 0.5, 0.5)
    interleaved = {0: 4.5, 0.25: 8, 0.5: 11.5, 1: 27.5}[latency]
    assert measure(make_schedule("interleaved", 4, 16), halves, latency).bubble == interleaved
    assert measure(make_schedule("zb-h1", 4, 16), costs, latency).bubble <= {0: 3, 0.25: 6, 0.5: 9, 1: 23}[latency]
