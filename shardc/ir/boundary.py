"""Marks in a traced function at which pipelines are cut: identities that differentiate, batch and transpose.

x --> stage_boundary[cut k] x         one stage ends here, the next begins
ct --> stage_boundary[cut k, backward] ct      its transpose: the same cut, crossed by the gradient
xs --> microbatches xs                the stack of microbatches that a loop runs over
"""

from __future__ import annotations

import itertools
from typing import Any, Final, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardc.errors import ArgumentError

T = TypeVar("T")

END: Final = -1
"""The cut after the forward pass of the last stage, where the loss is known and its gradient begins."""
_numbers = itertools.count()


def _identity(name: str) -> Primitive:
    """A primitive that returns its one operand, whatever its parameters."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims[0])
    return primitive


stage_boundary_p = _identity("stage_boundary")
microbatches_p = _identity("microbatches")
MARKS: Final = frozenset((stage_boundary_p, microbatches_p))


def _turn(ct: Any, _: Any, *, cut: int, leaf: int, backward: bool) -> list[Any]:
    return [stage_boundary_p.bind(ct, cut=cut, leaf=leaf, backward=not backward)]


ad.deflinear2(stage_boundary_p, _turn)
ad.deflinear2(microbatches_p, lambda ct, _: [ct])


def stage_boundary(x: T) -> T:
    """End a pipeline stage: an identity, after which the program runs on the devices of the next stage.

    Its transpose is the boundary of the backward pass, so one `jax.grad` body holds the cuts of both directions.
    Without a pipeline it has no effect.

    Args:
      x: an array, or a pytree of the values that cross. A value that is used after a boundary without passing through
        it skips the stages between.

    Returns:
      `x`.

    Raises:
      ArgumentError: there is no array in `x`.
    """
    if not jax.tree.leaves(x):
        raise ArgumentError(
            f"stage_boundary: there is no array in {x!r}; pass the values that the next stage reads, and continue "
            "with the result: x = shardc.stage_boundary(x)."
        )
    return mark_cut(x, next(_numbers))


def mark_cut(x: T, cut: int) -> T:
    """`stage_boundary` with a given number; equal numbers are one cut."""
    leaves, tree = jax.tree.flatten(x)
    marks = [stage_boundary_p.bind(jax.numpy.asarray(v), cut=cut, leaf=i, backward=False) for i, v in enumerate(leaves)]
    return jax.tree.unflatten(tree, marks)
