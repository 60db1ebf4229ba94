"""Tests of the suite that do not run in several processes, each with its reason."""

from __future__ import annotations

from fnmatch import fnmatchcase

EXCLUDED: dict[str, str] = {}
"""Patterns of test ids, and why."""


def reason(test: str) -> str | None:
    """Why a test does not run in several processes; None if it does."""
    return next((why for pattern, why in EXCLUDED.items() if fnmatchcase(test, pattern)), None)
