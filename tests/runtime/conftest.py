"""Fixtures of tests with links."""

from tests.runtime.peers import log_lines, no_leftovers

__all__ = ["log_lines", "no_leftovers"]
