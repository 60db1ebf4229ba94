"""Splits scans over layers into scans over fewer layers each, so that stages can be cut between them.

    c, ys = scan[5] c0 xs     -->   c1, ys0 = scan[3] c0 xs[0:3]; c, ys1 = scan[2] c1 xs[3:5]

Nothing is unrolled. Values that are stacked over the layers are in pieces throughout the program: a parameter, its
optimizer state and its new value become one argument, or result, for each piece. The equations between them run on each
piece (`rows`), so that a stage holds and updates only its own layers. If an equation needs a whole value, the pieces
are concatenated before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TypeAlias

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.eqns import concat_eqn, join_eqn, rows_eqn
from shardc.ir.loop import Carry, Loop
from shardc.ir.nested import trips_of
from shardc.ir.program import Program
from shardc.passes.trace.canonicalize import with_own_bodies
from shardc.pipeline.cut_search.split_rows import RowUse, piece_eqn, row_use, rows_of

Ends: TypeAlias = tuple[int, ...]
"""The starts of pieces of rows, and the end of the last one: `(0, 3, 5)`."""


@dataclass(frozen=True)
class Piece:
    """Rows `start:stop` of the input or result with this number; all of it if `rows` is None."""

    number: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Layers:
    """A dimension of layers, over which scans run.

    Attributes:
      count: the number of layers, L.
      scans: the scans over it, in the loop's body.
      values: the variables whose first dimension it is, inside and outside of the loop.
    """

    count: int
    scans: tuple[Eqn, ...]
    values: frozenset[Var]


@dataclass(frozen=True)
class Pieces:
    """A program whose stacked inputs and results are in pieces.

    Attributes:
      program: the program, with an input, or result, for each piece.
      inputs, outputs: for each of them its piece of the original program's inputs or results.
      scans: for each dimension of layers its scans; each scan as (first row, equation) of its pieces, in the order in
        which they run.
    """

    program: Program
    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]
    scans: tuple[tuple[tuple[tuple[int, Eqn], ...], ...], ...] = ()


def whole_program(program: Program) -> Pieces:
    """The program with each input and result in one piece."""
    inputs, outputs = program.in_paths, program.out_paths
    return Pieces(program, tuple(map(Piece, range(len(inputs)))), tuple(map(Piece, range(len(outputs)))))


def find_layers(program: Program, loop: Loop) -> list[Layers]:
    """The dimensions of layers: dimensions of parameters that scans in the loop's body run over."""
    scans = [e for e in loop.eqns if e.primitive.name == "scan" and trips_of(e) > 1 and not e.effects]
    if not scans:
        return []
    group = _UnionFind()
    for eqn in (*program.jaxpr.eqns, *loop.eqns):
        if eqn in scans:
            group.join([*_stacks(eqn), *Loop.of(eqn).stacks])
        elif eqn is not loop.eqn and (use := row_use(eqn)) is not None and use.op is None:
            group.join([*_stacked(eqn, use), *eqn.outvars])
    for inner, outer in loop.consts.items():
        group.join([inner, outer])
    for c in loop.carries:
        group.join([c.before, c.start, c.after, c.end])
    inputs = {group.top(v) for v in program.jaxpr.invars}
    found: dict[Var, list[Eqn]] = {}
    for eqn in scans:
        top = next((group.top(v) for v in _stacks(eqn)), None)
        if top in inputs:
            found.setdefault(top, []).append(eqn)
    members = group.members()
    return [Layers(trips_of(e[0]), tuple(e), frozenset(members[top])) for top, e in found.items()]


def _stacks(scan: Eqn) -> list[Var]:
    """The operands of which a scan reads one row in each step."""
    return compat.variables(Loop.of(scan).rows.values())


def _stacked(eqn: Eqn, use: RowUse) -> list[Var]:
    return [a for a, stacked in zip(eqn.invars, use.stacked, strict=True) if stacked and not compat.is_literal(a)]


class _UnionFind:
    """Groups of joined variables (a union-find structure)."""

    def __init__(self) -> None:
        self.parent: dict[Var, Var] = {}

    def top(self, v: Var) -> Var:
        while (up := self.parent.get(v, v)) is not v:
            self.parent[v] = v = self.parent.get(up, up)
        return v

    def join(self, atoms: Iterable[Atom]) -> None:
        variables = [a for a in atoms if not compat.is_literal(a)]
        for v in variables:
            self.parent.setdefault(v, v)
            self.parent[self.top(v)] = self.top(variables[0])

    def members(self) -> dict[Var, list[Var]]:
        found: dict[Var, list[Var]] = {}
        for v in self.parent:
            found.setdefault(self.top(v), []).append(v)
        return found


def split_scans(program: Program, loop: Loop, layers: Sequence[Layers], ends: Sequence[Ends]) -> Pieces:
    """The program with each dimension of layers split into pieces.

    Args:
      program, loop: the program, and its loop over microbatches.
      layers: its dimensions of layers.
      ends: the pieces of each dimension.
    """
    return _ScanSplitter(program, loop, layers, ends).run()


class _PieceBuilder:
    """Builds the equations of one jaxpr in which some values are in pieces."""

    def __init__(self, ends_of: dict[Var, Ends]) -> None:
        self.ends_of = ends_of
        self.eqns: list[Eqn] = []
        self.parts: dict[Var, list[Atom]] = {}
        self.sliced: set[Var] = set()  # made whole; the parts are slices
        self.joined: set[Var] = set()  # made in parts, and concatenated

    def receive(self, v: Var) -> list[Var]:
        """The variables of a value that comes from outside."""
        if v not in self.ends_of:
            return [v]
        self.parts[v] = made = [rows_of(v, b - a) for a, b in pairwise(self.ends_of[v])]
        return made

    def give(self, atom: Atom) -> list[Atom]:
        """The atoms of a value that goes outside."""
        return self.pieces(atom) if not compat.is_literal(atom) and atom in self.ends_of else [self.whole(atom)]

    def whole(self, atom: Atom) -> Atom:
        if not compat.is_literal(atom) and self._in_pieces(atom) and atom not in self.joined:
            self.joined.add(atom)
            self.eqns.append(concat_eqn(self.parts[atom], atom))
        return atom

    def pieces(self, v: Var) -> list[Atom]:
        if v not in self.parts:
            made: list[Atom] = []
            for a, b in pairwise(self.ends_of[v]):
                made.append(rows_of(v, b - a))
                self.eqns.append(rows_eqn(v, a, b, made[-1]))
            self.sliced.add(v)
            self.parts[v] = made
        return self.parts[v]

    def add(self, eqn: Eqn) -> None:
        """Add an equation, piece by piece if its operands are in pieces."""
        if not any(not compat.is_literal(a) and a in self.ends_of for a in (*eqn.invars, *eqn.outvars)):
            self.eqns.append(eqn)
            return
        use = row_use(eqn)
        stacked = [] if use is None else _stacked(eqn, use)
        values = [*stacked, *(eqn.outvars if use is None or use.op is None else ())]
        same = len({self.ends_of.get(v) for v in values}) == 1 and values[0] in self.ends_of if values else False
        if use is None or not same or (stacked and not any(self._in_pieces(v) for v in stacked)):
            self.eqns.append(eqn.replace(invars=[self.whole(a) for a in eqn.invars]))
            return
        made: list[Sequence[Var]] = []
        for k, (a, b) in enumerate(pairwise(self.ends_of[values[0]])):
            operands = [self.pieces(x)[k] if s else self.whole(x) for x, s in zip(eqn.invars, use.stacked, strict=True)]
            self.eqns.append(piece_eqn(eqn, use, b - a, operands))
            made.append(self.eqns[-1].outvars)
        for out, found in zip(eqn.outvars, zip(*made, strict=True), strict=True):
            if use.op is None:
                self.parts[out] = list(found)
            else:
                self._join(out, found, use.op)

    def _in_pieces(self, v: Var) -> bool:
        return v in self.parts and v not in self.sliced

    def _join(self, out: Var, parts: Sequence[Var], op: str) -> None:
        """Add the reduction of parts to `out`."""
        total = parts[0]
        for i, part in enumerate(parts[1:], 2):
            after = out if i == len(parts) else compat.fresh_var(out.aval)
            self.eqns.append(join_eqn(op, total, part, after))
            total = after


class _ScanSplitter:
    def __init__(self, program: Program, loop: Loop, layers: Sequence[Layers], ends: Sequence[Ends]) -> None:
        self.program, self.loop = program, loop
        self.ends_of = {v: e for found, e in zip(layers, ends, strict=True) if len(e) > 2 for v in found.values}
        self.dimension = {scan: n for n, found in enumerate(layers) for scan in found.scans}
        self.scans: list[list[tuple[tuple[int, Eqn], ...]]] = [[] for _ in layers]

    def run(self) -> Pieces:
        jaxpr, outer = self.program.jaxpr, _PieceBuilder(self.ends_of)
        invars, inputs = self._border(jaxpr.invars, outer.receive)
        for eqn in jaxpr.eqns:
            if eqn is self.loop.eqn:
                self._loop(outer)
            else:
                outer.add(eqn)
        outvars, outputs = self._border(jaxpr.outvars, outer.give)
        made = self.program.after("split_scans", compat.new_jaxpr(invars, outvars, outer.eqns, jaxpr))
        program = replace(
            made,
            in_paths=tuple(_path(self.program.in_paths[p.number], p) for p in inputs),
            out_paths=tuple(_path(self.program.out_paths[p.number], p) for p in outputs),
        )
        return Pieces(program, inputs, outputs, tuple(map(tuple, self.scans)))

    def _border(
        self, atoms: Sequence[Atom], names: Callable[[Atom], Sequence[Atom]]
    ) -> tuple[list[Atom], tuple[Piece, ...]]:
        """The atoms of inputs or results, and the piece of each."""
        found: list[Atom] = []
        pieces: list[Piece] = []
        for i, atom in enumerate(atoms):
            found += names(atom)
            ends = None if compat.is_literal(atom) else self.ends_of.get(atom)
            pieces += [Piece(i)] if ends is None else [Piece(i, rows) for rows in pairwise(ends)]
        return found, tuple(pieces)

    def _loop(self, outer: _PieceBuilder) -> None:
        loop, inner = self.loop, _PieceBuilder(self.ends_of)
        consts = [zip(inner.receive(v), outer.give(a), strict=True) for v, a in loop.consts.items()]
        befores = [inner.receive(c.before) for c in loop.carries]
        for eqn in loop.eqns:
            if eqn in self.dimension and any(v in self.ends_of for v in _stacks(eqn)):
                self._scan(inner, eqn)
            else:
                inner.add(eqn)
        carries: list[Carry] = []
        for c, before in zip(loop.carries, befores, strict=True):
            pieces = zip(before, inner.give(c.after), outer.give(c.start), outer.receive(c.end), strict=True)
            carries += (Carry(*piece) for piece in pieces)
        stacks = {v: inner.whole(row) for v, row in loop.stacks.items()}
        rows = {v: outer.whole(stack) for v, stack in loop.rows.items()}
        made = Loop(loop.eqn, dict(chain(*consts)), carries, rows, stacks, inner.eqns, loop.length)
        outer.eqns.append(made.equation())

    def _scan(self, level: _PieceBuilder, eqn: Eqn) -> None:
        """Add a scan over layers as scans over the pieces, one after the other."""
        loop = Loop.of(eqn)
        consts = {v: level.whole(a) for v, a in loop.consts.items()}
        state = [level.whole(c.start) for c in loop.carries]
        stacks = {v: level.pieces(a) for v, a in loop.rows.items() if not compat.is_literal(a)}
        rows = list(enumerate(pairwise(self.ends_of[_stacks(eqn)[0]])))
        ys: dict[int, list[Var]] = {}
        found: list[tuple[int, Eqn]] = []
        for k, (a, b) in reversed(rows) if loop.reverse else rows:
            last = k == (0 if loop.reverse else len(rows) - 1)
            ends = [c.end if last else compat.fresh_var(c.end.aval) for c in loop.carries]
            parts = zip(loop.carries, state, ends, strict=True)
            piece = replace(
                loop, consts=consts, carries=[replace(c, start=start, end=end) for c, start, end in parts],
                rows={v: pieces[k] for v, pieces in stacks.items()},
                stacks={rows_of(v, b - a): row for v, row in loop.stacks.items()}, length=b - a,
            )  # fmt: skip
            ys[k] = [*piece.stacks]
            found.append((a, with_own_bodies(piece.equation())))
            level.eqns.append(found[-1][1])
            state = ends
        for i, v in enumerate(loop.stacks):
            level.parts[v] = [ys[k][i] for k, _ in rows]
        self.scans[self.dimension[eqn]].append(tuple(found))


def _path(path: str, piece: Piece) -> str:
    return path if piece.rows is None else f"{path}[{piece.rows[0]}:{piece.rows[1]}]"
