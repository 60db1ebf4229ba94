"""Fixtures of the tests of runs."""

from tests.launch.launching import run

__all__ = ["run"]
