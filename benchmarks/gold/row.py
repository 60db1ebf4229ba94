"""One gold standard: a program, its annotations, and the bytes that the hand-written plan of it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Step = Callable[..., Any]
Pin = Callable[[Any, Any], Any]
Side = Literal["annotated", "auto", "jit"]
SIDES: tuple[Side, ...] = ("annotated", "auto", "jit")


@dataclass(frozen=True)
class Row:
    """One gold standard.

    Attributes:
      name: as `--only` takes it.
      mesh: axes and their sizes.
      step: the program, in plain JAX.
      args: shapes and dtypes.
      formula: of the bytes that each device sends, for people. Letters: b rows, s positions, h width, e bytes of an
        element, A = b·s·h·e, W = bytes of the weights, n devices on an axis (t model, d data, p tokens).
      gold: its value.
      unit: bytes of the smallest thing that the formula counts.
      annotated: the usual annotations, as `shardc.function` takes them.
      auto: just what defines the case.
      inner: makes the step with values in its middle annotated, where annotations of arguments say too little. It is
        given what annotates a value: `pin(x, PartitionSpec(...))`.
      donated: arguments that are updated.
      hbm: the memory of a device, where the hand-written plan is one for little.
      note: what is missing, or what comes out instead.
    """

    name: str
    mesh: Mapping[str, int]
    step: Step
    args: tuple[Any, ...]
    formula: str
    gold: float
    unit: int
    annotated: Mapping[str, Any]
    auto: Mapping[str, Any]
    inner: Callable[[Pin], Step] | None = None
    donated: tuple[str, ...] = ()
    hbm: str | None = None
    note: str = ""

    @property
    def devices(self) -> int:
        return prod(self.mesh.values())
