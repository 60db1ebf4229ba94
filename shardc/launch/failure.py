"""Failures of processes: their order, and how they are printed."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_FATE: Final = "JAX distributed service detected fatal errors"
"""Text that jaxlib prints when it ends a process because another one died."""
_OTHER_CALL: Final = "gloo::EnforceNotMet"
"""Text that Gloo prints when it ends a process because another one came to a collective with another size."""
_HEAD_START: Final = 0.5
"""Seconds subtracted from the time of a death: other processes see its closed connections before the launcher sees
its end."""


@dataclass(frozen=True)
class Failure:
    """How a process failed: exit code or signal, error text, last lines of output.

    Attributes:
      process: its number.
      code: exit code, as a shell gives it.
      why: in a few words.
      text: the traceback, or the message of `sys.exit`; empty if there is none.
      when: seconds of a clock of the launcher.
      follows: whether the failure of another process caused it.
      final: whether a restart cannot cure it.
      tail: the last lines of its standard error.
    """

    process: int
    code: int
    why: str
    text: str = ""
    when: float = 0.0
    follows: bool = False
    final: bool = False
    tail: Sequence[str] = ()

    @property
    def is_fate(self) -> bool:
        """Whether JAX ended this process because another one of its island had ended."""
        return any(_FATE in line for line in self.tail)

    @property
    def is_of_gloo(self) -> bool:
        """Whether Gloo ended this process; what the processes differ in, another one may say."""
        return self.code == 128 + signal.SIGABRT and any(_OTHER_CALL in line for line in self.tail)

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key of failures: the smallest is the cause of the end of the run."""
        return self.follows or self.is_fate or self.is_of_gloo, self.when - _HEAD_START * (
            self.why.startswith("killed") and self.code != 128 + signal.SIGABRT
        )


def shell_code(returned: int) -> int:
    """The exit code of a shell for a `Popen.returncode`: 128 + n for signal n."""
    return 128 - returned if returned < 0 else returned


def why_ended(returned: int) -> str:
    if returned >= 0:
        return f"ended with exit code {returned}"
    try:
        return f"killed by {signal.Signals(-returned).name}"
    except ValueError:
        return f"killed by signal {-returned}"


def failure_of(process: int, returned: int, reported: dict[str, Any] | None, when: float) -> Failure:
    """The failure of a process that ended with a code other than 0, or reported an error."""
    if reported is None:
        return Failure(process, shell_code(returned), why_ended(returned), when=when)
    return Failure(process, int(reported["code"]), reported["why"], reported["text"], when,
                   bool(reported["follows"]), bool(reported["final"]))  # fmt: skip


def prefixed(process: int, lines: Sequence[str]) -> str:
    return "\n".join(f"process {process}| {line}".rstrip() for line in lines)


def failure_text(failure: Failure, processes: int) -> str:
    """The full text of a failure. The standard error of process 0 has been shown already."""
    lines = [*failure.tail, *failure.text.splitlines()]
    shown = prefixed(failure.process, lines) if failure.process else failure.text.rstrip()
    if failure.text or processes == 1:
        return shown
    return "\n".join(filter(None, [shown, _sentence(failure)]))


def _sentence(failure: Failure) -> str:
    lost = "" if failure.why.startswith("ended") else "is lost: "
    return f"process {failure.process} {lost}{failure.why}."


def failure_line(failure: Failure) -> str:
    why = "ended by JAX, as a process of its island had ended" if failure.is_fate else failure.why
    return f"process {failure.process}| {why}"
