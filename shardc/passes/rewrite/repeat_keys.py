"""Repeats the keys of grouped attention, so that more devices can share its heads than there are heads of keys.

    y = attention q[32 heads] k[4 heads] v[4 heads]   -->   y = attention q k' v' where k', v' repeat each head twice

Heads of queries stay with the keys that they share, so four heads of keys go to four devices. Repeated to as many as a
part of the mesh has devices, heads are exchanged for tokens there, and each device gets the keys of its heads. The
gradients of repeated keys are added up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardc import compat
from shardc.compat import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from shardc.ir.nested import bodies_of, with_bodies
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns, operation_of, renamed, with_atoms
from shardc.machine.mesh import MeshView
from shardc.passes import Context
from shardc.passes.trace.canonicalize import inlined_eqns
from shardc.sbp.causal import COTANGENT, KEY, QUERY, VALUE, is_attention, tokens_of
from shardc.sbp.signature import find_rule


def repeat_keys(program: Program, context: Context) -> Program:
    """The program with repeated keys; itself if no attention has fewer of them than a part of the mesh has devices."""
    counts = _counts(context.view)
    if not any(_times(e, counts) > 1 for e in all_eqns(program.jaxpr)):
        return program
    return program.after("repeat_keys", _repeated_in(program.jaxpr, counts))


def _counts(mesh: MeshView) -> list[int]:
    """The numbers of devices along some of the axes."""
    sizes = list(mesh.sizes.values())
    some = (c for n in range(1, len(sizes) + 1) for c in itertools.combinations(sizes, n))
    return sorted(set(map(math.prod, some)))


def _heads(eqn: Eqn, port: int) -> int:
    return eqn.invars[port].aval.shape[3 - tokens_of(operation_of(eqn))]


def _times(eqn: Eqn, counts: Sequence[int]) -> int:
    """How often each head of keys is repeated: as little as helps."""
    if not is_attention(eqn.primitive.name) or (keys := _heads(eqn, KEY)) == 1:
        return 1
    op = operation_of(eqn)
    many = (math.lcm(keys, n) for n in counts)
    found = [n // keys for n in many if n > keys and _heads(eqn, QUERY) % n == 0]
    return min(found, default=1) if "n" in find_rule(op).factors() else 1


def _repeated_in(jaxpr: Jaxpr, counts: Sequence[int]) -> Jaxpr:
    eqns, names = list[Eqn](), dict[Var, Atom]()
    known: dict[tuple[Atom, int], Atom] = {}  # the gradients read what the attention does
    for old in jaxpr.eqns:
        eqn = with_atoms(old, names)
        if (times := _times(eqn, counts)) > 1:
            operands = list(eqn.invars)
            for i in (KEY, VALUE):
                key = operands[i], times
                if key not in known:
                    found, (known[key],) = inlined_eqns(_repeat(eqn, i, times), [operands[i]], eqn, ())
                    eqns += found
                operands[i] = known[key]
            found, results = inlined_eqns(_of_repeated(eqn, operands, times), operands, eqn, ())
            names |= zip(old.outvars, results, strict=True)
            eqns += found
            continue
        if bodies := bodies_of(eqn):
            eqn = eqn.replace(params=with_bodies(eqn, [_repeated_in(b, counts) for b in bodies]))
        eqns.append(eqn)
    return compat.new_jaxpr(jaxpr.invars, renamed(jaxpr.outvars, names), eqns, jaxpr)


def _repeat(eqn: Eqn, port: int, times: int) -> ClosedJaxpr:
    """Each head of an operand `times` times, one after the other."""
    dim = 3 - tokens_of(operation_of(eqn))

    def run(x: Any) -> Any:
        wide = jnp.broadcast_to(jnp.expand_dims(x, dim + 1), (*x.shape[: dim + 1], times, *x.shape[dim + 1 :]))
        return wide.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    return jax.make_jaxpr(run)(_shape(eqn.invars[port]))


def _of_repeated(eqn: Eqn, operands: Sequence[Atom], times: int) -> ClosedJaxpr:
    """The attention of repeated keys, or its gradients."""
    dim, bind = 3 - tokens_of(operation_of(eqn)), compat.bind_with(eqn.primitive, eqn.params)

    def summed(x: Any) -> Any:
        return x.reshape(*x.shape[:dim], -1, times, *x.shape[dim + 1 :]).sum(dim + 1)

    def run(*operands: Any) -> list[Any]:
        gradients = len(operands) > COTANGENT
        return [summed(y) if gradients and i in (KEY, VALUE) else y for i, y in enumerate(bind(*operands))]

    return jax.make_jaxpr(run)(*map(_shape, operands))


def _shape(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
