"""Calls that several processes make together: how they are written, and the error if they differ. Texts only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardc.errors import DisagreementError, all_offenders


def processes_text(processes: Sequence[int]) -> str:
    """`process 1` or `processes 0, 2`."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def members_text(processes: Sequence[int]) -> str:
    """Processes in few characters: `0,1`, or `0-7,9`."""
    runs: list[list[int]] = []
    for p in processes:
        if runs and runs[-1][-1] + 1 == p:
            runs[-1].append(p)
        else:
            runs.append([p])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def members_of(text: str) -> list[int]:
    """The processes that `members_text` has written."""
    runs = [list(map(int, part.split("-"))) for part in text.split(",")]
    return [p for run in runs for p in range(run[0], run[-1] + 1)]


MOST: Final = 12
"""The most lines of an error about facts that differ."""


def refuse_unlike(
    name: str, processes: Sequence[int], said: Sequence[Mapping[str, str]], where_known: bool = False
) -> None:
    """Raise DisagreementError if processes have not the same facts; it has a line for each fact that differs.

    Args:
      name: what they have to agree on, for errors.
      processes, said: the processes, and the facts of each by name.
      where_known: whether a fact may be missing in some of them, which then agree with the others.
    """
    lines: list[str] = []
    for fact in dict.fromkeys(f for each in said for f in each):
        groups: dict[str, list[int]] = {}
        for p, each in zip(processes, said, strict=True):
            if fact in each or not where_known:
                groups.setdefault(each.get(fact, "nothing"), []).append(p)
        if len(groups) > 1:
            lines.append(f"{fact}: {'; '.join(f'{processes_text(ps)}: {value}' for value, ps in groups.items())}")
    if len(lines) > MOST:
        lines = [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} more"]
    if lines:
        raise DisagreementError(all_offenders(f"{name}: the processes of this run differ in", lines))


def calls_of(members: Sequence[int]) -> str:
    """The name by which calls of these processes are gathered: they are counted together, so that unlike ones meet."""
    return f"calls of {members_text(members)}"


def call_text(call: str, facts: Any, plan: str = "") -> str:
    """The text that is gathered at a call: its name, what it shares, and the digest of the plan that it launches."""
    return json.dumps({"the call": call, "the plan": plan, "facts": facts})


def refuse_other_calls(name: str, texts: Mapping[int, str]) -> None:
    """Raise DisagreementError if these processes do not make the same call, or launch other plans; `texts` are those of
    `call_text`, by process."""
    said = [json.loads(text) for text in texts.values()]
    for fact in ("the call", "the plan"):
        refuse_unlike(name, list(texts), [{fact: each[fact]} for each in said])
