"""`shardc.progress`: a loop that shows its figures while it runs."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from shardc import compat
from shardc.arrays.remote_array import is_remote
from shardc.errors import ArgumentError, ShardcWarning, all_offenders
from shardc.live.figures import step_figures, waiting_text
from shardc.live.writers import CsvFile, Logger, ProgressLine, RowWriter, TensorBoard, is_own_column
from shardc.passes.trace.trace import where_of
from shardc.runtime.cluster import current

_log: Final = logging.getLogger("shardc")

_Steps: TypeAlias = list[tuple[int, Mapping[str, Any]]]
"""Steps with their results."""


@compat.api_boundary
def progress(  # noqa: PLR0913  # a public face
    step: Any = None,
    *,
    total: int | None = None,
    start: int = 0,
    every: int = 10,
    items: float | None = None,
    unit: str = "tokens",
    csv: str | PathLike[str] | None = None,
    tensorboard: str | PathLike[str] | None = None,
    log: Callable[..., Any] | None = None,
) -> Meter:
    """Show where a training loop is: its results, items per second, the measured time of a step beside the planned one,
    TFLOP/s, MFU, memory.

    No step waits for it: a row is read when the device has computed it, some steps later. On a terminal it is one line
    that changes in place, elsewhere a line for each row. Of several processes the first one speaks; `shardc run` shows
    the same figures, and which process waits, in its status line.

    MFU is the time that the step's matrix operations would take on all devices at the topology's rates, divided by the
    measured time; fake CPU devices, which share their cores, have none. Memory is the most that a device has had in
    use, as the backend counts it; if it does not (CPU), the plan's peak, and the line says "planned". For a pipeline
    the line says which rank waits most: as planned, or as measured if the last call was `step.measure(...)`.

    Args:
      step: the function that the loop calls: a `shardc.function`, a compiled one or a flow. Its plan gives the planned
        time, the operations and the memory. None: no such figures. Another function has none either, and a
        ShardcWarning says so.
      total: steps of the loop with those before `start`; None: unknown.
      start: steps that were done before, as `saved.last(...)` gives them.
      every: a row is shown after the first step, after each step whose number it divides, and after the last one.
      items: how many each step takes, of all processes together; their rate is shown.
      unit: what they are called: "tokens", "images".
      csv: a file for the rows: a column for each figure, times in seconds, memory in bytes. With the first
        row it is written anew if `start` is 0; else the rows after `start` are removed.
      tensorboard: a folder for events; needs `pip install "shardc[tensorboard]"`.
      log: called for each row as `log(figures, step=n)`, in the first process, by the thread of the loop: `wandb.log`,
        `mlflow.log_metrics`, `trackio.log`, or a function of yours. Figures are those of the columns of `csv`.

    Returns:
      A context manager. Its value is called after each step with the step's results by name: numbers, or arrays of one
      element. The first step compiles, and is in no rate. If a result is not finite, a line in red says since which
      step.

    Raises:
      ArgumentError: an argument is of another kind, or not in its range; the file cannot be written; tensorboardX is
        not installed. In a call: a result that is not one real number; a name that a column has already.

    Examples:
      >>> import sys
      >>> with progress(total=20, every=10) as p:
      ...     for i in range(20):
      ...         p(loss=1 / (i + 1))  # doctest: +ELLIPSIS
      step  1/20 | loss 1.0000...
      step 10/20 | loss 0.1000 | ... a step...
      step 20/20 | loss 0.0500 | ... a step...
    """
    whole = {"start": (start, 0), "every": (every, 1)} | ({} if total is None else {"total": (total, 0)})
    wrong = [
        f"{name}={n!r}: a whole number of {least} or more is needed."
        for name, (n, least) in whole.items()
        if isinstance(n, bool) or not isinstance(n, Integral) or n < least
    ]
    if not wrong and total is not None and start > total:
        wrong.append(f"start={start!r}: more than total={total!r}, which counts the steps before start too.")
    if items is not None and (isinstance(items, bool) or not isinstance(items, Real) or not 0 < items < math.inf):
        wrong.append(f"items={items!r}: a positive number is needed, or None.")
    if not isinstance(unit, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        wrong.append(f"unit={unit!r}: a text is needed.")
    for name, path in {"csv": csv, "tensorboard": tensorboard}.items():
        if path is not None and not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            wrong.append(f"{name}={path!r}: a path is needed, or None.")
    if not callable(log) and log is not None:
        wrong.append(f"log={log!r}: a function is needed that takes figures and step=, as wandb.log.")
    if not callable(step) and step is not None:
        wrong.append(f"step={step!r}: give the function that the loop calls; the number of steps is total=.")
    if wrong:
        raise ArgumentError(all_offenders("shardc.progress: arguments that do not fit", wrong))
    if step is not None and not hasattr(step, "latest"):
        text = (
            f"shardc.progress: {where_of(step)} is no function of shardc, so its planned time, operations and MFU are "
            "unknown; give the shardc.function that the loop calls, or none."
        )
        warnings.warn(text, ShardcWarning, stacklevel=compat.users_level())
    numbers = None if total is None else int(total), int(start), int(every), None if items is None else float(items)
    return Meter(_ShownLoop(step, *numbers, unit), csv, tensorboard, log)


class _ShownLoop:
    """The loop that is shown, as `progress` describes it."""

    def __init__(self, step: Any, total: int | None, start: int, every: int, items: float | None, unit: str) -> None:
        self.step, self.total, self.start, self.every, self.items, self.unit = step, total, start, every, items, unit

    def is_shown(self, step: int) -> bool:
        return step == self.start + 1 or step % self.every == 0 or step == self.total


@dataclass(frozen=True)
class _MeterRow:
    """The steps of a row, when they were computed, and the time of one of them."""

    steps: _Steps
    at: float
    seconds: float | None


class _Clock:
    """The times at which rows are computed, whatever the loop does meanwhile: each call looks, and a thread does while
    the loop waits for something else.

    A row is computed between two looks. A step's time counts from the earlier one for the row before and to the later
    one for this row, so that no step seems faster than it is.
    """

    def __init__(self) -> None:
        self._lock, self._stopped, self._thread = Lock(), Event(), None
        self._waiting: deque[tuple[float, _Steps]] = deque()
        """Rows that are not computed yet, and since when they are here."""
        self._computed: deque[_MeterRow] = deque()
        self._looked = self._changed = monotonic()
        """When rows were looked at, and found, last."""
        self._base: tuple[int, float] | None = None
        """A step, and a time at which it was not computed yet, or just so."""

    def add(self, steps: _Steps) -> None:
        self._waiting.append((monotonic(), steps))

    def computed(self) -> deque[_MeterRow]:
        """The rows that are computed; the caller takes them."""
        if self._waiting:
            self._look()
        if self._waiting and self._thread is None:
            self._thread = Thread(target=self._watch, name="shardc progress", daemon=True)
            self._thread.start()
        return self._computed

    def wait(self) -> None:
        """Wait until all rows are computed."""
        with self._lock:
            rows = list(self._waiting)
        for x in (x for _, steps in rows for x in steps[-1][1].values()):
            if not _is_computed(x):
                np.asarray(jax.block_until_ready(x))  # of all devices: the value may come from the first alone
            self._look()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(max((monotonic() - self._changed) / 50, 1e-3), 0.02)):
            self._look()

    def _look(self) -> None:
        with self._lock:
            begin, earliest, found = monotonic(), self._looked, list[_Steps]()
            while self._waiting and all(map(_is_computed, self._waiting[0][1][-1][1].values())):
                since, steps = self._waiting.popleft()
                earliest = max(self._looked, since)
                found.append(steps)
            self._looked, now = begin, monotonic()
            if not found:
                return
            last = found[-1][-1][0]  # rows that one look finds have one rate
            seconds = None if self._base is None else (now - self._base[1]) / (last - self._base[0])
            self._computed.extend(_MeterRow(steps, now, seconds) for steps in found)
            self._changed = now
            if self._base is None or now - self._base[1] >= 10 * (now - earliest):  # else known too roughly
                self._base = last, earliest


class Meter:
    """The figures of a loop. Made by `shardc.progress`."""

    def __init__(
        self, loop: _ShownLoop, csv: str | PathLike[str] | None, tensorboard: str | PathLike[str] | None,
        log: Callable[..., Any] | None,
    ) -> None:  # fmt: skip
        self._loop, self._files, self._log = loop, (csv, tensorboard), log
        self._done = loop.start
        self._screen: ProgressLine | None = None
        self._writers: list[RowWriter] = []
        self._closing: ExitStack | None = None
        self._since: _Steps = []
        """The steps after the last one that is shown."""
        self._clock = _Clock()
        self._names: set[str] = set()
        self._bad: set[str] = set()
        """Results that were not finite in the row before."""

    def __enter__(self) -> Meter:
        csv, folder = self._files
        cluster = current()
        self._status = None if cluster is None else cluster.loop
        self._speaks = (jax.process_index() if cluster is None else cluster.me) == 0
        with ExitStack() as opened:
            if self._speaks:
                if csv is not None:
                    self._writers.append(CsvFile(csv, self._loop.start))
                    opened.callback(self._writers[-1].close)
                if folder is not None:
                    self._writers.append(TensorBoard(folder))
                    opened.callback(self._writers[-1].close)
                if self._log is not None:
                    self._writers.append(Logger(self._log))
                self._screen = ProgressLine(self._loop.total, self._loop.unit)
                opened.callback(self._screen.close)
            opened.callback(self._clock.stop)
            self._closing = opened.pop_all()
        if self._status is not None:
            self._status.begin(self._loop.start)
        self._began = monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._closing is not None
        with self._closing:
            self._closing = None
            if kind is None:
                if self._since:
                    self._clock.add(self._since)
                self._clock.wait()
                self._show_computed()

    @compat.api_boundary
    def __call__(self, *unnamed: Any, **results: Any) -> None:
        """Say that one more step is done.

        Args:
          *unnamed: none: each result has a name.
          **results: its loss and other scalars by name.
        """
        if unnamed:
            raise ArgumentError("shardc.progress: give results by name: p(loss=loss), or p(**results) of a dict.")
        if self._closing is None:
            raise ArgumentError("shardc.progress: use it inside of `with shardc.progress(...) as p:`.")
        self._check(results)
        self._done += 1
        if not self._speaks:
            return
        self._since.append((self._done, results))
        if self._loop.is_shown(self._done):
            self._clock.add(self._since)
            self._since = []
        self._show_computed()

    def _check(self, results: Mapping[str, Any]) -> None:
        wrong = [
            f"{name} is {_short(x)}; give one number, as its mean."
            for name, x in results.items()
            if not isinstance(x, int | float) and getattr(x, "size", 0) != 1
        ]
        wrong += [
            f"{name} is {_short(x)}; give a real number."
            for name, x in results.items()
            if getattr(x, "size", 0) == 1 and getattr(getattr(x, "dtype", None), "kind", "f") in "cOSU"
        ]
        wrong += [
            f"{name} is traced: the call stands in a function that JAX traces once; return the value, and call "
            "shardc.progress in the loop around it."
            for name, x in results.items()
            if isinstance(x, compat.Tracer)
        ]
        if new := results.keys() - self._names:
            own = [n for n in results if n in new and is_own_column(n, self._loop.unit)]
            wrong += [f"{n} is the name of a figure that is there already; give another name." for n in own]
        if wrong:
            raise ArgumentError(all_offenders("shardc.progress: results that cannot be shown", wrong))
        self._names |= new

    def _show_computed(self) -> None:
        """Show the rows that are computed, in order."""
        rows = self._clock.computed()
        while rows:
            self._show(rows.popleft())

    def _show(self, row: _MeterRow) -> None:
        (step, results), seconds, loop = row.steps[-1], row.seconds, self._loop
        values = {name: value for name, x in results.items() if (value := _value_of(name, x)) is not None}
        rate = None if seconds is None or loop.items is None else loop.items / max(seconds, 1e-9)
        figures = {"step": step, "elapsed_seconds": row.at - self._began, **values}
        if rate is not None:
            figures[f"{loop.unit}_per_second"] = rate
        figures |= step_figures(loop.step, seconds)
        assert self._screen is not None
        self._warn(self._screen, values, row.steps)
        self._screen.write(figures, waiting_text(loop.step))
        for writer in self._writers:
            writer.write(figures)
        if self._status is not None:
            self._status.measured(step, values.get("loss"), rate if loop.unit == "tokens" else None)

    def _warn(self, screen: ProgressLine, values: Mapping[str, float], steps: _Steps) -> None:
        """Show since which step a result is not finite, once."""
        bad = {name for name, x in values.items() if not math.isfinite(x)}
        for name in sorted(bad - self._bad):
            read = ((step, _value_of(name, results[name])) for step, results in steps if name in results)
            first, value = next((step, x) for step, x in read if x is not None and not math.isfinite(x))
            screen.warn(f"step {first}: {name} is {value}")
        self._bad = bad


def _short(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__} {x!r}"[:60] if shape is None else f"{x.dtype}{list(shape)}"


def _is_lost(x: Any) -> bool:
    """Whether the value of a result cannot be read here: it lives in another process, or its buffer is gone."""
    return is_remote(x) or (
        isinstance(x, jax.Array) and (x.is_deleted() or not (x.is_fully_addressable or x.is_fully_replicated))
    )


def _is_computed(x: Any) -> bool:
    try:
        return not hasattr(x, "is_ready") or _is_lost(x) or x.is_ready()
    except RuntimeError:  # it failed, or the loop donates it right now: who reads it says so
        return True


def _value_of(name: str, x: Any) -> float | None:
    """The value of a result, waited for; None if it cannot be read."""
    if _is_lost(x):
        if isinstance(x, jax.Array) and x.is_deleted():
            _log.warning("shardc.progress: %s was donated to a later step before it was read; give a copy.", name)
        return None
    return float(np.asarray(x).reshape(()))
