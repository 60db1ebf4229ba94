"""A chart as SVG or PNG: for each actor planned above measured, and below them the registers in use of each channel.

It is drawn by matplotlib, an optional dependency. Text and traces do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardc.errors import PipelineError, ShardcError, writing
from shardc.report.chart import Chart, Track, scale_of
from shardc.report.tables import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, LINE = "#22262c", "#6b7280", "#d6d9de"
_FILL, _STEP = "#c9d6e4", "#b5482a"
_SIZE: Final = 7.0
"""Font size of the small text, points."""
_BOLD: Final = 8.5
"""That of the names of rows."""
_LETTER: Final = 0.62
"""Width of a letter, in font sizes."""
_ROW, _GAP, _CHANNEL = 0.2, 0.1, 0.2
"""Heights of a run's row, of the gap between ranks, and of a channel, inches."""
_POINTS: Final = 72
"""Points per inch."""
_MOST: Final = 0.5
_MOST_CHANNELS: Final = 64
_DRAWN: Final = (".svg", ".png")
_SETTINGS: Final[dict[Any, Any]] = {"svg.fonttype": "none", "svg.hashsalt": "shardc", "font.family": ["DejaVu Sans"]}


def draw_picture(chart: Chart, path: str | Path) -> None:
    """Write a picture of the chart to a file.

    Args:
      chart: the runs.
      path: ends in `.svg` or `.png`.

    Raises:
      PipelineError: another ending, or matplotlib is not installed.
    """
    with picture_file(Path(path)) as save:
        save(_figure(chart))


@contextmanager
def picture_file(
    path: Path, error: type[ShardcError] = PipelineError
) -> Generator[Callable[[Figure], None], None, None]:
    """A context in which figures are made. Gives a function that writes one to the file.

    Raises:
      ShardcError: an `error`, for another ending than `.svg` or `.png`, or if matplotlib is not installed.
    """
    if path.suffix.lower() not in _DRAWN:
        raise error(f"{path}: a picture has to be a .svg or .png file.")
    try:
        import matplotlib as mpl  # noqa: PLC0415  # an extra
    except ImportError:
        raise error(
            f'{path}: pictures need matplotlib, which is not installed: pip install "shardc[report]". '
            "The timeline as text and the trace do not need it."
        ) from None
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    with mpl.rc_context(_SETTINGS), writing(path):
        yield lambda figure: figure.savefig(path, dpi=150, metadata=metadata)


def _figure(chart: Chart) -> Figure:
    """The figure: head, actors and channels from top to bottom, sizes in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows, runs = len(chart.rows), len(chart.tracks)
    channels = chart.channels[:_MOST_CHANNELS]
    actions = max(sum(s.end > s.start for s in chart.spans(chart.tracks[0], row)) for row in chart.rows)
    left, right, foot, between = _left(chart, channels), 1.4, 0.42, 0.4
    plot = min(20.0, max(8.0, 0.2 * actions))
    lines = -(-len(_kinds_drawn(chart)) // _legend_columns(chart, left + plot + right))
    head = 0.51 + 0.17 * (runs + lines) + 0.3 * (not _alike(chart))
    tall = rows * (runs * _ROW + _GAP)
    low = len(channels) * _CHANNEL
    width, height = left + plot + right, head + tall + between + low + foot
    figure = Figure(figsize=(width, height), facecolor="white")

    def axes(bottom: float, size: float) -> Axes:
        made = figure.add_axes((left / width, bottom / height, plot / width, size / height))
        made.set_xlim(0, 1)
        made.tick_params(length=0, labelsize=_SIZE, colors=PALE)
        for side in made.spines.values():
            side.set_visible(False)
        return made

    upper = axes(foot + low + between, tall)
    _draw_rows(chart, upper, plot, left)
    if channels:
        lower = axes(foot, low)
        _draw_channels(chart, channels, lower)
        _draw_scale(chart, (upper, lower), plot)
    else:
        _draw_scale(chart, (upper,), plot)
    _draw_head(chart, figure, width, height)
    return figure


def _left(chart: Chart, channels: Sequence[int]) -> float:
    """Inches for the names of actors, with those of runs beside them, and of channels."""
    lines = [line for row in chart.rows for line in chart.row_text(row).split(", ")]
    names = _width(max(lines, key=len), _BOLD) / _POINTS + 0.2 + (0.65 if len(chart.tracks) > 1 else 0.0)
    return max(1.6, names, *(_width(chart.channel_text(c)) / _POINTS + 0.2 for c in channels))


def _kinds_drawn(chart: Chart) -> dict[str, str]:
    spans = (s for t in chart.tracks for row in chart.rows for s in chart.spans(t, row) if s.end > s.start)
    found = {chart.kind(s.label) for s in spans}
    return {kind: text for kind, text in chart.kinds.items() if kind in found}


def _legend_columns(chart: Chart, width: float) -> int:
    """The kinds that stand in a line of the legend."""
    widest = max((_width(f"{name}___", 8) for name in _kinds_drawn(chart).values()), default=1)
    return max(1, int((width - 0.3) * _POINTS / widest))


def _alike(chart: Chart) -> bool:
    return len(set(chart.spans_of_time)) == 1


def _draw_head(chart: Chart, figure: Figure, width: float, height: float) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure.text(0.15 / width, 1 - 0.12 / height, chart.title, size=10, weight="bold", color=INK, va="top")
    for i, track in enumerate(chart.tracks):
        y = 1 - (0.36 + 0.17 * i) / height
        figure.text(0.15 / width, y, chart.headline(track), size=8, color=PALE, va="top")
    handles = [Patch(color=chart.colours[k], label=text) for k, text in _kinds_drawn(chart).items()]
    if chart.has_chunks:
        handles.append(Patch(color=_lighter(PALE, 1), label="lighter: a rank's later stages"))
    if any(chart.is_unknown(t, row) for t in chart.tracks for row in chart.rows):
        handles.append(Patch(facecolor="white", edgecolor=LINE, hatch="////", label="hatched: unknown time"))
    figure.legend(
        handles=handles, ncols=min(len(handles), _legend_columns(chart, width)), loc="upper left", borderpad=0,
        borderaxespad=0, frameon=False, fontsize=8,
        bbox_to_anchor=(0.15 / width, 1 - (0.38 + 0.17 * len(chart.tracks)) / height),
        handlelength=1.0, handleheight=1.0, handletextpad=0.4, columnspacing=1.2, labelcolor=INK,
    )  # fmt: skip


def _draw_rows(chart: Chart, axes: Axes, plot: float, left: float) -> None:
    runs = len(chart.tracks)
    step = runs * _ROW + _GAP
    axes.set_ylim(len(chart.rows) * step, 0)
    axes.set_yticks([])
    for at, row in enumerate(chart.rows):
        top = at * step + _GAP / 2
        middle = top + runs * _ROW / 2
        axes.text(
            (0.15 - left) / plot,
            middle,
            chart.row_text(row).replace(", ", "\n"),
            size=_BOLD,
            color=INK,
            va="center",
            weight="bold",
        )
        for i, track in enumerate(chart.tracks):
            y = top + i * _ROW
            if chart.is_unknown(track, row):
                axes.axhspan(
                    y + 0.015, y + _ROW - 0.015, facecolor="white", edgecolor=LINE, hatch="////", lw=0, zorder=0
                )
            else:
                axes.axhspan(y + 0.015, y + _ROW - 0.015, color="#f4f5f7", lw=0, zorder=0)
            if runs > 1:
                axes.text(-0.06 / plot, y + _ROW / 2, track.name, size=_SIZE, color=PALE, va="center", ha="right")
            _draw_row(_TrackRow(chart, track, row, chart.spans_of_time[i], plot), axes, y)


@dataclass(frozen=True)
class _TrackRow:
    """One actor in one run.

    Attributes:
      chart, track, row: the run and the actor.
      extent: time of the whole width.
      width: inches.
    """

    chart: Chart
    track: Track
    row: int
    extent: float
    width: float


def _draw_row(row: _TrackRow, axes: Axes, y: float) -> None:
    """Draw a bar for each task of one actor in one run, with its name if that fits."""
    chart, track = row.chart, row.track
    bars: dict[str, list[tuple[float, float]]] = {}
    drawn = [s for s in chart.spans(track, row.row) if s.end > s.start]
    scale = row.width * _POINTS / row.extent if row.extent else 0.0
    names = {kind: _name_that_fits(chart, track, kind, scale) for kind in {chart.kind(s.label) for s in drawn}}
    for span in drawn:
        start, length = span.start / row.extent, (span.end - span.start) / row.extent
        kind = chart.kind(span.label)
        colour = _lighter(chart.colours[kind], chart.chunk(span.label))
        bars.setdefault(colour, []).append((start, length))
        text = names[kind](span.label)
        if text and _width(text) <= length * row.width * _POINTS:
            axes.text(
                start + length / 2, y + _ROW / 2, text, size=_SIZE, color="white" if _is_dark(colour) else INK,
                ha="center", va="center_baseline", clip_on=True,
            )  # fmt: skip
    for colour, xs in bars.items():
        axes.broken_barh(xs, (y + 0.015, _ROW - 0.03), facecolor=colour, edgecolor="white", linewidth=0.4, zorder=2)


def _width(text: str, size: float = _SIZE) -> float:
    """Width of a text and the margin beside it, points."""
    return len(text) * _LETTER * size + 2


def _name_that_fits(chart: Chart, track: Track, kind: str, scale: float) -> Callable[[Hashable], str]:
    """The longest form of name that fits most tasks of a kind; all of them use the same form."""
    each = (s for row in chart.rows for s in chart.spans(track, row))
    spans = [s for s in each if s.end > s.start and chart.kind(s.label) == kind]
    for name in (chart.label, chart.number):
        fitting = sum(_width(name(s.label)) <= (s.end - s.start) * scale for s in spans)
        if fitting >= _MOST * len(spans) or not any(chart.number(s.label) for s in spans):
            return name
    return _nothing


def _nothing(label: Hashable) -> str:
    del label
    return ""


def _draw_channels(chart: Chart, channels: Sequence[int], axes: Axes) -> None:
    """Draw a row for each channel: its registers in use as steps, where the full height is all registers."""
    axes.set_ylim(len(channels), 0)
    axes.set_yticks([i + 0.5 for i in range(len(channels))], [chart.channel_text(c) for c in channels])
    axes.tick_params(axis="y", labelsize=_SIZE, labelcolor=INK)
    about = "registers in use" + (": planned filled, measured as a line" if len(chart.tracks) > 1 else ", as planned")
    if len(channels) < len(chart.channels):
        about += f"; {len(chart.channels) - len(channels)} more channels are not drawn"
    axes.text(0, -0.35, about, size=_SIZE, color=PALE)
    axes.text(1.005, -0.35, "peak", size=_SIZE, color=PALE)
    for row, number in enumerate(channels):
        channel = chart.network.channels[number]
        peaks = [t.timeline.peaks[number] for t in chart.tracks]
        full = max(channel.registers or 0, *peaks, 1)
        axes.axhline(row + 0.92, color=LINE, lw=0.5, zorder=1)
        for i, (track, extent) in enumerate(zip(chart.tracks, chart.spans_of_time, strict=True)):
            xs, ys = _steps(track, number, extent, track.timeline.makespan)
            heights = [row + 0.92 - 0.8 * y / full for y in ys]
            if i == 0:
                axes.fill_between(xs, heights, row + 0.92, step="post", color=_FILL, lw=0, zorder=2)
            else:
                axes.step(xs, heights, where="post", color=_STEP, lw=0.8, zorder=3)
        axes.text(1.005, row + 0.55, _use_text(chart, number), size=_SIZE, color=PALE, va="center")


def _steps(track: Track, channel: int, extent: float, end: float) -> tuple[list[float], list[int]]:
    occupancy = track.timeline.occupancy[channel]
    if not extent:
        return [0.0], [0]
    xs = [0.0, *(t / extent for t, _ in occupancy), end / extent]
    ys = [0, *(n for _, n in occupancy)]
    return xs, [*ys, ys[-1]]


def _use_text(chart: Chart, number: int) -> str:
    """`2 of 3, each 1.5 KiB`: the planned peak of registers in use, and their number."""
    channel = chart.network.channels[number]
    most = chart.tracks[0].timeline.peaks[number]
    bound = ", unbounded" if channel.registers is None else f" of {channel.registers}"
    size = f", each {bytes_text(channel.bytes)}" if channel.bytes else ""
    return f"{most}{bound}{size}"


def _draw_scale(chart: Chart, axes: Sequence[Axes], plot: float) -> None:
    """Draw the time scale below; if the planned run has its own scale, draw that one above."""
    extents = chart.spans_of_time
    for i, extent in enumerate(extents if not _alike(chart) else extents[:1]):
        places, texts, unit = scale_of(extent, int(plot * 1.1), seconds=chart.seconds)
        xs = [p / extent if extent else 0.0 for p in places]
        last = i == len(extents) - 1 or _alike(chart)
        for a in axes if last else ():
            for x in xs:
                a.axvline(x, color=LINE, lw=0.5, zorder=0.5)
            a.set_xticks(xs, [""] * len(xs))
        name = f"{chart.tracks[i].name}, " if len(chart.tracks) > 1 and not _alike(chart) else ""
        label = f"{name}{unit or 'units of the costs'}"
        if last:
            axes[-1].set_xticks(xs, texts)
            axes[-1].set_xlabel(label, size=_SIZE, color=PALE, labelpad=2)
        else:
            other = axes[0].secondary_xaxis("top")
            other.set_xticks(xs, texts)
            other.tick_params(length=2, labelsize=_SIZE, colors=PALE, pad=1)
            other.spines["top"].set_visible(False)
            other.set_xlabel(label, size=_SIZE, color=PALE, labelpad=2)


def _lighter(colour: str, chunk: int) -> str:
    """The colour itself for a rank's first stage, a lighter one for each later stage."""
    part = min(0.6, 0.35 * chunk)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * part):02x}" for c in parts)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150
