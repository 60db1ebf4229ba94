"""Measure pipelines beside their peers and print the tables of benchmarks/pipeline/README.md.

    python -m benchmarks.pipeline [--quick] [--part peers sleep overhead host-ahead memory] [--torch-python PYTHON]

The same as `python -m benchmarks.run --only pipeline`, by parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.pipeline.tables import PARTS, pipeline


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns: whether it works, not how fast")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--torch-python", help="a Python with torch, if this one has none")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    options.console = Console() if sys.stdout.isatty() else Console(width=180)
    found = pipeline(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
