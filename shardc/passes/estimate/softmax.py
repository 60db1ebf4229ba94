"""Softmax in float32 of products of a smaller type, as attention has it: what of it XLA:TPU keeps in memory.

Where a mask or a bias is put over the scores, XLA:TPU writes them in float32, and one loop over these finds the largest
of each row, the exponentials and their sum: both arrays are there at one time. Only rows no longer than `ROW` stay
inside one operation with the product.

The exponentials are kept for the gradient. Not if queries share their keys: those have two dimensions, and the product
has them in another order than the softmax. Then XLA:TPU keeps the product, or the sum of several of which one is such,
and computes the exponentials in each loop that reads them. It makes the softmax anew, too, and may multiply it only
after the loop for the gradient of the scores. Of a sum it makes the gradient twice, for the loops of either product,
but once for one example. But if the product's pieces go around, it does as elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.walk import itemsize_of
from shardc.passes.estimate.backend import IN_LOOPS, Step

ROW: Final = 2048
"""Numbers in a row that XLA:TPU has inside of an operation. Of 2,560 it had in one program, and in another not."""

AGAIN: Final = 3
"""Loops that read exponentials of which there is a gradient: their sum, their quotient by it, and the gradient."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What exponentials are computed from.

    Attributes:
      rows: that of which each row's largest is taken away.
      kept: that is computed from, of a smaller type: a product, or a sum of several.
      products: these.
      turned: whether no order of the operands of one of them gives the order of the dimensions of the rows.
      written: whether the rows are in memory beside the exponentials: they are long, and a mask or a bias is in them.
    """

    rows: Var
    kept: Var
    products: tuple[Var, ...]
    turned: bool
    written: bool


@dataclass(frozen=True, slots=True)
class Again:
    """Exponentials that are computed in each loop that reads them, unless the product's pieces go around.

    Attributes:
      begin, last: the point at which they are made, and that of the last loop that reads them.
      until: before which what that loop makes, the gradient for several loops, is in memory in their type; or `last`.
    """

    value: Var
    scores: Scores
    begin: int
    last: int
    until: int


def find_scores(step: Step, maker: Mapping[Var, Step]) -> Scores | None:
    """What an exponential is computed from, if it is of rows less their largest, and those from smaller products.

    Args:
      maker: of each value the equation that makes it.
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
    at: Var, order: Sequence[int], maker: Mapping[Var, Step], names: Collection[str] | None = None
) -> tuple[Var, Sequence[int], bool]:
    """What a value is computed from number by number, by any operations or these, the order in which its dimensions are
    there, and whether a table is joined to it on the way."""
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


def _products(at: Var, order: Sequence[int], maker: Mapping[Var, Step]) -> list[tuple[Var, Sequence[int]]] | None:
    """The products whose sum a value is, and the order in which its dimensions are there; None: it is no such sum."""
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


def _whole_operands(step: Step, of: Var, maker: Mapping[Var, Step]) -> list[Var]:
    return [a for a in dict.fromkeys(step.operands) if _is_whole(a, of, maker)]


def _less_largest(a: Atom, maker: Mapping[Var, Step]) -> Var | None:
    """The rows, if a value is rows less the largest of each."""
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
"""What there is between the largest of a row and the row less it; `max` is with -inf."""


def _origin(a: Atom, maker: Mapping[Var, Step]) -> Atom:
    """What has been spread over other dimensions to be this."""
    while not compat.is_literal(a) and a in maker and maker[a].eqn.primitive.name == "broadcast_in_dim":
        a = maker[a].eqn.invars[0]
    return a


def _is_whole(a: Var, of: Var, maker: Mapping[Var, Step]) -> bool:
    """Whether it has a number for each of another."""
    return compat.size_of(a.aval) == compat.size_of(of.aval) and a.aval.dtype != bool and _origin(a, maker) is a


def _is_table(a: Var, maker: Mapping[Var, Step]) -> bool:
    """Whether it is more than one number."""
    of = _origin(a, maker)
    return not compat.is_literal(of) and of.aval.size > 1


def _turned(order: Sequence[int], product: Eqn) -> bool:
    """Whether the dimensions of a product come in an order that it would have with neither order of its operands."""
    ((contracted, _), (batch, _)) = product.params["dimension_numbers"]
    first, left = len(batch), len(product.invars[0].aval.shape) - len(contracted)
    direct = tuple(range(len(order)))
    exchanged = (*direct[:first], *direct[left:], *direct[first:left])
    return tuple(order) not in (direct, exchanged) and tuple(order[:first]) == direct[:first]
