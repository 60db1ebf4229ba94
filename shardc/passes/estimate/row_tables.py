"""Arrays that are padded row by row on a TPU: tables that rows are gathered from or scattered to.

XLA:TPU chooses the layout with the least padding: a table of 64 columns has its rows side by side. A gather or scatter
of rows wants each row in a tile of its own, padded to 128. So XLA:TPU copies a table before a gather, and makes the
result of a scatter in that layout from the beginning. A loop that reads such a value copies its other operands into the
layout, too: where gradients come from a scatter, the moments and the weights. `memory.filled_bytes` counts the bytes:
none where a row fills its tile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Eqn, Var
from shardc.passes.estimate.backend import FusionKind, ScheduledEqn


@dataclass(frozen=True, slots=True)
class RowTable:
    """A value that is padded row by row from `begin` until before `end`.

    Attributes:
      gathered: rows are gathered from it; XLA:TPU pads others a little less (`memory.filled_bytes`).
      copied: the padded array is a copy; the value is live in its ordinary layout as well.
    """

    value: Var
    begin: int
    end: int
    gathered: bool
    copied: bool


def find_row_tables(
    lookups: Iterable[Eqn], starts: Mapping[Var, int], reads: Mapping[Var, Sequence[Var]],
    maker: Mapping[Var, ScheduledEqn],
    last: Callable[[Var, int], int], replacing: Collection[Var],
) -> tuple[RowTable, ...]:  # fmt: skip
    """The values that are padded row by row, and when.

    Args:
      lookups: gathers and scatters of the program.
      starts, reads: values that loops materialize, when, and what these loops read (`fused_loops.reads_of`).
      maker: the equation that makes each value.
      last: the last point at which a value is read; the given point if it is not read.
      replacing: results that replace arguments in place.
    """
    found: list[RowTable] = []
    copies: dict[Var, int] = {}
    scattered: list[Var] = []
    for eqn in filter(_takes_rows, lookups):
        table, rows, t = _viewed(eqn.invars[0], maker), eqn.outvars[0], maker[eqn.outvars[0]].at
        if eqn.primitive.name == "gather":
            if table in maker:
                found.append(RowTable(table, maker[table].at, last(table, t) + 1, gathered=True, copied=False))
            else:
                copies[table] = min(t, copies.get(table, t))
        else:
            scattered.append(rows)
            found.append(RowTable(rows, t, last(rows, t) + 1, gathered=False, copied=rows in replacing))
            rows = eqn.invars[2]
        found.append(RowTable(rows, t, t + 1, gathered=False, copied=True))
    found += [RowTable(a, t, last(a, t) + 1, gathered=True, copied=True) for a, t in copies.items()]
    for a, t in _updated(scattered, starts, reads, maker).items():
        if a not in copies:
            found.append(RowTable(a, t, t + 1, gathered=False, copied=True))
    return tuple(found)


def _updated(
    scattered: Sequence[Var],
    starts: Mapping[Var, int],
    reads: Mapping[Var, Sequence[Var]],
    maker: Mapping[Var, ScheduledEqn],
) -> dict[Var, int]:
    """The arguments that loops read together with the result of a scatter, or with what follows from it; each with the
    last point at which a loop reads that result itself."""
    root, at, found = {v: v for v in scattered}, dict.fromkeys(scattered, 0), dict[Var, Var]()
    for v in sorted(reads, key=starts.__getitem__) if scattered else ():
        source = next((root[a] for a in reads[v] if a in root), None)
        if source is None:
            continue
        root[v] = source
        at[source] = max(at[source], starts[v]) if source in reads[v] else at[source]
        found |= {a: source for a in reads[v] if a not in maker}
    return {a: at[source] for a, source in found.items()}


def _viewed(a: Var, maker: Mapping[Var, ScheduledEqn]) -> Var:
    """The value that `a` is a view of."""
    while a in maker and maker[a].kind is FusionKind.VIEW and maker[a].operands:
        a = maker[a].operands[0]
    return a


def _takes_rows(eqn: Eqn) -> bool:
    """Whether a lookup takes the last dimension whole, and there are others."""
    dims, rank = eqn.params["dimension_numbers"], len(eqn.invars[0].aval.shape)
    of = getattr(dims, "start_index_map", None) or getattr(dims, "scatter_dims_to_operand_dims", ())
    return rank > 1 and rank - 1 not in of and not any(map(compat.is_literal, eqn.invars))
