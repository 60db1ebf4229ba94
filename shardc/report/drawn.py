"""What can be drawn: the text, the picture and the trace of a chart."""

from __future__ import annotations

from pathlib import Path

from shardc.report.chart import Chart
from shardc.report.chart_text import chart_text
from shardc.report.picture import draw_picture
from shardc.report.tables import WIDTH
from shardc.report.trace_file import write_trace


class Drawn:
    """A run that can be drawn: the simulated one, or a real one, planned above measured.

    Attributes:
      writes: whether this process writes files; one of several does.
    """

    writes = True

    @property
    def chart(self) -> Chart:
        """The run.

        Raises:
          ShardcError: there was none yet.
        """
        raise NotImplementedError

    def timeline(self, width: int = WIDTH) -> str:
        """The run as text: a row for each rank or actor, `width` characters to a line."""
        return chart_text(self.chart, width)

    def draw(self, path: str | Path) -> None:
        """Draws the run, and how full its channels are, into an `.svg` or `.png` file.

        Raises:
          PipelineError: another ending, or matplotlib is not installed (`pip install "shardc[report]"`).
        """
        chart = self.chart
        if self.writes:
            draw_picture(chart, path)

    def trace(self, path: str | Path) -> None:
        """Writes the run as a trace into a `.json` file, for https://ui.perfetto.dev or chrome://tracing.

        Raises:
          PipelineError: another ending.
        """
        chart = self.chart
        if self.writes:
            write_trace(chart, path)
