"""Digests of programs, and of all that placed programs do: equal ones have equal digests, in every process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shardc import compat
from shardc.compat import Atom, Jaxpr, Var
from shardc.ir.nested import NESTED, bodies_of
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.plan.plan import PlacedProgram
from shardc.plan.rows import operation_text, placement_word
from shardc.sbp.placement import Pin


def digest_of(programs: Iterable[PlacedProgram], *texts: str) -> str:
    """A digest of programs with their literals and boxings, the placement of every value, the buffers that results
    take, and the options that XLA is given. Arrays that a program closes over are not in it.

    Args:
      programs: the programs.
      texts: further texts that count.
    """
    found = hashlib.sha256()

    def add(text: str) -> None:
        found.update(f"{len(text)} {text}".encode())

    for program in programs:
        jaxpr, at = program.boxed.jaxpr, program.boxed.placements
        add(f"{program.program.name} on {program.mesh.axes}, {program.ties}")
        for name, digest in digests(jaxpr).items():
            add(f"{name} {digest}")
        for text in (*_literals(jaxpr), *map("=".join, program.xla_options.items())):
            add(text)
        for placements in (program.inputs, program.outputs, [at[v] for e in all_eqns(jaxpr) for v in e.outvars]):
            add(", ".join(map(placement_word, placements)))
    for text in texts:
        add(text)
    return found.hexdigest()[:16]


def is_same_program(one: Program, other: Program) -> bool:
    """Whether two traces of a function compute the same: equations, literals, and the arrays that they close over."""
    if list(map(id, one.captured)) != list(map(id, other.captured)) or one.out_tree != other.out_tree:
        return False
    return _literals(one.jaxpr) == _literals(other.jaxpr) and digests(one.jaxpr) == digests(other.jaxpr)


def _literals(jaxpr: Jaxpr) -> list[str]:
    atoms = (*(a for e in all_eqns(jaxpr) for a in e.invars), *jaxpr.outvars)
    return [f"{np.asarray(a.val).tolist()!r}" for a in atoms if compat.is_literal(a)]


def digests(jaxpr: Jaxpr) -> dict[str, str]:
    """For each primitive a digest of the parameters and connections of its operations, the same in every process.

    Values of literals are not in it: a plan holds whatever they are.
    """
    numbers: dict[Var, int] = {}
    hashes: dict[str, Any] = {}

    def number(atom: Atom) -> str:
        return "literal" if compat.is_literal(atom) else str(numbers.setdefault(atom, len(numbers)))

    for var in jaxpr.invars:
        number(var)
    for n, eqn in enumerate(all_eqns(jaxpr)):
        bodies = [f"{[number(v) for v in b.invars]} -> {[number(a) for a in b.outvars]}" for b in bodies_of(eqn)]
        params = {k: v for k, v in eqn.params.items() if k not in NESTED.get(eqn.primitive.name, ())}
        wires = f"{[number(a) for a in eqn.invars]} -> {[number(v) for v in eqn.outvars]}"
        weak = [bool(getattr(v.aval, "weak_type", False)) for v in eqn.outvars]
        line = f"{n} {operation_text(eqn)} {weak} {wires} {bodies} {_stable(params)}\n"
        hashes.setdefault(eqn.primitive.name, hashlib.sha256()).update(line.encode())
    results = f"{[number(a) for a in jaxpr.outvars]}"
    hashes.setdefault("results", hashlib.sha256()).update(results.encode())
    return {name: h.hexdigest()[:12] for name, h in sorted(hashes.items())}


def _stable(value: Any) -> str:
    """A parameter as text that is the same in every process."""
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
        return "{" + ", ".join(sorted(f"{_stable(k)}: {_stable(v)}" for k, v in items)) + "}"
    if isinstance(value, frozenset | set):
        return "{" + ", ".join(sorted(map(_stable, value))) + "}"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_stable, value))})"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        body: Jaxpr = getattr(value, "jaxpr", value)
        return _stable(digests(body))
    if isinstance(value, Pin) and value.fixed is not None:
        fixed = ", ".join(map(repr, sorted(value.fixed)))
        return f"Pin(placement={value.placement!r}, fixed=frozenset({{{fixed}}}), said={value.said!r})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
