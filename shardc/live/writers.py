"""Where the rows of a training loop go: a terminal or plain text, a CSV file, TensorBoard, another logger."""

from __future__ import annotations

import csv
import importlib
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from time import monotonic
from typing import IO, Any, Final, Protocol, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from shardc.errors import ArgumentError
from shardc.report.tables import bytes_text, seconds_text

Row: TypeAlias = Mapping[str, float]
"""The figures after a step, by the name of their column; `step` is the first one."""

_EVERY: Final = 0.1
"""Seconds for which a terminal shows a row at least: to draw it takes longer than a fast step."""


class RowWriter(Protocol):
    """A place for rows."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class ProgressLine:
    """One line on a terminal that changes in place, without the last parts if it is narrow; elsewhere a line of text
    for each row.

    Args:
      total: steps of the loop; None: unknown.
      unit: of what the loop counts beside steps: "tokens".
    """

    def __init__(self, total: int | None, unit: str) -> None:
        self._total, self._unit, self._shown, self._text = total, unit, -math.inf, ""
        self._console = console = Console()
        wide = [BarColumn(bar_width=10), TimeRemainingColumn()] if console.width >= 60 else []
        count = [*wide[:1], MofNCompleteColumn(), *wide[1:]] if total else []
        self._room = (21 if wide else 1) + 2 * len(str(total)) + 1 if total else 0
        """Columns of the terminal before the text."""
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        self._bar = Progress(*count, text, console=console, auto_refresh=False) if console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def write(self, row: Row, waits: str = "") -> None:
        """Show a row, and who waits."""
        step = int(row["step"])
        parts = [part for part in (*_texts(row, self._unit), waits) if part]
        if self._bar is None:
            of = f"/{self._total}" if self._total else ""
            self._print(" | ".join([f"step {step:{len(str(self._total or 0))}}{of}", *parts]))
            return
        kept, parts = (1, parts) if self._total else (2, [f"step {step}", *parts])
        while len(parts) > kept and len(" | ".join(parts)) > self._console.width - self._room:
            del parts[-2 if parts[-1].startswith("loss ") else -1]
        self._bar.update(self._task, completed=step, description=" | ".join(parts))
        if monotonic() - self._shown >= _EVERY or step == self._total:
            self._bar.refresh()
            self._shown = monotonic()

    def warn(self, text: str) -> None:
        """Show a line that stays, in red."""
        self._print(f"*** {text} ***", "bold red")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()


_OWN: Final = (
    "step", "elapsed_seconds", "step_seconds", "planned_seconds", "tflops", "mfu", "memory_bytes",
    "planned_memory_bytes",
)  # fmt: skip
"""Names of columns that are no results of steps."""


def is_own_column(name: str, unit: str) -> bool:
    """Whether a column has this name already."""
    return name in _OWN or name == f"{unit}_per_second"


def _texts(row: Row, unit: str) -> list[str]:
    """The parts of a line: results first."""
    found = [f"{name} {_number_text(x)}" for name, x in row.items() if not is_own_column(name, unit)]
    if (rate := row.get(f"{unit}_per_second")) is not None:
        found.append(f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s")
    planned = [f"planned {seconds_text(row['planned_seconds'])}"] if "planned_seconds" in row else []
    measured = [f"{seconds_text(row['step_seconds'])} a step"] if "step_seconds" in row else []
    found.append(", ".join(measured + planned))
    if "tflops" in row:
        found.append(f"{row['tflops']:.3g} TFLOP/s" + (f", MFU {row['mfu']:.1%}" if "mfu" in row else ""))
    if "memory_bytes" in row:
        found.append(f"memory {bytes_text(row['memory_bytes'])}")
    elif "planned_memory_bytes" in row:
        found.append(f"memory {bytes_text(row['planned_memory_bytes'])}, planned")
    return found


def _number_text(x: float) -> str:
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.3g}"


class CsvFile:
    """A CSV file with a line for each row. A new column widens the whole file. Until the first row it stays as it was.

    Args:
      path: the file; its folder is made.
      start: rows up to this step are kept if the file is there: they are of the run that this one goes on with.

    Raises:
      ArgumentError: the file cannot be written, or is no such file.
    """

    def __init__(self, path: str | PathLike[str], start: int) -> None:
        self._name, self._path, self._columns = fspath(path), Path(path), list[str]()
        self._file: IO[str] | None = None
        self._kept: list[dict[str, Any]] = []
        """The rows of the steps before, until the first row."""
        with self._usable():
            if self._path.exists():
                with self._path.open("r+", newline="", encoding="utf-8") as file:
                    self._kept = [row for row in csv.DictReader(file) if int(row["step"]) <= start] if start else []
                self._columns = list(self._kept[0]) if self._kept else []

    @contextmanager
    def _usable(self) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            raise ArgumentError(f"shardc.progress: csv={self._name!r} cannot be used: {error!r}.") from error

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", newline="", encoding="utf-8", buffering=1)
        self._csv = csv.DictWriter(self._file, self._columns, restval="")
        self._csv.writeheader()
        self._csv.writerows(rows)

    def write(self, row: Row) -> None:
        new = [name for name in row if name not in self._columns]
        with self._usable():
            if new or self._file is None:
                rows = self._kept
                if self._file is not None:
                    self.close()
                    with self._path.open(newline="", encoding="utf-8") as file:
                        rows = list(csv.DictReader(file))
                self._columns += new
                self._rewrite(rows)
                self._kept = []
            self._csv.writerow(dict(row))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """An event file for TensorBoard, with a scalar for each column. It is made with the first row.

    Args:
      folder: as `tensorboard --logdir` takes it.

    Raises:
      ArgumentError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            library: Any = importlib.import_module("tensorboardX")
        except ImportError as error:
            raise ArgumentError(
                f'shardc.progress: tensorboard= needs tensorboardX: pip install "shardc[tensorboard]" ({error}).'
            ) from error
        self._new, self._events = partial(library.SummaryWriter, fspath(folder)), None

    def write(self, row: Row) -> None:
        events = self._events = self._events or self._new()
        for name, x in row.items():
            if name != "step":
                events.add_scalar(name, x, int(row["step"]))

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


@dataclass(frozen=True)
class Logger:
    """The function of another logger, called as `log(figures, step=3)`."""

    log: Callable[..., Any]

    def write(self, row: Row) -> None:
        self.log({name: x for name, x in row.items() if name != "step"}, step=int(row["step"]))

    def close(self) -> None:
        """The logger is the user's, who closes it."""
