"""Values of options: numbers, meshes, costs. What is none is an error of one line that names the option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from shardc.pipeline.schedule.costs import StageCosts


def number(kind: type[int] | type[float], least: float, wanted: str, *, above: bool = False) -> Callable[[str], Any]:
    """The reader of a finite number of `least` or more, or above it."""

    def read(text: str) -> Any:
        try:
            found = kind(text)
        except ValueError:
            found = kind(least) - 1
        if not least <= found < float("inf") or (above and found == least):
            raise click.BadParameter(f'"{text}" is not {wanted}')
        return found

    return read


positive = number(int, 1, "a whole number of 1 or more")
count = number(int, 0, "a whole number of 0 or more")
time = number(float, 0, "a time of 0 or more")
seconds = number(float, 0, "a time of more than 0 seconds", above=True)
_cost = number(float, 0, "a cost of 0 or more")
_registers = number(int, 0, 'a whole number of 0 or more, or "auto"')


def mesh(text: str) -> dict[str, Any]:
    """Sizes of axes: `data=4,model=2`."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(axis.isidentifier() and n.isdecimal() and int(n) for axis, _, n in pairs):
        raise click.BadParameter(f'"{text}" is not a mesh; write data=4,model=2')
    axes = [axis for axis, _, _ in pairs]
    if twice := [axis for axis in dict.fromkeys(axes) if axes.count(axis) > 1]:
        raise click.BadParameter(f'"{text}" has axis {", ".join(twice)} twice')
    return {axis: int(n) for axis, _, n in pairs}


def sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def registers(text: str) -> int | str:
    return text if text == "auto" else _registers(text)


def costs(text: str) -> StageCosts:
    """Times of F, B, W for all stages, or for each: `1,1,1;2,1,1`."""
    rows = [[_cost(c) for c in row.split(",")] for row in text.split(";")]
    if any(len(row) != 3 for row in rows):
        raise click.BadParameter(f'"{text}" has to be three numbers F,B,W')
    return StageCosts.read(rows)


def processes(text: str) -> tuple[int | None, int | None]:
    """The least number of processes, and the number to start: of `2:4`, of `4`, or under a cluster of `2:`."""
    least, colon, most = text.rpartition(":")
    read = number(int, 1, "a whole number of 1 or more, or two, the least and the most: 2:4")
    found = read(least) if colon else None, read(most) if most or not colon else None
    if found[0] and found[1] and found[0] > found[1]:
        raise click.BadParameter(f'"{text}": the least, {found[0]}, is more than the most, {found[1]}')
    return found


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def restarts(text: str) -> tuple[int, float]:
    """How many restarts, and within how many seconds: `3`, or `3/1h`."""
    most, slash, within = text.partition("/")
    wanted = "a whole number of 0 or more, or one within a time: 3/1h, with s, m, h or d"
    if slash and within[-1:] not in _UNITS:
        raise click.BadParameter(f'"{text}" is not {wanted}')
    seconds = number(float, 0, wanted, above=True)(within[:-1]) * _UNITS[within[-1]] if slash else float("inf")
    return number(int, 0, wanted)(most), seconds


def port(text: str) -> str:
    """A port, or an address with a port."""
    return f":{text}" if text.isdecimal() else address(text)


def address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise click.BadParameter(f'"{text}" is not an address with a port, such as a:4711')
    return text
