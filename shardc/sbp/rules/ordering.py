"""Operations that compare along a dimension: that dimension stays whole."""

from __future__ import annotations

from shardc.sbp.rules.layout import without
from shardc.sbp.rules.reduction import kept_only
from shardc.sbp.signature import Operation, Rule, dims, rule


@rule("argmax", "argmin")
def arg_extremum(op: Operation) -> Rule:
    """An index of each row."""
    return kept_only(op)


@rule("sort")
def sort(op: Operation) -> Rule:
    """Each row is sorted for itself, all operands alike."""
    names = without(dims(len(op.operands[0].shape)), [op.params["dimension"]])
    return Rule((names,) * len(op.operands), (names,) * len(op.results))


@rule("top_k")
def top_k(op: Operation) -> Rule:
    """Values and indices of the k largest of each row."""
    rank = len(op.operands[0].shape)
    names = without(dims(rank), [op.params["axis"] % rank])
    return Rule((names,), (names, names))
