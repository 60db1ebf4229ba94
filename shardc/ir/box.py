"""The primitive of a boxing, `y = box[src dst] x`, and programs that contain their boxings.

`box` is the identity on the logical value, so the program still runs on one device and gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.walk import itemsize_of
from shardc.machine.mesh import MeshView
from shardc.sbp.boxing import Boxing, find_boxing
from shardc.sbp.placement import Placement
from shardc.sbp.signature import Rule

box_p = Primitive("box")
"""A second operand is a value that the boxing waits for: a boxing that is repeated late keeps its result in memory for
a shorter time. `shared` is the number of boxings that start together (`MeshView.shared`)."""
box_p.def_impl(lambda x, *after, src, dst, source, shared: x)
box_p.def_abstract_eval(lambda x, *after, src, dst, source, shared: x)
mlir.register_lowering(box_p, lambda ctx, x, *after, src, dst, source, shared: [x])


def boxing_of(eqn: Eqn, mesh: MeshView) -> Boxing:
    """The steps of a `box` equation."""
    aval, src, dst = eqn.invars[0].aval, eqn.params["src"], eqn.params["dst"]
    view = mesh.where_start_is_shared(eqn.params["shared"])
    return find_boxing(tuple(aval.shape), itemsize_of(aval), src, dst, view)


@dataclass(frozen=True)
class Boxed:
    """A program that contains its boxings.

    Attributes:
      jaxpr: the program; `box` equations stand before their readers.
      placements: the placement of every variable, also in nested bodies.
      rules: known rules of operations, by equation.
      host: the values that live in the memory of the host (`ir.memory_move`).
    """

    jaxpr: Jaxpr
    placements: Mapping[Var, Placement]
    rules: Mapping[Eqn, Rule] = field(default_factory=dict[Eqn, Rule])
    host: frozenset[Var] = frozenset()
