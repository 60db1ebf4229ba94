"""A call of one program as SVG or PNG: what its time goes to, and the bytes in memory, from begin to end."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from shardc.errors import ArgumentError
from shardc.plan.plan import SpmdPlan
from shardc.report.chart import scale_of
from shardc.report.page.course import BUCKETS, KINDS, Course, course_of
from shardc.report.page.equations import program_rows
from shardc.report.picture import INK, LINE, PALE, picture_file
from shardc.report.tables import bytes_text, percent_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _LEFT, _RIGHT, _HEAD, _FOOT = 9.0, 1.9, 0.25, 0.75, 0.4
"""Inches of the picture, of the names at the left, and of the margins."""
_ROW, _MEMORY, _GAP = 0.24, 1.3, 0.12
"""Inches of a row of time, of the memory, and between them."""
_MEMORY_COLOUR: Final = "#6f86a0"


def draw_program(plan: SpmdPlan, path: str | PathLike[str]) -> None:
    """Write a picture of a call to a file.

    Args:
      plan: of one program.
      path: ends in `.svg` or `.png`.

    Raises:
      ArgumentError: another ending, or matplotlib is not installed.
    """
    with picture_file(Path(path), ArgumentError) as save:
        save(_figure(plan, course_of(program_rows(plan), plan.profile())))


def _figure(plan: SpmdPlan, course: Course) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    tall = _ROW * len(course.shares)
    height = _HEAD + tall + _GAP + _MEMORY + _FOOT
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")

    def axes(bottom: float, size: float) -> Axes:
        plot = _WIDTH - _LEFT - _RIGHT
        made = figure.add_axes((_LEFT / _WIDTH, bottom / height, plot / _WIDTH, size / height))
        made.set_xlim(0, BUCKETS)
        made.tick_params(length=0, labelsize=7, colors=PALE)
        for side in made.spines.values():
            side.set_visible(False)
        return made

    _draw_times(course, axes(_FOOT + _MEMORY + _GAP, tall))
    _draw_memory(plan, course, axes(_FOOT, _MEMORY))
    time, hbm = plan.time, plan.mesh.topology.hbm
    overlap = f", of which {seconds_text(time.overlapped)} overlap" if time.overlapped else ""
    host = f", {seconds_text(time.host)} moving to and from host memory" * bool(time.host)
    launch = f", {seconds_text(time.launch)} launching (not drawn)" * bool(time.launch)
    lines = (
        f"{seconds_text(plan.seconds)} a call: {seconds_text(time.computing)} computing, {seconds_text(time.moving)} "
        f"in collectives{overlap}{host}{launch}",
        f"peak memory {bytes_text(plan.memory.peak)} of {bytes_text(hbm)} ({percent_text(plan.memory.peak / hbm)})",
    )
    figure.text(
        0.15 / _WIDTH,
        1 - 0.12 / height,
        f"{plan.program.name} on {plan.mesh}",
        size=10,
        weight="bold",
        color=INK,
        va="top",
    )
    for i, line in enumerate(lines):
        figure.text(0.15 / _WIDTH, 1 - (0.34 + 0.17 * i) / height, line, size=8, color=PALE, va="top")
    return figure


def _draw_times(course: Course, axes: Axes) -> None:
    """Draw a row for each kind: the height of a bar is its share of that part of the call."""
    axes.set_ylim(len(course.shares), 0)
    axes.set_xticks([])
    axes.set_yticks([i + 0.5 for i in range(len(course.shares))], [KINDS[kind][0] for kind in course.shares])
    axes.tick_params(axis="y", labelcolor=INK)
    for i, (kind, shares) in enumerate(course.shares.items()):
        axes.axhspan(i + 0.06, i + 0.94, color="#f4f5f7", lw=0, zorder=0)
        axes.stairs(
            i + 0.94 - 0.88 * shares, np.arange(BUCKETS + 1), baseline=i + 0.94, fill=True, color=KINDS[kind][1], lw=0
        )


def _draw_memory(plan: SpmdPlan, course: Course, axes: Axes) -> None:
    hbm, fullest = plan.mesh.topology.hbm, float(course.bytes.max())
    near = fullest > hbm / 3
    axes.set_ylim(0, 1.05 * (max(hbm, fullest) if near else fullest) or 1.0)
    axes.stairs(course.bytes, np.arange(BUCKETS + 1), fill=True, color=_MEMORY_COLOUR, lw=0)
    axes.axvline(course.peak + 0.5, color=INK, lw=0.6)
    if near:
        axes.axhline(hbm, color="#b5482a", lw=0.9, ls="--")
    axes.set_yticks([fullest], [f"memory, {bytes_text(fullest)}"])
    axes.tick_params(axis="y", labelcolor=INK)
    places, texts, unit = scale_of(course.extent, 9, seconds=True)
    xs = [place / course.extent * BUCKETS for place in places]
    axes.set_xticks(xs, texts)
    axes.set_xlabel(unit, size=7, color=PALE, labelpad=2)
    for x in xs:
        axes.axvline(x, color=LINE, lw=0.5, zorder=0)
