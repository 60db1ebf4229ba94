"""The release of JAX that the tests run on, where that makes a difference."""

import jax

OLDEST = "0.10"
IS_OLDEST = jax.__version__.startswith(f"{OLDEST}.")
"""Whether it is the oldest that is supported."""
