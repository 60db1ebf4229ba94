"""Compares JAX's own cases at random placements with one device, and prints a table by groups.

    python -m tests.harnesses --seed 0 --draws 4 --groups add,scatter --part 1/8 --limit 20

Ends with 1 if a value was wrong, a compiled program sent what its plan does not say, or something failed that is no
documented error. What it draws hangs on the seed and
the case's name alone: `--only NAME` runs a case again as it was.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("NPROC", "16")  # threads of XLA:CPU: two for each device, or collectives can hang
os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> int:
    from tests.harnesses.report import run_all  # noqa: PLC0415  # JAX reads the environment when it is imported

    options = _parser().parse_args()
    return run_all(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.harnesses", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=4, help="meshes and placements for each case")
    parser.add_argument("--groups", type=_names, default=(), help="names with commas between; without, all")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="every N-th case of each group")
    parser.add_argument("--limit", type=int, help="at most so many cases of each group")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--log", help="a file that gets one line of JSON for each case, while it runs")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _part(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write 1/8 to 8/8")
    return int(i), int(n)


if __name__ == "__main__":
    sys.exit(main())
