"""Charts as text, word for word."""

import pytest

from shardc.report.chart_text import chart_text
from tests.report.charts import chart


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
