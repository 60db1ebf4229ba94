"""`shardc.fsdp`: a placement that is chosen for each leaf by its shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardc import compat
from shardc.errors import ArgumentError
from shardc.sbp.placement import Placement, S

MIN_SIZE: Final = 2**14
"""Default `min_size` of `fsdp`: arrays of fewer elements stay whole. 64 KiB of float32."""


@dataclass(frozen=True)
class FullySharded:
    """The placement that `fsdp` makes; its fields are `fsdp`'s arguments."""

    axes: tuple[str, ...]
    min_size: int
    only_if_divides: bool
    beside: Any = None

    def choose(self, shape: Sequence[int], beside: Placement, sizes: Mapping[str, int]) -> Placement:
        """The placement of a leaf of `shape` that has placement `beside` on the other axes of the mesh."""
        dim = self._dimension(shape, beside, sizes)
        if dim is None:
            return beside
        return Placement([*beside.items(), *((a, S(dim)) for a in self.axes)])

    def _dimension(self, shape: Sequence[int], beside: Placement, sizes: Mapping[str, int]) -> int | None:
        """The dimension with most left to split; the last of equal ones."""
        if math.prod(shape) < max(self.min_size, 1):
            return None
        n = math.prod(sizes[a] for a in self.axes)
        found: tuple[int, int] | None = None
        for dim, size in enumerate(shape):
            others = math.prod(sizes[a] for a in beside.axes_of(dim))
            fits = size % (n * others) == 0 if self.only_if_divides else size > others
            found = max(filter(None, (found, (-(-size // others), dim) if fits else None)), default=None)
        return None if found is None else found[1]

    def __str__(self) -> str:
        axis = self.axes[0] if len(self.axes) == 1 else self.axes
        said = [repr(axis)]
        said += [f"min_size={self.min_size}"] * (self.min_size != MIN_SIZE)
        said += ["only_if_divides=False"] * (not self.only_if_divides)
        said += [f"beside={self.beside}"] * (self.beside is not None)
        return f"fsdp({', '.join(said)})"

    __repr__ = __str__


def axis_names(who: str, axis: Any) -> tuple[str, ...]:
    """The axes that `shardc.fsdp` and the like are given: one, or several.

    Raises:
      ArgumentError: they are no names.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, Iterable) else (axis,)
    if not all(isinstance(a, str) for a in axes):
        raise ArgumentError(
            f'shardc.{who}: axis={axis!r}; write the name of an axis of the mesh, as shardc.{who}("data"), or several, '
            'as ("replica", "data").'
        )
    return axes


@compat.api_boundary
def fsdp(
    axis: str | Sequence[str], *, min_size: int = MIN_SIZE, only_if_divides: bool = True, beside: Any = None
) -> FullySharded:
    """A placement for parameters and optimizer state: each array is split along its largest dimension.

    Fully sharded data parallel, or ZeRO (Rajbhandari et al. 2019): weights are gathered where they are used, gradients
    reduce-scattered, and each device updates its part. It can be given wherever a placement can: for an argument, for a
    subtree, or for a pattern of `shardc.rules`. Arrays of one shape are split alike, so moments are placed as their
    weights.

    Args:
      axis: axis of the mesh over which arrays are split, or several, outermost first.
      min_size: arrays of fewer elements are whole: biases and norms are not worth a collective.
      only_if_divides: only dimensions that the devices divide evenly are split, so that every result is a jax.Array. An
        array without one is whole. With False it is the largest dimension, evenly or not.
      beside: placements over other axes, as `shardc.rules` of tensor parallel weights; what they split counts. What it
        leaves open is whole.

    Raises:
      ArgumentError: `min_size` is negative, or no axis is named, or with something else than text.

    Examples:
      >>> fsdp("data", beside={"model": S(-1)})
      fsdp('data', beside={'model': S(-1)})
    """
    axes = axis_names("fsdp", axis)
    if not axes or min_size < 0:
        what = f"min_size={min_size} is negative" if axes else "no axis is named"
        raise ArgumentError(f'shardc.fsdp: {what}; write shardc.fsdp("data"), or a min_size of 0 to split all.')
    return FullySharded(axes, min_size, only_if_divides, beside)
