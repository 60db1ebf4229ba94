"""Shares of what could be hidden behind computation that XLA hides on each kind of machine, and options of XLA.

A share is of the seconds that a plan could hide (`shardc/passes/estimate/overlap.py`), by kind of collective; "ring"
are the permutes of pieces that go around: of a product, or of keys. A kind without a share is waited for. Sources, by
the letter:
  [S] Schedules of the programs of benchmarks/overlap.py, compiled without devices by XLA:GPU of jax 0.12.0.1 (with
      `RING_OPTIONS` where a plan has rings) and by libtpu 0.0.50.1, without flags: seconds of planned collectives that
      have computation between their start and their done, over the seconds that could be hidden.
  [R] Rings compiled for 32 chips of v5p: 106 of 112 permutes beside products (docs/design/collective-matmul.md).
  [G] Not measured: as the nearest machine that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

Overlaps: TypeAlias = tuple[tuple[str, float], ...]

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "ring")
FULL: Final[Overlaps] = tuple((kind, 1.0) for kind in KINDS)
"""All that could be hidden is: programs whose trainers set flags for it."""
NONE: Final[Overlaps] = ()

_HOPPER: Final[Overlaps] = (
    ("all_reduce", 0.85), ("all_gather", 0.7), ("reduce_scatter", 0.85), ("all_to_all", 0.8), ("permute", 0.8),
    ("ring", 0.9),
)  # fmt: skip
"""[S] 17 programs for h100:8; all-reduces as reduce-scatters, permutes as all-to-alls [G]."""
_AMPERE: Final[Overlaps] = (("all_gather", 0.7), ("all_to_all", 0.5), ("permute", 0.5), ("ring", 0.6))
"""[S] Three programs for a100:8; gathers as on h100 (all in one of them, next to nothing in another)."""
_V5E: Final[Overlaps] = (("all_gather", 1.0), ("ring", 0.78))
"""[S] Six programs for v5e:4x2."""
_TPU: Final[Overlaps] = (("ring", 0.95),)
"""[R]; [S] of gathers and reductions of two programs for v5p:2x2x2 nothing is hidden."""

SHARES: Final[Mapping[str, Overlaps]] = MappingProxyType(
    {
        "cpu": NONE, "v4": _TPU, "v5e": _V5E, "v5p": _TPU, "v6e": _TPU, "tpu7x": _TPU, "a100-40": _AMPERE,
        "a100": _AMPERE, "h100": _HOPPER, "h800": _HOPPER, "h200": _HOPPER, "b200": _HOPPER, "gb200": _HOPPER,
        "gb300": _HOPPER,
    }
)  # fmt: skip
"""By the name of the machine. b200: the same was found in two programs. v4, v6e, tpu7x, h200, gb200 and gb300: [G]."""

RING_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"xla_disable_hlo_passes": "dot-merger", "xla_gpu_experimental_parallel_collective_overlap_limit": "4"}
)
"""Options of XLA:GPU for programs with rings: products of pieces stay apart, and pieces move both ways at once."""


def options_text(options: Mapping[str, str]) -> str:
    """Options of XLA as `name=value`."""
    return ", ".join(f"{name}={value}" for name, value in options.items())
