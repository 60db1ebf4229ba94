"""A digest of all that placed programs do: equal programs have equal digests, in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from shardc import compat
from shardc.ir.walk import all_eqns
from shardc.plan.plan import PlacedProgram
from shardc.plan.saved_plan import digests, placement_word


def digest_of(programs: Iterable[PlacedProgram], *texts: str) -> str:
    """A digest of programs with their literals and boxings, the placement of every value, and the buffers that results
    take. Arrays that a program closes over are not in it.

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
        every = all_eqns(jaxpr)
        for atom in (*(a for e in every for a in e.invars), *jaxpr.outvars):
            if compat.is_literal(atom):
                add(f"{np.asarray(atom.val).tolist()!r}")
        for placements in (program.inputs, program.outputs, [at[v] for e in every for v in e.outvars]):
            add(", ".join(map(placement_word, placements)))
    for text in texts:
        add(text)
    return found.hexdigest()[:16]
