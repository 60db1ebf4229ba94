"""Programs that tests compile, kept for the next run: XLA takes two thirds of the time of folders that compile much."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

import jax
from jax._src import lru_cache

FOLDER: Final = Path(__file__).parents[1] / ".cache" / "tests"
SUFFIX: Final = "-cache"


def keep(folder: Path = FOLDER) -> None:
    """Keep all programs from now on. Workers share them: none reads a file that another one is writing."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lru_cache.LRUCache.put = _put  # JAX writes in place, and has no public way to choose another


def _put(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    path = Path(str(cache.path), f"{key}{SUFFIX}")
    if path.exists():
        return
    made = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}")
    made.write_bytes(value)
    made.replace(path)


def drop_if_larger(most: int = 2 << 30, folder: Path = FOLDER) -> None:
    """Drop all programs if they take more than `most` bytes: old ones are never read again."""
    found = list(folder.glob(f"*{SUFFIX}"))
    if sum(path.stat().st_size for path in found) > most:
        for path in found:
            path.unlink(missing_ok=True)
