"""Canonical form: calls inlined, dead equations removed, every variable unique. `jit[...] f x --> the body of f`.

Only scan, while, cond and remat stay nested, and are planned where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import NamedSharding

from shardc import compat
from shardc.compat import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from shardc.ir.boundary import MARKS
from shardc.ir.constrain import constrain_p
from shardc.ir.host_callback import ONCE
from shardc.ir.nested import NESTED, parted, while_of
from shardc.ir.user_shard_map import CAST, UNTYPED, is_unit
from shardc.passes.trace.find_signatures import OperationSignatures, find_signatures
from shardc.sbp import rules as _rules
from shardc.sbp.signature import has_rule, is_extended

del _rules  # importing it has registered its rules

INLINED: Final = {
    **dict.fromkeys(
        ("closed_call", "composite", "core_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "pjit",
         "program_order"),
        ("call_jaxpr", "jaxpr"),
    ),
    "custom_partitioning": ("call",),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
    "custom_vmap_call": ("call",),
    "linear_call": ("callee",),
}  # fmt: skip
"""Calls that only name their body, and the parameters that hold it, of which a release of JAX has one.

Differentiation and batching are over, so their own rules for these are not needed any more. Nor is the rule by which
`custom_partitioning` tells a partitioner what it cannot see in the body: a plan reads the body itself.
"""

IDENTITIES: Final = ("relayout", "with_memory_space_constraint", "to_edtype", "from_edtype")
"""Hints about how one device stores a value, and types of numbers that mean something to differentiation alone. They
are dropped: a plan decides where values are, and differentiation is over."""
EVERY: Final = "*"
"""In `replicate`: all primitives without a rule."""
_PLANNED: Final = frozenset((
    "box", "constrain", "device_put", "microbatches", "receive", "send", "shard_map", "sharding_constraint", "split",
    "stage_boundary", *NESTED, *INLINED, *ONCE,
))  # fmt: skip
"""Primitives that passes handle themselves: they need no rule."""


def _typed(atom: Atom) -> bool:
    """Whether the type of an atom, or of a literal's value, names a mesh."""
    return compat.has_sharding(atom.aval) or compat.has_sharding(getattr(getattr(atom, "val", None), "aval", None))


class _Inliner:
    """The walk that inlines calls.

    Attributes:
      eqns: the canonical equations so far.
      marks: those of pipelines stay.
      untyped: the equations are the body of a unit, without types of what differs between devices; it is bound as it
        is.
      replicate: primitives that get no signatures.
    """

    def __init__(self, marks: bool, untyped: bool = False, replicate: Collection[str] = (EVERY,)) -> None:
        self.eqns: list[Eqn] = []
        self.marks, self.untyped, self.replicate = marks, untyped, replicate

    def fresh(self, aval: Any) -> Var:
        if compat.is_typed_number(getattr(aval, "dtype", None)):
            aval = compat.shaped_array(aval.shape, compat.number_of(aval.dtype))
        typed = self.untyped or compat.has_sharding(aval)
        return compat.fresh_var(compat.without_sharding(aval) if typed else aval)

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Atom], args: Sequence[Atom], caller: Eqn | None, inlined: bool = False
    ) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Atom) -> Atom:
            if not compat.is_literal(atom):
                return env[atom]
            return compat.literal(np.asarray(atom.val), compat.without_sharding(atom.aval)) if _typed(atom) else atom

        for inner in jaxpr.eqns:
            eqn = inner if caller is None else compat.with_line_of(inner, caller)
            eqn = _with_one_condition(compat.with_names_of(eqn, caller) if inlined and caller is not None else eqn)
            if caller is not None and caller.primitive.name != "while" and eqn.primitive.name in NESTED:
                eqn = compat.with_rounds_of(eqn, caller)
            env |= zip(eqn.outvars, self.equation(eqn, [read(a) for a in eqn.invars]), strict=True)
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: Eqn, invars: list[Atom]) -> Sequence[Atom]:
        """The results of an equation, its canonical form added to `eqns`."""
        name = eqn.primitive.name
        if name == "split":
            slices = _slices_of(eqn, invars[0])
            self.eqns += slices
            return [e.outvars[0] for e in slices]
        if eqn.primitive is constrain_p:  # inside a shardc trace a pin is one by axis names
            eqn = eqn.replace(params={"pin": eqn.params["pin"]})
            if eqn.params["pin"].fixed == frozenset():
                return invars[:1]
        if name in _OF_SHARDINGS and (self.untyped or says_nothing(eqn.params[_OF_SHARDINGS[name]])):
            return invars[:1]
        if name in IDENTITIES or (eqn.primitive in MARKS and not self.marks) or (name == CAST and self.untyped):
            return invars[:1]
        call = _inlined(eqn, invars)
        if call is None and self.has_no_rule(eqn):
            found = find_signatures(eqn.replace(invars=invars))
            if isinstance(found, OperationSignatures):
                eqn = found.put_into(eqn)
            elif found is not None:
                call = found, invars
        if call is not None:
            closed, args = call
            return self.run(closed.jaxpr, _as_literals(closed), args, eqn, inlined=True)
        return self.put(eqn, invars) if name == "device_put" else self.kept(eqn, invars)

    def kept(self, eqn: Eqn, invars: list[Atom]) -> list[Var]:
        """The results of an equation that stays."""
        if eqn.primitive.name == "reshard":
            eqn = eqn.replace(primitive=sharding_constraint_p, params=_constraint(eqn.params["dst_sharding"]))
        if self.untyped:
            eqn = compat.with_manual_axes(eqn)
        if eqn.primitive.name in UNTYPED and self.untyped:
            params = {**eqn.params, "axis_index_groups": None}
            eqn = eqn.replace(primitive=UNTYPED[eqn.primitive.name], params=params)
        outvars = [self.fresh(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=self.params(eqn)))
        return outvars

    def has_no_rule(self, eqn: Eqn) -> bool:
        """Whether an equation needs signatures."""
        name = eqn.primitive.name
        if self.untyped or EVERY in self.replicate or name in self.replicate:
            return False
        return not has_rule(name) and name not in _PLANNED

    def put(self, eqn: Eqn, invars: Sequence[Atom]) -> list[Atom]:
        """`device_put x --> x`, or `sharding_constraint x` if it names a sharding; other targets stay."""
        found: list[Atom] = []
        for x, old, device, *rest in zip(invars, eqn.outvars, *(eqn.params[k] for k in _OF_PUTS), strict=True):
            if device is None or says_nothing(device):
                found.append(x)
                continue
            params: dict[str, Any] = {k: (v,) for k, v in zip(_OF_PUTS, (device, *rest), strict=True)}
            primitive = eqn.primitive
            if isinstance(device, NamedSharding) and old.aval.memory_space == x.aval.memory_space:
                primitive = sharding_constraint_p
                params = _constraint(device)
            found.append(self.fresh(old.aval))
            self.eqns.append(compat.new_eqn([x], [found[-1]], primitive, params, eqn))
        return found

    def params(self, eqn: Eqn) -> dict[str, Any]:
        params = _without_shardings(eqn)
        if is_unit(eqn):
            params["jaxpr"] = self._body(params["jaxpr"], eqn, untyped=True)
        for key in NESTED.get(eqn.primitive.name, ()):
            body = params[key]
            bodies = [self._body(b, eqn) for b in (body if isinstance(body, tuple) else (body,))]
            params[key] = tuple(bodies) if isinstance(body, tuple) else bodies[0]
        return params

    def _body(self, body: Any, caller: Eqn, untyped: bool | None = None) -> Any:
        untyped = self.untyped if untyped is None else untyped
        if hasattr(body, "consts"):
            consts = _as_literals(body)
            return compat.close(canonical_jaxpr(body.jaxpr, consts, caller, self.marks, untyped, self.replicate))
        return canonical_jaxpr(body, (), caller, self.marks, untyped, self.replicate)


def _constraint(sharding: NamedSharding) -> dict[str, Any]:
    """The parameters of a `sharding_constraint`."""
    return {"sharding": sharding, "layout": None, "context_mesh": None, "unconstrained_dims": frozenset()}


def _without_shardings(eqn: Eqn) -> dict[str, Any]:
    """The parameters without shardings. JAX writes the shardings of a unit's results into later equations; they mean
    nothing."""
    if eqn.primitive is sharding_constraint_p:
        return dict(eqn.params)
    return {k: None if isinstance(v, NamedSharding) else v for k, v in compat.params_of(eqn).items()}


_OF_PUTS: Final = ("devices", "srcs", "copy_semantics")
_OF_SHARDINGS: Final = {"reshard": "dst_sharding", "sharding_constraint": "sharding"}


def says_nothing(sharding: Any) -> bool:
    """Whether a sharding is over no mesh, as that of a type without one."""
    return isinstance(sharding, NamedSharding) and sharding.mesh.empty


_OVER_DIMENSIONS: Final = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
"""JAX's collectives that vmap leaves over the dimensions of a mapped axis, as reductions."""


def _inlined(eqn: Eqn, invars: Sequence[Atom]) -> tuple[ClosedJaxpr, Sequence[Atom]] | None:
    """The body that an equation only names, and its arguments; None if it is no call."""
    if eqn.primitive.name == "custom_linear_solve":
        consts, ends = eqn.params["const_lengths"], itertools.accumulate(eqn.params["const_lengths"])
        *_, end, all_consts = ends  # constants of matvec, vecmat, solve and transpose_solve
        return eqn.params["jaxprs"].solve, [*invars[end - consts.solve : end], *invars[all_consts:]]
    if eqn.primitive.name in _OVER_DIMENSIONS and all(isinstance(a, int) for a in eqn.params["axes"]):
        reduce, (x,) = _OVER_DIMENSIONS[eqn.primitive.name], invars
        value = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
        return jax.make_jaxpr(lambda x: reduce(x, eqn.params["axes"]))(value), invars
    if eqn.primitive.name == "add_any" and compat.is_typed_number(eqn.outvars[0].aval.dtype):
        return compat.sum_of_typed(eqn.outvars[0].aval), invars
    body = next((eqn.params[k] for k in INLINED.get(eqn.primitive.name, ()) if k in eqn.params), None)
    return None if body is None else (body, invars)


def _as_literals(closed: ClosedJaxpr) -> list[Atom]:
    return [compat.literal(c, compat.aval_of(c)) for c in closed.consts]


def _slices_of(eqn: Eqn, x: Atom) -> list[Eqn]:
    """The parts of a `split` as slices, so that each gets its own placement."""
    axis, begin, found = eqn.params["axis"], 0, list[Eqn]()
    for out, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):
        starts, limits = [0] * len(x.aval.shape), list(x.aval.shape)
        starts[axis], limits[axis] = begin, begin + size
        begin += size
        params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
        found.append(
            eqn.replace(
                primitive=lax.slice_p,
                invars=[x],
                outvars=[compat.fresh_var(compat.without_sharding(out.aval))],
                params=params,
            )
        )
    return found


def _with_one_condition(eqn: Eqn) -> Eqn:
    """A `while` that vmap gave a condition for each row --> `while any(cond c): c = where(cond c, body c, c)`."""
    if eqn.primitive.name != "while" or not while_of(eqn).cond.outvars[0].aval.shape:
        return eqn
    loop = while_of(eqn)
    cond, body = (eqn.params[k] for k in NESTED["while"])

    def any_row(*args: Any) -> Any:
        return jex.jaxpr_as_fun(cond)(*args)[0].any()

    def body_where(*args: Any) -> list[Any]:
        first, consts, old = parted(args, loop.cond_consts, loop.body_consts, loop.carries)
        (going,) = jex.jaxpr_as_fun(cond)(*first, *old)
        new = jex.jaxpr_as_fun(body)(*consts, *old)
        lead = range(going.ndim)
        return [lax.select(lax.broadcast_in_dim(going, n.shape, lead), n, o) for n, o in zip(new, old, strict=True)]

    params = {
        **eqn.params,
        "cond_jaxpr": jax.make_jaxpr(any_row)(*cond.in_avals),
        "body_jaxpr": jax.make_jaxpr(body_where)(*parted(cond.in_avals, loop.cond_consts)[0], *body.in_avals),
        "body_nconsts": len(loop.cond_consts) + len(loop.body_consts),
    }
    return eqn.replace(invars=[*loop.cond_consts, *eqn.invars], params=params)


def canonical_jaxpr(
    jaxpr: Jaxpr, consts: Sequence[Atom], caller: Eqn | None = None, marks: bool = False, untyped: bool = False,
    replicate: Collection[str] = (EVERY,),
) -> Jaxpr:  # fmt: skip
    """The jaxpr with calls inlined and fresh variables; its constants replaced by `consts`.

    Equations without a user's line get that of `caller`, the equation whose body this is.
    """
    inliner = _Inliner(marks, untyped, replicate)
    invars = [inliner.fresh(v.aval) for v in jaxpr.invars]
    outvars = inliner.run(jaxpr, consts, invars, caller)
    return compat.new_jaxpr(invars, outvars, inliner.eqns, jaxpr)


def inlined_eqns(
    closed: ClosedJaxpr, args: Sequence[Atom], caller: Eqn, replicate: Collection[str]
) -> tuple[list[Eqn], list[Atom]]:
    """The canonical equations of a closed jaxpr that replaces `caller`, and its results; marks stay."""
    inliner = _Inliner(marks=True, replicate=replicate)
    results = inliner.run(closed.jaxpr, _as_literals(closed), args, caller)
    return inliner.eqns, results


def with_own_bodies(eqn: Eqn) -> Eqn:
    """A copy of an equation with its own variables in nested bodies."""
    if eqn.primitive.name not in NESTED:
        return eqn
    return eqn.replace(params=_Inliner(marks=True).params(eqn))


def canonicalize(
    closed: ClosedJaxpr, marks: bool = False, replicate: Collection[str] = ()
) -> tuple[Jaxpr, tuple[Any, ...]]:
    """A closed jaxpr as an open one whose last inputs are the captured arrays, and those arrays.

    Captured scalars become literals: there is nothing to place. The marks of pipelines stay if `marks`. Operations
    without a rule get signatures (`find_signatures`), except primitives in `replicate`.
    """
    closed = compat.without_refs(closed)
    invars = [compat.fresh_var(compat.without_sharding(v.aval)) for v in closed.jaxpr.invars]
    captured: list[Any] = []
    consts: list[Atom] = []
    extra: list[Var] = []
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if not var.aval.shape and not is_extended(var.aval.dtype) and not isinstance(value, compat.Tracer):
            consts.append(compat.literal(value, var.aval))
        else:
            extra.append(compat.fresh_var(compat.without_sharding(var.aval)))
            consts.append(extra[-1])
            captured.append(value)
    inliner = _Inliner(marks, replicate=replicate)
    outvars = inliner.run(closed.jaxpr, consts, invars, None)
    jaxpr = compat.new_jaxpr([*invars, *extra], outvars, inliner.eqns, closed.jaxpr)
    return compat.remove_dead(jaxpr, [True] * len(outvars)), tuple(captured)
