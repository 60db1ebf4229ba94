"""Fixtures of tests with links."""

from tests.runtime.launcher import a_run
from tests.runtime.peers import log_lines, no_leftovers

__all__ = ["a_run", "log_lines", "no_leftovers"]
