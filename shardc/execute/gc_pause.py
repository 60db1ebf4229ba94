"""Python's collector of reference cycles, while plans are made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def paused() -> Generator[None, None, None]:
    """No search for cycles of references inside. A plan is made of millions of objects that stay and hardly a cycle;
    looking through them again and again took a quarter of the time of planning 24 unrolled layers. Afterwards they are
    old ones, without having been looked through."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what others froze stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
