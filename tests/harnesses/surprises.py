"""Groups whose compiled programs may send what their plans do not say, each with the reason. Others fail the run."""

from __future__ import annotations

SURPRISES: dict[str, str] = {}
"""Group -> what XLA does there."""
