"""A digest of all that placed programs do: equal programs have equal digests, in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from shardc.ir.walk import all_eqns
from shardc.plan.plan import PlacedProgram
from shardc.plan.saved_plan import digests, placement_word


def digest_of(programs: Iterable[PlacedProgram], *texts: str) -> str:
    """A digest of programs with their boxings, the placement of every value, and the buffers that results take.

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
        for placements in (program.inputs, program.outputs, [at[v] for e in all_eqns(jaxpr) for v in e.outvars]):
            add(", ".join(map(placement_word, placements)))
    for text in texts:
        add(text)
    return found.hexdigest()[:16]
