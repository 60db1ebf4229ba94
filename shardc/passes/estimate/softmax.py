"""Softmax in float32 of products of a smaller type, as in attention: which of its arrays XLA:TPU materializes.

With a mask or a bias, XLA:TPU writes the scores in float32, and one loop over them computes the maximum of each row,
the exponentials and their sum: both arrays are live at one time. Only rows of at most `ROW` elements stay fused with
the product.

The exponentials are kept for the gradient, except where queries share their keys. Then the queries have two dimensions,
and the product has its dimensions in another order than the softmax. XLA:TPU keeps the product, or the sum of several
of which one is such, and recomputes the exponentials in each loop that reads them. It recomputes the softmax, too, and
may multiply it only after the loop for the gradient of the scores. For a sum it computes the gradient twice, in the
loop of either product, but once for a batch of one. If the product's pieces go around a ring, the exponentials are kept
as elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.walk import itemsize_of
from shardc.passes.estimate.backend import IN_LOOPS, ScheduledEqn

ROW: Final = 2048
"""Elements of a row up to which XLA:TPU keeps it inside a fusion. At 2,560 one program did, and another did not."""

LEAST_LOOPS: Final = 3
"""Loops that read exponentials which have a gradient: their sum, their quotient by it, and the gradient."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that exponentials are computed from.

    Attributes:
      rows: the scores, from which the maximum of each row is subtracted.
      kept: the origin of `rows` in a smaller type: a product, or a sum of several.
      products: the products in `kept`.
      turned: one of them has its dimensions in an order that no order of its operands gives for `rows`.
      written: `rows` are materialized beside the exponentials: they are long, and a mask or a bias is in them.
    """

    rows: Var
    kept: Var
    products: tuple[Var, ...]
    turned: bool
    written: bool


@dataclass(frozen=True, slots=True)
class RecomputedExp:
    """Exponentials that are recomputed in each loop that reads them, unless the product's pieces go around a ring.

    Attributes:
      begin, last: the point at which they are made, and that of the last loop that reads them.
      until: the end of the live range of what that loop makes, the gradient for several loops, in their type; else
        `last`.
    """

    value: Var
    scores: Scores
    begin: int
    last: int
    until: int


def find_scores(step: ScheduledEqn, maker: Mapping[Var, ScheduledEqn]) -> Scores | None:
    """The scores of an exponential of rows less their maximum, where the rows come from products of a smaller type;
    else None.

    Args:
      maker: the equation that makes each value.
    """
    if step.eqn.primitive.name != "exp" or (rows := _less_largest(step.eqn.invars[0], maker)) is None:
        return None
    at, order, joined = _origin_of(rows, tuple(range(len(rows.aval.shape))), maker)
    products = _products(at, order, maker)
    if products is None or itemsize_of(at.aval) >= itemsize_of(rows.aval):
        return None
    turned = any(_turned(o, maker[product].eqn) for product, o in products)
    return Scores(rows, at, tuple(p for p, _ in products), turned, joined and rows.aval.shape[-1] > ROW)


def _origin_of(
    at: Var, order: Sequence[int], maker: Mapping[Var, ScheduledEqn], names: Collection[str] | None = None
) -> tuple[Var, Sequence[int], bool]:
    """The value that `at` is computed from element by element, by any operations or only by `names`.

    Returns:
      The value, the order of the dimensions there, and whether a table is combined with it on the way.
    """
    joined = False
    while (made := maker.get(at)) is not None and made.kind in IN_LOOPS and made.eqn.primitive.name != "box":
        if names is not None and made.eqn.primitive.name not in names:
            break
        whole = _whole_operands(made, at, maker)
        turns = made.eqn.primitive.name == "transpose"
        if len(whole) != 1 or not (turns or whole[0].aval.shape == at.aval.shape):
            break
        joined |= any(a is not whole[0] and _is_table(a, maker) for a in made.operands)
        order = [made.eqn.params["permutation"][d] for d in order] if turns else order
        at = whole[0]
    return at, order, joined


def _products(
    at: Var, order: Sequence[int], maker: Mapping[Var, ScheduledEqn]
) -> list[tuple[Var, Sequence[int]]] | None:
    """The matrix products (`dot_general`) whose sum a value is, up to scaling, each with its order of dimensions; None
    if the value is not such a sum."""
    made = maker.get(at)
    if made is None:
        return None
    if made.eqn.primitive.name == "dot_general":
        return [(at, order)]
    if made.eqn.primitive.name not in _SUMS or len(terms := _whole_operands(made, at, maker)) != 2:
        return None
    found: list[tuple[Var, Sequence[int]]] = []
    for term in terms:
        origin, turned, joined = _origin_of(term, order, maker, _SCALED)
        products = None if joined else _products(origin, turned, maker)
        if products is None:
            return None
        found += products
    return found


def _whole_operands(step: ScheduledEqn, of: Var, maker: Mapping[Var, ScheduledEqn]) -> list[Var]:
    return [a for a in dict.fromkeys(step.operands) if _is_whole(a, of, maker)]


def _less_largest(a: Atom, maker: Mapping[Var, ScheduledEqn]) -> Var | None:
    """The rows, if a value is rows less the maximum of each; else None."""
    less = None if compat.is_literal(a) else maker.get(a)
    if less is None or less.eqn.primitive.name != "sub" or any(map(compat.is_literal, less.eqn.invars)):
        return None
    rows, largest = less.eqn.invars
    while (made := maker.get(largest)) is not None and made.eqn.primitive.name in _SAME and made.operands:
        largest = made.operands[0]
    if made is None or made.eqn.primitive.name != "reduce_max" or made.eqn.invars[0] is not rows:
        return None
    return rows if made.eqn.params["axes"] == (len(rows.aval.shape) - 1,) else None


_SUMS: Final = frozenset(("add", "add_any", "sub"))
_SCALED: Final = frozenset(("convert_element_type", "div", "mul", "neg", "transpose"))
_SAME: Final = frozenset(("broadcast_in_dim", "max", "reshape", "stop_gradient"))
"""Operations between the maximum of a row and its subtraction; `max` is with -inf."""


def _origin(a: Atom, maker: Mapping[Var, ScheduledEqn]) -> Atom:
    """The value before any broadcasts."""
    while not compat.is_literal(a) and a in maker and maker[a].eqn.primitive.name == "broadcast_in_dim":
        a = maker[a].eqn.invars[0]
    return a


def _is_whole(a: Var, of: Var, maker: Mapping[Var, ScheduledEqn]) -> bool:
    """Whether `a` has an element of its own for each element of `of`: it is no broadcast and no mask."""
    return compat.size_of(a.aval) == compat.size_of(of.aval) and a.aval.dtype != bool and _origin(a, maker) is a


def _is_table(a: Var, maker: Mapping[Var, ScheduledEqn]) -> bool:
    """Whether a value has more than one distinct element."""
    of = _origin(a, maker)
    return not compat.is_literal(of) and of.aval.size > 1


def _turned(order: Sequence[int], product: Eqn) -> bool:
    """Whether the dimensions of a product are wanted in an order that it has with neither order of its operands."""
    ((contracted, _), (batch, _)) = product.params["dimension_numbers"]
    first, left = len(batch), len(product.invars[0].aval.shape) - len(contracted)
    direct = tuple(range(len(order)))
    exchanged = (*direct[:first], *direct[left:], *direct[first:left])
    return tuple(order) not in (direct, exchanged) and tuple(order[:first]) == direct[:first]
