"""The primitive of a move between a device's memory and its host's, `y = memory_move[to] x`.

It is the identity on the value, so the program still runs on one device and gives the same numbers. A value on the host
is read by moves only: an argument or result that lives there, or the rows of a stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import nested_bodies

MemorySpace: TypeAlias = Literal["host", "device"]

MEMORY_KIND: Final = "pinned_host"
"""JAX's name of the host memory that devices read and write directly."""

memory_move_p = Primitive("memory_move")
memory_move_p.def_impl(lambda x, *, to, source: x)
memory_move_p.def_abstract_eval(lambda x, *, to, source: x)
mlir.register_lowering(memory_move_p, lambda ctx, x, *, to, source: [x])


def memory_move_eqn(x: Atom, out: Var, to: MemorySpace, source: str) -> Eqn:
    """`out = memory_move[to] x`; `source`: the line of user code that made the value, or its path."""
    return compat.new_eqn([x], [out], memory_move_p, {"to": to, "source": source}, None)


def is_memory_move(eqn: Eqn) -> bool:
    return eqn.primitive is memory_move_p


def host_values(jaxpr: Jaxpr) -> frozenset[Var]:
    """The values of a program, nested bodies included, that live in the memory of the host."""
    return frozenset(_host_values(jaxpr))


def _host_values(jaxpr: Jaxpr) -> Iterator[Var]:
    for eqn in jaxpr.eqns:
        if is_memory_move(eqn):
            yield from eqn.outvars if eqn.params["to"] == "host" else compat.variables(eqn.invars)
        for body in nested_bodies(eqn):
            inside = set(_host_values(body.jaxpr))
            yield from inside
            yield from (a for v, a in body.given(eqn) if v in inside and not compat.is_literal(a))
            results = zip(body.results, body.jaxpr.outvars, strict=True)
            yield from (eqn.outvars[k] for k, a in results if not compat.is_literal(a) and a in inside)
