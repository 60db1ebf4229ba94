"""Sinks reshapes that merge dimensions through what treats these alike, until nothing is left to merge.

    y = reshape[6,5] x:[2,3,5]; z = exp y; s = reduce_sum[0] z  -->  z' = exp x; s = reduce_sum[0,1] z'

Losses, MLPs and norms are often written on flattened tokens. A merged dimension of which an inner factor is split has
no placement, so the reshape moves the whole value, though nothing that follows needs it. The walk (`merge_walk`) holds
a merged value in its factors, and merges it only where an operation needs that. A reshape that splits the dimension
again ends this, and so does a reduction over it.

What hangs together by such values is rewritten if fewer bytes are merged, or split, than before, and if no axis of the
mesh fits a merged dimension but none of its factors.
"""

from __future__ import annotations

from collections.abc import Collection

from shardc import compat
from shardc.compat import Eqn, Jaxpr
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.passes import Context
from shardc.passes.rewrite.factors import is_plain, merged_by


def sink_merges(program: Program, context: Context) -> Program:
    """The program whose merging reshapes stand as late as possible."""
    sizes = () if context.mesh is None else [n for n in context.mesh.sizes.values() if n > 1]
    jaxpr = sunk(program.jaxpr, sizes) if sizes else program.jaxpr
    return program if jaxpr is program.jaxpr else program.after("sink_merges", jaxpr)


def sunk(jaxpr: Jaxpr, sizes: Collection[int] = ()) -> Jaxpr:
    """The canonical jaxpr whose merging reshapes stand as late as possible; `sizes`: of the axes of the mesh."""
    merging = {e.outvars[0] for e in all_eqns(jaxpr) if _merges(e, sizes)}
    while merging:
        from shardc.passes.rewrite.merge_walk import walked

        made, worse = walked(jaxpr, merging)
        if not worse:
            return compat.remove_dead(made, [True] * len(made.outvars))
        merging -= worse
    return jaxpr


def _merges(eqn: Eqn, sizes: Collection[int]) -> bool:
    """Whether an equation is a reshape that merges dimensions, each with a factor for every axis that fits it."""
    if (factors := merged_by(eqn)) is None or is_plain(factors):
        return False
    merged = zip(factors, eqn.outvars[0].aval.shape, strict=True)
    return not any(size % n == 0 and all(f % n for f in group) for group, size in merged for n in sizes)
