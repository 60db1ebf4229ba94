"""`shardc.data_parallel`: parameters whole, rows split, gradients reduced once, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.errors import ArgumentError
from shardc.ir.box import Boxed, box_p
from shardc.ir.nested import bodies_of
from shardc.passes.trace.fully_sharded import axis_names
from shardc.plan.plan import SpmdPlan
from shardc.sbp.placement import S

_AVOIDS: Final = frozenset(("all_gather", "reduce_scatter", "all_to_all", "permute", "fill", "slice"))
"""The steps of a boxing that a data parallel plan does without: all but the sum of what is partial."""


@dataclass(frozen=True)
class DataParallel:
    """The placements that `data_parallel` gives to all arguments; its fields are `data_parallel`'s arguments."""

    axes: tuple[str, ...]
    batch: tuple[str, ...]

    def placements(self, names: Sequence[str], static: Collection[str], where: str) -> dict[str, Any]:
        """The placement of each argument."""
        batch = self.batch or tuple(n for n in names if n == "batch")
        unknown = [n for n in batch if n not in names]
        if unknown or not batch:
            what = f"names {', '.join(map(repr, unknown))}" if unknown else "does not say which arguments are the batch"
            raise ArgumentError(
                f"{where}: {self} {what}; its arguments are {', '.join(names)}. Write "
                f"shardc.data_parallel({self._axis!r}, batch={names[-1:]!r})."
            )
        rows = dict.fromkeys(self.axes, S(0))
        return {n: rows if n in batch else {} for n in names if n not in static}

    @property
    def _axis(self) -> str | tuple[str, ...]:
        return self.axes[0] if len(self.axes) == 1 else self.axes

    def avoids(self, axes: Iterable[str]) -> frozenset[tuple[str, str]]:
        """The steps that a plan avoids, each with each axis of a mesh."""
        return frozenset(itertools.product(_AVOIDS, axes))

    def __str__(self) -> str:
        batch = self.batch[0] if len(self.batch) == 1 else self.batch
        return f"data_parallel({self._axis!r}{f', batch={batch!r}' if self.batch else ''})"

    __repr__ = __str__


@compat.api_boundary
def data_parallel(axis: str | Sequence[str], *, batch: str | Sequence[str] = ()) -> DataParallel:
    """Exactly data parallel, for `in_placements=`: every device holds the parameters and sees a part of the rows.

    Each gradient, and each other result, is summed over the devices once, after the backward pass, and nothing else is
    sent. A step that cannot do so, as one whose batch normalization takes means over all rows, is a PlacementError when
    it is planned, which says what it would have to send besides.

    Args:
      axis: axis of the mesh over which rows are split, or several, outermost first.
      batch: names of the arguments whose dimension 0 is the rows; by default the one that is called `batch`. All other
        arguments are whole.

    Raises:
      ArgumentError: an axis is no text.
      PlacementError: in a call, with what would be sent besides, and the line.

    Examples:
      >>> data_parallel("data", batch=("x", "y"))
      data_parallel('data', batch=('x', 'y'))
    """
    axes = axis_names("data_parallel", axis)
    return DataParallel(axes, (batch,) if isinstance(batch, str) else tuple(batch))


def sent_besides(plan: SpmdPlan) -> list[str]:
    """What a plan sends besides one sum of each gradient after the backward pass, a line for each line of the user's
    code."""
    lines = [
        f"{c.kind} of {c.value} at {c.source or 'an argument or result'}, from {c.src} to {c.dst}"
        for c in plan.collectives
        if c.kind != "all_reduce"
    ]
    lines += [
        f"all_reduce of {c.value} at {c.source}, {f'{c.count} times' if c.count > 1 else 'in each round'} in a loop"
        for c in plan.collectives
        if c.kind == "all_reduce" and (c.count > 1 or c.per_iteration)
    ]
    lines += [
        f"all_reduce of {compat.short_text(e.outvars[0].aval.shape, e.outvars[0].aval.dtype)} at "
        f"{compat.source_line(e)}, before the backward pass has ended"
        for e in _too_early(plan.boxed.jaxpr, plan.boxed, {})
    ]
    return list(dict.fromkeys(lines))


def _too_early(jaxpr: Jaxpr, boxed: Boxed, sums: Mapping[Var, tuple[Eqn, ...]]) -> Iterator[Eqn]:
    """The sums that something is computed from together with values that are still split or partial.

    `sums`: those that inputs of the jaxpr are computed from.
    """
    known: dict[Var, tuple[Eqn, ...]] = dict(sums)
    for eqn in jaxpr.eqns:
        read = compat.variables(eqn.invars)
        found = tuple(dict.fromkeys(e for v in read for e in known.get(v, ())))
        split = [v for v in (*read, *eqn.outvars) if _differs(v, boxed)]
        if found and split and not bodies_of(eqn):
            yield from found
        for body in bodies_of(eqn):
            pairs = zip(reversed(body.invars), reversed(eqn.invars), strict=False)
            entered = {v: found for v, a in pairs if not compat.is_literal(a) and (found := known.get(a, ()))}
            yield from _too_early(body, boxed, entered)
        if eqn.primitive is box_p and eqn.params["src"].partial_axes:
            found = (*found, eqn)
        known |= dict.fromkeys(eqn.outvars, found) if found else {}


def _differs(v: Var, boxed: Boxed) -> bool:
    """Whether devices hold different parts of a value."""
    placement = boxed.placements.get(v)
    return placement is not None and bool(placement.items_)
