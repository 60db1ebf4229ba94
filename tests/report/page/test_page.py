"""The page: its data, its escaping, and itself in headless Chromium, with clicks."""

import colorsys
import html
import json
import re
import sys
from pathlib import Path
from unittest.mock import ANY

import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.dataflow.chart import flow_chart
from shardc.dataflow.page import flow_page
from shardc.errors import ArgumentError
from shardc.report.page.page import page_of
from shardc.report.tables import bytes_text, seconds_text
from shardc.sbp.placement import local_extent
from tests.dataflow.flows import SECONDS, trained
from tests.report.page import plans
from tests.report.page.browser import browse


def report(plan, tmp_path, **options):
    plan.report(tmp_path / "plan.html", **options)
    return (tmp_path / "plan.html").read_text("utf-8")


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def cards_of(text):
    """The cards of a page: name, value, note."""
    cards = re.findall(r"<dt>(.*?)</dt>\s*<dd class=\"value\">(.*?)</dd>.*?<dd>(.*?)</dd>", text, re.DOTALL)
    return [tuple(map(html.unescape, card)) for card in cards]


# ---- data


def test_nothing_of_the_user_breaks_out(tmp_path):
    text = report(plans.spmd(), tmp_path)
    assert "<img" not in text and text.count("</script>") == 2
    data = data_of(text)
    assert f"params/{plans.EVIL}" in [row["path"] for row in data["arrays"][0]["rows"]]
    assert plans.EVIL in data["program"]["texts"]
    assert html.escape(plans.EVIL, quote=False).replace('"', "&#34;").replace("'", "&#39;") in text


@pytest.mark.parametrize("make", [plans.spmd, plans.pipeline])
def test_the_page_needs_nothing_else(make, tmp_path):
    text = report(make(), tmp_path)
    assert re.findall(r"\b(?:src|href)\s*=\s*[\"'(]|@import|url\(", text) == []
    assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_it_says_what_explain_says(tmp_path):
    plan = plans.spmd()
    text = report(plan, tmp_path)
    assert html.unescape(re.search(r'<pre class="wide">(.*?)</pre>', text, re.DOTALL)[1]) == plan.explain()


def test_warnings_come_first_and_alike_notes_once(tmp_path):
    def step(params, x):
        return [p - x.mean() for p in params], x.sum()

    f = shardc.function(step, mesh=shardc.make_mesh(topology="v5p:2x2x1", data=4), in_placements={"x": {"data": S(0)}})
    page = page_of(f.plan([plans.f32(2000, 1000)] * 2, plans.f32(8, 4)))
    assert len(page.warnings) == 1 and page.warnings[0].startswith("params is returned as results but not donated")
    text = report(f.plan([plans.f32(2000, 1000)] * 2, plans.f32(8, 4)), tmp_path)
    assert text.index("not donated") < text.index("Time of a call")


def test_values_on_the_host_are_seen():
    plan = plans.offloaded()
    page = page_of(plan)
    cards = {figure.name: figure for figure in page.figures}
    assert cards["Host memory"].value == bytes_text(plan.memory.host) and page.warnings == []
    assert seconds_text(plan.time.host) in cards["Host memory"].note
    at = {row["path"]: row["placement"] for row in page.data["arrays"][0]["rows"]}
    assert [path for path, where in at.items() if where.endswith(", on the host")] == ["opt_state/mu"]
    assert "moving to and from host memory" in [kind[0] for kind in page.data["course"]["kinds"]]
    assert page_of(plans.offloaded(None)).warnings == [
        "Values live in host memory, but fake CPU devices share it: nothing is saved."
    ]


def test_a_pipeline_has_runs_ranks_and_schedule():
    plan = plans.pipeline()
    data = page_of(plan).data
    assert [m["name"] for m in data["meshes"]] == [f"stage {i}" for i in range(4)]
    assert data["schedule"] == str(plan.schedule).splitlines()
    assert len(data["ranks"]["ranks"]) == 4 and data["ranks"]["worst"] == plan.memory.worst.rank
    assert max(data["ranks"]["ranks"][plan.memory.worst.rank]["bytes"]) == plan.memory.peak
    (track,) = data["chart"]["tracks"]
    spans = [span for row in track["spans"] for span in row]
    assert max(span[-1] for span in spans) == pytest.approx(1e6, abs=1)
    assert len(spans) == sum(s.end > s.start for row in plan.simulate().spans for s in row)


def test_a_recorded_pipeline_stands_beside_the_planned_one(tmp_path, compiled_fast):
    mesh = shardc.make_mesh(pipe=2, data=2)

    def step(w, x):
        def loss(w, x):
            return (shardc.stage_boundary(jnp.tanh(x @ w)) @ w).sum()

        return shardc.accumulate(loss, microbatches=2)(w, x)

    made = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline()).compile(np.ones((8, 8)), np.ones((8, 8)))
    made.measure(np.ones((8, 8)), np.ones((8, 8)))
    text = report(made, tmp_path)
    tracks = data_of(text)["chart"]["tracks"]
    assert [t["name"] for t in tracks] == ["planned", "measured"]
    planned, measured = made.chart.tracks
    took = seconds_text(measured.timeline.makespan)
    assert cards_of(text)[:2] == [
        ("Time of a call, measured", took, "every task waited for"),
        ("Time of a call, planned", seconds_text(made.plan.seconds), ANY),
    ]
    said = f"Measured: a call took {took} (every task waited for); planned: {seconds_text(made.plan.seconds)}."
    assert said in text and planned.timeline.makespan == pytest.approx(made.plan.seconds)


def test_a_flow_and_its_run(tmp_path):
    with trained() as train:
        data = data_of(report(train.plan(jnp.zeros(4), 0), tmp_path, rounds=6, seconds=SECONDS))
        assert set(data) == {"meshes", "arrays", "chart", "program", "totals", "words"}
        assert data["chart"]["tracks"][0]["unknown"] == [False] * 6
        arrow = "\N{RIGHTWARDS ARROW}"
        paths = [row["path"] for row in data["arrays"][0]["rows"]]
        assert paths == [f"learn {arrow} learn", f"play together {arrow} learn"]
        assert "learn" in data["program"]["texts"]
        given = train.run(jnp.zeros(4), range(3), record=True)[1]
        assert [t["name"] for t in data_of(report(given, tmp_path))["chart"]["tracks"]] == ["planned", "measured"]


def test_what_is_unknown_of_a_flow_is_said_beside_its_figures(tmp_path):
    with trained() as train:
        plan = train.plan(jnp.zeros(4), 0)
        text = report(plan, tmp_path)
        about = "averaged over rounds; the time of play, test is unknown"
        assert cards_of(text)[0] == ("Time of a round", f"at least {seconds_text(plan.seconds)}", about)
        assert "The time of play, test is unknown: shardc.host(..., seconds=) says it, run(..., record=True)" in text
        assert data_of(text)["chart"]["tracks"][0]["unknown"] == [False, True, True, False, False, True]
        said = report(plan, tmp_path, seconds=SECONDS)
        times = ("Time of a round", seconds_text(plan.average(SECONDS)), "averaged over rounds")
        assert cards_of(said)[0] == times and "is unknown" not in said


def test_a_recorded_flow_says_first_what_was_measured(tmp_path):
    with trained() as train:
        given = train.run(jnp.zeros(4), range(3), record=True)[1]
        text = report(given, tmp_path)
    planned, measured = (seconds_text(track.timeline.makespan / 3) for track in given.chart.tracks)
    assert cards_of(text)[:2] == [
        ("Time of a round, measured", measured, "averaged over 3 recorded rounds, each node waited for"),
        ("Time of a round, planned", planned, "host functions as measured; 3 simulated"),
    ]
    assert f"A round took {measured}, averaged over 3 recorded rounds with each node waited for" in text


def test_one_quantity_has_one_number():
    """What is added up is said where a sum over stages stands beside the most of one device."""
    plan = plans.pipeline()
    page = page_of(plan)
    cards = {figure.name: figure for figure in page.figures}
    assert cards["Sent by a device"].value == f"at most {bytes_text(plan.bytes_per_device)}"
    assert page.data["words"]["totals"].startswith("Bytes in one call, one device of each stage added up")
    assert any(s.title == "Totals by axis and kind, one device of each stage added up" for s in page.sections)
    spmd = plans.spmd()
    words = page_of(spmd).data["words"]
    assert words["totals"] == "Bytes that each device sends in one call, and their time."
    assert sum(row[3] for row in page_of(spmd).data["totals"]) == spmd.bytes_per_device
    assert words["course"] == ""
    step = shardc.function(lambda w, x: x @ w, mesh=shardc.make_mesh(data=2))
    plan = step.plan(plans.f32(8, 8), plans.f32(8, 8))
    page, launch = page_of(plan), seconds_text(plan.time.launch)
    whole = seconds_text(plan.seconds)
    assert page.data["words"]["course"] == f" The call takes {whole}: what is drawn and {launch} of launching."
    assert page.data["course"]["extent"] == pytest.approx(plan.seconds - plan.time.launch, rel=1e-3)


def test_calls_of_a_function_in_a_round_are_counted():
    step = shardc.function(
        lambda w, x: x @ w, mesh=shardc.make_mesh(data=2), in_placements={"w": {"data": S(0)}, "x": {"data": S(1)}},
        out_placements={},
    )  # fmt: skip
    plan = shardc.flow(lambda w: (step(step(step(w, w), w), w), None)).plan(plans.f32(8, 8))
    own = plan.nodes[1].work.plan
    page = flow_page(plan, flow_chart(plan, 2))
    assert sum(row[3] for row in page.data["totals"]) == 3 * own.bytes_per_device > 0
    assert "in a round" in page.data["words"]["program"] and "without launching" in page.data["words"]["program"]


def test_of_what_a_plan_is_proved():
    (card,) = (figure for figure in page_of(plans.spmd()).figures if figure.name == "Bound")
    assert card.value.startswith(("proved optimal", "within "))
    assert card.note == "of the seconds of a call; no other plan was timed"


def test_what_is_wrong_is_said(tmp_path, monkeypatch):
    plan = plans.spmd()
    with pytest.raises(ArgumentError, match=r"plan\.pdf: a report has to be an \.html file"):
        plan.report(tmp_path / "plan.pdf")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ArgumentError, match=r'pip install "shardc\[report\]"'):
        plan.report(tmp_path / "plan.html")
    assert plan._repr_html_() is None


# ---- in a browser

CLICKS = """
await wait(() => $("#course table") && $("#program .tree") && $("#totals table"));
found.images = all("img").length;
found.bar = $("#totals .share i").getBoundingClientRect().width;
found.wider = document.documentElement.scrollWidth > innerWidth;
found.names = all("#program .tree > details > summary .name").map(e => e.textContent);
$("#program details > summary").click();
await wait(() => all("#program details .line").length);
found.opened = all("#program details .line .code").map(e => e.textContent);
$("#program details > summary").click();
type($("#program-search"), "dot_general");
found.hits = $("#program [role=status]").textContent;
found.hit = all("#program .line small")[0].textContent;
type($("#program-search"), "no such thing");
found.none = $("#program [role=status]").textContent;
const row = all("#places tbody tr").find(e => e.textContent.includes("params/down"));
row.querySelector("button").click();
found.chosen = $(".picture h3").textContent;
found.held = data.arrays.flatMap(group => group.rows).map(array => {
  const mesh = data.meshes[array.mesh], places = [];
  for (let i = 0; i < mesh.axes[0][1]; i++) for (let j = 0; j < mesh.axes[1][1]; j++)
    places.push(array.shape.map((_, dim) => extent(array, mesh, dim, {[mesh.axes[0][0]]: i, [mesh.axes[1][0]]: j})));
  return [array.path, places];
});
type($("#array-search"), "down");
found.arrays = all("#places tbody tr").length;
found.texts = NUMBERS.map(n => [bytesText(n), secondsText(n)]);
$("#tables details summary").click();
found.tables = $("#tables details").open;
"""


def test_clicks(tmp_path):
    plan = plans.spmd()
    numbers = [0, 1, 1023, 1024, 123456, 2**20 - 1, 3.2e9, 5e13, 1.5e-9, 1.26e-6, 0.0123, 0.9996, 12.6, 1234.6]
    plan.report(tmp_path / "plan.html")
    found = browse(tmp_path / "plan.html", CLICKS.replace("NUMBERS", str(numbers)))
    assert found["texts"] == [[bytes_text(n), seconds_text(n)] for n in numbers]
    assert (found["images"], found["wider"]) == (0, False) and found["bar"] > 50
    assert found["names"] == [plans.EVIL, "down", "backward", "step"]
    assert any(line.startswith("plans.py:") for line in found["opened"])
    assert re.fullmatch(r"\d+ lines", found["hits"]) and found["none"] == "0 lines"
    assert found["chosen"] == "params/down" and found["tables"]
    assert found["arrays"] == 1
    sizes, borders = plan.mesh.sizes, {b.path: b for b in plan.in_borders}
    for path, places in found["held"]:
        if path in borders:
            b = borders[path]
            at = [{"data": i, "model": j} for i in range(4) for j in range(2)]
            wanted = [
                [local_extent(n, b.placement.axes_of(d), sizes, where) for d, n in enumerate(b.aval.shape)]
                for where in at
            ]
            assert [[[a, a + n] for a, n in place] for place in wanted] == places


PIECES = """
await wait(() => $(".picture svg"));
const colourOfChip = e => getComputedStyle(e.querySelector("i")).backgroundColor;
found.chips = Object.fromEntries(all("#places .chip").map(e => [e.textContent, colourOfChip(e)]));
for (const path of ["params/down", "x"]) {
  all("#places tbody button").find(e => e.textContent === path).click();
  found[path] = [all(".picture svg:first-of-type rect.stripe").map(e => getComputedStyle(e).fill),
    all(".picture text.in").map(e => e.textContent), getComputedStyle($(".picture text.in")).fill];
}
"""


def test_pieces_have_shades_of_the_colour_of_the_axis_that_cuts_them(tmp_path):
    plans.spmd().report(tmp_path / "plan.html")
    found = browse(tmp_path / "plan.html", PIECES)

    def parts(colour):
        return [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]

    def light(colour):
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    for path, axis, pieces in (("params/down", "model = 2", 2), ("x", "data = 4", 4)):
        fills, texts, ink = found[path]
        assert len(set(fills)) == pieces and len(fills) == len(texts) == 8  # a label in each cell
        for fill in set(fills):
            hues = [colorsys.rgb_to_hls(*parts(colour))[0] for colour in (fill, found["chips"][axis])]
            assert hues[0] == pytest.approx(hues[1], abs=0.02)
            assert light(fill) / light(ink) > 4.5


RUNS = """
await wait(() => $("#run .rows svg path") && $("#schedule b") && $("#ranks svg"));
found.wider = document.documentElement.scrollWidth > innerWidth;
found.rows = all("#run .names div").filter(e => e.textContent.startsWith("rank")).length;
found.kinds = all("#run .chip").map(e => e.textContent);
const svg = $("#run .rows svg"), before = svg.getAttribute("width"), box = svg.getBoundingClientRect();
const x = box.left + box.width * data.chart.tracks[0].spans[0].find(s => s[2] === "F3")[3] / 1e6 + 0.5;
svg.dispatchEvent(new MouseEvent("mousemove", {clientX: x, clientY: box.top + 5, bubbles: true}));
found.says = $("#run .says").textContent;
const zoom = $("#run input[type=range]");
type(zoom, "4");
found.zoomed = $("#run .rows svg").getAttribute("width") / before;
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_clicks_on_a_pipeline(width, tmp_path):
    plans.pipeline().report(tmp_path / "plan.html")
    found = browse(tmp_path / "plan.html", RUNS, width)
    assert found["rows"] == 4 and not found["wider"]
    assert {"forward", "backward"} <= set(found["kinds"])
    assert found["says"].startswith("rank 0, planned, ") and "F3, forward: " in found["says"]
    assert found["zoomed"] == pytest.approx(4, rel=0.05)


def test_the_files_are_small():
    folder = Path(shardc.__file__).parent / "report" / "page"
    assert sum(p.stat().st_size for p in folder.iterdir() if p.suffix in (".js", ".css", ".html")) < 50_000
