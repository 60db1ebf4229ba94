"""An action of a pipeline: one task of one stage on one microbatch. `2F0` is stage 2, forward, microbatch 0."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

KINDS: Final = {"F": "forward", "B": "full backward", "I": "input gradient", "W": "weight gradient"}
"""The letters of torch.distributed.pipelining, so that schedules can be exchanged. B is I and W in one task."""

_ACTION: Final = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")


class Action(NamedTuple):
    """One task of one stage on one microbatch. Prints as it parses.

    Examples:
      >>> str(Action(2, "F", 0)), Action.parse("2F0")
      ('2F0', Action(stage=2, kind='F', microbatch=0))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Parse an action. Raises ValueError if the text is not one."""
        found = _ACTION.fullmatch(text.strip())
        if not found:
            raise ValueError(f'"{text}" is not an action; write <stage><F|B|I|W><microbatch>, such as 2F0.')
        stage, kind, microbatch = found.groups()
        return Action(int(stage), kind, int(microbatch))
