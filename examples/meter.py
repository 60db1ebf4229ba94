"""How a long loop shows where it is: a progress bar on a terminal, elsewhere some twenty lines."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Meter:
    """Counts steps of `per_step` units each, and shows the mean loss of the last twenty.

    The first step compiles, and is left out of the rate.
    """

    def __init__(self, steps: int, unit: str, per_step: int, name: str) -> None:
        self.steps, self.unit, self.per_step, self.name = steps, unit, per_step, name
        self.done, self.skipped, self.start = 0, 0, 0.0
        self.losses: deque[float] = deque(maxlen=20)
        console = Console()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> Meter:
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=self.steps)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.bar:
            self.bar.stop()

    def skip(self, steps: int) -> None:
        """Say that so many steps were done before."""
        self.done = self.skipped = steps
        if self.bar:
            self.bar.update(self.task, completed=steps)

    def step(self, loss: float) -> None:
        """Say that one more step is done."""
        now = time.perf_counter()
        self.done += 1
        counted = self.done - self.skipped - 1
        if counted == 0:
            self.start = now
        self.losses.append(loss)
        line = f"{self.name}  loss {sum(self.losses) / len(self.losses):.4f}"
        if counted > 0:
            line += f"  {counted * self.per_step / (now - self.start):,.0f} {self.unit}/s"
        if self.bar:
            self.bar.update(self.task, advance=1, description=line)
        elif counted == 0 or self.done == self.steps or self.done % max(10, self.steps // 20) == 0:
            print(f"step {self.done:{len(str(self.steps))}}/{self.steps}  {line}", flush=True)
