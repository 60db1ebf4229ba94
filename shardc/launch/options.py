"""Options of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from shardc.errors import ClusterError
from shardc.launch.job import Job, Script
from shardc.runtime.cluster import RunConfig


@dataclass(frozen=True)
class RunOptions:
    """The options of a run. `python -m shardc run --help` explains each."""

    script: Script
    processes: int | None = None
    """How many to start; the most of them if the run may go on with fewer."""
    least: int | None = None
    """How many the run may go on with; None: with no fewer."""
    islands: int = 1
    restarts: int = 0
    window: float = math.inf
    """Seconds within which restarts are counted."""
    log: Path | None = None
    status: Path | None = None
    metrics: str | None = None
    silence: float = 10.0
    deadline: float = 600.0
    host_0_deadline: float | None = None
    """Seconds for which other hosts wait for a host 0 that is started anew; None: they end with it."""
    grace: float = 25.0
    plain_data: bool = False
    carrier: str | None = None
    secret: Path | None = None
    bind: str | None = None
    ray: bool = False
    hosts: str | None = None
    host: int | None = None
    at: str | None = None
    spares: int = 0
    """Places at which nothing runs before another one is lost."""

    def log_of(self, process: int) -> Path | None:
        return self.log / f"process-{process}.log" if self.log else None

    def flight_of(self, process: int) -> Path | None:
        """The file of the flight recorder of a process."""
        return self.log / f"process-{process}.flight" if self.log else None

    def job(self, processes: int, store: str, secret: bytes) -> Job:
        """The job of process 0 at its first start; the supervisor makes those of the others of it."""
        config = RunConfig(
            me=0, processes=processes, islands=self.islands, store=store, secret=secret, links="",
            restarts=self.restarts, window=self.window, silence=self.silence, deadline=self.deadline,
            least=self.least or 0, grace=self.grace, plain_data=self.plain_data, carrier=self.carrier or "",
            judging=self.silence,  # by then a process has given a sign of life, or is lost
        )  # fmt: skip
        return Job(config)

    def places(self, hosts: int) -> int:
        """How many places so many hosts have: one each, if nothing else is said."""
        return self.processes + self.spares if self.processes else hosts

    def missing(self, places: int) -> tuple[int, float]:
        """How many of so many places a run can begin without, and how many seconds it waits for these."""
        return places - (self.least or places - self.spares), self.silence

    def check(self, processes: int) -> None:
        """Raise ClusterError for options that do not fit so many processes."""
        if processes < 1:
            places = processes + self.spares
            raise ClusterError(f"--spares {self.spares}: of {places} places none is left to run a process.")
        if processes % self.islands:
            raise ClusterError(
                f"{processes} process{'es' * (processes != 1)} cannot form {self.islands} islands of one size: "
                f"{processes} / {self.islands} is not a whole number. Give another --islands or --processes."
            )
        if self.carrier == "put" and self.islands == processes:
            raise ClusterError(
                f"--carrier put: with {self.islands} islands each process has a JAX runtime of its own; values between "
                "runtimes go over links. Give fewer --islands, or leave --carrier out."
            )
        if self.least is not None and self.least > processes:
            raise ClusterError(f"--processes: at least {self.least} are asked for, and there are {processes}.")
