"""`shardc.function`: traces, plans, compiles and calls."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardc import compat
from shardc.arrays.placed import PlacedArray, StackedArray, as_jax, is_placed, leaf_aval
from shardc.arrays.placed import put as put_tree
from shardc.errors import (
    ArgumentError,
    MeshError,
    PipelineError,
    PlacementError,
    ShardcWarning,
    all_offenders,
    did_you_mean,
)
from shardc.execute import gc_pause
from shardc.execute.call_cache import CallCache, has_tracers
from shardc.execute.executable import Executable
from shardc.execute.pipeline_executable import PipelineExecutable
from shardc.ir.constrain import constrain_p, pin_of
from shardc.ir.program import Program
from shardc.machine.mesh import AnyMesh, as_it_is_set, auto_mesh, explicit_axes, meshes_along, view, without_mesh
from shardc.passes.recompute.sink_constants import sink_constants
from shardc.passes.trace.canonicalize import EVERY
from shardc.passes.trace.pins import Leaf, Pins, code_text, is_leaf_spec, says_names, wrong_constraints
from shardc.passes.trace.share_loops import share_loops
from shardc.passes.trace.trace import Arguments, Call, is_array, leaves_by_path, path_text, settings, trace
from shardc.pipeline.make import make_pipeline_plan
from shardc.pipeline.plan import Pipeline, PipelineRequest
from shardc.plan.check_found import check_found
from shardc.plan.data_parallel import AVOIDS, DataParallel, sent_besides
from shardc.plan.make import Misfit, make_plan
from shardc.plan.replay import replay
from shardc.plan.request import Argument, ArgumentsTree, Request
from shardc.plan.saved_json import load_plan
from shardc.plan.saved_plan import SavedPlan
from shardc.plans import AnyPlan, MemoryLimitError, PipelinePlan, Plan
from shardc.report.elsewhere import elsewhere_text, mesh_text
from shardc.report.heed import warnings_of
from shardc.sbp.layout import plain_placement
from shardc.sbp.placement import AUTO, Auto, Pin, Placement, S, as_sbp
from shardc.sbp.signature import is_extended

T = TypeVar("T")
AnyExecutable: TypeAlias = Executable | PipelineExecutable


class Compiled:
    """What `Function.compile` gives: the executable of one plan, called like the function."""

    def __init__(self, arguments: Arguments, executable: AnyExecutable, plan: AnyPlan) -> None:
        self._arguments = arguments
        self._cached_calls = CallCache(arguments)
        self.executable = executable
        self.plan = plan
        self.audit = executable.audit
        self.hlo = executable.hlo
        self.memory_stats = executable.memory_stats

    @compat.face
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if (again := self._cached_calls.run(tree, leaves)) is not None:
            return again[0]
        call = self._taken_apart(args, kwargs)
        out = _run(self.executable, call)
        self._cached_calls.add(tree, leaves, self.executable)  # the call has shown that it fits
        return out

    def _taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call, if it is one that the plan is for."""
        call = self._arguments.take_apart(args, kwargs)
        self.executable.refuse_others([leaf_aval(x) for x in call.leaves if is_array(x)])
        return call

    @compat.face
    def check(self, *args: Any, **kwargs: Any) -> int:
        """Holds the signatures that were found for operations without a rule against the values of a call.

        The program runs on one device, callbacks too, and each such operation on the pieces that the plan gives to the
        devices.

        Returns:
          The number of operations that were compared.

        Raises:
          SignatureError: pieces differ from the whole; it names the primitives, and how to refuse what was found.
          PipelineError: this is a pipeline; check the function without `pipeline=`.
        """
        call = self._taken_apart(args, kwargs)
        if isinstance(self.plan, PipelinePlan):
            raise PipelineError(f"{self.plan.program.name} is a pipeline; check the function without pipeline=.")
        leaves = [as_jax(x) if is_extended(leaf_aval(x).dtype) else np.asarray(x) for x in call.leaves if is_array(x)]
        with without_mesh():
            return check_found(self.plan, [*leaves, *self.plan.program.captured], self._arguments.where)

    @compat.face
    def measure(self, *args: Any, **kwargs: Any) -> Any:
        """A call of a pipeline that waits for every task, so that `trace`, `draw` and `timeline` show what devices did.

        It is slower than a plain call: nothing is launched ahead. Gives what the call gives.

        Raises:
          PipelineError: this is no pipeline.
        """
        leaves = [x for x in self._taken_apart(args, kwargs).leaves if is_array(x)]
        return jax.tree.unflatten(self.plan.program.out_tree, self._pipeline.measure(leaves))

    def timeline(self, width: int = 120) -> str:
        """The last call of a pipeline as text, planned above measured for each rank.

        Raises:
          PipelineError: nothing was called yet, or this is no pipeline.
        """
        return self._pipeline.timeline(width)

    def draw(self, path: str | Path) -> None:
        """Draws the last call of a pipeline into an `.svg` or `.png` file.

        Raises:
          PipelineError: nothing was called yet, this is no pipeline, or matplotlib is missing.
        """
        self._pipeline.draw(path)

    def trace(self, path: str | Path) -> None:
        """Writes the last call of a pipeline, planned beside measured, as JSON for https://ui.perfetto.dev.

        Raises:
          PipelineError: nothing was called yet, or this is no pipeline.
        """
        self._pipeline.trace(path)

    def with_schedule(self, schedule: Any) -> Compiled:
        """The same pipeline under another schedule, without anything placed or compiled again.

        Args:
          schedule: as for `Pipeline`. It has to run each stage on the rank that it has, and to split its backward if
            this one's does.

        Raises:
          PipelineError: it wants other tasks, cannot be, or deadlocks; or this is no pipeline.
        """
        made = self._pipeline.with_schedule(schedule)
        return Compiled(self._arguments, made, PipelinePlan.of(made.plan))

    @property
    def _pipeline(self) -> PipelineExecutable:
        if isinstance(self.executable, PipelineExecutable):
            return self.executable
        raise PipelineError(
            f"{self.plan.program.name} is one program, no pipeline: there are no actors to show; "
            "jax.profiler.trace(...) shows what is in it."
        )


def _run(executable: AnyExecutable, call: Call) -> Any:
    out = executable([x for x in call.leaves if is_array(x)])
    return jax.tree.unflatten(executable.plan.program.out_tree, out)


class Method:
    """A `Function` bound to the object that it is a method of."""

    def __init__(self, function: Function, instance: Any) -> None:
        self.__self__, self.__func__ = instance, function

    @compat.face
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @compat.face
    def plan(self, *args: Any, **kwargs: Any) -> AnyPlan:
        return self.__func__.plan(self.__self__, *args, **kwargs)

    @compat.face
    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Plans and compiles a call; what comes back takes the object as its first argument."""
        return self.__func__.compile(self.__self__, *args, **kwargs)


class Function:
    """A function of one device that runs on a mesh. Made by `shardc.function`."""

    def __init__(
        self, fn: Callable[..., Any], mesh: AnyMesh, in_placements: Any, out_placements: Any,
        donate: Sequence[str], static: Sequence[str], pipeline: Pipeline | None = None, saved: SavedPlan | None = None,
        replicate: Sequence[str] = (),
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, fn)
        self._arguments = arguments = Arguments(fn, static)
        if not isinstance(mesh, Mesh | AbstractMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MeshError(
                f"{arguments.where}: mesh={mesh!r} is no mesh; write mesh=shardc.make_mesh(data=4, model=2)."
            )
        self.mesh = auto_mesh(mesh)
        self._pipeline, self._saved, self._replicate = pipeline, saved, tuple(replicate)
        self._meshes = [] if pipeline is None else _meshes_of(pipeline, self.mesh, arguments.where)
        self._view = view(mesh)
        if pipeline is not None:
            self._view = replace(view(self._meshes[0]), taken="" if pipeline.meshes else pipeline.axis)
        self._strict = in_placements if isinstance(in_placements, DataParallel) else None
        if self._strict is not None:
            if pipeline is not None:
                raise PipelineError(
                    f"{arguments.where}: {in_placements} is for one mesh, and a pipeline has several; pin the batch, "
                    'with in_placements={...: {"data": S(0)}}.'
                )
            in_placements = self._strict.placements(arguments.names, static, arguments.where)
            self._view = replace(self._view, avoids=AVOIDS)
        self._in_placements, self._out_placements = in_placements, out_placements
        self._donate = frozenset(donate)
        wrong = arguments.check(donate, "donate_argnames")
        wrong += arguments.check(static, "static_argnames")
        named = list(map(str, in_placements)) if says_names(in_placements, arguments.names, self._view) else []
        wrong += arguments.check(named, "in_placements")
        wrong += [
            f"{what} names {n!r}, which is static: a constant lives nowhere; leave it out."
            for what, names in (("donate_argnames", donate), ("in_placements", named))
            for n in names
            if n in static
        ]
        if wrong:
            raise ArgumentError(all_offenders(f"{arguments.where}: names that do not fit", wrong))
        self._programs: dict[Any, Program] = {}
        self._plans: dict[Any, list[tuple[tuple[Argument, ...], AnyPlan]]] = {}
        self._executables: dict[Any, AnyExecutable] = {}
        self._cached_calls = CallCache(self._arguments)
        self._warned: set[str] = set()

    @compat.face
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._plain(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if (again := self._cached_calls.run(tree, leaves)) is not None:
            return again[0]
        call = self._arguments.take_apart(args, kwargs)
        if has_tracers(call.leaves):
            return self._inside(call)
        executable = self._executable(self._plan(call))
        self._cached_calls.add(tree, leaves, executable)
        return _run(executable, call)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Method(self, instance)

    @compat.face
    def plan(self, *args: Any, **kwargs: Any) -> AnyPlan:
        """The plan of a call. Takes arrays or `jax.ShapeDtypeStruct`s; needs no devices."""
        return self._plan(self._arguments.take_apart(args, kwargs))

    @compat.face
    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Plans and compiles a call without running it."""
        plan = self._plan(self._arguments.take_apart(args, kwargs))
        executable = self._executable(plan)
        _ = executable.compiled
        return Compiled(self._arguments, executable, plan)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under `jax.disable_jit()`: the function itself, operation by operation, on one device."""
        self._arguments.take_apart(args, kwargs)  # names that do not fit
        args, kwargs = jax.tree.map(_on_one_device, (args, kwargs))
        return self._arguments.fn(*args, **kwargs)

    def _executable(self, plan: AnyPlan) -> AnyExecutable:
        mesh = as_it_is_set(self.mesh)
        if (id(plan), mesh) not in self._executables:
            pipelined = isinstance(plan, PipelinePlan)
            with without_mesh():
                made = PipelineExecutable(plan, self._meshes) if pipelined else Executable(plan, mesh)
            self._executables[id(plan), mesh] = made
            for text in warnings_of(plan, self._arguments.where, self._replicate):
                if text not in self._warned:
                    self._warned.add(text)
                    warnings.warn(text, ShardcWarning, stacklevel=compat.users_level())
        return self._executables[id(plan), mesh]

    def _key(self, call: Call) -> Any:
        leaves = tuple(
            (a.shape, a.dtype, a.weak_type) if (a := leaf_aval(x) if is_array(x) else None) is not None else (x,)
            for x in call.leaves
        )
        return (call.tree, leaves, call.static, settings(), jax.sharding.get_abstract_mesh())

    def _plan(self, call: Call) -> AnyPlan:
        key = self._key(call)
        arrivals = self._arrivals(call)
        for arguments, plan in self._plans.get(key, ()):
            known = zip(arrivals, arguments, plan.inputs, strict=False)
            if all(now == a.arrival or (a.arrival is None and now == planned) for now, a, planned in known):
                return plan
        with gc_pause.paused():
            program = self._program(call)
            with without_mesh():
                arguments, plan = self._plan_anew(call, program, arrivals)
        self._plans.setdefault(key, []).append((arguments, plan))
        return plan

    def _plan_anew(
        self, call: Call, program: Program, arrivals: Sequence[Placement | None]
    ) -> tuple[tuple[Argument, ...], AnyPlan]:
        into, out = self._pins(call, program)
        dynamic = [i for i, x in enumerate(call.leaves) if is_array(x)]
        arguments = tuple(
            Argument(into.pins[i], arrival, call.names[i] in self._donate)
            for i, arrival in zip(dynamic, arrivals, strict=True)
        )
        notes = (*into.notes, *out.notes)
        tree, where = ArgumentsTree(call.tree, tuple(dynamic)), self._arguments.where
        if self._pipeline is not None:
            asked = PipelineRequest(
                program, self.mesh, self._meshes, arguments, out.pins, self._pipeline, where, notes, tree
            )
            return arguments, PipelinePlan.of(make_pipeline_plan(asked))
        shared = None if self._saved is None else self._saved.shared
        program = share_loops(program, [a.pin for a in arguments], self._view, self._replicate, shared)
        request = Request(program, self._view, arguments, out.pins, notes, self._view.limit, where, tree)
        found = make_plan(request) if self._saved is None else replay(self._saved, request)
        if isinstance(found, Misfit):
            raise MemoryLimitError(found)
        if self._saved is None and self._strict is not None and (lines := sent_besides(found)):
            what = f"{self._strict} sums each gradient once, after the backward pass; this step sends besides"
            mend = f"in_placements={code_text(self._in_placements)} says where arguments live, and nothing of what"
            raise PlacementError(f"{self._says([all_offenders(what, lines)])}\nLet it: {mend} may be sent.")
        return arguments, Plan.of(found)

    def _program(self, call: Call) -> Program:
        """What a call runs, with the marks of pipelines if this is one."""
        marks = self._pipeline is not None
        key = (self._key(call), marks)
        if key not in self._programs:
            program = trace(self._arguments, call, marks, self._replicate)
            self._programs[key] = program.after("sink_constants", sink_constants(program.jaxpr))
        return self._programs[key]

    def _pins(self, call: Call, program: Program) -> tuple[Pins, Pins]:
        """What is said of a call's arguments, and of its results."""
        into, out = self._in_pins(call), self._out_pins(program)
        offenders = [*into.offenders, *out.offenders, *wrong_constraints(program, self._view)]
        if offenders:
            raise PlacementError(self._says(offenders))
        return into, out

    def on(self, mesh: AnyMesh, pipeline: Pipeline | None = None) -> Function:
        """The same function on another mesh, or as a pipeline; what was traced is not traced again."""
        arguments = self._arguments
        made = Function(
            arguments.fn, mesh, self._strict or self._in_placements, self._out_placements, sorted(self._donate),
            sorted(arguments.static), pipeline, replicate=self._replicate,
        )  # fmt: skip
        made._programs = self._programs
        return made

    def look(self, *args: Any) -> tuple[Program, list[Pin | None]]:
        """The program of a call, with the marks of pipelines if this is one, and all that is said of where its
        arguments and results live."""
        call = self._arguments.take_apart(args, {})
        program = self._program(call)
        into, out = self._pins(call, program)
        return program, [*into.pins, *out.pins]

    def _says(self, offenders: Sequence[str]) -> str:
        return all_offenders(f"{self._arguments.where}, mesh {self._view}:", offenders)

    def _in_pins(self, call: Call) -> Pins:
        """One pin for each leaf of the call."""
        leaves = [_leaf(path, inner, x) for path, inner, x in zip(call.paths, call.inner, call.leaves, strict=True)]
        pins = Pins("in_placements", leaves, self._view)
        numbers: dict[str, Any] = jax.tree.unflatten(call.tree, range(len(leaves)))
        spec: Any = self._in_placements
        constant = {n for n, _ in call.static} - self._arguments.static  # numbers that this call leaves out
        if isinstance(spec, tuple | list) and not is_leaf_spec(spec):
            names = [n for n in self._arguments.names if n in numbers or n in constant]
            many = self._arguments.var_positional
            if many in names and len(spec) > (at := names.index(many)) + 1:  # as in jax.jit, one for each of `*xs`
                if len(spec) - at != len(numbers[many]):
                    wanted = f"{len(spec) - at} for the {len(numbers[many])} arguments of *{many}"
                    pins.offenders.append(f"in_placements: {wanted}; write one for each, or one for all of them.")
                    return pins
                spec, names = (*spec[:at], tuple(spec[at:])), names[: at + 1]
            if len(spec) > len(names):
                said = f"{len(spec)} for {len(names)} arguments ({', '.join(names)})"
                pins.offenders.append(f"in_placements: {said}; write one for each argument, or a dict by name.")
            for name, part in zip(names, spec, strict=False):
                if name in numbers:
                    pins.spread(part, numbers[name], name)
            return pins
        if says_names(spec, self._arguments.names, self._view):
            spec = self._arguments.nest_keywords({n: s for n, s in spec.items() if n not in constant})
        pins.spread(spec, numbers)
        return pins

    def _out_pins(self, program: Program) -> Pins:
        spec = self._out_placements
        each = isinstance(spec, tuple | list) and not is_leaf_spec(spec)  # rules match inside the result they stand for
        leaves = [
            Leaf(f"result {path}".rstrip(), path.partition("/")[2] if each else path, tuple(aval.shape), aval.dtype)
            for path, aval in zip(program.out_paths, program.out_avals, strict=True)
        ]
        pins = Pins("out_placements", leaves, self._view)
        pins.spread(self._out_placements, jax.tree.unflatten(program.out_tree, range(len(leaves))))
        return pins

    def _arrivals(self, call: Call) -> list[Placement | None]:
        """Where each array of the call already lives on the mesh."""
        elsewhere: list[tuple[str, str, Any]] = []
        found: list[Placement | None] = []
        for name, path, x in zip(call.names, call.paths, call.leaves, strict=True):
            if is_array(x):
                arrival = _arrival(x, self.mesh) if self._pipeline is None else _arrival_in(x, self.mesh, self._meshes)
                found.append(arrival if not isinstance(arrival, str) else None)
                if isinstance(arrival, str):
                    elsewhere.append((name, path, x))
        if elsewhere:
            raise ArgumentError(elsewhere_text(self._arguments.where, self._view, elsewhere))
        return found

    def _inside(self, call: Call) -> Any:
        """In an outer jit, grad or vmap: the plain function, its pins as sharding constraints; no plan is claimed."""
        into = self._in_pins(call)
        if into.offenders:
            raise PlacementError(self._says(into.offenders))
        abstracted = replace(call, leaves=tuple(map(abstract, call.leaves)))
        program = trace(self._arguments, abstracted, replicate=(EVERY,))
        results = self._out_pins(program)
        offenders = [*results.offenders, *wrong_constraints(program, self._view)]
        if offenders:
            raise PlacementError(self._says(offenders))
        at = [(pin, p) for x, pin, p in zip(call.leaves, into.pins, call.paths, strict=True) if is_array(x)]
        at_out = [(pin, f"result {path}") for pin, path in zip(results.pins, program.out_paths, strict=True)]

        def run(*arrays: Any) -> list[Any]:
            return self._constrained(_replay(program, self._constrained(arrays, at), self.mesh), at_out)

        if explicit_axes():
            there = jax.sharding.get_abstract_mesh()
            if dict(there.shape) != dict(self.mesh.shape):
                raise MeshError(
                    f"{self._arguments.where} is called in an outer jit, grad or vmap, whose mesh in context "
                    f"({mesh_text(there)}) is another than its own ({mesh_text(self.mesh)}); set that one, with "
                    "jax.set_mesh, or call it outside."
                )
            specs = [jax.sharding.PartitionSpec() if pin is None else pin.placement.to_spec() for pin, _ in at_out]
            run = jax.jit(jax.sharding.auto_axes(run, out_sharding=specs))
        dynamic = [x for x in call.leaves if is_array(x)]
        return jax.tree.unflatten(program.out_tree, run(*dynamic))

    def _constrained(self, xs: Sequence[Any], at: Sequence[tuple[Pin | None, str]]) -> list[Any]:
        """Arrays with their pins, if they have any, as sharding constraints."""
        return [
            x if pin is None else _as_constraint(x, pin, self.mesh, path) for x, (pin, path) in zip(xs, at, strict=True)
        ]


def abstract(x: Any) -> Any:
    """An array's shape, dtype and weak type in its place; what is no array, or a number, as it is."""
    if not is_array(x) or isinstance(x, bool | int | float | complex):
        return x
    aval = leaf_aval(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _on_one_device(x: Any) -> Any:
    """An array of several devices, as JAX puts it on one."""
    if is_placed(x):
        return jax.numpy.asarray(np.asarray(x))
    if not isinstance(x, jax.Array) or compat.is_tracer(x) or len(x.sharding.device_set) == 1:
        return x
    if is_extended(x.dtype):
        words = jax.numpy.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return jax.numpy.asarray(np.asarray(x))


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
            f"{path} is pinned at {pin.placement}, but the function is called in an outer jit, grad or vmap, where JAX "
            "cannot say a partial sum; call it outside, or pin it at B or S."
        )
    shape = np.shape(x)
    placement = plain_placement(shape, pin.placement.resolve(len(shape)), dict(mesh.shape))  # JAX takes no uneven split
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, placement.to_spec()))


ELSEWHERE: Final = "elsewhere"
"""Says of an array that it lives on other devices, or on another mesh."""


def _arrival(x: Any, mesh: AnyMesh) -> Placement | str | None:
    """Where an array lives on the mesh; None if it may be put anywhere; or ELSEWHERE."""
    if isinstance(x, StackedArray):
        return ELSEWHERE
    if isinstance(x, PlacedArray):
        return x.placement if _is_same(x.mesh, mesh) else ELSEWHERE
    sharding = getattr(x, "sharding", None)
    if sharding is None or (isinstance(x, jax.Array) and not getattr(x, "committed", True)):
        return None
    if isinstance(sharding, NamedSharding) and _is_same(sharding.mesh, mesh):
        idle = [a for a, n in mesh.shape.items() if n == 1]
        return Placement.from_sharding(sharding).without(idle)
    if isinstance(mesh, Mesh) and set(sharding.device_set) == set(mesh.devices.flat) and sharding.is_fully_replicated:
        return Placement()
    return ELSEWHERE


def _is_same(theirs: AnyMesh, ours: AnyMesh) -> bool:
    """Whether two meshes have the same axes and devices, as far as they have devices."""
    if tuple(theirs.shape.items()) != tuple(ours.shape.items()):
        return False
    if isinstance(theirs, AbstractMesh) or isinstance(ours, AbstractMesh):
        return True
    return np.array_equal(theirs.devices, ours.devices)


def _meshes_of(pipeline: Pipeline, mesh: AnyMesh, where: str) -> list[AnyMesh]:
    """The mesh of each rank."""
    if pipeline.meshes is None:
        return meshes_along(mesh, pipeline.axis)
    given = list(pipeline.meshes)
    strange = [f"meshes[{r}] is {m!r}" for r, m in enumerate(given) if not isinstance(m, Mesh | AbstractMesh)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if strange or not given:
        raise MeshError(
            f"{where}: Pipeline(meshes=...) wants a mesh for each rank, {'; '.join(strange) or 'got none'}; write "
            "meshes=[jax.sharding.Mesh(devices[:4], ('data',)), jax.sharding.Mesh(devices[4:6], ('data',))]."
        )
    axes = [", ".join(map(str, m.axis_names)) for m in given]
    if len(set(axes)) > 1:
        raise MeshError(
            f"{where}: the meshes of a pipeline's ranks have the same axes, of whatever size, as one placement is for "
            f"all of them; these have {'; '.join(axes)}. Add axes of size 1."
        )
    for a, b in combinations(range(len(given)), 2):
        both = _devices(given[a]) & _devices(given[b])
        if both and given[a].size + given[b].size > 2:
            raise MeshError(
                f"{where}: ranks {a} and {b} of the pipeline share {', '.join(sorted(map(str, both)))}; collectives "
                "of two ranks on one device can wait for each other for ever; give each rank devices of its own."
            )
    return [auto_mesh(m) for m in given]


def _devices(mesh: AnyMesh) -> set[Any]:
    return set(mesh.devices.flat) if isinstance(mesh, Mesh) else set()


def _arrival_in(x: Any, mesh: AnyMesh, meshes: Sequence[AnyMesh]) -> Placement | str | None:
    """The same for a pipeline: on one rank's mesh, or on the whole one."""
    if isinstance(x, StackedArray):
        return x.placement if x.mesh in meshes else None
    devices = set(x.sharding.device_set) if isinstance(x, jax.Array) else set[Any]()
    for m in meshes:
        if isinstance(m, Mesh) and (devices == set(m.devices.flat) or (isinstance(x, PlacedArray) and x.mesh == m)):
            return _arrival(x, m)
    if isinstance(x, jax.Array) and getattr(x, "committed", False) and isinstance(mesh, Mesh):
        return None if devices <= set(mesh.devices.flat) else _arrival(x, mesh)
    return _arrival(x, meshes[0]) if not isinstance(x, jax.Array) else None


@compat.face
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
    pipeline: Pipeline | None = None,
    plan: str | PathLike[str] | SavedPlan | None = None,
    replicate: str | Sequence[str] = (),
    **unknown: Any,
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
      pipeline: runs the loop of `shardc.accumulate` as a pipeline over its microbatches, in stages cut at
        `shardc.stage_boundary`. Its axis of the mesh stands in no placement.
      plan: a plan that `plan.save(path)` wrote: its path, or what `shardc.load_plan` gives. It is lowered as it is,
        without a search, and only for calls of the shapes that it was made for; other placements that are given are
        held against it.
      replicate: primitives without a rule that are to be computed whole on every device, by name, though shardc finds
        signatures for them; `"*"` for all.

    Returns:
      A `Function`: called like `fn`, with `.plan(...)` and `.compile(...)`.

    Raises:
      ArgumentError: `fn` is no function; a keyword that `function` does not take, as `in_shardings`; a name that is no
        argument of `fn`; a file that is no plan. When it is called: a plan of another
        program, with all that differs.

    Example:
      >>> mesh = make_mesh(data=1)
      >>> @function(mesh=mesh, in_placements={"x": {"data": S(0)}})
      ... def double(x):
      ...     return 2 * x
      >>> double(np.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """

    refuse_unknown("shardc.function", fn, unknown, function)
    if pipeline is not None and not isinstance(pipeline, Pipeline):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f'pipeline={pipeline!r} is no Pipeline; write pipeline=shardc.Pipeline(schedule="1f1b").')

    saved = plan if plan is None or isinstance(plan, SavedPlan) else load_plan(plan)
    if saved is not None and pipeline is not None:
        raise PipelineError(
            f"plan={saved.name!r}: a pipeline is always planned anew. Pin the borders that were saved, with "
            "in_placements=shardc.load_plan(...).in_placements and out_placements=shardc.load_plan(...).out_placements."
        )

    def decorate(fn: Callable[..., Any]) -> Any:
        over = pipeline.meshes[0] if mesh is None and pipeline is not None and pipeline.meshes else mesh
        if over is None:
            return fn
        donate = [*_words(donate_argnames), *_names_at(donate_argnums, fn, "donate_argnums")]
        static = [*_words(static_argnames), *_names_at(static_argnums, fn, "static_argnums")]
        whole = [*_words(replicate)]
        return Function(fn, over, in_placements, out_placements, donate, static, pipeline, saved, whole)

    return decorate if fn is None else decorate(fn)


_OF_JIT: Final = {"in_shardings": "in_placements", "out_shardings": "out_placements"}
"""Keywords of jax.jit, and those that say the same here."""


def refuse_unknown(what: str, fn: object, unknown: Mapping[str, Any], taker: Callable[..., Any]) -> None:
    """Raises ArgumentError if `fn` is given and no function, or keywords are that `taker` does not take."""
    if fn is not None and (not callable(fn) or isinstance(fn, Mesh | AbstractMesh)):  # meshes can be called
        said = fn if isinstance(fn, str) and fn.isidentifier() else "step"
        raise ArgumentError(
            f"{what} wants a function, got {fn!r}; write {what}({said}, mesh=mesh), or @{what}(mesh=mesh) above it."
        )
    known = [n for n, p in inspect.signature(taker).parameters.items() if p.kind is p.KEYWORD_ONLY]
    lines = [
        f"{n}: write {_OF_JIT[n]}=, which takes PartitionSpecs and NamedShardings too." if n in _OF_JIT
        else f"{n}: it takes {', '.join(known)}.{did_you_mean(n, known)}"
        for n in unknown
    ]  # fmt: skip
    if lines:
        raise ArgumentError(all_offenders(f"{what}: keywords that it does not take", lines))


def _words(x: Any) -> Sequence[Any]:
    return (x,) if isinstance(x, str | int) else x


@compat.face
def put(tree: Any, mesh: AnyMesh, placements: Any) -> Any:
    """Puts the arrays of a pytree on a mesh.

    Args:
      tree: pytree of arrays; leaves that are no arrays are left as they are.
      mesh: a mesh with devices.
      placements: as `in_placements` says them, or as `plan.in_placements` gives them: a leaf, `shardc.rules`, or a
        pytree prefix; what is AUTO or None is left as it is.

    Returns:
      The tree with jax.Arrays; where a placement is an uneven split or a partial sum, PlacedArrays.

    Raises:
      ArgumentError: the mesh has no devices.
      PlacementError: a placement does not fit the mesh or its array, or the two trees do not match.
    """
    pairs, structure = leaves_by_path(tree), jax.tree.structure(tree)
    pins = Pins("placements", [_leaf(p := path_text(path), p, x) for path, x in pairs], view(mesh))
    pins.spread(placements, jax.tree.unflatten(structure, range(len(pairs))))
    if pins.offenders:
        raise PlacementError(all_offenders(f"shardc.put, mesh {view(mesh)}:", pins.offenders))
    placed = [None if pin is None else pin.placement for pin in pins.pins]
    return put_tree(tree, mesh, jax.tree.unflatten(structure, placed))


def _leaf(path: str, inner: str, x: Any) -> Leaf | None:
    if not is_array(x):
        return None
    aval = leaf_aval(x)
    return Leaf(path, inner, tuple(aval.shape), aval.dtype)


def _names_at(numbers: int | Sequence[int], fn: Callable[..., Any], what: str) -> list[str]:
    arguments = Arguments(fn, ())
    names = arguments.names
    wrong = [f"{what} names argument {i}." for i in _words(numbers) if not -len(names) <= i < len(names)]
    if wrong:
        has = f"{arguments.where} has {len(names)} arguments, numbered from 0: {', '.join(names)}"
        raise ArgumentError(all_offenders(has, wrong))
    return [names[i] for i in _words(numbers)]


def constrain(x: T, placement: Any) -> T:
    """Pins a value inside a function: the identity, with a placement that the plan keeps.

    Args:
      x: an array, or a pytree of arrays that are all placed so.
      placement: a dict from axis to sbp, a Placement, a PartitionSpec or a NamedSharding; `{"data": S(0), ...: AUTO}`
        pins one axis. What does not fit the value or the mesh is an error when the function is planned.

    Returns:
      `x`.
    """
    pin = _loose_pin(placement)

    def one(leaf: Any) -> Any:
        rank = np.ndim(leaf)
        splits = [s.dim for s in pin.placement.values() if isinstance(s, S)]
        fits = all(-rank <= dim < rank for dim in splits)  # if not, the plan says so with all that is wrong
        resolved = Pin(pin.placement.resolve(rank) if fits else pin.placement, pin.fixed)
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
    if isinstance(placement, Mapping) and isinstance(placement.get(..., AUTO), Auto):
        named = {a: as_sbp(s) for a, s in placement.items() if a is not ...}
        return Pin(Placement(named), frozenset(named) if ... in placement else None)
    raise PlacementError(
        f"shardc.constrain: {code_text(placement)} is no placement; write a dict from axis to sbp, as "
        "{'data': S(0)}, with ...: AUTO in it for axes that are to be chosen."
    )
