"""`shardc.function`: traces, plans, compiles and calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardc import compat
from shardc.errors import ArgumentError, PlacementError, all_offenders, did_you_mean
from shardc.mesh import AnyMesh, auto_mesh, view
from shardc.passes.constrain import constrain_p, pin_of
from shardc.passes.pins import Leaf, is_leaf_spec, pins_of, several_matches
from shardc.passes.plan import Argument, Plan, make_plan
from shardc.passes.program import Program
from shardc.passes.trace import Arguments, Call, is_array, leaf_aval, path_text, settings, trace
from shardc.route import Routes, has_tracers
from shardc.runtime.executable import Executable
from shardc.runtime.placed import PlacedArray, is_placed
from shardc.sbp.placement import AUTO, Pin, Placement, as_sbp

T = TypeVar("T")


class NamedArguments(tuple[Any, ...]):
    """A tuple of arguments whose items may also be had by name."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> NamedArguments:
        made = cls(values.values())
        made.names = tuple(values)
        return made

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names.index(key) if isinstance(key, str) else key)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("names", ()):
            return self[name]
        raise AttributeError(name)

    def __repr__(self) -> str:
        return "(" + ", ".join(f"{n}={v!r}" for n, v in zip(self.names, self, strict=True)) + ")"


jax.tree_util.register_pytree_node(
    NamedArguments,
    lambda a: (tuple(a), a.names),
    lambda names, values: NamedArguments.of(dict(zip(names, values, strict=True))),
)


class Compiled:
    """What `Function.compile` gives: the executable of one plan, called like the function."""

    def __init__(self, arguments: Arguments, executable: Executable) -> None:
        self._arguments = arguments
        self._routes = Routes(arguments)
        self.executable = executable
        self.plan = executable.plan
        self.audit = executable.audit
        self.hlo = executable.hlo
        self.memory_stats = executable.memory_stats

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if (again := self._routes.run(tree, leaves)) is not None:
            return again[0]
        call = self._arguments.take_apart(args, kwargs)
        program = self.plan.program
        given = [leaf_aval(x) for x in call.leaves if is_array(x)]
        self.executable.refuse_others(given, program.in_avals[: len(program.in_avals) - len(program.captured)])
        out = _run(self.executable, call)
        self._routes.add(tree, leaves, self.executable)  # the call has shown that it fits
        return out


def _run(executable: Executable, call: Call) -> Any:
    out = executable([x for x in call.leaves if is_array(x)])
    return jax.tree.unflatten(executable.plan.program.out_tree, out)


class Function:
    """A function of one device that runs on a mesh. Made by `shardc.function`."""

    def __init__(
        self, fn: Callable[..., Any], mesh: AnyMesh, in_placements: Any, out_placements: Any,
        donate: Sequence[str], static: Sequence[str],
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, fn)
        self._fn, self.mesh = fn, auto_mesh(mesh)
        self._view = view(mesh)
        self._arguments = Arguments(fn, static)
        self._in_placements, self._out_placements = in_placements, out_placements
        self._donate = frozenset(donate)
        wrong = self._arguments.check(donate, "donate_argnames")
        wrong += self._arguments.check(static, "static_argnames")
        if _is_by_name(in_placements):
            wrong += self._arguments.check([str(n) for n in in_placements], "in_placements")
        if wrong:
            raise ArgumentError(all_offenders(f"{fn.__name__} (shardc.function):", wrong))
        self._programs: dict[Any, Program] = {}
        self._plans: dict[Any, list[tuple[tuple[Argument, ...], Plan]]] = {}
        self._executables: dict[int, Executable] = {}
        self._routes = Routes(self._arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if (again := self._routes.run(tree, leaves)) is not None:
            return again[0]
        call = self._arguments.take_apart(args, kwargs)
        if has_tracers(call.leaves):
            return self._inside(call)
        executable = self._executable(self._plan(call))
        self._routes.add(tree, leaves, executable)
        return _run(executable, call)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of a call. Takes arrays or `jax.ShapeDtypeStruct`s; needs no devices."""
        return self._plan(self._arguments.take_apart(args, kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Plans and compiles a call without running it."""
        executable = self._executable(self._plan(self._arguments.take_apart(args, kwargs)))
        _ = executable.compiled
        return Compiled(self._arguments, executable)

    def _executable(self, plan: Plan) -> Executable:
        if id(plan) not in self._executables:
            self._executables[id(plan)] = Executable(plan, self.mesh)
        return self._executables[id(plan)]

    def _key(self, call: Call) -> Any:
        leaves = tuple(
            (a.shape, a.dtype, a.weak_type) if is_array(x) and (a := leaf_aval(x)) is not None else (x,)
            for x in call.leaves
        )
        return (call.tree, leaves, call.static, settings())

    def _plan(self, call: Call) -> Plan:
        key = self._key(call)
        arrivals = self._arrivals(call)
        for arguments, plan in self._plans.get(key, ()):
            if all(
                r is None or (a.arrival or p) == r
                for r, a, p in zip(arrivals, arguments, plan.inputs, strict=False)
            ):
                return plan
        program = self._programs.get(key)
        offenders: list[str] = []
        notes: list[str] = []
        pins = self._in_pins(call, offenders, notes)
        if offenders:
            raise PlacementError(all_offenders(f"{self._where()}: in_placements", offenders))
        if program is None:
            program = self._programs[key] = trace(self._arguments, call)
        dynamic = [i for i, x in enumerate(call.leaves) if is_array(x)]
        arguments = tuple(
            Argument(pins[i], arrival, call.names[i] in self._donate)
            for i, arrival in zip(dynamic, arrivals, strict=True)
        )
        plan = make_plan(program, self._view, arguments, self._out_pins(program), notes)
        plan._in_tree = self._tree_of(call, dynamic, plan)  # pyright: ignore[reportPrivateUsage]
        self._plans.setdefault(key, []).append((arguments, plan))
        return plan

    def _where(self) -> str:
        code = getattr(inspect.unwrap(self._fn), "__code__", None)
        line = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else ""
        return f"{self._fn.__name__}{line}"

    def _tree_of(self, call: Call, dynamic: Sequence[int], plan: Plan) -> NamedArguments:
        leaves: list[Placement | None] = [None] * len(call.leaves)
        for i, p in zip(dynamic, plan.inputs, strict=False):
            leaves[i] = p
        by_name = jax.tree.unflatten(call.tree, leaves)  # a dict: JAX has put its keys in order of name
        return NamedArguments.of({name: by_name[name] for name in self._arguments.names if name in by_name})

    def _in_pins(self, call: Call, offenders: list[str], notes: list[str]) -> list[Pin | None]:
        """One pin for each leaf of the call."""
        pins: list[Pin | None] = [None] * len(call.leaves)
        values = jax.tree.unflatten(call.tree, range(len(call.leaves)))
        for name, spec in self._specs(values, offenders):
            _spread(spec, values[name], name, call, self._view, pins, offenders, notes)
        return pins

    def _specs(self, values: Mapping[str, Any], offenders: list[str]) -> Iterable[tuple[str, Any]]:
        spec = self._in_placements
        if _is_by_name(spec):
            return [(n, s) for n, s in spec.items() if n in values]
        if is_leaf_spec(spec):
            return [(n, spec) for n in values]
        if isinstance(spec, tuple | list):
            if len(spec) > len(values):
                offenders.append(f"{len(spec)} placements for {len(values)} arguments ({', '.join(values)}).")
            return list(zip(values, spec, strict=False))
        offenders.append(f"{spec!r} is neither a dict by argument name, a tuple with one entry an argument, nor a placement.")
        return []

    def _out_pins(self, program: Program) -> list[Pin | None]:
        offenders: list[str] = []
        leaves = [
            Leaf(f"result {p}".rstrip(), p, tuple(v.aval.shape), v.aval.dtype)
            for p, v in zip(program.out_paths, program.jaxpr.outvars, strict=True)
        ]
        pins: list[Pin | None] = [None] * len(leaves)
        numbers = jax.tree.unflatten(program.out_tree, range(len(leaves)))
        _spread_leaves(self._out_placements, numbers, leaves, self._view, pins, offenders, [])
        if offenders:
            raise PlacementError(all_offenders(f"{self._where()}: out_placements", offenders))
        return pins

    def _arrivals(self, call: Call) -> list[Placement | None]:
        """Where each array of the call already lives on the mesh."""
        offenders: list[str] = []
        found: list[Placement | None] = []
        for path, x in zip(call.paths, call.leaves, strict=True):
            if is_array(x):
                arrival = _arrival(x, self.mesh)
                found.append(arrival if not isinstance(arrival, str) else None)
                if isinstance(arrival, str):
                    offenders.append(f"{path}: {arrival}")
        if offenders:
            raise ArgumentError(all_offenders(f"{self._where()}: arguments that are not on the mesh {self._view}", offenders))
        return found

    def _inside(self, call: Call) -> Any:
        """Inside an outer jit, grad or vmap: the plain function, its pins as sharding constraints; no plan is claimed."""
        offenders: list[str] = []
        pins = self._in_pins(call, offenders, [])
        if offenders:
            raise PlacementError(all_offenders(f"{self._where()}: in_placements", offenders))
        leaves = [
            _as_constraint(x, pin, self.mesh, path) if pin is not None and is_array(x) else x
            for x, pin, path in zip(call.leaves, pins, call.paths, strict=True)
        ]
        program = trace(self._arguments, Call(call.names, call.inner, tuple(map(_abstract, leaves)), call.tree, call.static))
        dynamic = [x for x in leaves if is_array(x)]
        out = _replay(program, dynamic, self.mesh)
        pinned = [
            x if pin is None else _as_constraint(x, pin, self.mesh, f"result {path}")
            for x, pin, path in zip(out, self._out_pins(program), program.out_paths, strict=True)
        ]
        return jax.tree.unflatten(program.out_tree, pinned)


def _abstract(x: Any) -> Any:
    if not is_array(x) or isinstance(x, bool | int | float | complex):
        return x
    aval = leaf_aval(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _replay(program: Program, leaves: Sequence[Any], mesh: AnyMesh) -> list[Any]:
    """Runs a program under an outer trace, its pins as JAX's sharding constraints."""
    env: dict[Any, Any] = dict(zip(program.jaxpr.invars, [*leaves, *program.captured], strict=True))
    for eqn in program.jaxpr.eqns:
        xs = [a.val if compat.is_literal(a) else env[a] for a in eqn.invars]
        pin = pin_of(eqn)
        if eqn.primitive is constrain_p and pin is not None:
            out = [_as_constraint(xs[0], pin, mesh, "shardc.constrain")]
        else:
            out = compat.bind_with(eqn.primitive, eqn.params)(*xs)
        env |= dict(zip(eqn.outvars, out, strict=True))
    return [a.val if compat.is_literal(a) else env[a] for a in program.jaxpr.outvars]


def _as_constraint(x: Any, pin: Pin, mesh: AnyMesh, path: str) -> Any:
    if pin.placement.partial_axes:
        raise PlacementError(
            f"{path} is pinned at {pin.placement}, but the function is called inside an outer jit, grad or vmap, where JAX "
            "cannot say a partial sum; call it outside, or pin it at B or S."
        )
    if is_placed(x):
        x = x.to_jax()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, pin.placement.to_spec()))


def _arrival(x: Any, mesh: AnyMesh) -> Placement | str | None:
    """Where an array lives on the mesh; None if it may be put anywhere; a text if it lives elsewhere."""
    if isinstance(x, PlacedArray):
        if dict(x.mesh.shape) != dict(mesh.shape):
            return f"a PlacedArray on the mesh {dict(x.mesh.shape)}; take its value with .to_jax() or np.asarray()."
        return x.placement
    sharding = getattr(x, "sharding", None)
    if sharding is None or (isinstance(x, jax.Array) and not getattr(x, "committed", True)):
        return None
    if isinstance(sharding, NamedSharding) and tuple(sharding.mesh.shape.items()) == tuple(mesh.shape.items()):
        same = isinstance(mesh, AbstractMesh) or isinstance(sharding.mesh, AbstractMesh)
        if same or (isinstance(sharding.mesh, Mesh) and np.array_equal(sharding.mesh.devices, mesh.devices)):
            idle = [a for a, n in mesh.shape.items() if n == 1]
            return Placement.from_sharding(sharding).without(idle)
    if isinstance(mesh, Mesh) and set(sharding.device_set) == set(mesh.devices.flat) and sharding.is_fully_replicated:
        return Placement()
    return (
        f"lives on {_devices_text(sharding)}, not on the function's mesh. Put it there with "
        "shardc.put(x, mesh, placement), or pass a numpy array."
    )


def _devices_text(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return f"the mesh {dict(sharding.mesh.shape)}, split {sharding.spec}"
    return f"{len(sharding.device_set)} device(s) of its own"


def _is_by_name(spec: Any) -> bool:
    return isinstance(spec, dict) and bool(spec) and not is_leaf_spec(spec)


def _spread(
    spec: Any, value: Any, name: str, call: Call, mesh: Any, pins: list[Pin | None], offenders: list[str],
    notes: list[str],
) -> None:  # fmt: skip
    leaves = [
        Leaf(path, inner, tuple(a.shape), a.dtype)
        if is_array(x) and (a := leaf_aval(x)) is not None
        else Leaf(path, inner, (), np.dtype(object))
        for path, inner, x in zip(call.paths, call.inner, call.leaves, strict=True)
    ]
    arrays = {i for i, x in enumerate(call.leaves) if is_array(x)}
    del name
    _spread_leaves(spec, value, leaves, mesh, pins, offenders, notes, arrays)


def _spread_leaves(
    spec: Any, numbers: Any, leaves: Sequence[Leaf], mesh: Any, pins: list[Pin | None], offenders: list[str],
    notes: list[str], arrays: set[int] | None = None,
) -> None:  # fmt: skip
    """Gives each numbered leaf of the tree its pin, by a leaf spec or a pytree prefix of leaf specs."""
    if is_leaf_spec(spec):
        mine = [i for i in jax.tree.leaves(numbers) if arrays is None or i in arrays]
        found = pins_of(spec, [leaves[i] for i in mine], mesh, offenders)
        notes += several_matches(spec, [leaves[i] for i in mine])
        for i, pin in zip(mine, found, strict=True):
            pins[i] = pin
        return
    parts, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=is_leaf_spec)
    if len(parts) == 1 and not parts[0][0]:
        offenders.append(f"{spec!r} is no placement; write a dict from axis to sbp, as {{'data': S(0)}}, or AUTO.")
        return
    one_level = jax.tree_util.tree_flatten_with_path(numbers, is_leaf=lambda x: x is not numbers)[0]
    children = {path_text(p): child for p, child in one_level}
    for key, part in _children(spec):
        if key in children:
            _spread_leaves(part, children[key], leaves, mesh, pins, offenders, notes, arrays)
        else:
            offenders.append(
                f"placements name {key!r}, which the value has not ({', '.join(children)}).{did_you_mean(key, children)}"
            )


def _children(spec: Any) -> list[tuple[str, Any]]:
    flat = jax.tree_util.tree_flatten_with_path(spec, is_leaf=lambda x: x is not spec)[0]
    return [(path_text(p), child) for p, child in flat]


def function(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh | None = None,
    in_placements: Any = AUTO,
    out_placements: Any = AUTO,
    donate_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Makes a function of one device run on a mesh.

    Args:
      fn: the function: plain JAX, with jax.grad, flax and optax inside.
      mesh: a jax Mesh or AbstractMesh, whatever its axis types. Without one, `fn` itself comes back.
      in_placements: where arguments live: a dict by argument name, a tuple with an entry for each argument, or one
        placement for all; each a leaf, `shardc.rules`, or a pytree prefix of leaves. A leaf is AUTO (the compiler
        chooses), a dict from axis to sbp, a Placement, a tuple with one sbp for each mesh axis, a PartitionSpec or a
        NamedSharding.
      out_placements: the same for the result.
      donate_argnames, donate_argnums: arguments whose buffers results may take; a result of the same path and aval
        keeps such an argument's placement.
      static_argnames, static_argnums: arguments that are constants of the trace; hashable.

    Returns:
      A `Function`: called like `fn`, with `.plan(...)` and `.compile(...)`.

    Raises:
      ArgumentError: a name that is no argument of `fn`.

    Example:
      >>> mesh = make_mesh(data=1)
      >>> @function(mesh=mesh, in_placements={"x": {"data": S(0)}})
      ... def double(x):
      ...     return 2 * x
      >>> double(np.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        if mesh is None:
            return fn
        names = tuple(inspect.signature(fn).parameters)
        donate = [*_words(donate_argnames), *(names[i] for i in _words(donate_argnums))]
        static = [*_words(static_argnames), *(names[i] for i in _words(static_argnums))]
        return Function(fn, mesh, in_placements, out_placements, donate, static)

    return decorate if fn is None else decorate(fn)


def _words(x: Any) -> Sequence[Any]:
    return (x,) if isinstance(x, str | int) else x


def constrain(x: T, placement: Any) -> T:
    """Pins a value inside a function: the identity, with a placement that the plan keeps.

    Args:
      x: an array, or a pytree of arrays that are all placed so.
      placement: a leaf as in `in_placements`, but AUTO; `{"data": S(0), ...: AUTO}` pins one axis.

    Returns:
      `x`.
    """
    pin = _loose_pin(placement)

    def one(leaf: Any) -> Any:
        resolved = Pin(pin.placement.resolve(np.ndim(leaf)), pin.fixed)
        return constrain_p.bind(jax.numpy.asarray(leaf), pin=resolved)

    return jax.tree.map(one, x)


def _loose_pin(placement: Any) -> Pin:
    """A pin that is not yet held against a mesh: the function that it stands in does that."""
    if isinstance(placement, Placement):
        return Pin(placement)
    if isinstance(placement, NamedSharding):
        return Pin(Placement.from_sharding(placement))
    if isinstance(placement, jax.sharding.PartitionSpec):
        return Pin(Placement.from_spec(placement))
    if isinstance(placement, Mapping):
        named = {a: as_sbp(s) for a, s in placement.items() if a is not ...}
        return Pin(Placement(named), frozenset(named) if ... in placement else None)
    raise PlacementError(f"shardc.constrain: {placement!r} is no placement; write a dict from axis to sbp.")


