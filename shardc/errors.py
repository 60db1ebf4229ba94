"""Errors that shardc raises for a mistake of its user. One shallow tree; a test pins every message.

A message says who (function, source line), where (argument path), what (shape, placement, mesh), which rule was broken
with its numbers, and a fix. One error lists all offenders.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path


class ShardcError(Exception):
    """Base of all errors that shardc raises on purpose."""


class PlacementError(ShardcError, ValueError):
    """An invalid placement: wrong axis, wrong rank, S on a scalar, P where the value cannot be partial."""


class ForbiddenMoveError(PlacementError):
    """A program that has to move over an axis what `forbid=` says may not; or a compiled one that does."""


class ArgumentError(ShardcError, TypeError):
    """A call or a decorator whose arguments do not fit the function: misspelt names, clashing pins, foreign arrays."""


class MeshError(ShardcError, ValueError):
    """A mesh that the machine or the topology cannot provide."""


class TracingError(ShardcError, RuntimeError):
    """Something in the function that cannot run on a mesh, such as an ordered effect on several devices."""


class SignatureError(ShardcError, RuntimeError):
    """Signatures found for an operation without a rule that are wrong for the values of a call."""


class PipelineError(ShardcError, ValueError):
    """An invalid pipeline: a bad schedule, too few credits, too little memory, stages that do not fit. Or a run of one
    that was stopped.

    Attributes:
      process: the other process of the run that stopped it; None if there is none.
    """

    def __init__(self, message: str, process: int | None = None) -> None:
        super().__init__(message)
        self.process = process


class StageMemoryError(PipelineError):
    """By the estimate that cutting uses, no cut into this many stages fits the memory."""


class StepFailedError(ShardcError, RuntimeError):
    """A step that failed at run time. The message says which arguments are intact and which donated ones are lost."""


class PipelineTaskError(StepFailedError):
    """A pipeline task that failed at run time; the exception that it raised is the cause.

    Attributes:
      actor: number of the actor that ran it.
      label: of the step, such as the Action `2F0`.
      source: origin of the task; empty if unknown.
      round: of the run; 0 in a call of a pipeline.
    """

    def __init__(self, message: str, actor: int, label: object, source: str, round: int = 0) -> None:
        super().__init__(message)
        self.actor = actor
        self.label = label
        self.source = source
        self.round = round


class CheckError(ShardcError, RuntimeError):
    """A compiled program that computes other numbers than one device, found by `check="first"`.

    Attributes:
      report: what `compiled.check` gives.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class ClusterError(ShardcError, RuntimeError):
    """Processes that cannot run together: one never came, an address is in use, a secret or an environment is wrong."""


class DisagreementError(ClusterError):
    """Processes of one run that differ where they must be equal: plan, arguments, JAX's version or settings."""


class PeerLostError(StepFailedError):
    """A process of the run that died or fell silent. The arguments of the failed step are unchanged.

    Attributes:
      process: its number.
    """

    def __init__(self, message: str, process: int) -> None:
        super().__init__(message)
        self.process = process


class FlowError(ShardcError, ValueError):
    """An invalid dataflow: a round that no order of rounds can run, a node whose result is not what it declared."""


class RoundFailedError(StepFailedError):
    """A dataflow that failed while it ran; the exception of its node is the cause.

    Attributes:
      node: the name of the node that failed.
      round: the round that it was in.
      rounds: the rounds that were complete.
      state: the state after them; None if a part of it is lost.
      given: what each of them gave.
    """

    def __init__(self, message: str, node: str, round: int, rounds: int, state: object, given: object) -> None:
        super().__init__(message)
        self.node = node
        self.round = round
        self.rounds = rounds
        self.state = state
        self.given = given


class RunEnds(SystemExit):  # nothing is wrong
    """The end of a run that SIGTERM has asked to end: all its processes have saved a step. Its exit code is 143.

    Attributes:
      step: the step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(143)
        self.step = step


class CheckpointError(ShardcError, RuntimeError):
    """A checkpoint that cannot be written, or one that does not hold the state that is asked for."""


class ShardcWarning(UserWarning):
    """An expensive choice that is easy to avoid: given once for each function."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised for or while they were handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_of_another_process(error: BaseException) -> bool:
    """Whether an error follows from the loss or the failure of another process of the run."""
    return any(
        isinstance(e, PeerLostError) or (isinstance(e, PipelineError) and e.process is not None) for e in causes(error)
    )


@contextmanager
def writing(path: str | PathLike[str]) -> Generator[None]:
    """A context in which a file that a user names is written.

    Raises:
      ArgumentError: the file cannot be written there.
    """
    try:
        yield
    except OSError as error:
        folder = Path(path).parent
        why = error.strerror if folder.is_dir() else f"there is no folder {folder}"
        raise ArgumentError(f"{path} cannot be written: {why}.") from None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`' Did you mean "model"?'` if one of `words` is close to `word`, else an empty string."""
    near = difflib.get_close_matches(word, [w for w in words if w != word], n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def number_text(count: int, noun: str) -> str:
    """`1 array`, `2 arrays`, `0 matches`, `3 boundaries`."""
    stem, end = (noun[:-1], "ies") if noun.endswith("ry") else (noun, "es" if noun.endswith(("s", "ch")) else "s")
    return f"{count} {noun if count == 1 else stem + end}"


def all_offenders(head: str, offenders: Sequence[str]) -> str:
    """One message for all offenders: `head`, then one indented line (or block) for each."""
    blocks = ["  " + o.replace("\n", "\n  ") for o in offenders]
    return "\n".join([head, *blocks])
