"""Train a small GPT-2 in one process and in two, with the same script, and compare the losses.

    python -m examples.processes --steps 50

Twice: data x tensor parallel on one mesh (one jax.distributed), and as a pipeline of two stages, each in a JAX runtime
of its own. Exit status 1: losses differ by more than 1e-6 of their size, or a process has compiled what its plan does
not list.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

TOLERANCE = 1e-6
"""Relative: what another order of sums in float32 may change in a loss."""
SECONDS = 900
"""The longest that a run may take."""


@dataclass(frozen=True)
class Case:
    """A way to train, in one process and in several.

    Attributes:
      name: for the table.
      options: of examples.train.
      islands: JAX runtimes of the run in several processes.
    """

    name: str
    options: str
    islands: int = 1


CASES = (
    Case("data x tensor", "--mesh data=4,model=2 --plan data_tensor"),
    Case("2 stages", "--mesh pipe=2,data=2,model=2 --plan pipeline", islands=2),
)


@dataclass(frozen=True)
class Ended:
    """What a run has printed, by process.

    Attributes:
      code: its exit status.
      texts: of each process.
      seconds: that it took.
    """

    code: int
    texts: Sequence[str]
    seconds: float
    losses: list[list[float]] = field(init=False)
    audits: list[str] = field(init=False)

    def __post_init__(self) -> None:
        lines = [re.findall(r'^{"step": .*}$', text, re.MULTILINE) for text in self.texts]
        object.__setattr__(self, "losses", [[json.loads(line)["loss"] for line in some] for some in lines])
        object.__setattr__(self, "audits", re.findall(r"^audit[^:]*: (.*)$", "\n".join(self.texts), re.MULTILINE))

    @property
    def ok(self) -> bool:
        """Whether every process ended well, with an audit that is clean and the same losses."""
        clean = [a for a in self.audits if a.startswith(("planned = found", "found within plan"))]
        return self.code == 0 and len(clean) == len(self.texts) and all(x == self.losses[0] for x in self.losses)


def run(case: Case, processes: int, devices: int, steps: int, more: Sequence[str] = ()) -> Ended:
    """Train in so many processes, which have the devices among them. One process is started without a launcher."""
    words = ["-m", "examples.train", *case.options.split(), *more, "--steps", str(steps), "--loss-log", "-"]
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"process-{p}.log" for p in range(processes)]
        if processes > 1:
            launch = f"--processes {processes} --devices {devices // processes} --islands {case.islands} --log {folder}"
            words = ["-m", "shardc", "run", *launch.split(), *words]
        else:
            words += ["--devices", str(devices)]
        with open(Path(folder) / "output", "w+") as output:
            done = subprocess.run(
                [sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS, check=False
            )
            output.seek(0)
            shown = output.read()
        texts = [log.read_text(errors="replace") for log in logs] if processes > 1 else [shown]
    if done.returncode:
        print(shown[-4000:], file=sys.stderr)
    return Ended(done.returncode, texts, perf_counter() - begin)


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference; infinite if the numbers are not as many."""
    if not wanted or len(found) != len(wanted):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def table(rows: Sequence[tuple[Case, int, Ended, float | None]]) -> Table:
    """What was run and what came out; the difference is to the run in one process."""
    shown = Table(box=None, pad_edge=False)
    for name in ("run", "processes", "first loss", "last loss", "difference", "audit", "time"):
        shown.add_column(name, justify="left" if name in ("run", "audit") else "right")
    for case, processes, ended, difference in rows:
        losses = ended.losses[0] or [float("nan")]
        audits = [a if len(a) < 60 else f"{a[:57]}..." for a in ended.audits]
        shown.add_row(
            case.name, str(processes), f"{losses[0]:.6f}", f"{losses[-1]:.6f}",
            "" if difference is None else f"{difference:.1e}", "\n".join(audits) or "none", f"{ended.seconds:.0f} s",
        )  # fmt: skip
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.processes",
        description=__doc__,
        epilog="More options go to examples.train.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=8, help="of all processes together")
    options, more = parser.parse_known_args(argv)
    rows: list[tuple[Case, int, Ended, float | None]] = []
    good = True
    for case in CASES:
        one, several = (run(case, n, options.devices, options.steps, more) for n in (1, options.processes))
        difference = apart(several.losses[0], one.losses[0])
        rows += [(case, 1, one, None), (case, options.processes, several, difference)]
        good &= one.ok and several.ok and difference <= TOLERANCE
    console = Console(width=120)
    console.print(table(rows))
    console.print("the losses are equal" if good else f"FAILED: more than {TOLERANCE:.0e} apart, or a run is not clean")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
