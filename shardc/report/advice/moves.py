"""The words for what moves between the devices of a mesh: what forces it, and what would do without."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from shardc.ir.collective import known_bytes
from shardc.plan.borders import Border
from shardc.report.advice.cost import Change, Words, searched
from shardc.report.advice.elsewhere import Asked
from shardc.report.advice.pieces import TimePiece
from shardc.report.tables import bytes_text, fold_leaves, placement_text, seconds_text

NAMED: Final = 3
"""The arguments, or lines, of one cost that are named."""


def sent_text(pieces: Sequence[TimePiece]) -> str:
    """`all_gather and permute over data, 12 times, 1.5 MiB`, and how much of it is hidden."""
    moves = [c for p in pieces for c in p.moves]
    kinds, axes = Counter(c.kind for c in moves), dict.fromkeys(a for c in moves for a in c.axes)
    times = f"{n} times" if (n := sum(c.count for c in moves)) > 1 else "once"
    hidden = seconds_text(math.fsum(p.hidden for p in pieces))
    more = f"; {hidden} more overlap with computing" * (hidden != "0 s")
    kind = " and ".join(k for k, _ in kinds.most_common())
    return f"{kind} over {', '.join(axes)}, {times}, {bytes_text(known_bytes(moves))}{more}"


def names_text(paths: Iterable[str]) -> str:
    """`params/blocks_*/up/kernel x2, x and 3 more`."""
    texts = [" ".join(text.split()) for _, text, _ in fold_leaves(((), path, None) for path in dict.fromkeys(paths))]
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more


def at_text(name: str, line: str) -> str:
    return f"{name} at {line}" if line else name


def _dearest(pieces: Sequence[TimePiece]) -> str:
    """Who makes the value that is dearest to move, and who reads it, each with its placement."""
    p = pieces[0]
    made, reader = p.name.original, p.reader
    source = f"{at_text(made.word, made.line)} leaves" if made.kind == "value" else f"{made} is"
    if reader is None or reader.kind not in ("value", "result"):
        reads = "it leaves its loop, or the program, at"
    else:
        reads = f"{reader.word} reads it at" if reader.kind == "value" else f"{reader} has it at"
    text = f"{source} {p.value} at {placement_text(p.src)}, {reads} {placement_text(p.dst)}."
    return f"The dearest of {len(pieces)}: {text}" if len(pieces) > 1 else text


def of_argument(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    paths = list(dict.fromkeys(p.name.original.word for p in pieces))
    what = f"{sent_text(pieces)}, of argument{'s' * (len(paths) > 1)} {names_text(paths)}"
    return _of_borders(asked, pieces, what, paths, asked.plan.in_borders, "")


def of_result(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    paths = list(dict.fromkeys(p.reader.word for p in pieces if p.reader is not None))
    what = (
        f"{sent_text(pieces)}, of {f'results {names_text(paths)}' if len(paths) > 1 else f'result {paths[0]}'.rstrip()}"
    )
    return _of_borders(asked, pieces, what, paths, asked.plan.out_borders, "result ")


def _of_borders(
    asked: Asked, pieces: Sequence[TimePiece], what: str, paths: Sequence[str], borders: Sequence[Border], kind: str
) -> Words:
    by_path = {b.path: b for b in borders}
    fixed = [path for path in paths if path in by_path and _is_fixed(by_path[path])]
    if not fixed:
        return Words(what, f"{_dearest(pieces)} The placement was chosen.", ())
    pinned = "It is" if len(paths) == 1 else "All are" if len(fixed) == len(paths) else f"{len(fixed)} of them are"
    how = "pinned" if by_path[fixed[0]].known.pin is not None else "passed"
    changes = (*_moved(asked, pieces), searched(f"{kind}{fixed[0]}".rstrip()))
    return Words(what, f"{_dearest(pieces)} {pinned} {how} there.", changes)


def _is_fixed(border: Border) -> bool:
    """Whether its placement, or a part of it, was known before planning."""
    pin, arrival = border.known.pin, border.known.arrival
    return arrival is not None or (pin is not None and pin.fixed != frozenset())


def of_constraint(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    lines = list(dict.fromkeys(p.reader.line for p in pieces if p.reader is not None))
    what = f"{sent_text(pieces)}, for the constraint{'s' * (len(lines) > 1)} at {', '.join(lines[:NAMED])}"
    return Words(what, _dearest(pieces), (*_moved(asked, pieces), searched(lines[0].partition(" (")[0])))


def _moved(asked: Asked, pieces: Sequence[TimePiece]) -> Iterator[Change]:
    """The change that puts what is pinned where its reader, or its maker, has it."""
    if (found := asked.elsewhere(pieces)) is None:
        return
    plan, (places, other) = asked.plan, found
    at = ", ".join(dict.fromkeys(map(placement_text, places.values())))
    where = "read" if pieces[0].reason == "argument" else "made"
    full, hbm = other.memory.peak > plan.mesh.topology.hbm, plan.mesh.topology.hbm
    who = f"{names_text(places)} at {at}, where {'they are' if len(places) > 1 else 'it is'} {where}"
    more = f" (more memory than the {bytes_text(hbm)} that a device has)" * full
    if (saves := plan.seconds - other.seconds) > 0:
        yield Change(f"{who}{more}", saves, "at least", other.memory.peak - plan.memory.peak)


def of_sum(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    half = math.fsum(min(p.seconds, p.wire / 2) for p in pieces if p.value.startswith("f32"))
    narrow = Change("Float32 sums in bfloat16, with fewer digits (docs/mixed-precision.md)", half, "at most")
    return Words(f"{sent_text(pieces)}, of partial sums", _dearest(pieces), (narrow,) * bool(half))


def of_value(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    return Words(f"{sent_text(pieces)}, of values between operations", _dearest(pieces), ())


def of_window(asked: Asked, pieces: Sequence[TimePiece]) -> Words:
    p = pieces[0]
    why = f"{at_text(p.name.word, p.name.line)} needs pieces of {p.value} that other devices hold."
    return Words(f"{sent_text(pieces)}, of pieces for operations", why, ())
