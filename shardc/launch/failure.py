"""Failures of processes: their order, and how they are printed."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

_FATE: Final = "JAX distributed service detected fatal errors"
"""Text that jaxlib prints when it ends a process because another one died."""
_OTHER_CALL: Final = "gloo::EnforceNotMet"
"""Text that Gloo prints when it ends a process because another one came to a collective with another size."""
_HEAD_START: Final = 0.5
"""Seconds subtracted from the time of a death: other processes see its closed connections before the launcher sees
its end."""
SETTLE: Final = 0.3
"""Seconds for which a failure waits for others of the same cause."""
LOST: Final = 75
"""The exit code of a run that has lost a process: EX_TEMPFAIL of sysexits.h, another try may succeed."""
DISAGREE: Final = 76
"""The exit code if the processes disagree: EX_PROTOCOL, another try does the same."""
_CAUSE_SECONDS: Final = 3.0
"""Seconds for which a failure that follows from another one waits for that one."""


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
    def may_follow(self) -> bool:
        """Whether another process may have caused this failure."""
        return self.follows or self.is_fate or self.is_of_gloo

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key of failures: the smallest is the cause of the others."""
        killed = self.why.startswith("killed") and self.code != 128 + signal.SIGABRT
        return self.may_follow, not self.final, self.when - _HEAD_START * killed


class Losses:
    """Failures that wait for their cause: the first to be reported need not be the first that happened."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []

    def add(self, failure: Failure) -> None:
        self._failures.append(failure)

    def __bool__(self) -> bool:
        return bool(self._failures)

    def is_due(self, now: float) -> bool:
        """Whether a failure has waited long enough."""
        return any(now >= f.when + (_CAUSE_SECONDS if f.may_follow else SETTLE) for f in self._failures)

    def take(self, processes: Collection[int] | None = None) -> list[Failure]:
        """Take the failures of these processes, or all. The first one is the cause."""
        taken = [f for f in self._failures if processes is None or f.process in processes]
        self._failures = [f for f in self._failures if f not in taken]
        return sorted(taken, key=lambda f: f.order)


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
