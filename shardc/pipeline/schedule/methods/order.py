"""Orders of forwards and backwards that do not depend on costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardc.pipeline.schedule.action import Action


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then a backward and a forward in turn, then the remaining backwards.

    The rank holds at most `ahead` activations. If `ahead` is all of them, these are all forwards, then all backwards.
    """
    yield from forwards[:ahead]
    for i, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + i : ahead + i + 1]


def one_stage(rank: int, microbatches: int, ahead: int, backward: str = "B") -> Iterator[Action]:
    """`alternate` for a rank with one stage."""
    forwards = [Action(rank, "F", j) for j in range(microbatches)]
    return alternate(forwards, [Action(rank, backward, j) for j in range(microbatches)], ahead)
