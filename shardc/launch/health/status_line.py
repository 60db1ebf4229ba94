"""The status line of a run: its progress, and which process waits for which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardc.launch.health.figures import RunFigures

_SLOW: Final = 0.1
"""The part of the time from which on the slowest process is named."""


def status_text(figures: RunFigures, said: Mapping[int, Mapping[str, Any]]) -> str:
    """The figures and reports in one line: `step 12 | loss 3.20 | 5,300 tokens/s | process 0 waits for ...`."""
    numbers = {"step {}": figures.step, "loss {:.2f}": figures.loss, "{:,.0f} tokens/s": figures.tokens_per_second}
    parts = [text.format(x) for text, x in numbers.items() if x is not None]
    if figures.slowest is not None and figures.slowest.share >= _SLOW:
        parts.append(f"all wait for process {figures.slowest.process}, {figures.slowest.share:.0%} of the time")
    parts += [f"process {p} waits for {facts['waits']}" for p, facts in said.items() if facts.get("waits")]
    parts += [f"process {p}: {facts['fault']}" for p, facts in said.items() if "fault" in facts]
    return " | ".join(parts)
