"""Cases whose result JAX leaves open, each with the reason. What merely fails is a bug, and not listed.

None in JAX 0.10.2: no scatter that says its indices are unique has two that meet, as a test counts; those out of
bounds under PROMISE_IN_BOUNDS are dropped, as JAX's documentation says, and are run.
"""

from __future__ import annotations

UNDEFINED: dict[str, str] = {}
"""Name of the case -> why its result is open."""
