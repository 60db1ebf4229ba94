"""The attention in a program: computed by a kernel, or by two products with a softmax between them.

A kernel keeps the scores of queries and keys out of memory. XLA fuses no attention by itself: what it is made of is
planned as it stands in the program, and its scores are written and read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.box import Boxed
from shardc.ir.walk import executions, local_bytes, short_aval
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import IN_LOOPS, kind_of


@dataclass(frozen=True, slots=True)
class Attention:
    """Where a program computes attention.

    Attributes:
      source: the line of user code.
      scores: dtype and logical shape of the scores in memory, as `f32[8,16,1024,1024]`; empty if a kernel computes it.
      bytes: of these scores, per device.
      count: executions in one call; what is recomputed counts again.
    """

    source: str
    scores: str
    bytes: int
    count: int


def find_attention(boxed: Boxed, mesh: MeshView) -> list[Attention]:
    """The attention of a boxed program, in its order."""
    times: dict[Eqn, int] = {}
    for eqn, count in executions(boxed.jaxpr):
        times[eqn] = times.get(eqn, 0) + count
    maker = {v: eqn for eqn in times for v in eqn.outvars}
    found: dict[Eqn, Attention] = {}
    for eqn, count in times.items():
        source = compat.source_line(eqn)
        if eqn.primitive.name.startswith("dot_product_attention") and "fwd" in eqn.primitive.name:
            found[eqn] = Attention(source, "", 0, count)
        for exp in _softmaxes(eqn, maker) if eqn.primitive.name == "dot_general" else ():
            scores = exp.outvars[0]
            held = local_bytes(scores, boxed.placements[scores], mesh.sizes)
            found.setdefault(exp, Attention(compat.source_line(exp), short_aval(scores.aval), held, times[exp]))
    return list(found.values())


def _softmaxes(product: Eqn, maker: Mapping[Var, Eqn]) -> Iterator[Eqn]:
    """The exponentials between this product and another one that an operand of it follows from."""
    for a in product.invars:
        before = list(_way_back(a, maker))
        first = compat.variables(before[-1].invars) if before else ()
        exps = [e for e in before if e.primitive.name in ("exp", "exp2")]
        if len(exps) == 1 and any(maker[v].primitive.name == "dot_general" for v in first if v in maker):
            yield exps[0]


def _way_back(a: Atom, maker: Mapping[Var, Eqn]) -> Iterator[Eqn]:
    """The operations that compute a value element by element, the last one first, as long as each has one operand that
    is no mask, scalar or statistic of the rows."""
    while not compat.is_literal(a) and a in maker and kind_of(made := maker[a]) in IN_LOOPS:
        whole = {x for x in compat.variables(made.invars) if _is_whole(x, a, maker)}
        if len(whole) != 1:
            return
        yield made
        (a,) = whole


def _is_whole(x: Var, of: Var, maker: Mapping[Var, Eqn]) -> bool:
    broadcast = x in maker and maker[x].primitive.name == "broadcast_in_dim"
    return compat.size_of(x.aval) == compat.size_of(of.aval) and x.aval.dtype != bool and not broadcast
