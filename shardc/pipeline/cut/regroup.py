"""Reassociates sums over values of several stages, outside of the loop over microbatches.

Each stage sums its own terms first:

add (add a0 b3) c0   -->   stage 0: s0 = add a0 c0;  s = add s0 b3
reduce_and (concatenate a0 b3)   -->   stage 0: s0 = reduce_and a0;  stage 3: s3 = reduce_and b3;  s = and s0 s3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from jax import lax
from jax.extend.core import Primitive

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.walk import ADDITIONS, reads_of
from shardc.pipeline.cut.reassociate import StageSum, reassociate, terms_of


def regroup(eqns: Sequence[Eqn], anchors: dict[Var, int], outvars: Sequence[Atom]) -> list[Eqn]:
    """The equations with sums, and similar reductions, reassociated by stage.

    Examples are a global norm, or a test whether all gradients are finite.

    Args:
      eqns: the equations, in order.
      anchors: the stage of each value that is made on one stage; the stages of new values are added.
      outvars: variables that are also read outside of `eqns`.
    """
    made = {v: e for e in eqns for v in e.outvars}
    readers = reads_of(eqns, outvars)
    inner = {
        (kind, a) for e in eqns if (kind := _kind(e)) for a in e.invars
        if not compat.is_literal(a) and readers[a] == 1
    }  # fmt: skip
    stage_of = lambda a: None if compat.is_literal(a) else anchors.get(a)  # noqa: E731
    found: list[Eqn] = []
    for eqn in eqns:
        kind = _kind(eqn)
        groups: list[StageSum] = []
        if kind == "add" and ("add", eqn.outvars[0]) not in inner:
            (out,) = eqn.outvars
            count, readers[out] = readers.get(out, 0), 1
            groups = reassociate(out, lambda a: a, made, readers, stage_of)
            readers[out] = count
        elif kind and (kind, eqn.outvars[0]) not in inner:
            groups = _in_groups(terms_of(eqn, kind, made, readers), stage_of, eqn)
        elif eqn.primitive.name in _REDUCTIONS:
            groups = _stacked(eqn, made, readers, stage_of)
        if len(groups) < 2:
            found.append(eqn)
            continue
        found += [e for _, _, eqns in groups for e in eqns]
        anchors |= {v: stage for stage, _, eqns in groups for e in eqns for v in e.outvars}
        primitive = lax.add_p if kind == "add" else _REDUCTIONS.get(eqn.primitive.name, eqn.primitive)
        joined = _join([a for _, a, _ in groups], primitive, eqn, eqn.outvars[0])
        anchors |= {v: anchors.get(v, groups[0][0]) for e in joined for v in e.outvars}
        found += joined
    return found


_REDUCTIONS: Final[Mapping[str, Primitive]] = {
    "reduce_and": lax.and_p, "reduce_max": lax.max_p, "reduce_min": lax.min_p, "reduce_or": lax.or_p,
    "reduce_sum": lax.add_p,
}  # fmt: skip
_ORDERLESS: Final = frozenset(("and", "or", "max", "min"))


def _kind(eqn: Eqn) -> str:
    """The name of a commutative operation of two operands; empty for other operations."""
    name = eqn.primitive.name
    return "add" if name in ADDITIONS else name if name in _ORDERLESS else ""


def _join(parts: Sequence[Atom], primitive: Primitive, like: Eqn, out: Var | None = None) -> list[Eqn]:
    """`out = parts[0] + parts[1] + ...`, for any operation of two operands."""
    eqns: list[Eqn] = []
    total = parts[0]
    for i, part in enumerate(parts[1:], 2):
        after = out if i == len(parts) and out is not None else compat.fresh_var(part.aval)
        eqns.append(compat.new_eqn([total, part], [after], primitive, {}, like))
        total = after
    return eqns


def _in_groups(terms: Sequence[Atom], stage_of: Callable[[Atom], int | None], like: Eqn) -> list[StageSum]:
    """The terms of one operation grouped by stage; terms without a stage go to the first one."""
    by_stage = _by_stage(terms, stage_of)
    found: list[StageSum] = []
    for stage, some in by_stage.items():
        eqns = _join(some, like.primitive, like)
        found.append((stage, eqns[-1].outvars[0] if eqns else some[0], eqns))
    return found


def _by_stage(terms: Sequence[Atom], stage_of: Callable[[Atom], int | None]) -> dict[int, list[Atom]]:
    stages = [stage_of(a) for a in terms]
    known = sorted({s for s in stages if s is not None})
    return {
        stage: [a for a, s in zip(terms, stages, strict=True) if s == stage or (s is None and stage == known[0])]
        for stage in known
    }


def _stacked(
    eqn: Eqn, made: Mapping[Var, Eqn], readers: Mapping[Var, int], stage_of: Callable[[Atom], int | None]
) -> list[StageSum]:
    """`reduce (concatenate a b c)` by the stages of a, b and c. JAX stacks many values in several concatenations."""
    x = eqn.invars[0]
    stack = None if compat.is_literal(x) else made.get(x)
    if stack is None or stack.primitive.name != "concatenate" or readers[x] > 1:
        return []
    if tuple(eqn.params["axes"]) != (0,) or len(x.aval.shape) != 1:
        return []
    found: list[StageSum] = []
    for stage, some in _by_stage(terms_of(stack, "concatenate", made, readers), stage_of).items():
        part = compat.fresh_var(x.aval.update(shape=(sum(a.aval.shape[0] for a in some),)))
        out = compat.fresh_var(eqn.outvars[0].aval)
        found.append((stage, out, [
            stack.replace(invars=some, outvars=[part]), eqn.replace(invars=[part], outvars=[out])
        ]))  # fmt: skip
    return found
