"""What lies row by row on a TPU: tables that rows are gathered from, or scattered to.

XLA:TPU keeps an array so that least of its tiles is filled up, a table of 64 columns with its rows side by side. To
gather rows, or to add to some, it wants each in a place of its own, filled up to 128. So it copies a table before rows
are gathered from it, and what rows are scattered to it makes like that from the beginning. All that a loop
reads together with such a value it copies, too: when gradients come from a scatter, the moments and the weights.
How many bytes that takes, `memory.filled_bytes` has; where a row fills its place, none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Eqn, Var
from shardc.passes.estimate.backend import Kind, Step


@dataclass(frozen=True, slots=True)
class Table:
    """A value that lies row by row from `begin` until before `end`.

    Attributes:
      gathered: rows are gathered from it; of others XLA:TPU fills up a little less (`memory.filled_bytes`).
      copied: besides it lies as others do.
    """

    value: Var
    begin: int
    end: int
    gathered: bool
    copied: bool


def find_tables(
    lookups: Iterable[Eqn], starts: Mapping[Var, int], reads: Mapping[Var, Sequence[Var]], maker: Mapping[Var, Step],
    last: Callable[[Var, int], int], replacing: Collection[Var],
) -> tuple[Table, ...]:  # fmt: skip
    """All that lies row by row, and when.

    Args:
      lookups: gathers and scatters of the program.
      starts, reads: what loops make in memory, when, and what they read there (`find_loops`).
      maker: of each value the equation that makes it.
      last: the last point at which a value is read; the one given, if it is not.
      replacing: results that are put in the place of arguments.
    """
    found: list[Table] = []
    copies: dict[Var, int] = {}
    scattered: list[Var] = []
    for eqn in filter(_takes_rows, lookups):
        table, rows, t = _viewed(eqn.invars[0], maker), eqn.outvars[0], maker[eqn.outvars[0]].at
        if eqn.primitive.name == "gather":
            if table in maker:
                found.append(Table(table, maker[table].at, last(table, t) + 1, gathered=True, copied=False))
            else:
                copies[table] = min(t, copies.get(table, t))
        else:
            scattered.append(rows)
            found.append(Table(rows, t, last(rows, t) + 1, gathered=False, copied=rows in replacing))
            rows = eqn.invars[2]
        found.append(Table(rows, t, t + 1, gathered=False, copied=True))
    found += [Table(a, t, last(a, t) + 1, gathered=True, copied=True) for a, t in copies.items()]
    for a, t in _updated(scattered, starts, reads, maker).items():
        if a not in copies:
            found.append(Table(a, t, t + 1, gathered=False, copied=True))
    return tuple(found)


def _updated(
    scattered: Sequence[Var], starts: Mapping[Var, int], reads: Mapping[Var, Sequence[Var]], maker: Mapping[Var, Step]
) -> dict[Var, int]:
    """The arguments that loops read together with what rows were scattered to, or with what follows from that. All
    are there when the last of the loops that read it itself runs."""
    root, at, found = {v: v for v in scattered}, dict.fromkeys(scattered, 0), dict[Var, Var]()
    for v in sorted(reads, key=starts.__getitem__) if scattered else ():
        source = next((root[a] for a in reads[v] if a in root), None)
        if source is None:
            continue
        root[v] = source
        at[source] = max(at[source], starts[v]) if source in reads[v] else at[source]
        found |= {a: source for a in reads[v] if a not in maker}
    return {a: at[source] for a, source in found.items()}


def _viewed(a: Var, maker: Mapping[Var, Step]) -> Var:
    """What a value is another view of."""
    while a in maker and maker[a].kind is Kind.VIEW and maker[a].operands:
        a = maker[a].operands[0]
    return a


def _takes_rows(eqn: Eqn) -> bool:
    """Whether the last dimension is taken whole, and is not the only one."""
    dims, rank = eqn.params["dimension_numbers"], len(eqn.invars[0].aval.shape)
    of = getattr(dims, "start_index_map", None) or getattr(dims, "scatter_dims_to_operand_dims", ())
    return rank > 1 and rank - 1 not in of and not any(map(compat.is_literal, eqn.invars))
