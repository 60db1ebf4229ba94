"""A timeline as text: a row for each actor, time from left to right, idle time as dots.

For times that are round numbers, as those of schedules are. `chart_text` draws measured times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import reduce
from typing import Final

from shardc.report.tables import padded_name, wrapped_rows
from shardc.runtime.actor import Span

_DENOMINATOR: Final = 100
"""The largest denominator of a time in units of the shortest action."""
_TOO_FINE: Final = 3
"""The exact unit is too fine if it makes the shortest action wider than its label by more than this factor."""
_WIDTH: Final = 40
"""The most characters of a line per action in it."""


def draw_timeline(
    spans: Sequence[Sequence[Span]],
    *,
    width: int | None = None,
    label: Callable[[Hashable], str] = str,
    name: str = "rank",
) -> str:
    """The timeline as text. The width of an action is its duration.

    Args:
      spans: the spans of each actor, in order of time.
      width: characters of a line, after which the drawing is wrapped; None: no limit.
      label: the text of a span's label.
      name: the word for an actor.

    Returns:
      A line of times, then a line for each actor. A dot is an idle unit of time (see `unit_of`). Actions shorter than
      one unit are not drawn.
    """
    unit = unit_of(spans, label)
    if not unit:
        return ""
    drawn = [[s for s in row if round(s.end / unit) > round(s.start / unit)] for row in spans]
    shortest = min(round(s.end / unit) - round(s.start / unit) for row in drawn for s in row)
    longest = max(len(label(s.label)) for row in drawn for s in row)
    is_exact = unit == _exact(spans, min(s.end - s.start for row in spans for s in row if s.end > s.start))
    scale = -(-(longest + 1) // shortest) if is_exact else 1  # characters of a unit
    columns = round(max(s.end for row in drawn for s in row) / unit)
    heads = ["time", *(f"{name} {r}" for r in range(len(spans)))]
    margin = max(map(len, heads)) + 3
    step = _step(columns, scale, unit)
    rows = [_ruler(columns, scale, unit, step), *(_row(row, columns, scale, unit, label) for row in drawn)]
    per_line = columns if width is None else max(1, (width - margin) // scale // step) * step
    return wrapped_rows(heads, rows, per_line * scale)


def unit_of(spans: Sequence[Sequence[Span]], label: Callable[[Hashable], str] = str) -> float:
    """The time of one dot in `draw_timeline`, 0 if nothing takes time.

    It is the longest unit that divides all times. If the drawing would be very wide with it, it is 1, 2 or 5 times a
    power of ten, and times are rounded to it.
    """
    shortest = min((s.end - s.start for row in spans for s in row if s.end > s.start), default=0.0)
    if not shortest:
        return 0.0
    widest = max(len(label(s.label)) for row in spans for s in row) + 1
    end, most = max(s.end for row in spans for s in row), max(map(len, spans))
    fits = max(shortest / widest, end / (most * _WIDTH))
    exact = _exact(spans, shortest)
    if exact * _TOO_FINE >= fits:
        return exact
    power = 10.0 ** math.floor(math.log10(fits))
    return power * max(n for n in (1, 2, 5) if n * power <= fits * (1 + 1e-9) or n == 1)


def _exact(spans: Sequence[Sequence[Span]], shortest: float) -> float:
    """The longest unit that divides all times."""
    ends = {t / shortest for row in spans for s in row for t in (s.start, s.end)}
    return shortest * float(reduce(_gcd, (Fraction(t).limit_denominator(_DENOMINATOR) for t in ends), Fraction(0)))


def _gcd(a: Fraction, b: Fraction) -> Fraction:
    both = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * both), int(b * both)), both)


def _step(columns: int, scale: int, unit: float) -> int:
    """Units from one time of the ruler to the next: 1, 2, 5, 10, 20, ..."""
    widest = len(f"{columns * unit:g}") + 2
    return next(s for s in (n * 10**k for k in range(9) for n in (1, 2, 5)) if s * scale >= max(widest, 10))


def _ruler(columns: int, scale: int, unit: float, step: int) -> str:
    text = "".join(f"{f'{round(c * unit, 9):g}':<{step * scale}}" for c in range(0, columns, step))
    return text[: columns * scale]


def _row(row: Sequence[Span], columns: int, scale: int, unit: float, label: Callable[[Hashable], str]) -> str:
    text = list(("." + " " * (scale - 1)) * columns)
    for span in row:
        first, last = round(span.start / unit) * scale, round(span.end / unit) * scale
        text[first:last] = padded_name(label(span.label), last - first)
    return "".join(text)
