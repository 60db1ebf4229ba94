"""The picture of one program: a row for each part of its time, and the memory."""

import sys
import xml.etree.ElementTree as ET

import pytest

from shardc.errors import ArgumentError
from tests.report.page import plans

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("make", [plans.spmd, plans.with_loops, plans.offloaded])
def test_an_svg_says_what_the_plan_says(make, tmp_path):
    plan = make()
    plan.draw(tmp_path / "plan.svg")
    texts = {"".join(t.itertext()).strip() for t in ET.parse(tmp_path / "plan.svg").getroot().iter(f"{SVG}text")}
    assert {
        f"{plan.program.name} on {plan.mesh}",
        "reading and writing memory",
        *{c.kind for c in plan.collectives},
    } <= texts
    assert any(text.startswith("peak memory ") for text in texts)
    assert ("moving to and from host memory" in texts) is bool(plan.time.host)
    assert any("launching (not drawn)" in text for text in texts) is bool(plan.time.launch)


def test_a_png_and_other_endings(tmp_path, monkeypatch):
    plan = plans.spmd()
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ArgumentError, match=r"plan\.pdf: a picture has to be a \.svg or \.png file"):
        plan.draw(tmp_path / "plan.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match="pictures need matplotlib"):
        plan.draw(tmp_path / "plan.svg")
