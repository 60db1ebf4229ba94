"""Runs beside each other: as text word for word, as pictures and traces in what makes them well-formed."""

import json
import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from shardc.errors import PipelineError
from shardc.pipeline.schedule.action import Action
from shardc.report import picture
from shardc.report.chart import scale_of
from shardc.report.chart_text import chart_text
from shardc.report.picture import draw_picture
from shardc.report.trace_file import trace_events, write_trace
from tests.report.charts import chart

SVG = "{http://www.w3.org/2000/svg}"


# -- text


@pytest.mark.parametrize(
    ("name", "of"),
    {
        "planned": ("1f1b", 4, 8),
        "measured": ("1f1b", 2, 4, 1.2),
        "much_slower": ("zb-h1", 2, 4, 9.0),
        "chunks": ("zb-v", 2, 4, None, 2),
        "on_below": ("1f1b", 4, 24),
        "crowded": ("zb-h1", 16, 64),
    }.items(),
)
def test_text(name, of, golden):
    golden(f"chart_{name}", chart_text(chart(*of), 100))


def test_no_line_is_wider_than_asked():
    for width in (60, 100, 200):
        drawing = [n for n in chart_text(chart("zb-h1", 4, 8, 1.3), width).splitlines() if " | " in n]
        assert len(drawing) > 8 and width - 20 < max(map(len, drawing)) <= width


def test_runs_of_one_length_share_a_scale_and_others_do_not():
    assert len(set(chart("1f1b", 2, 4, 1.2).spans_of_time)) == 1
    assert len(set(chart("1f1b", 2, 4, 9.0).spans_of_time)) == 2


@pytest.mark.parametrize(
    ("extent", "most", "texts", "unit"),
    [
        (0.0346, 5, ["0", "10", "20", "30"], "ms"),
        (7.06e-4, 10, ["0", "100", "200", "300", "400", "500", "600", "700"], "us"),
        (1.0, 3, ["0", "0.5", "1"], "s"),
        (2.5e-3, 3, ["0", "1", "2"], "ms"),
        (0.0, 3, ["0"], "ns"),
    ],
)
def test_scales_are_round(extent, most, texts, unit):
    places, found, name = scale_of(extent, most, seconds=True)
    assert (found, name) == (texts, unit)
    assert all(0 <= p <= extent * (1 + 1e-9) for p in places)


def test_a_scale_without_seconds():
    assert scale_of(27.0, 4, seconds=False) == ([0.0, 10.0, 20.0], ["0", "10", "20"], "")


# -- traces


@pytest.fixture(scope="module")
def shown():
    return chart("zb-h1", 4, 8, 1.3)


@pytest.fixture(scope="module")
def events(shown):
    return json.loads(json.dumps(trace_events(shown)))["traceEvents"]


def test_every_event_has_what_perfetto_wants(events):
    wants = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "s": {"name", "cat", "pid", "tid", "ts", "id"},
        "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    }
    assert {e["ph"] for e in events} == set(wants)
    for e in events:
        assert wants[e["ph"]] <= set(e), e
        assert all(isinstance(e[k], int | float) and e[k] >= 0 for k in ("ts", "dur") if k in e), e
        assert all(isinstance(e[k], int) for k in ("pid", "tid") if k in e), e
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(pid, r + 1): f"rank {r}" for pid in (1, 2) for r in range(4)}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["planned", "measured (every task waited for)"]


def test_the_slices_are_the_spans(shown, events):
    for pid, track in enumerate(shown.tracks, 1):
        for rank, row in enumerate(track.timeline.spans):
            found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, rank + 1)]
            assert [(e["name"], e["ts"], e["dur"]) for e in found] == [
                (shown.label(s.label), s.start * 1e6, (s.end - s.start) * 1e6) for s in row
            ]


def test_slices_of_one_rank_do_not_overlap(events):
    rows = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for row in rows.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in zip(sorted(row), sorted(row)[1:], strict=False))


def test_an_arrow_for_each_message_from_inside_its_slice_into_another(shown, events):
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * shown.tracks[0].timeline.messages
    slices = [e for e in events if e["ph"] == "X"]

    def around(event):
        return [
            e for e in slices
            if (e["pid"], e["tid"]) == (event["pid"], event["tid"]) and e["ts"] < event["ts"] < e["ts"] + e["dur"]
        ]  # fmt: skip

    for number, start in starts.items():
        end = ends[number]
        (giver,), (taker,) = around(start), around(end)
        assert start["ts"] <= end["ts"] and giver["tid"] != taker["tid"]
        assert giver["args"]["microbatch"] == taker["args"]["microbatch"]


def test_the_counters_are_the_registers_in_use(shown, events):
    for pid, track in enumerate(shown.tracks, 1):
        for number in shown.channels:
            name = f"in use: {shown.network.channels[number].name}"
            found = [e for e in events if e["ph"] == "C" and (e["pid"], e["name"]) == (pid, name)]
            assert found[0]["args"] == {"registers": 0} and found[-1]["args"] == {"registers": 0}
            assert max(e["args"]["registers"] for e in found) <= track.timeline.peaks[number]


def test_a_trace_is_a_file(shown, tmp_path):
    write_trace(shown, tmp_path / "step.json")
    read = json.loads((tmp_path / "step.json").read_text())
    assert read["traceEvents"] and read["otherData"]["title"] == "step: zb-h1"


# -- pictures


@pytest.mark.parametrize(
    "of", [("1f1b", 2, 4, 1.2), ("1f1b", 2, 4, 9.0), ("zb-v", 4, 8, None, 2)], ids=["one scale", "two", "chunks"]
)
def test_an_svg_holds_ranks_channels_and_legend(of, tmp_path):
    drawn = chart(*of)
    draw_picture(drawn, tmp_path / "step.svg")
    root = ET.parse(tmp_path / "step.svg").getroot()
    assert root.tag == f"{SVG}svg"
    texts = ["".join(t.itertext()).strip() for t in root.iter(f"{SVG}text")]
    assert drawn.title in texts
    assert all(drawn.headline(t) in texts for t in drawn.tracks)
    assert all(texts.count(f"rank {r}") == 1 for r in range(len(drawn.network.actors)))
    kinds = {"1f1b": {"forward", "backward"}, "zb-v": {"forward", "input gradient", "weight gradient"}}
    assert kinds[of[0]] <= set(texts)
    assert {"activation 0\N{RIGHTWARDS ARROW}1", "stash 0"} <= set(texts)


def test_a_picture_is_the_same_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_picture(chart("1f1b", 2, 4, 1.2), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("of", [("1f1b", 2, 64), ("zb-v", 4, 8, 1.3, 2)], ids=["many", "chunks"])
def test_names_do_not_leave_their_bars(of):
    figure = picture._figure(chart(*of))
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = figure.axes[0]
    bars = [p.get_extents(axes.transData) for c in axes.collections for p in c.get_paths()]
    names = [t for t in axes.texts if t.get_text().isdigit()]
    assert len(names) > 60
    for name in names:
        inner = name.get_window_extent(renderer)
        x, y = (inner.x0 + inner.x1) / 2, (inner.y0 + inner.y1) / 2
        assert any(b.x0 <= inner.x0 and inner.x1 <= b.x1 for b in bars if b.x0 < x < b.x1 and b.y0 < y < b.y1)


def test_a_png_has_pixels(tmp_path):
    draw_picture(chart("1f1b", 2, 4), tmp_path / "step.png")
    data = (tmp_path / "step.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20], "big") > 1000


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"step\.jpg: a picture has to be a \.svg or \.png file"):
        draw_picture(chart("1f1b", 2, 4), tmp_path / "step.jpg")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipelineError, match=r'pip install "shardc\[report\]"'):
        draw_picture(chart("1f1b", 2, 4), tmp_path / "step.svg")


# -- names


def test_labels_and_kinds():
    own, several = chart("1f1b", 2, 4), chart("zb-v", 2, 4, None, 2)
    action = Action(1, "F", 3)
    assert own.label(action) == "F3" and several.label(action) == "1F3"
    assert own.label("update 1") == "U" and several.label("update 1") == "U1"
    assert own.kind("update 0.1") == "U" and own.kind("load 3") == "L" and own.kind("done 1") == "-"
    assert several.chunk(Action(3, "F", 0)) == 1 and several.chunk(Action(0, "F", 0)) == 0
