"""The only file that imports from jax._src: one block for each reason. JAX 0.10 and newer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax._src import core as _core

# Why: jax.extend.core names these types but not the constructors that a pass over jaxprs needs.
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import partial_eval as _pe
from jax.extend import core as jex

Jaxpr: TypeAlias = Any
ClosedJaxpr: TypeAlias = Any
Eqn: TypeAlias = Any
Var: TypeAlias = Any
Atom: TypeAlias = Any
Literal = jex.Literal
Primitive = jex.Primitive
Tracer = jax.core.Tracer


def is_literal(atom: Atom) -> bool:
    return isinstance(atom, jex.Literal)


def is_drop(var: Var) -> bool:
    return isinstance(var, _core.DropVar)


def fresh_var(aval: Any) -> Var:
    """A variable of its own: never equal to another."""
    return _core.Var(aval)


def literal(value: Any, aval: Any) -> Atom:
    return jex.Literal(value, aval)


def close(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    return jex.ClosedJaxpr(jaxpr, tuple(consts))


def new_jaxpr(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Eqn], like: Jaxpr) -> Jaxpr:
    """A jaxpr without constants; the effects are those of `eqns`."""
    effects = frozenset[Any]().union(*(e.effects for e in eqns)) if eqns else frozenset[Any]()
    kept = {e for e in like.effects if e in effects}
    info = like.debug_info.with_unknown_names()
    return jex.Jaxpr((), list(invars), list(outvars), list(eqns), kept, info)


def new_eqn(
    invars: Sequence[Atom], outvars: Sequence[Var], primitive: Any, params: Mapping[str, Any], like: Eqn | None
) -> Eqn:
    """An equation without effects, with the source line of `like`."""
    info = like.source_info if like is not None else _source_info_util.new_source_info()
    ctx = like.ctx if like is not None else None
    return _core.new_jaxpr_eqn(list(invars), list(outvars), primitive, dict(params), frozenset(), info, ctx)


# Why: dead equations would be planned and listed though XLA removes them.
def remove_dead(jaxpr: Jaxpr, used: Sequence[bool]) -> Jaxpr:
    """The jaxpr without dead equations, all inputs kept."""
    return _pe.dce_jaxpr(jaxpr, list(used), instantiate=True)[0]


# Why: there is no public way from an equation to the user's line.
def source_line(eqn: Eqn) -> str:
    """`file.py:12 (function)` of the user's code that made an equation; empty if unknown."""
    frame = _source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    name = frame.file_name.rsplit("/", 1)[-1]
    return f"{name}:{frame.start_line} ({frame.function_name})"


def name_stack(eqn: Eqn) -> str:
    return str(eqn.source_info.name_stack)


def with_source(eqn: Eqn) -> Any:
    """A context in which what is traced gets the source line of `eqn`."""
    stack = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    return _source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


# Why: a jitted function says whether it is inside a trace only by what its arguments are.
def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def aval_of(x: Any) -> Any:
    """Shape, dtype and weak type of an array, number or ShapeDtypeStruct, without shardings."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    weak = bool(getattr(aval, "weak_type", False))
    return jax.core.ShapedArray(tuple(aval.shape), aval.dtype, weak_type=weak)


def bind_with(prim: Any, params: Mapping[str, Any]) -> Callable[..., list[Any]]:
    """Binds `prim` with `params`, always to a list of results."""

    def bind(*operands: Any, **overrides: Any) -> list[Any]:
        out = prim.bind(*operands, **{**params, **overrides})
        return list(out) if prim.multiple_results else [out]

    return bind
