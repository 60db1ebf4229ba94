"""The status line of a run: its progress, and which process waits for which."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def status_text(statuses: Mapping[int, str]) -> str:
    """The reports of the processes in one line: `step 12 | loss 3.20 | 5,300 tokens/s | process 0 waits for ...`."""
    said = {p: _facts(text) for p, text in sorted(statuses.items()) if text and p >= 0}
    parts = [_first(said, "step", "step {}"), _first(said, "loss", "loss {:.2f}"),
             _first(said, "tokens", "{:,.0f} tokens/s")]  # fmt: skip
    parts += [f"process {p} waits for {facts['waits']}" for p, facts in said.items() if facts.get("waits")]
    parts += [f"process {p}: {facts['fault']}" for p, facts in said.items() if "fault" in facts]
    return " | ".join(filter(None, parts))


def _facts(text: str) -> dict[str, Any]:
    """The facts that a process reports; if that failed, its error as the fact `fault`."""
    try:
        return json.loads(text)
    except ValueError:
        return {"fault": text}


def _first(said: Mapping[int, Mapping[str, Any]], name: str, text: str) -> str:
    """The fact as reported by the lowest process that has it."""
    for facts in said.values():
        if name in facts:
            return text.format(facts[name])
    return ""
