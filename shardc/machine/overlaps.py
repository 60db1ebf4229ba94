"""What XLA hides behind computation on each kind of machine, of what it could, and the options that it is given for it.

A share is of the seconds that a plan could hide (`shardc/passes/estimate/overlap.py`), by kind of collective; "ring"
are the permutes of a product whose pieces go around. Measured without devices, by XLA's own compilers: the schedules of
the programs of benchmarks/overlap.py, which docs/accelerators.md lists. Kinds without a share are waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

Overlaps: TypeAlias = tuple[tuple[str, float], ...]

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "ring")
FULL: Final[Overlaps] = tuple((kind, 1.0) for kind in KINDS)
"""Everything that depends on nothing that is computed meanwhile is hidden: what a plan counted on at best."""
NONE: Final[Overlaps] = ()

SHARES: Final[Mapping[str, Overlaps]] = MappingProxyType({k: FULL for k in "v4 v5e v5p v6e tpu7x a100-40 a100 h100 h800 h200 b200 gb200 gb300".split()} | {"cpu": NONE})

RING_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"xla_disable_hlo_passes": "dot-merger", "xla_gpu_experimental_parallel_collective_overlap_limit": "4"}
)
"""Options of XLA:GPU for programs with rings: products of pieces stay apart, and pieces move both ways at once."""


def options_text(options: Mapping[str, str]) -> str:
    """Options of XLA as `name=value`."""
    return ", ".join(f"{name}={value}" for name, value in options.items())
