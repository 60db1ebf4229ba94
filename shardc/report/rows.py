"""Rows of text under a scale of time: how a task fills its characters, and long rows going on below."""

from __future__ import annotations

from collections.abc import Sequence


def filled(name: str, room: int, *, apart: bool = True) -> str:
    """A name that takes up its room: `F0----- `; with a blank at its end if it is to stand apart from the next."""
    text = max(1, room - apart)
    return f"{name[:text]:-<{text}} "[:room]


def below(heads: Sequence[str], rows: Sequence[str], room: int) -> str:
    """Rows behind their heads, cut into parts of `room` characters that stand one below the other."""
    margin = max(map(len, heads))
    longest = max(map(len, rows))
    return "\n\n".join(
        "\n".join(f"{h:<{margin}} | {r[at : at + room]}".rstrip() for h, r in zip(heads, rows, strict=True))
        for at in range(0, longest, room)
    )
