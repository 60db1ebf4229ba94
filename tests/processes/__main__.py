"""`python -m tests.processes [pytest arguments]`: tests of the suite in 2 processes with 4 devices each.

Without arguments: all files that `suite.py` names.
"""

import argparse
import sys

from tests.processes.run import run_tests
from tests.processes.suite import FILES, OWN

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--devices", type=int, default=4, help="devices of each process")
parser.add_argument("--seconds", type=float, default=3600)
parser.add_argument("--show", action="store_true", help="show the end of what each process prints")
options, rest = parser.parse_known_args()
report = run_tests(
    rest or [*OWN, *FILES],
    processes=options.processes,
    devices=options.devices,
    seconds=options.seconds,
    show=options.show,
)
sys.stdout.write(report.text() + "\n")
sys.exit(bool(report.bad))
