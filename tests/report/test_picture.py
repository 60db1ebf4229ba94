"""Charts as pictures: ranks, channels and legend are in them, and names fit their bars."""

import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from shardc.errors import PipelineError
from shardc.report import picture
from shardc.report.picture import draw_picture
from tests.report.charts import chart

SVG = "{http://www.w3.org/2000/svg}"


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
