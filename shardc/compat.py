"""All imports of non-public JAX (`jax._src`), in blocks that each state why they are needed. JAX 0.10 and newer."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, cast

import jax
import numpy as np

# Why: jax.extend.core names these types but not the constructors that a pass over jaxprs needs.
from jax._src import api_util as _api_util
from jax._src import compilation_cache as _cache
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import hardware_utils as _hardware
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src.array import ArrayImpl as _Array
from jax._src.clusters import ClusterEnv as _ClusterEnv
from jax._src.cudnn import fused_attention_stablehlo as _attention
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax._src.lib import xla_client as _xla
from jax._src.random import core as _random
from jax._src.random import prng as _prng
from jax._src.state import discharge as _discharge
from jax.experimental import topologies
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core as jex

if TYPE_CHECKING:
    from typing_extensions import TypeIs

log = logging.getLogger("shardc")


class Var(Protocol):
    """A variable of a jaxpr; hashed by identity."""

    @property
    def aval(self) -> Any: ...


class LiteralAtom(Protocol):
    """A constant operand or result."""

    @property
    def aval(self) -> Any: ...
    @property
    def val(self) -> Any: ...


Atom: TypeAlias = Var | LiteralAtom


class Eqn(Protocol):
    """An equation; hashed by identity."""

    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Var]: ...
    @property
    def primitive(self) -> Any: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def source_info(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...
    def replace(self, **changes: Any) -> Eqn: ...


class Jaxpr(Protocol):
    """A jaxpr; hashed by identity."""

    @property
    def constvars(self) -> Sequence[Var]: ...
    @property
    def invars(self) -> Sequence[Var]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def eqns(self) -> Sequence[Eqn]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def debug_info(self) -> Any: ...


ClosedJaxpr: TypeAlias = Any
Tracer = _core.Tracer
"""Why: only the types of its arguments tell whether a jitted function is inside a trace."""
ExtendedDType = _dtypes.ExtendedDType


F = TypeVar("F", bound=Callable[..., Any])

_Literal: Final = jex.Literal
_KINDS: Final[tuple[Any, Any]] = jex.Jaxpr, jex.ClosedJaxpr
_EVERY_JAXPR_IS_CLOSED: Final = _KINDS[0] is _KINDS[1]


def is_literal(atom: Atom) -> TypeIs[LiteralAtom]:
    return isinstance(atom, _Literal)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among `atoms`, each once."""
    return list(dict.fromkeys(a for a in atoms if not is_literal(a)))


@functools.lru_cache(maxsize=4096)
def size_of(aval: Any) -> int:
    """Number of elements, cached: JAX counts them again at every access."""
    return aval.size


def fresh_var(aval: Any) -> Var:
    """A new variable, equal to no other."""
    return _core.Var(aval)


def literal(value: Any, aval: Any) -> Atom:
    return jex.Literal(value, aval)


def close(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    """The closed jaxpr with these constants. Since JAX 0.12 every jaxpr is closed: without constants it stays
    itself."""
    if _EVERY_JAXPR_IS_CLOSED and not consts:
        return jaxpr
    return jex.ClosedJaxpr(cast(Any, jaxpr), tuple(consts))


def new_jaxpr(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Eqn], like: Jaxpr) -> Jaxpr:
    """A jaxpr without constants; its effects are those of `eqns`."""
    effects = frozenset[Any]().union(*(e.effects for e in eqns)) if eqns else frozenset[Any]()
    kept = {e for e in effects if e in like.effects or e == TRANSFER}
    info = like.debug_info.with_unknown_names()
    parts: tuple[Any, ...] = list(invars), list(outvars), list(eqns)
    return cast(Any, jex.Jaxpr)((), *parts, kept, info)


TRANSFER: Final = "transfer"
"""The effect of a transfer between stages: no pass removes it as dead."""


def new_eqn(
    invars: Sequence[Atom], outvars: Sequence[Var], primitive: Any, params: Mapping[str, Any], like: Eqn | None,
    effects: Collection[str] = (),
) -> Eqn:  # fmt: skip
    """An equation with the source line of `like`; it has no effects of JAX."""
    info = like.source_info if like is not None else _source_info_util.new_source_info()
    ctx = like.ctx if like is not None else None
    make: Any = _core.new_jaxpr_eqn
    return make(list(invars), list(outvars), primitive, dict(params), frozenset(effects), info, ctx)


# Why: an equation is evaluated under the mesh of its trace, where axes that a shard_map leaves out are not manual.
def with_manual_axes(eqn: Eqn) -> Eqn:
    """An equation of a shard_map's body, whose mesh has manual axes alone."""
    mesh = eqn.ctx.cur_abstract_mesh
    if mesh.empty or mesh.are_all_axes_manual:
        return eqn
    manual = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, jax.sharding.AxisType.Manual))
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(manual):
        return eqn.replace(ctx=type(eqn.ctx)())


# Why: dead equations would be planned and listed though XLA removes them.
def remove_dead(jaxpr: Jaxpr, used: Sequence[bool]) -> Jaxpr:
    """The jaxpr without dead equations, all inputs kept."""
    dce: Any = _pe.dce_jaxpr
    return dce(jaxpr, list(used), instantiate=True)[0]


# Why: there is no public way from an equation to the user's line.
_OURS: Final = os.path.dirname(__file__) + os.sep
_TRACE: Final = os.path.join(_OURS, "passes", "trace", "trace.py")


@functools.cache
def _owner_of(file: str) -> str:
    """The owner of the code in a file: `user`, `library`, `entry` (where shardc calls the user's function) or `inner`
    (JAX, Python and the rest of shardc)."""
    if file == _TRACE:
        return "entry"
    if file.startswith(_OURS) or not _source_info_util.is_user_filename(file):
        return "inner"
    return "library" if re.search(r"[/\\](site|dist)-packages[/\\]", file) else "user"


def source_line(eqn: Eqn) -> str:
    """`file.py:12 (function)` of the innermost frame of the user's own code that made an equation; without one, of the
    innermost frame of a library; empty if unknown."""
    return _line_of(eqn.source_info.traceback)[0]


# Why: JAX's errors name the traced function, and users know only their own.
def traced_as(fn: F, users: Callable[..., Any], names: Sequence[str]) -> F:
    """`fn` under the name of the user's function in JAX's errors, with these names for its flat arguments."""
    fn_: Any = fn
    info = _api_util.debug_info("shardc.function", users, (), {}, signature=inspect.Signature())
    fn_.__fun_debug_info__ = info._replace(arg_names=tuple(names))
    return fn


# Why: tracebacks show only the user's code. JAX hides its frames between its entry points and the user's function; the
# frames that its errors list as text, as those of a leaked tracer, are chosen apart.
_traceback_util.register_exclusion(_OURS)
_source_info_util.register_exclusion(_OURS)


def api_boundary(fn: F) -> F:
    """Mark a function that users call: an error below it has no frames of JAX and shardc in its traceback, as JAX's
    option `jax_traceback_filtering` says."""
    return _traceback_util.api_boundary(fn)


_REMOVED: Final = _traceback_util._simplified_tb_msg  # pyright: ignore[reportPrivateUsage]
FRAMES_NOTE: Final = f"--------------------\n{_REMOVED}"
"""The note that JAX adds to an error below a function of `api_boundary`."""
_filtering: Final = _traceback_util._filtering_mode  # pyright: ignore[reportPrivateUsage]


def interruptible(fn: F) -> F:
    """Mark a function that users call and that waits for long: what ends it, as Ctrl-C, has no such frames either."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            if error.__traceback__ is not None and _filtering() not in ("off", "tracebackhide"):
                error.with_traceback(_traceback_util.filter_traceback(error.__traceback__))
            raise

    return cast(F, called)


def users_level() -> int:
    """The `stacklevel` for a warning of the caller that shows the user's line."""
    callers = [frame.filename for frame in inspect.stack(0)[1:]]
    return next((i for i, file in enumerate(callers, 1) if _owner_of(file) in ("user", "library")), len(callers))


def users_line() -> str:
    """The user's line that led here: `train.py:41`."""
    frames = [f for f in inspect.stack(0) if _owner_of(f.filename) == "user"]
    return f"{os.path.basename(frames[0].filename)}:{frames[0].lineno}" if frames else ""


def with_line_of(eqn: Eqn, caller: Eqn) -> Eqn:
    """`eqn`, of the body of `caller`, with the user's line of `caller` if it has none: a body's traceback ends
    there."""
    if _line_of(eqn.source_info.traceback)[1] or not _line_of(caller.source_info.traceback)[1]:
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(traceback=caller.source_info.traceback))


def with_names_of(eqn: Eqn, caller: Eqn) -> Eqn:
    """`eqn`, of the inlined body of `caller`, inside the scopes and transformations of `caller`."""
    names = caller.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))


# Why: the expected rounds of a loop have to stay with its equation through all of JAX.
_ROUNDS: Final = re.compile(r"shardc\.trips\((\d+)\)")


def scope_of_rounds(n: int) -> str:
    """The name of the scope owner loops are expected to make `n` rounds."""
    return f"shardc.trips({n})"


EXPECTED: Final = "shardc.expected"
"""The name of the scope of a `cond` whose last branch nearly always runs."""


def is_expected(eqn: Eqn) -> bool:
    """Whether the last branch of a `cond` nearly always runs."""
    return eqn.primitive.name == "cond" and EXPECTED in scopes_named(eqn)


def rounds_of(eqn: Eqn) -> int | None:
    """The expected rounds of a `while`, from the innermost scope that gives them; None if no scope does."""
    found = next((m for n in reversed(scopes_named(eqn)) if (m := _ROUNDS.fullmatch(n))), None)
    return None if found is None else int(found[1])


def scopes_named(eqn: Eqn) -> list[str]:
    """The names of the scopes of an equation, the innermost last."""
    return [s.name for s in eqn.source_info.name_stack.stack if isinstance(s, _source_info_util.Scope)]


def with_rounds_of(eqn: Eqn, caller: Eqn) -> Eqn:
    """`eqn`, of the body of `caller`, with the expected rounds of `caller` if it has none of its own."""
    n = rounds_of(caller)
    if n is None or rounds_of(eqn) is not None:
        return eqn
    stack = _source_info_util.NameStack((_source_info_util.Scope(scope_of_rounds(n)),)) + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


_REPLACING: Final = threading.Lock()
_replaced: dict[str, tuple[Any, int]] = {}
"""Functions of JAX that are replaced at the moment: the original, and the number of contexts that ask for it."""


@contextmanager
def _replacing(module: Any, name: str, by: Callable[[Any], Any]) -> Generator[None, None, None]:
    """A context in which a function of JAX is `by(the original)`, in all threads."""
    with _REPLACING:
        original, times = _replaced.get(name, (getattr(module, name), 0))
        _replaced[name] = original, times + 1
        if not times:
            setattr(module, name, functools.wraps(original)(by(original)))
    try:
        yield
    finally:
        with _REPLACING:
            original, times = _replaced.pop(name)
            if times > 1:
                _replaced[name] = original, times - 1
            else:
                setattr(module, name, original)


# Why: JAX makes slices of an associative scan while it traces. What is traced in a user context is kept for equal
# values of this context alone.
_MAKER: Final = jax.make_user_context(None)
_SCAN: Final = re.compile(r"shardc\.scan\((.*)\)")


@contextmanager
def scans_made_by(make: Callable[..., Any]) -> Generator[None, None, None]:
    """A context in which `jax.lax.associative_scan(...)` of this thread is `make(its original, ...)`, of positional
    arguments.

    Args:
      make: hashable; what JAX has traced with one is used again with those that are equal.
    """
    with _replacing(jax.lax, "associative_scan", _scan_made), _MAKER(make):
        yield


def _scan_made(scan: Callable[..., Any]) -> Callable[..., Any]:
    def made(fn: Any, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
        make = _MAKER.value
        return scan(fn, elems, reverse, axis) if make is None else make(scan, fn, elems, reverse, axis)

    return made


# Why: JAX asks cuDNN for its version while it traces attention, and no plan for a GPU could be made without one.
_CUDNN: Final = 91_300
"""The version that a plan counts on: the last that JAX asks for."""


@contextmanager
def cudnn_traced() -> Generator[None, None, None]:
    """A context in which cuDNN's attention is traced, on a machine without cuDNN as for a Hopper GPU."""
    if _attention.cuda_versions is not None:
        yield
        return
    with (
        _replacing(_attention, "check_cudnn_version", lambda _: lambda: _CUDNN),
        _replacing(_attention, "check_compute_capability", lambda _: lambda capability: True),
    ):
        yield


def scope_of_scan(kind: str) -> str:
    """The name of the scope of an associative scan, by which `scan_named` finds its equations."""
    return f"shardc.scan({kind})"


def scan_named(eqn: Eqn) -> str | None:
    """The name of the associative scan that an equation belongs to; None if it belongs to none."""
    names = (s.name for s in eqn.source_info.name_stack.stack if isinstance(s, _source_info_util.Scope))
    return next((m[1] for n in names if (m := _SCAN.fullmatch(n))), None)


def scopes_of(eqn: Eqn) -> tuple[tuple[str, ...], bool]:
    """The names of the scopes of an equation, outermost first, as `("GPT2", "blocks_0", "attn")`, and whether it
    belongs to a backward pass."""
    stack = eqn.source_info.name_stack.stack
    names = tuple(s.name for s in stack if isinstance(s, _source_info_util.Scope) and not _is_ours(s.name))
    return names, any(isinstance(s, _source_info_util.Transform) and s.name == "transpose" for s in stack)


def _is_ours(scope: str) -> bool:
    return bool(scope == _AGAIN or _ROUNDS.fullmatch(scope) or _SCAN.fullmatch(scope))


# Why: JAX puts what a checkpoint recomputes into a scope of this name.
_REMATTED: Final = "rematted_computation"
_AGAIN: Final = "shardc.recompute"


def as_recomputed(eqn: Eqn) -> Eqn:
    """An equation as one that computes again what another computed before."""
    stack = _source_info_util.NameStack((_source_info_util.Scope(_AGAIN),)) + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def is_recomputed(eqn: Eqn) -> bool:
    """Whether an equation computes again what was computed before: for `jax.checkpoint`, or as `as_recomputed` says."""
    return any(s.name in (_REMATTED, _AGAIN) for s in eqn.source_info.name_stack.stack)


@functools.lru_cache(maxsize=1024)
def _line_of(traceback: Any) -> tuple[str, bool]:
    """The text of a line, and whether it is the user's."""
    library = ""
    codes, offsets = traceback.raw_frames() if traceback else ((), ())
    for code, offset in zip(codes, offsets, strict=True):
        owner = _owner_of(code.co_filename)
        if owner == "entry":
            break
        if owner == "user":
            return _frame_text(code, offset), True
        if owner == "library" and not library:
            library = _frame_text(code, offset)
    return library, False


def _frame_text(code: CodeType, offset: int) -> str:
    frame = _source_info_util.raw_frame_to_frame(code, offset)
    function = re.sub(r"\.<locals>\.<\w+>$", "", frame.function_name).rpartition("<locals>.")[2]
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({function})"


def with_source(eqn: Eqn) -> Any:
    """A context in which traced equations get the source line of `eqn`."""
    stack = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    return _source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def short_text(shape: Sequence[int], dtype: Any) -> str:
    """`f32[8,128]`."""
    return _core.ShapedArray(tuple(shape), dtype).str_short(short_dtypes=True)


# Why: a call inside a trace is a part of it, even if its arguments are constants: checkify traces like this.
def inside_trace() -> bool:
    return not _core.trace_state_clean()


# Why: a value that is assembled during a trace must not become part of it, and needs no mesh but its own.
@contextmanager
def at_once() -> Generator[None, None, None]:
    """A context in which programs run at once, whatever the current trace or mesh, compiled in any case: operation by
    operation JAX cannot compute on devices of several processes."""
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(_NO_MESH), jax.disable_jit(False):
        yield


_NO_MESH: Final = jax.sharding.AbstractMesh((), ())


# Why: JAX says which generator a key array is for, and not which one a type of keys is for.
def words_of_keys(dtype: Any) -> tuple[int, ...]:
    """The shape of the words that hold one key of an extended dtype."""
    return tuple(dtype._impl.key_shape)


def keys_of_words(words: jax.Array, dtype: Any) -> jax.Array:
    """The key array of an extended dtype that these words hold."""
    return jax.random.wrap_key_data(words, impl=dtype._impl.name)


# Why: differentiation knows extended dtypes that are no keys by their rules; a compiled program has their numbers.
def is_typed_number(dtype: Any) -> bool:
    """Whether a dtype is an extended one, each element of which is a number: none of keys."""
    if not isinstance(dtype, ExtendedDType) or jax.dtypes.issubdtype(cast(Any, dtype), jax.dtypes.prng_key):
        return False
    return not _core.physical_element_aval(dtype).shape


def number_of(dtype: Any) -> Any:
    """The dtype of the numbers of such a dtype; others as they are."""
    return _core.physical_element_aval(dtype).dtype if is_typed_number(dtype) else dtype


def sum_of_typed(aval: Any) -> ClosedJaxpr:
    """The sum of two values of such a dtype in differentiation; it may be a maximum."""
    value = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.make_jaxpr(functools.partial(aval.dtype._rules.add, aval.dtype))(value, value)


# Why: four registries make JAX accept arrays of another type, such as its own arrays of keys.
def register_array(kind: type, read: Callable[[Any], jax.Array]) -> None:
    """Make JAX accept arrays of a class as arguments, operands and constants: as the jax.Array that `read` returns."""

    def type_of(x: Any) -> Any:
        return _core.typeof(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type))

    def shard(xs: Sequence[Any], *how: Any) -> Any:
        return pxla.shard_args(*how, [read(x) for x in xs])

    try:
        pxla = importlib.import_module("jax._src.interpreters.pxla")
        _core.pytype_aval_mappings[kind] = type_of
        _dtypes.register_canonicalize_value_handler(kind, None)
        pxla.shard_arg_handlers[kind] = shard
        _mlir.register_constant_handler(kind, lambda val, aval: _mlir.ir_constant(read(val)))
    except (ImportError, AttributeError) as error:  # then JAX refuses each such array with an error of its own
        log.warning("this JAX accepts no %s outside of shardc functions: %s", kind.__name__, error)


# Why: the attributes of a jax.Array are set by JAX's own code, and releases add to them.
def array_attributes() -> list[tuple[str, bool]]:
    """The attributes that the class of JAX's arrays defines and not `jax.Array`, and whether each is a property."""
    names = [n for n in dir(_Array) if not n.startswith(("_", "unsafe_")) or n.startswith("__")]
    own = [n for n in names if n not in _OF_EVERY_CLASS]
    found = [(n, getattr(_Array, n)) for n in own if getattr(_Array, n) is not getattr(jax.Array, n, None)]
    return [*((n, not callable(x)) for n, x in found), *((n, True) for n in _OF_KEYS)]


_OF_KEYS: Final = "_impl", "_base_array"
"""Attributes of key arrays that JAX's functions of random bits read."""


_OF_EVERY_CLASS: Final = {
    *("__class__", "__new__", "__init__", "__del__", "__doc__", "__module__", "__dict__", "__slots__", "__weakref__"),
    *("__annotations__", "__subclasshook__", "__init_subclass__", "__hash__", "__repr__"),
    *("__buffer__", "__release_buffer__", "__cuda_array_interface__"),  # contiguous memory
}


def aval_of(x: Any) -> Any:
    """Shape, dtype and weak type of an array, number or ShapeDtypeStruct, without shardings."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    weak = bool(getattr(aval, "weak_type", False))
    return shaped_array(tuple(aval.shape), aval.dtype, weak)


# Why: the weak type of a leaf decides dtypes of results, and each repeated call compares it: this takes a third of
# the time of `jax.typeof`.
def is_weak(x: Any) -> bool:
    """Whether JAX types a leaf weakly, as a Python number."""
    return bool(_dtypes.is_weakly_typed(x))


def shaped_array(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> Any:
    return _core.ShapedArray(shape, dtype, weak_type=weak_type)


def with_sharding(aval: Any, sharding: Any) -> Any:
    """An aval with a sharding over an abstract mesh in its type."""
    return aval.update(sharding=sharding)


def sharding_of(x: Any) -> Any:
    """Where an array of JAX's own class lies, or is to lie if it is described; None for anything else, as a number."""
    return x.sharding if isinstance(x, _Array | jax.ShapeDtypeStruct) else None


def without_sharding(aval: Any) -> Any:
    """A ShapedArray without shardings and without the axes along which it differs; other avals as they are."""
    if type(aval) is not _core.ShapedArray:
        return aval
    return shaped_array(tuple(aval.shape), aval.dtype, bool(aval.weak_type))


def has_sharding(aval: Any) -> bool:
    """Whether the type of a value names a mesh, that is, it was traced with explicit axes."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


# Why: a reduction that is bound without its `out_sharding` works on one device but not in shard_map (JAX 0.12).
def params_of(eqn: Eqn) -> dict[str, Any]:
    """The parameters of an equation, with those that JAX's own functions always pass."""
    name = eqn.primitive.name
    return {**_default_params(name), **eqn.params} if name in ("reduce_max", "reduce_min") else dict(eqn.params)


@functools.cache
def _default_params(name: str) -> dict[str, Any]:
    closed = jax.make_jaxpr(functools.partial(getattr(jax.lax, name), axes=(0,)))(np.zeros(1, np.float32))
    return {k: v for k, v in closed.eqns[-1].params.items() if v is None}


# Why: a result must be as weakly typed as on one device, or the next operation has another type.
def as_aval(x: Any, aval: Any) -> Any:
    """`x` with the dtype and weak type of `aval`."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return x
    return _lax._convert_element_type(x, aval.dtype, weak_type=aval.weak_type)  # pyright: ignore[reportPrivateUsage]


def bind_with(prim: Any, params: Mapping[str, Any]) -> Callable[..., list[Any]]:
    """A function that binds `prim` with `params`, always to a list of results."""

    def bind(*operands: Any, **overrides: Any) -> list[Any]:
        out = prim.bind(*operands, **{**params, **overrides})
        return list(out) if prim.multiple_results else [out]

    return bind


# Why: XLA chooses another kernel for an operand in another layout, and JAX's name of layouts is experimental.
def row_major(x: Any) -> Any:
    """`x`, whose last dimension is the innermost one in memory."""
    if x.ndim < 2 or not isinstance(x.dtype, np.dtype):
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


# Why: jax.device_put inspects every array in Python, which takes three times as long as the copy itself.
def copies_to(shardings: Sequence[Any]) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """A function that copies arrays to these shardings, piece by piece: each must already consist of such pieces."""
    copy = getattr(_xla, "batched_copy_array_to_devices_with_sharding", None)
    if copy is None:
        return lambda xs: jax.device_put(list(xs), list(shardings))
    targets = list(shardings)
    devices = [s._internal_device_list for s in targets]  # of other processes too
    semantics = [_xla.ArrayCopySemantics.ALWAYS_COPY] * len(targets)

    def copied(xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if any(isinstance(x, _prng.PRNGKeyArray) for x in xs):  # key arrays are no arrays of the runtime
            return jax.device_put(list(xs), targets)
        return copy(list(xs), devices, targets, semantics)

    return copied


# Why: a scan counts its operands by numbers until JAX 0.10, since 0.11 by the structure of JAX's own trees.
def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carries of a scan."""
    return _counts(params["ft_in"]) if "ft_in" in params else (params["num_consts"], params["num_carry"])


@functools.lru_cache(maxsize=1024)
def _counts(ft_in: Any) -> tuple[int, int]:
    consts, carries, _ = ft_in.unpack()
    return len(consts), len(carries)


def with_scan_counts(params: Mapping[str, Any], consts: int, carries: int, ends: tuple[int, int]) -> dict[str, Any]:
    """The parameters of a scan that count its operands. `ends`: the numbers of inputs and outputs of its body."""
    if "ft_in" not in params:
        return {"num_consts": consts, "num_carry": carries}
    flattree = importlib.import_module("jax._src.flattree")
    none = flattree.nones
    return {
        "ft_in": flattree.pack((none(consts), none(carries), none(ends[0] - consts - carries))),
        "ft_out": flattree.pack((none(carries), none(ends[1] - carries))),
    }


# Why: jax.jit too replaces refs by values before it compiles; no public name does.
def without_refs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The closed jaxpr whose refs are values that its equations hand on: `r = new_ref x; r[...] <- y; r[...] --> y`."""
    return _discharge.discharge_state(closed, lower=False) if _makes_refs(closed) else closed


def _makes_refs(closed: ClosedJaxpr) -> bool:
    return _core.internal_mutable_array_effect in closed.effects or any(
        map(_makes_refs, (body for eqn in closed.eqns for body in jaxprs_in(eqn.params.values())))
    )


# Why: the definition of an operation without a rule is in its lowering, or in hijax.
def jaxprs_in(values: Iterable[Any]) -> list[Any]:
    """The jaxprs among parameter values and in tuples of them, closed or not."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += jaxprs_in(value)
    return found


def definition_of(eqn: Eqn) -> ClosedJaxpr | None:
    """The body that defines an operation in JAX: the `expand` of a hijax primitive, or the Python function that is its
    lowering on every platform. None if there is none, or none for these operands."""
    fn = _expansion_of(eqn) or _lowered_function_of(eqn.primitive, eqn.params)
    if fn is None:
        return None
    try:
        closed = jax.make_jaxpr(fn)(*(shaped_array(v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in eqn.invars))
    except Exception as error:  # noqa: BLE001  # a library's function may raise anything
        log.debug("the definition of %s: %s", eqn.primitive.name, error)
        return None
    avals: Any = closed.out_avals
    made = [(a.shape, a.dtype) for a in avals]
    calls_itself = any(e.primitive is eqn.primitive for e in closed.jaxpr.eqns)
    fits = made == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return closed if fits and not calls_itself and not closed.jaxpr.effects else None


def _expansion_of(eqn: Eqn) -> Callable[..., Any] | None:
    prim = eqn.params.get("_prim")
    if eqn.primitive.name != "call_hi_primitive" or prim is None:
        return None
    return lambda *xs: jax.tree.leaves(prim.expand(*prim.in_tree.unflatten(xs)))


def _lowered_function_of(primitive: Any, params: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The function that `mlir.lower_fun` made the default lowering from, if no platform has a kernel of its own.

    Those of sparse products read indices without a check: they cannot be tried on random operands, nor on pieces.
    """
    cells = _lowered_function(_mlir._lowerings.get(primitive))  # pyright: ignore[reportPrivateUsage]
    if cells is None:
        return None
    tables: Any = _mlir._platform_specific_lowerings.values()  # pyright: ignore[reportPrivateUsage]
    kernels = [t for t in tables if primitive in t and _lowered_function(t[primitive]) is None]
    if kernels and not getattr(cells["fun"], "__module__", "").startswith("jax.experimental.sparse"):
        return None
    fun, several = functools.partial(cells["fun"], **params), cells["multiple_results"]
    return (lambda *xs: list(fun(*xs))) if several else lambda *xs: [fun(*xs)]


def _lowered_function(entry: Any) -> dict[str, Any] | None:
    """The arguments of `mlir.lower_fun` that made a lowering; None if something else made it."""
    rule: Any = getattr(entry, "rule", entry)
    if getattr(rule, "__qualname__", "") != "lower_fun.<locals>.f_lowered":
        return None
    cells = dict(zip(rule.__code__.co_freevars, (c.cell_contents for c in rule.__closure__), strict=True))
    return cells if cells.keys() == {"fun", "multiple_results"} else None


# Why: the detection of clusters is a part of jax.distributed.initialize, which starts with what it finds.
@dataclass(frozen=True)
class DetectedProcess:
    """This process among those that a cluster has started.

    Attributes:
      cluster: name of the kind of cluster, as JAX calls it: slurm, ompi, k8s, ...
      coordinator: host and port of process 0; the host may be a name.
      processes: how many there are.
      me: number of this one.
      local: its number on its host; None if the cluster does not say.
    """

    cluster: str
    coordinator: str
    processes: int
    me: int
    local: int | None


def detect_process(seconds: float) -> DetectedProcess | None:
    """The cluster that has started this process, as JAX detects it. None: no cluster has.

    Args:
      seconds: wait so long for the name of the coordinator's host to be known.
    """
    for kind in _ClusterEnv._cluster_types:  # pyright: ignore[reportPrivateUsage]
        if kind.opt_in_only_method or not kind.is_env_present():
            continue
        port = os.environ.get("JAX_COORDINATOR_PORT")
        coordinator = kind.get_coordinator_address(timeout_secs=int(seconds), override_coordinator_port=port)
        host, _, port = coordinator.rpartition(":")
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        name = kind.name or kind.__name__
        local = kind.get_local_process_id()
        return DetectedProcess(name, f"{host}:{port}", kind.get_process_count(), kind.get_process_id(), local)
    return None


# Why: neither the generator of keys nor the gamma sample of one key is public.
def generator_of(dtype: Any) -> str:
    """The name of JAX's generator for keys of this dtype; empty if the generator is not one of JAX's."""
    impl = dtype._impl
    return impl.name if _prng.prngs.get(impl.name) is impl else ""


def gamma_of_each(keys: Any, alphas: Any, log_space: bool) -> Any:
    """A sample for each key and alpha, as `random_gamma` makes it from keys that are already split."""
    one = functools.partial(_random._gamma_one, log_space=log_space)  # pyright: ignore[reportPrivateUsage]
    pair = (keys.flatten(), alphas.flatten())
    if generator_of(keys.dtype) == "threefry2x32":
        samples = jax.vmap(one)(*pair)
    else:
        samples = jax.lax.map(lambda xs: one(*xs), pair)  # with other generators a batch of keys makes other bits
    return samples.reshape(alphas.shape)


# Why: only the class of its client tells a compile-only device.
def is_compile_only(device: Any) -> bool:
    """Whether programs are compiled for a device, and run on none."""
    return _compiles_only(getattr(device, "client", None))


def _compiles_only(client: Any) -> bool:
    return type(client).__name__ == "CompileOnlyPyClient"


# Why: JAX writes an executable of compile-only devices to its compilation cache, and cannot read it from there; and
# XLA:CPU writes one that was read from there without its code.
@contextmanager
def compiles_again(for_all: bool = False) -> Generator[None, None, None]:
    """A context in which JAX keeps no executables of compile-only devices, or of no devices at all."""

    def unless(used: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda client: not (for_all or _compiles_only(client)) and used(client)

    with _replacing(_cache, "is_cache_used", unless):
        yield


_PLUGINS: Final[Mapping[str, Sequence[str]]] = {
    "cuda": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    "tpu": ("libtpu",),
}


def has_plugin(platform: str) -> bool:
    """Whether JAX's plugin for `cuda` or `tpu` is installed."""
    return bool(_plugins(platform))


def _plugins(platform: str) -> list[str]:
    """The modules of JAX's plugins for a platform that are installed."""
    there = [m for m in _PLUGINS[platform] if importlib.util.find_spec(m.partition(".")[0])]
    return [m for m in there if importlib.util.find_spec(m)]


# Why: a plugin looks for its devices when it is loaded: that for CUDA registers nothing where the driver is missing,
# and libtpu asks the machine which slice it is in.
def compile_only_devices(platform: str, name: str, **options: Any) -> list[Any]:
    """The devices of a machine that XLA compiles for and that is not there.

    Args:
      platform: `cuda` or `tpu`, whose plugin is installed.
      name, options: as `jax.experimental.topologies.get_topology_desc` has them.

    Raises:
      jax.errors.JaxRuntimeError: the plugin knows no such machine.
    """
    find = functools.partial(topologies.get_topology_desc, name, platform, **options)
    if platform == "tpu":
        with _alone():
            return list(find().devices)
    try:
        return list(find().devices)
    except NotImplementedError:  # JAX has found no driver
        plugin = importlib.import_module(_plugins(platform)[0])
        with _replacing(plugin, "_check_cuda_versions", lambda _: lambda **_: None):
            plugin.initialize()
        return list(find().devices)


@contextmanager
def _alone() -> Generator[None, None, None]:
    """A context in which libtpu takes a machine without chips for a host of its own. It reads this once."""
    chips, _ = _hardware.num_available_tpu_chips_and_device_id()
    wanted = {} if chips else {name: value for name, value in _NO_CHIPS.items() if name not in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for each in wanted:
            del os.environ[each]


_NO_CHIPS: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # chips belong to one process, and there are none
}
