"""The values of a plan, each where it stands in the placement problem, and those that a name means."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardc.compat import Var
from shardc.errors import ArgumentError
from shardc.ir.box import Boxed
from shardc.ir.program import Program
from shardc.passes.place.problem import Node, Problem
from shardc.passes.trace.pins import matcher
from shardc.plan.names import Use, ValueName, names_of
from shardc.sbp.placement import Placement


@dataclass(frozen=True, eq=False, slots=True)
class Named:
    """A value of a plan.

    Attributes:
      name: its name; a result has the line of the value that leaves.
      aval: its type.
      placement: where it is made; of a result, where it leaves.
      node, port: where it stands in the placement problem.
      made_of: the operands of its operation; of a result, the value that leaves.
      uses: its readers.
    """

    name: ValueName
    aval: Any
    placement: Placement
    node: Node
    port: int
    made_of: Sequence[Use]
    uses: Sequence[Use]


def values_of(program: Program, problem: Problem, boxed: Boxed) -> list[Named]:
    """All values of a boxed program: arguments, what its operations make, results."""
    names = names_of(boxed, program)

    def named(var: Var, made_of: Sequence[Use]) -> Named:
        value, placement = problem.values[var], boxed.placements[var]
        port = len(value.maker.operands) + value.port
        return Named(names.values[var], var.aval, placement, value.maker, port, made_of, names.uses[var])

    left = [
        Named(replace(use.reader, line=use.value.line), use.aval, use.at, node, 0, (use,), ())
        for use, node in zip(names.results, problem.sinks, strict=True)
        if use is not None
    ]
    return [*itertools.starmap(named, names.made_of.items()), *left]


def find_values(values: Sequence[Named], pattern: str) -> list[Named]:
    """The values that a name means: of the ways to mean one the first that any value fits.

    A whole name; a pattern with `*`, which matches any text, `/` included, over names and lines, then over the ends of
    names; the end of a name; a part of one, from `/` to `/`; a line, `model.py:12`. A text of a report that stands for
    several names, `argument mu/{bias,scale}  x2`, means each of them.

    Raises:
      ArgumentError: there is none.
    """
    found = _meant(values, pattern) or [v for each in _each(pattern) for v in _meant(values, each)]
    if found:
        return list(dict.fromkeys(found))
    raise ArgumentError(
        f"why={pattern!r}: no value of the plan has that name. Values are named by the path of an argument or result, "
        "by the modules and the primitive of the operation that makes them, or by its line, model.py:12; `*` matches "
        f"any text.{_near(pattern, values)}"
    )


def _meant(values: Sequence[Named], pattern: str) -> list[Named]:
    glob, end, parts = matcher(pattern), matcher(f"*/{pattern}"), f"/{pattern.strip('/')}/"
    texts = {v: _texts(v.name, pattern) for v in values}
    ways: tuple[Callable[[Named], object], ...] = (
        lambda v: pattern in texts[v],
        lambda v: "*" in pattern and (any(map(glob.match, texts[v])) or glob.match(v.name.line)),
        lambda v: "*" in pattern and any(map(end.match, texts[v])),
        lambda v: any(f"/{text}/".endswith(parts) for text in texts[v]),
        lambda v: any(parts in f"/{text}/" for text in texts[v]),
        lambda v: v.name.line.startswith(f"{pattern} (") or v.name.line == pattern,
    )
    for fits in ways if pattern.strip("/") else ():
        found = [v for v in values if fits(v)]
        if found:
            return found
    return []


def _texts(name: ValueName, pattern: str) -> tuple[str, ...]:
    """The spellings of a name; with its kind in front too, if the pattern begins with that."""
    kind, texts = f"{name.kind} ", name.spellings
    return (*texts, *(kind + text for text in texts)) if pattern.startswith(kind) else texts


_PRINTED: Final = re.compile(r"(?:copy of |the end of )*(.*?)(?:  x\d+)?")


def _each(pattern: str) -> list[str]:
    """The names that a text of a report stands for: `copy of argument mu/{bias,scale}  x2` is for two."""
    shown = _PRINTED.fullmatch(pattern)
    words = re.split(r"\{([^{}]*)\}", shown[1] if shown else pattern)
    return list(map("".join, itertools.product(*(w.split(",") if i % 2 else [w] for i, w in enumerate(words)))))


def _near(pattern: str, values: Sequence[Named]) -> str:
    """` Near are ...`: names, or lines, that look like it; some of the names if none does."""
    names = list(dict.fromkeys(v.name.spellings[0] for v in values))
    lines = list(dict.fromkeys(v.name.line.partition(" (")[0] for v in values if v.name.line))
    word = pattern.replace("*", "").strip("/")
    near = difflib.get_close_matches(word, lines if re.search(r"\.py(:|$)", word) else names, n=3)
    if not near:  # a part of a name may be what is misspelt
        tails = {"/".join(n.split("/")[-k:]): n for n in names for k in range(1, word.count("/") + 3)}
        near = [tails[t] for t in difflib.get_close_matches(word, tails, n=3, cutoff=0.7)]
    some = near or names[:3] or ["none"]
    return f" {'Near are' if near else 'There are'} {', '.join(some)}."
