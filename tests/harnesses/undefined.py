"""Cases whose result JAX leaves open, each with the reason. What merely fails is a bug, and not listed."""

from __future__ import annotations

UNDEFINED: dict[str, str] = {}
