"""The version of shardc, and the JAX releases that it supports: an older one is an error, a newer one a warning."""

from __future__ import annotations

import re
import warnings
from typing import Final

VERSION: Final = "0.2.0"
"""Of shardc itself; the wheel has it from here."""
OLDEST: Final = "0.10"
NEWEST: Final = "0.12.0.1"
"""The newest release in locks/."""
PYTHONS: Final = ("3.11", "3.12", "3.13")
"""The versions of Python that have a lock."""


def check_jax(version: str) -> None:
    """Check the version of JAX against the supported releases.

    Args:
      version: as in `jax.__version__`.

    Raises:
      ImportError: it is older than the oldest release that shardc runs on.
    """
    if version_numbers(version) < version_numbers(OLDEST):
        raise ImportError(
            f"shardc needs jax {OLDEST} or newer, and this is jax {version}; install a newer one: "
            f'pip install --upgrade "jax>={OLDEST}"'
        )
    if version_numbers(version) > version_numbers(NEWEST):
        warnings.warn(
            f"shardc is tested with jax {OLDEST}.2 to {NEWEST}, and this is jax {version}. If something fails, install "
            f'a tested release: pip install "jax=={NEWEST}"',
            stacklevel=3,
        )


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.12.0.dev7+cpu --> (0, 12, 0)`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
