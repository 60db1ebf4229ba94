"""Charts as traces: their events are well-formed, and have the times of the spans."""

import json

import pytest

from shardc.errors import PipelineError
from shardc.report.trace_file import trace_events, write_trace
from tests.report.charts import chart


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


@pytest.mark.parametrize("name", ["step.pdf", "step.png", "step.svg", "step.html", "step"])
def test_other_endings_are_refused(shown, tmp_path, name):
    with pytest.raises(PipelineError) as caught:
        write_trace(shown, tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name}: a trace has to be a .json file."
    assert not (tmp_path / name).exists()
