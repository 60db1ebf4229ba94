"""One job of a section, in a process of its own: `python -m benchmarks.gpu.child memory mlp [--tiny]`."""

from __future__ import annotations

import argparse
import math
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.batch import READY
from benchmarks.measure import report

LONGEST = 1500
"""Characters of an error's message that are kept."""


def describe(error: BaseException) -> dict[str, str]:
    text = str(error)
    return {"type": type(error).__name__, "message": text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."}


def verdict(wrong: list[str]) -> dict[str, Any]:
    """The end of a row: whether everything was right, and if not the error."""
    return {"ok": False, "error": {"type": "Wrong", "message": "; ".join(wrong)}} if wrong else {"ok": True}


def figure(difference: float) -> float | str:
    """A difference as a figure of the report. JSON has no infinity and no NaN."""
    return float(difference) if math.isfinite(difference) else "not equal"


def wait_for_turn() -> None:
    """Says that everything is compiled, and waits until this process may use the device."""
    report(**{READY: True})
    sys.stdin.readline()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section")
    parser.add_argument("job")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    try:
        import_module(f"benchmarks.gpu.{options.section}").measure(options.job, options)
    except Exception as error:  # noqa: BLE001  it becomes a row of the report, and the exit status
        traceback.print_exc()
        report(**describe(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
