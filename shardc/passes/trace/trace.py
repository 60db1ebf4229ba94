"""Traces a call of a Python function: arguments --> leaves with paths, function --> canonical jaxpr."""

from __future__ import annotations

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardc import compat
from shardc.arrays.placed import as_jax, as_placed, leaf_aval
from shardc.errors import ArgumentError, TracingError, all_offenders, did_you_mean
from shardc.ir.boundary import END, stage_boundary_p
from shardc.ir.nested import NESTED
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import automatic, explicit_axes, without_mesh
from shardc.machine.topology import BackendKind
from shardc.passes.trace.canonicalize import canonicalize
from shardc.passes.trace.chunk_scans import Chunks, ScanMaker
from shardc.passes.trace.constants import has_hash, key_of, key_of_static, why_no_constant


def path_text(path: Iterable[Any]) -> str:
    """`layers/0/kernel`: keys, attribute names and indices joined by `/`."""
    return "/".join(_entry(k) for k in path)


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a pytree with their paths. A leaf in a flax box has the path of the box: `kernel`, without
    `value`."""
    pairs: list[tuple[tuple[Any, ...], Any]] = []
    stop = lambda x: _is_box(type(x)) or (is_leaf is not None and is_leaf(x))  # noqa: E731
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        if not _is_box(type(x)):
            pairs.append((path, x))
            continue
        pairs += [((*path, *inner[1:]), leaf) for inner, leaf in jax.tree_util.tree_flatten_with_path(x, is_leaf)[0]]
    return pairs


def _entry(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@dataclass(frozen=True)
class Call:
    """One call of a function as flat leaves.

    Attributes:
      names: the argument of each leaf.
      inner: path of each leaf inside its argument.
      leaves: arrays, and leaves that are no arrays (static).
      tree: structure of the arguments by name.
      static: values of the static arguments, by name.
      types: for each array the sharding in its type, None if it has none; empty: no mesh has Explicit axes.
    """

    names: tuple[str, ...]
    inner: tuple[str, ...]
    leaves: tuple[Any, ...]
    tree: Any
    static: tuple[tuple[str, Any], ...]
    types: tuple[NamedSharding | None, ...] = ()

    @property
    def paths(self) -> list[str]:
        return ["/".join(filter(None, pair)) for pair in zip(self.names, self.inner, strict=True)]

    def refuse_shapes(self, where: str) -> None:
        """Raises ArgumentError if leaves are shapes, which can be planned for and not called with."""
        wrong = [p for p, x in zip(self.paths, self.leaves, strict=True) if isinstance(x, jax.ShapeDtypeStruct)]
        if wrong:
            head = f"{where}: .plan(...) and .compile(...) take shapes, a call arrays"
            raise ArgumentError(
                all_offenders(head, [f"{path} is a jax.ShapeDtypeStruct, which has no values." for path in wrong])
            )

    @property
    def constants(self) -> dict[str, Any]:
        """Keys of the static arguments and of the leaves that are no arrays, by path."""
        fixed = {path: key_of(x) for path, x in zip(self.paths, self.leaves, strict=True) if not is_array(x)}
        return fixed | {name: key_of_static(x) for name, x in self.static}


def is_array(x: Any) -> bool:
    """Whether a leaf is traced; other leaves are constants of the trace."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) or (
        is_number(x) or isinstance(x, compat.Tracer)
    )


def is_number(x: Any) -> bool:
    """Whether a leaf is a number of Python; NumPy's have a dtype of their own, though some are floats for Python."""
    return isinstance(x, int | float | complex) and not isinstance(x, np.generic)


@lru_cache(maxsize=256)
def _is_of(package: str, kind: type, names: tuple[str, ...]) -> bool:
    """Whether a type is, or derives from, one of these of a package that need not be installed."""
    return any(c.__name__ in names and c.__module__.partition(".")[0] == package for c in kind.__mro__)


def _is_box(kind: type) -> bool:
    """Whether a type is a variable of nnx, or a linen array's partitioning metadata."""
    return _is_of("flax", kind, ("Variable", "AxisMetadata"))


def is_nnx(x: object) -> bool:
    """Whether `x` is a module, an optimizer or a variable of flax.nnx, which functions can write to."""
    return _is_of("flax", type(x), ("Pytree", "Variable"))


def is_nnx_state(x: object) -> bool:
    """Whether `x` is a state of flax.nnx, which functions take and return as they do other pytrees."""
    return _is_of("flax", type(x), ("State",))


def is_equinox(x: object) -> bool:
    return _is_of("equinox", type(x), ("Module",))


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)  # a partial's func


def where_of(fn: Callable[..., Any]) -> str:
    """`step (train.py:12)`: a function and its line, for errors."""
    code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
    name = _name_of(fn)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name


class Arguments:
    """The signature of a function: the names of its arguments, the static ones."""

    def __init__(self, fn: Callable[..., Any], static: Sequence[str]) -> None:
        self.fn = fn
        self.name = _name_of(fn)
        try:
            self.signature = inspect.signature(fn)
        except ValueError:
            raise ArgumentError(
                f"{self.name}: Python knows no names of its arguments; write a function around it, as lambda x: "
                f"{self.name}(x)."
            ) from None
        self.static = frozenset(static)
        self.names = tuple(self.signature.parameters)
        kinds = inspect.Parameter
        parameters = self.signature.parameters.items()
        self.var_positional = next((n for n, p in parameters if p.kind is kinds.VAR_POSITIONAL), "")
        self.var_keyword = next((n for n, p in parameters if p.kind is kinds.VAR_KEYWORD), None)

    @property
    def where(self) -> str:
        return where_of(self.fn)

    def check(self, names: Iterable[str], what: str) -> list[str]:
        """A line for each of `names` that is no argument of the function."""
        if self.var_keyword is not None:
            return []
        return [
            f"{what} names {n!r}, which is no argument of {self.name}({', '.join(self.names)})."
            f"{did_you_mean(n, self.names)}"
            for n in names
            if n not in self.names
        ]

    def nest_keywords(self, by_name: Mapping[str, Any]) -> dict[str, Any]:
        """Entries by argument name, with those of keywords that `**kwargs` takes nested under its name."""
        if self.var_keyword is None:
            return dict(by_name)
        rest = {n: s for n, s in by_name.items() if n not in self.names}
        return {**{n: s for n, s in by_name.items() if n in self.names}, **({self.var_keyword: rest} if rest else {})}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The leaves of a call.

        Raises:
          ArgumentError: a call that does not fit the signature, a static argument without a hash, or a leaf that is
            neither an array nor a constant.
        """
        call, given = self._bind(args, kwargs)
        wrong = [
            f"{n}: a static argument has to be hashable, and a {type(v).__name__} is not; pass a tuple, or "
            "another immutable value."
            for n, v in call.static
            if not has_hash(v)
        ]
        for name, inner, x in zip(call.names, call.inner, call.leaves, strict=True):
            # a default that is not passed is fixed with the function, as what it closes over
            if not is_array(x) and (name in given or not has_hash(x)) and (line := why_no_constant(name, inner, x)):
                wrong.append(line)
            elif isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm":
                path = "/".join(filter(None, (name, inner)))
                wrong.append(f"{path}: JAX has no arrays of {x.dtype}; pass numbers.")
        if wrong:
            raise ArgumentError(all_offenders(f"{self.where}: invalid arguments", wrong))
        return call

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The leaves of a call, whatever they are."""
        return self._bind(args, kwargs)[0]

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The values of a call by the names of the arguments, without those that it leaves out."""
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            near = "".join(did_you_mean(k, self.names) for k in kwargs if k not in self.names)
            raise ArgumentError(f"{self.where}: {error}; call {self.name}{self.signature}.{near}") from None

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, set[str]]:
        """The leaves of a call, and the names of the arguments that are given."""
        bound = self.by_name(args, kwargs)
        given = set(bound.arguments)
        bound.apply_defaults()
        # default numbers are static, so that `if train:` and shapes can read them; jax.jit does the same
        defaults = ((n, v) for n, v in bound.arguments.items() if n not in given and has_hash(v))
        fixed = self.static | {n for n, v in defaults if any(map(is_number, jax.tree.leaves(v)))}
        # pytrees sort the keys of a dict, not those of an OrderedDict: leaves keep the order of the signature
        dynamic = OrderedDict((n, v) for n, v in bound.arguments.items() if n not in fixed)
        static = tuple((n, v) for n, v in bound.arguments.items() if n in fixed)
        flat, tree = leaves_by_path(dynamic), jax.tree.structure(dynamic)
        names = tuple(_entry(path[0]) for path, _ in flat)
        inner = tuple(path_text(path[1:]) for path, _ in flat)
        return Call(names, inner, tuple(as_placed(x) for _, x in flat), tree, static), given

    def call(self, values: Mapping[str, Any]) -> Any:
        """Calls the function with values by name."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self.signature.parameters.items():
            if name not in values:
                continue
            match parameter.kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    args.extend(values[name])
                case inspect.Parameter.VAR_KEYWORD:
                    kwargs.update(values[name])
                case inspect.Parameter.KEYWORD_ONLY:
                    kwargs[name] = values[name]
                case _:
                    args.append(values[name])
        return self.fn(*args, **kwargs)


def _is_ordered(eqn: compat.Eqn, pipeline: bool) -> bool:
    """Whether an equation has an effect whose order cannot be kept: JAX keeps that of io_callbacks on one mesh."""
    kinds = [type(e).__name__ for e in eqn.effects]
    return any("Ordered" in kind and (pipeline or "IO" not in kind) for kind in kinds)


def held_by_nnx(values: Any) -> dict[str, Any]:
    """The contents of nnx modules among the arguments, by path."""
    pairs = jax.tree_util.tree_flatten_with_path(values, is_leaf=is_nnx)[0]
    modules = [(path, x) for path, x in pairs if is_nnx(x)]
    return {path_text((*path, *inner)): leaf for path, x in modules for inner, leaf in leaves_by_path(x)}


_RETURN_STATE: Final = "Return the state, or pass the module itself: what is written to it is kept."


def refuse_lost_writes(
    where: str, before: Mapping[str, Any], after: Mapping[str, Any], results: Sequence[Any], fix: str = _RETURN_STATE
) -> None:
    """Raises if a function has written to an nnx module among its arguments, and does not return what it wrote."""
    returned = set(map(id, results))
    lost = [path for path, x in after.items() if before.get(path) is not x and id(x) not in returned]
    if lost:
        some = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise TracingError(
            f"{where} writes to nnx modules among its arguments, and what it writes would be lost: {some}. {fix}"
        )


def settings() -> tuple[Any, ...]:
    """The JAX settings that a trace depends on."""
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


@contextmanager
def under(known: tuple[Any, ...]) -> Generator[None]:
    """A context with the settings that `settings()` gave in another thread: JAX keeps them per thread."""
    with ExitStack() as stack:
        for name, value, now in zip(_SETTINGS, known, settings(), strict=True):
            if value != now:
                stack.enter_context(getattr(jax, name.removeprefix("jax_"))(value))
        yield


_SETTINGS: Final = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
)


def _names_for_jax(call: Call) -> list[str]:
    """The name of each leaf in JAX's words: `model['off']`."""
    numbered = jax.tree.unflatten(call.tree, range(len(call.leaves)))
    pairs = jax.tree_util.tree_flatten_with_path(numbered)[0]
    return [_entry(path[0]) + jax.tree_util.keystr(path[1:]) for path, _ in pairs]


def _traced(make: Callable[..., Any], avals: Sequence[Any], types: Sequence[NamedSharding | None]) -> Any:
    """The jaxpr of a function: traced as `jax.jit` traces it, where arguments have shardings in their types, else with
    automatic axes of the mesh in context.

    Other ways are tried where that fails: JAX refuses programs whose shardings contradict each other, which a plan
    places all the same, and fewer of them under a mesh in context; and a function that closes over arrays whose types
    have shardings needs the axes as they are. The error is that of the first way.
    """
    if not types and not explicit_axes():
        return make(*avals)
    typed = [compat.with_sharding(a, t) if t else a for a, t in zip(avals, types or [None] * len(avals), strict=True)]
    mesh = next((t.mesh.abstract_mesh for t in types if t), None)
    ways = [(nullcontext, typed), (automatic, avals)] if types else [(automatic, avals), (nullcontext, avals)]
    if mesh is not None and jax.sharding.get_abstract_mesh().empty:
        ways.insert(1, (lambda: jax.sharding.use_abstract_mesh(mesh), typed))
    first: Exception | None = None
    for way, values in ways:
        try:
            with way():
                return make(*values)
        except Exception as error:  # noqa: BLE001  # JAX refuses types by errors of many classes; the first is raised
            first = first or error
    assert first is not None
    raise first


def _boundary_in(jaxpr: compat.Jaxpr) -> str:
    """The line of the user's first stage boundary in a traced function; empty if there is none."""
    cuts = (e for e in all_eqns(jaxpr) if e.primitive is stage_boundary_p and e.params["cut"] != END)
    return next(map(compat.source_line, cuts), "")


def _notes(error: Exception, call: Call) -> Iterator[str]:
    """Lines below an error of JAX, or of the function, for mistakes that shardc can name."""
    if isinstance(error, NameError) and "axis name" in str(error):
        yield (
            "shardc: the function is written for one device, and sees whole arrays: leave psum, pmean and axis_index "
            "out, as in x.mean(). The collectives follow from the placements."
        )
    if "cuDNN is not detected" in str(error):
        yield (
            'shardc: implementation="cudnn" runs on GPUs alone, and this mesh is of none: leave it out, or plan for '
            'GPUs, as on make_mesh(topology="h100:8", ...).'
        )
    for name, listed in _lists_of_numbers(call).items():
        if "[" in name and f"'{listed}'" not in str(error):
            continue  # the state of an optimizer has such lists too
        yield (
            f"shardc: {name} is a {listed}, and each of its numbers an argument of its own; for an array write "
            f"np.asarray({name}), for a shape jax.ShapeDtypeStruct({name}, np.float32)."
        )


def _lists_of_numbers(call: Call) -> dict[str, str]:
    """The arguments, and parts of them, that are lists or tuples of numbers alone, with their types."""
    return {
        name: type(x).__name__
        for argument, given in jax.tree.unflatten(call.tree, call.leaves).items()
        for name, x in _outermost_lists(argument, given)
        if jax.tree.leaves(x)
    }


def _outermost_lists(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """The outermost lists and tuples of numbers alone in a tree, each with its name in Python."""
    if isinstance(x, list | tuple) and all(map(_is_scalar, jax.tree.leaves(x))):
        yield name, x
    elif type(x) in (list, tuple, dict):
        for key, part in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _outermost_lists(f"{name}[{key!r}]", part)


def _is_scalar(x: Any) -> bool:
    """Whether a leaf is a number of Python, or the type of one in a flow."""
    return is_number(x) or (isinstance(x, jax.ShapeDtypeStruct) and not x.shape)


def trace(
    arguments: Arguments,
    call: Call,
    marks: bool = False,
    replicate: Collection[str] = (),
    scans: Chunks = (),
    backend: BackendKind = "cpu",
) -> Program:
    """The canonical program of a function at the avals of a call; with the marks of pipelines if `marks`.

    Args:
      replicate: primitives without a rule that get no signatures (`canonicalize`).
      scans: kinds of associative scans that are traced in chunks (`chunk_scans`).
      backend: the compiler that it is planned for. JAX traces cuDNN's attention for GPUs alone.
    """
    dynamic = [i for i, x in enumerate(call.leaves) if is_array(x)]
    avals = [leaf_aval(call.leaves[i]) for i in dynamic]
    if typed := [
        f"{call.paths[i]}: {a.dtype}" for i, a in zip(dynamic, avals, strict=True) if compat.is_typed_number(a.dtype)
    ]:
        raise ArgumentError(
            all_offenders(f"{arguments.where}: types for gradients; pass the numbers as they are", typed)
        )
    out_info: list[Any] = []

    def flat(*values: Any) -> list[Any]:
        leaves = list(call.leaves)
        for i, value in zip(dynamic, values, strict=True):
            leaves[i] = value
        inputs = jax.tree.unflatten(call.tree, leaves)
        before = held_by_nnx(inputs)
        out = arguments.call({**inputs, **dict(call.static)})
        pairs, tree = leaves_by_path(out), jax.tree.structure(out)
        refuse_lost_writes(arguments.where, before, held_by_nnx(inputs), [x for _, x in pairs])
        bad = [
            f"{f'result {path_text(p)}'.rstrip()} is {x!r}, a {type(x).__name__}; return an array, or leave it out."
            for p, x in pairs
            if not is_array(x)
        ]
        bad += [
            f"{f'result {path_text(p)}'.rstrip()} is of {x.dtype}, a type for gradients; return "
            f'jax.lax.convert_element_type(x, "{compat.number_of(x.dtype)}").'
            for p, x in pairs
            if is_array(x) and compat.is_typed_number(leaf_aval(x).dtype)
        ]
        if bad:
            raise ArgumentError(all_offenders(f"{arguments.where}: results that are no arrays", bad))
        out_info[:] = [[path_text(p) for p, _ in pairs], tree]
        return [x for _, x in pairs]

    names = _names_for_jax(call)
    compat.traced_as(flat, arguments.fn, [names[i] for i in dynamic])
    on_gpu = compat.cudnn_traced() if backend == "gpu" else nullcontext()
    with compat.scans_made_by(ScanMaker(scans)), on_gpu:
        try:
            closed = _traced(jax.make_jaxpr(flat), avals, call.types)
        except Exception as error:
            for note in _notes(error, call):
                error.add_note(note)
            raise
    if refs := [x for x in closed.consts if isinstance(x, jax.Ref)]:
        raise TracingError(
            all_offenders(
                f"{arguments.where} reads or writes Refs that were made outside of it; pass their values as arguments, "
                "and return the new ones",
                [str(jax.typeof(r)) for r in refs],
            )
        )
    with without_mesh():
        jaxpr, captured = canonicalize(closed, marks, replicate)
    ordered = [e for e in all_eqns(jaxpr) if e.primitive.name not in NESTED and _is_ordered(e, marks)]
    if ordered:
        raise TracingError(
            all_offenders(
                f"{arguments.where} has ordered effects, which several devices cannot keep; write ordered=False",
                [f"{e.primitive.name} at {compat.source_line(e)}" for e in ordered],
            )
        )
    moved = [e for e in all_eqns(jaxpr) if e.primitive.name == "device_put"]
    if moved:
        lines = [f"device_put to {e.params['devices'][0]} at {compat.source_line(e)}" for e in moved]
        raise TracingError(
            all_offenders(
                f"{arguments.where}: the values of a shardc function live on its mesh; leave the device_put out, or "
                "give it a NamedSharding over the mesh",
                list(dict.fromkeys(lines)),
            )
        )
    every = call.paths
    paths = [every[i] for i in dynamic]
    paths += [f"closure/{i}" for i in range(len(captured))]
    captured = tuple(map(as_jax, captured))
    return Program(
        arguments.name,
        jaxpr,
        tuple(paths),
        tuple(out_info[0]),
        captured,
        call.tree,
        out_info[1],
        scans=scans,
        boundary="" if marks else _boundary_in(closed.jaxpr),
        passed=(("canonicalize", jaxpr),),
    )
