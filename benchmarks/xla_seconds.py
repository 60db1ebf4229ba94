"""XLA:TPU's own seconds of a compiled program, the bodies of loops as often as they run.

`cost_analysis()["optimal_seconds"]` counts each instruction once, a loop's body too. The text of the program notes for
each instruction how many cycles XLA expects it to take; the same sum with loops as often as they run, over the sum
without, says how many times as much the whole is. Neither knows the links: in optimal_seconds a collective is the
reading of what it sends and the writing of what it gets (4 GiB reduced over 8 chips of v5p: 3.7 ms, where a ring takes
42), and cycles of collectives are not noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardc.passes.audit.hlo_text import Module, parse_module, trip_count

CLOCK = 1.75e9
"""Cycles of v5p in a second."""
UNKNOWN = 10**12
"""Cycles of one instruction that are no estimate: ten minutes. XLA notes 2^63 - 1 where it has none, as of scatters
that it gives to the SparseCores; optimal_seconds of such a program are no time either, and may be negative."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def xla_seconds(compiled: Any) -> float:
    """XLA:TPU's optimal_seconds of a `jax.stages.Compiled`, bodies times trips."""
    return float(compiled.cost_analysis()["optimal_seconds"]) * repeated(compiled.as_text())


def cycle_seconds(hlo: str) -> float:
    """Of all instructions whose cycles are noted, bodies times trips."""
    return sum(n * trips for n, trips in cycles(parse_module(hlo))) / CLOCK


def repeated(hlo: str) -> float:
    """Cycles of a program over those of its instructions one by one; 1 without loops.

    Raises:
      ValueError: a loop's trips are not known.
    """
    found = list(cycles(parse_module(hlo)))
    once = sum(n for n, _ in found)
    return sum(n * trips for n, trips in found) / once if once else 1.0


def cycles(module: Module, computation: str = "", trips: int = 1) -> Iterator[tuple[int, int]]:
    """Of each instruction its cycles, and how often it runs. A fusion is one instruction."""
    computation = computation or module.entry
    for i in module.computations[computation].values():
        noted = _CYCLES.search(i.attributes)
        if noted and int(noted[1]) < UNKNOWN:
            yield int(noted[1]), trips
        if i.opcode in ("while", "call", "conditional", "async-start") and not noted:
            times = trip_count(module, computation, i) if i.opcode == "while" else 1
            if times is None:
                raise ValueError(f"the trips of {i.name} are not known")
            for callee in i.callees:
                yield from cycles(module, callee, trips * times)
