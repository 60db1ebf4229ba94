"""Measure the gold standards and print the tables of benchmarks/gold/README.md.

    python -m benchmarks.gold [--large] [--only NAME ...] [--explain] [--json FILE]

Each row in a process of its own, on as many fake devices as it wants. --large: sizes of real models, planned only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.gold.large import LARGE
from benchmarks.gold.rows import ROWS
from benchmarks.gold.tables import gold


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", action="store_true", help="the rows at sizes of real models, planned, not compiled")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some rows")
    parser.add_argument("--explain", action="store_true", help="print the plans, too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = LARGE if options.large else ROWS
    if unknown := [name for name in options.only if name not in rows]:
        parser.error(f"no such rows: {', '.join(unknown)}; there are {', '.join(rows)}")
    options.console = Console() if sys.stdout.isatty() else Console(width=200)
    found = gold(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
