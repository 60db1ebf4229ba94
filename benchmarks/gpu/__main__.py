"""shardc on one GPU, in one command and within 8 minutes.

    PYTHONPATH=. python3 -m benchmarks.gpu [--out DIR] [--sections steps,memory,...] [--tiny] [--budget SECONDS]

Wants jax with CUDA, flax, optax, numba, scipy and rich. It downloads nothing, and its data are random. A section that
fails is reported with its error, the others run, and the exit status is 1. DIR/gpu.json and DIR/gpu.md are written
after each section; what is printed is gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.batch import Batch
from benchmarks.gpu.machine import FILE
from benchmarks.gpu.sections import LETTERS, MACHINE, SECTIONS, Section
from benchmarks.gpu.tables import failures, heading, notes, to_markdown, to_rich

BUDGET = 460.0
"""Seconds in all, so that the command ends within 8 minutes."""


def groups(chosen: Sequence[Section], jobs: int) -> list[list[Section]]:
    """What runs at the same time. Sections that measure no time run side by side where there are cores enough; they
    come first, for they say whether the device works at all."""
    beside = [s for s in chosen if not s.apart]
    first = [beside] if jobs > 1 and beside else [[s] for s in beside]
    return first + [[s] for s in chosen if s.apart]


def environment() -> dict[str, str]:
    """Of the processes: no process takes the device's memory before it needs it."""
    paths = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join(paths)}
    platforms = [p for p in env.get("JAX_PLATFORMS", "").split(",") if p]
    if platforms and "cpu" not in platforms:  # the section values compares with it
        env["JAX_PLATFORMS"] = ",".join([*platforms, "cpu"])
    return env


class Run:
    """All sections, one group after the other, and the files that say what was found."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.end = time.monotonic() + options.budget
        self.found: dict[str, Any] = {
            "machine": {"ok": False},
            "sections": {s.name: {"ok": False, "state": "not run"} for s in options.sections},
            "budget": options.budget, "tiny": options.tiny, "date": time.strftime("%Y-%m-%d %H:%M"),
        }  # fmt: skip

    def __call__(self) -> bool:
        """Whether everything went well."""
        (self.options.out / FILE).unlink(missing_ok=True)  # it may be of another machine
        parts = [[MACHINE], *groups(self.options.sections, self.options.jobs)]
        self.write()
        for i, part in enumerate(parts):
            left, shares = self.end - time.monotonic(), [max(s.seconds for s in p) for p in parts[i:]]
            self.run(part, left * shares[0] / sum(shares))
        return self.found["machine"]["ok"] and all(s["ok"] for s in self.found["sections"].values())

    def run(self, part: Sequence[Section], seconds: float) -> None:
        open_ = {section: self.batch(section, seconds) for section in part}
        try:
            while open_:
                for section, batch in [(s, b) for s, b in open_.items() if not b.step()]:
                    del open_[section]
                    self.finish(section, batch)
                time.sleep(0.05)
        finally:
            for section, batch in open_.items():  # interrupted: what was measured by then is kept
                batch.stop("Interrupted", "the command was ended")
                self.finish(section, batch)

    def batch(self, section: Section, seconds: float) -> Batch:
        jobs = self.options.jobs if section.many else 1
        args = ["--out", str(self.options.out.resolve()), *(["--tiny"] if self.options.tiny else [])]
        return Batch(
            section.name, section.jobs(self.options.tiny, jobs), seconds, jobs, section.in_turn, args, environment()
        )

    def finish(self, section: Section, batch: Batch) -> None:
        result = {
            "title": section.title, "ok": True, "seconds": batch.took, "budget": batch.seconds, "rows": batch.rows,
            "errors": batch.errors, "summary": section.summary(batch.rows),
        }  # fmt: skip
        result["ok"] = not any(failures(result))
        if section is MACHINE:
            self.found["machine"] = result
            self.console.print(heading(result), "\n", soft_wrap=True)
        else:
            self.found["sections"][section.name] = result
        self.write()
        self.console.print(to_rich(section, result))
        for note in notes(result):
            self.console.print(note, soft_wrap=True, markup=False)
        self.console.print(f"{section.name}: {batch.took:.0f} s of {batch.seconds:.0f}\n")

    def write(self) -> None:
        for name, text in (("gpu.json", json.dumps(self.found, indent=1)), ("gpu.md", to_markdown(self.found))):
            new = self.options.out / f"{name}.new"
            new.write_text(text)
            new.replace(self.options.out / name)  # a file that is read is whole, whenever the command is ended


def chosen(text: str) -> list[Section]:
    names = [LETTERS.get(name, name) for name in text.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return [s for name, s in SECTIONS.items() if name in names]


def main(argv: Sequence[str] | None = None) -> int:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--sections", type=chosen, default=list(SECTIONS.values()),
                        help=f"with commas between them: {', '.join(SECTIONS)}, or a to e")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small sizes and few programs: whether it works, on a CPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds in all")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, cores // 4)), help="processes of a section at once")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as `timeout` sends it: processes are ended, files written
    console = Console() if sys.stdout.isatty() else Console(width=180)
    return 0 if Run(options, console)() else 1


if __name__ == "__main__":
    sys.exit(main())
