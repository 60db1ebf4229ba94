"""`shardc.function`: traces, plans, compiles and calls."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh

from shardc import compat
from shardc.arrays.placed import leaf_aval
from shardc.calls.arrivals import arrivals
from shardc.calls.call_pins import argument_pins, result_pins
from shardc.calls.leaves import abstract, on_one_device
from shardc.calls.opened import STRUCTURE, placed_results
from shardc.calls.openers import OpenArguments
from shardc.calls.options import UNSAID, Options, Unsaid, checked_placements, decorated, meshes_of
from shardc.calls.outer_trace import run_in_outer_trace
from shardc.calls.types import argument_types, explicit_mesh
from shardc.calls.watch import notify_called, notify_made
from shardc.compiled import Compiled, run
from shardc.dataflow.round import refuse_lost_modules, traced_round
from shardc.errors import (
    ArgumentError,
    ForbiddenMoveError,
    MeshError,
    PipelineError,
    PlacementError,
    ShardcWarning,
    all_offenders,
    did_you_mean,
)
from shardc.execute import gc_pause
from shardc.execute.at_work import line_if_long
from shardc.execute.call_cache import CallCache, has_tracers
from shardc.execute.executable import Executable
from shardc.execute.process_group import environment
from shardc.execute.saved_code import refuse_unlike
from shardc.ir.program import Program
from shardc.ir.user_shard_map import explicit_mesh_of
from shardc.ir.walk import all_eqns
from shardc.machine.ahead import with_devices
from shardc.machine.mesh import AnyMesh, as_it_is_set, auto_mesh, meshes_along, view, without_mesh
from shardc.passes import IMBALANCE, after_trace
from shardc.passes.rewrite.fix_order import sums_in_parts
from shardc.passes.rewrite.share_loops import devices_along
from shardc.passes.trace.canonicalize import EVERY
from shardc.passes.trace.chunk_scans import Chunks, scans_of, split_scans
from shardc.passes.trace.constants import key_of, key_of_static
from shardc.passes.trace.pins import Pins, code_text, matcher, wrong_constraints
from shardc.passes.trace.trace import Arguments, Call, is_array, settings, trace, where_of
from shardc.pipeline.options import Pipeline, PipelineRequest
from shardc.plan.data_parallel import DataParallel, sent_besides
from shardc.plan.digest import is_same_program
from shardc.plan.forbid import Forbid, forbid_text, read_forbid
from shardc.plan.make import DoesNotFit, make_plan
from shardc.plan.request import Argument, ArgumentsTree, Request
from shardc.plan.saved_plan import SavedPlan
from shardc.plans import MemoryLimitError, Plan, lacks
from shardc.report.plan_warnings import warnings_of
from shardc.sbp.placement import AUTO, Pin, Placement

if TYPE_CHECKING:
    from shardc.execute.pipeline_executable import FlowOfPipeline, PipelineExecutable
    from shardc.pipelines import CompiledPipeline, PipelinePlan

AnyPlan: TypeAlias = "Plan | PipelinePlan"
AnyExecutable: TypeAlias = "Executable | PipelineExecutable"
AnyCompiled: TypeAlias = "Compiled | CompiledPipeline"


class BoundFunction:
    """A `Function` bound to the object that it is a method of."""

    def __init__(self, function: Function, instance: Any) -> None:
        self.__self__, self.__func__ = instance, function

    @property
    def latest(self) -> AnyExecutable | None:
        return self.__func__.latest

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @compat.api_boundary
    def plan(self, *args: Any, **kwargs: Any) -> AnyPlan:
        return self.__func__.plan(self.__self__, *args, **kwargs)

    @compat.api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> AnyCompiled:
        """Plans and compiles a call; what comes back takes the object as its first argument."""
        return self.__func__.compile(self.__self__, *args, **kwargs)


@dataclass(frozen=True)
class _Known:
    """A plan, with the program and the arguments that it was made for."""

    program: Program
    arguments: tuple[Argument, ...]
    plan: AnyPlan

    def takes(self, arrived: Sequence[Placement | None]) -> bool:
        """Whether arguments that live at `arrived` are those of the plan, or live where it takes them."""
        each = zip(arrived, self.arguments, self.plan.whole_inputs, strict=False)
        return all(now == a.arrival or (a.arrival is None and now == planned) for now, a, planned in each)


class Function:
    """A function of one device that runs on a mesh. Made by `shardc.function`.

    It is called like the function that it was made of, with plain or placed arrays, and gives jax.Arrays.

    **Constants.** A leaf of the arguments that is no array is a constant: another value is another plan. It has to be
    one that cannot change: text, a number, None, an enum, a type, a function, a frozen dataclass, or a tuple of these;
    also dtypes, meshes, shardings, placements and linen modules. Any other object (a config, a random generator, an
    iterator, the `self` of a method) is an ArgumentError: mark it static, or pass its numbers. A static argument is
    compared by `==` and its hash, as by `jax.jit`. A default that a call leaves out is part of the function.

    **Modules.** What the function writes to modules of flax.nnx among its arguments (optimizers, metrics, random
    streams, variables) is kept, as by `nnx.jit`. In a plan, and for `shardc.rules`, such a module is the tree of its
    variables, `layers/0/kernel`; one that `in_placements` does not place gets the placements of its metadata. The
    compiler places what is written; what is written to a donated module stays where it was. Attributes without a hash
    are compared by their contents. In modules of equinox all leaves that are no arrays are constants, numbers too, and
    results may be such modules. `shardc.flax.function` and `shardc.equinox.function` say what they add.

    **Inside other transformations.** Inside an outer `jit`, `grad` or `vmap` it is the plain function with its pins as
    sharding constraints, and no plan is claimed. Inside another shardc function, or a stage of a pipeline, its pins are
    pins by axis name, partial sums too; an axis that the mesh there does not have is an error.

    **A mesh set with `jax.set_mesh`** is visible inside: PartitionSpecs and a `shard_map` without a mesh read it. If it
    is the function's own mesh, results have its axis types.

    **Explicit axes.** If the mesh has them, pins, and where committed arrays live, are in the types of arguments while
    the function is traced, as under `jax.jit`. A `reshard` inside is a pin; `out_sharding=` of single operations is
    not. Programs whose types JAX refuses are traced with automatic axes.

    **Errors** in the function read as under `jax.jit`, without shardc's frames (`jax_traceback_filtering`). With
    `jax_debug_nans` a call that makes a NaN runs again on one device, and the error names the operation and its line;
    donated arguments are kept. Under `jax.disable_jit()` the plain function runs on one device. A ShardcWarning comes
    once, when the function is compiled: for more than 1 MB that an operation without a rule computes on every device,
    and for more than 1 MB of arguments that come back as results and are not donated.

    `copy.deepcopy` gives a function that begins with nothing planned.
    """

    def __init__(self, fn: Callable[..., Any], mesh: AnyMesh, options: Options) -> None:
        functools.update_wrapper(self, fn)
        self._arguments = arguments = options.arguments(fn)
        if not isinstance(mesh, Mesh | AbstractMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MeshError(
                f"{arguments.where}: mesh={mesh!r} is no mesh; write mesh=shardc.make_mesh(data=4, model=2)."
            )
        self._options, self.mesh = options, auto_mesh(mesh)
        self._as_given = mesh  # with the axis types that arguments are traced with
        pipeline = options.pipeline
        self._ranks = None if pipeline is None else meshes_of(pipeline, self.mesh, arguments.where)
        self._view = view(mesh)
        if pipeline is not None and self._ranks is not None:
            self._view = replace(view(self._ranks[0]), taken="" if pipeline.meshes else pipeline.axis)
        self._forbidden = read_forbid(options.forbid, self._view, arguments.where)
        self._view = replace(self._view, avoids=self._forbidden)
        strict = options.in_placements
        self._strict = strict if isinstance(strict, DataParallel) else None
        if self._strict is not None:
            if pipeline is not None:
                raise PipelineError(
                    f"{arguments.where}: {strict} is for one mesh, and a pipeline has several; pin the batch, "
                    'with in_placements={...: {"data": S(0)}}.'
                )
            self._view = replace(self._view, avoids=self._forbidden | strict.avoids(self._view.sizes))
        self._in_placements = checked_placements(arguments, options, self._view)
        self._moved_from: list[Mesh] = []
        self._begin()
        notify_made(self)

    def _begin(self) -> None:
        """Begins with nothing traced, planned or compiled."""
        self._programs: dict[Any, Program] = {}
        self._plans: dict[Any, list[_Known]] = {}
        self._executables: dict[Any, AnyExecutable] = {}
        self._cached_calls = CallCache(self._arguments)
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: Any) -> Function:
        """The function anew, on the same mesh."""
        made = copy.copy(self)
        fn = copy.deepcopy(self._arguments.fn, memo)
        functools.update_wrapper(made, fn)
        made._arguments = self._options.arguments(fn)
        made._moved_from = list(self._moved_from)
        made._begin()
        return made

    def __repr__(self) -> str:
        ranks = f", a pipeline of {len(self._ranks)} ranks" if self._ranks is not None else ""
        return f"Function({self._arguments.where} on {view(self.mesh)}{ranks})"

    def __getattr__(self, name: str) -> NoReturn:
        lacks(self, name)

    # -- calls

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if traced_round() is not None:
            return self.call_every(args, kwargs, 1)
        if not self._arguments.meets_modules and not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            leaves, tree = jax.tree.flatten((args, kwargs))
            if (again := self._cached_calls.run(tree, leaves)) is not None:
                return again[0]
        with self._arguments.opened(args, kwargs) as opened:
            return opened.close(self._call(opened.args, opened.kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of arrays, the cached one if these are of modules: else none is known."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._plain(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if STRUCTURE in kwargs and (again := self._cached_calls.run(tree, leaves)) is not None:
            return again[0]
        call = self._arguments.bind(args, kwargs)
        if has_tracers(call.leaves):
            return self._inside(call)
        call.refuse_shapes(self._arguments.where)
        executable = self._executable(self._plan(call))
        if not executable.unchecked:
            self._cached_calls.add(tree, leaves, call, executable, explicit_mesh(call, self._as_given) is not None)
        return run(executable, call)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    # -- as a node of a flow

    def call_every(self, args: tuple[Any, ...], kwargs: dict[str, Any], every: int) -> Any:
        """A call in the round of a flow that is traced, which runs every so many rounds."""
        from shardc.dataflow.call import call_in_round

        if self._options.check == "first":
            raise ArgumentError(
                f'{self._arguments.where}: check="first" is for calls, and this is a node of a flow; leave it out, and '
                "check the function alone: function.compile(...).check(...)."
            )
        with self._arguments.opened(args, kwargs) as opened:
            refuse_lost_modules(self._arguments.where, opened.held)
            return opened.close(call_in_round(self, opened.args, opened.kwargs, every))

    @property
    def arguments(self) -> OpenArguments:
        return self._arguments

    @property
    def donates(self) -> tuple[str, ...]:
        """The names of the arguments whose buffers results may take."""
        return self._options.donate_argnames

    @property
    def meshes(self) -> tuple[AnyMesh, ...]:
        """The mesh; of a pipeline, those of its ranks."""
        return (self.mesh,) if self._ranks is None else tuple(self._ranks)

    @property
    def latest(self) -> AnyExecutable | None:
        """The executable, with its plan, that was made last; None before the first call."""
        return next(reversed(self._executables.values()), None)

    @compat.api_boundary
    def plan(self, *args: Any, **kwargs: Any) -> AnyPlan:
        """The plan of a call. Takes arrays or `jax.ShapeDtypeStruct`s; needs no devices."""
        with self._arguments.opened(args, kwargs) as opened:
            return self._plan(self._arguments.bind(opened.args, opened.kwargs))

    @compat.api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> AnyCompiled:
        """Plans and compiles a call without running it.

        On a mesh of `make_mesh(topology=...)` XLA's compiler for that machine compiles, and nothing can be called: its
        audit, HLO and memory are those of the machine.

        Returns:
          A `Compiled`, or a `CompiledPipeline`: called like the function, for calls of these shapes alone.

        Raises:
          MeshError: JAX's plugin for the machine that the mesh names is not installed.
        """
        with self._arguments.opened(args, kwargs) as opened:
            call = self._arguments.bind(opened.args, opened.kwargs)
            notify_called(self, call)
            return self.compile_of(call)

    def compile_in_flow(self, flow: FlowOfPipeline, *args: Any, **kwargs: Any) -> CompiledPipeline:
        """A pipeline compiled as a node of a flow: the processes of its ranks call it, and no others."""
        from shardc.execute.pipeline_executable import PipelineExecutable
        from shardc.pipelines import CompiledPipeline, PipelinePlan

        with self._arguments.opened(args, kwargs) as opened:
            call = self._arguments.bind(opened.args, opened.kwargs)
            plan = self.plan_of(call)
            assert isinstance(plan, PipelinePlan)
            executable = PipelineExecutable(plan, self.meshes, flow=flow)
            _ = executable.compiled
            return CompiledPipeline(self._arguments, (call.tree, call.constants), executable, plan)

    def compile_of(self, call: Call) -> AnyCompiled:
        """A call compiled; for compile-only devices if the mesh has none."""
        meshes = self._meshes_to_compile_for()
        plan, made_for = self.plan_of(call), (call.tree, call.constants)
        executable = self._executable(plan, meshes)
        if isinstance(plan, Plan):
            assert isinstance(executable, Executable)
            _ = executable.compiled
            return Compiled(self._arguments, made_for, executable, plan)
        from shardc.pipelines import CompiledPipeline

        assert not isinstance(executable, Executable)
        if executable.absent:
            executable.compile_tasks()
        else:
            _ = executable.compiled
        return CompiledPipeline(self._arguments, made_for, executable, plan)

    def _meshes_to_compile_for(self) -> Sequence[AnyMesh]:
        """The mesh, or those of a pipeline's ranks, with compile-only devices in place of none."""
        pipeline = self._options.pipeline
        if isinstance(self.mesh, AbstractMesh) and pipeline is not None and pipeline.meshes is None:
            return meshes_along(with_devices(self.mesh), pipeline.axis)
        return [with_devices(mesh) for mesh in self.meshes]

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under `jax.disable_jit()`: the function itself, operation by operation, on one device."""
        call = self._arguments.bind(args, kwargs)
        values = jax.tree.unflatten(call.tree, map(on_one_device, call.leaves))
        made = self._arguments.call({**values, **dict(call.static)})
        return jax.tree.map(lambda x: x, made)  # without the marks of constants

    def _inside(self, call: Call) -> Any:
        """In an outer jit, grad or vmap: the plain function, its pins as sharding constraints; no plan is claimed."""
        if self._forbidden:
            raise ForbiddenMoveError(
                f"{self._arguments.where}: in jax.jit, jax.grad or jax.vmap XLA decides what moves, so "
                f"forbid={forbid_text(self._forbidden)} cannot be promised. Call it outside of them, or leave it out."
            )
        if self._options.deterministic:
            raise ArgumentError(
                f"{self._arguments.where}: in jax.jit, jax.grad or jax.vmap XLA decides in which order sums are added, "
                "so deterministic= cannot be promised. Call it outside of them, or leave it out."
            )
        into = argument_pins(call, self._arguments, self._in_placements, self._view)
        if into.offenders:
            raise PlacementError(self._says(into.offenders))
        abstracted = replace(call, leaves=tuple(map(abstract, call.leaves)))
        typed = self._typed(call, [None for x in call.leaves if is_array(x)])
        abstracted = replace(abstracted, types=typed.types)
        program = after_trace(
            trace(self._arguments, abstracted, replicate=(EVERY,), backend=self._view.topology.backend)
        )
        out = result_pins(program, placed_results(call, self._options.out_placements), self._view)
        offenders = [*out.offenders, *wrong_constraints(program, self._view)]
        if offenders:
            raise PlacementError(self._says(offenders))
        return run_in_outer_trace(call, program, into.pins, out.pins, self.mesh, self._arguments.where)

    # -- what calls are planned and compiled as, each kept

    def _executable(self, plan: AnyPlan, meshes: Sequence[AnyMesh] = ()) -> AnyExecutable:
        meshes = meshes or self.meshes
        mesh = as_it_is_set(meshes[0])
        if (id(plan), mesh) not in self._executables:
            with without_mesh():
                if isinstance(plan, Plan):
                    made = Executable(plan, mesh, saved=self._options.saved)
                else:
                    from shardc.execute.pipeline_executable import PipelineExecutable

                    made = PipelineExecutable(plan, meshes)
                if self._forbidden:
                    from shardc.report.refused.forbidden_moves import refuse_compiled

                    refuse_compiled(made.audit(), self._forbidden, self._arguments.where)
            made.unchecked = self._options.check == "first" and not made.absent
            self._executables[id(plan), mesh] = made
            for text in warnings_of(plan, self._arguments.where, self._options.replicate):
                if text not in self._warned:
                    self._warned.add(text)
                    warnings.warn(text, ShardcWarning, stacklevel=compat.users_level())
        return self._executables[id(plan), mesh]

    def _key(self, call: Call) -> Any:
        leaves = tuple(
            (a.shape, a.dtype, a.weak_type) if (a := leaf_aval(x) if is_array(x) else None) is not None else key_of(x)
            for x in call.leaves
        )
        static = tuple((n, key_of_static(v)) for n, v in call.static)  # 2 and 2.0 are equal, their programs are not
        return (call.tree, leaves, static, settings(), jax.sharding.get_abstract_mesh())

    def _plan(self, call: Call) -> AnyPlan:
        notify_called(self, call)
        return self.plan_of(call)

    def plan_of(self, call: Call) -> AnyPlan:
        """The plan of a call; the known one if its arguments have the types and places of an earlier one's."""
        arrived = arrivals(call, self.mesh, self._ranks, self._moved_from, self._arguments.where, self._view)
        call = self._typed(call, arrived)
        key = (self._key(call), call.types)
        for known in self._plans.setdefault(key, []):
            if known.takes(arrived):
                return known.plan
        with gc_pause.paused(), line_if_long(f"planning {self._arguments.where}"):
            program = self._program(call, arrived)
            for known in itertools.chain(*self._plans.values()):  # of other types, which nothing in it depends on
                if known.program is program and known.takes(arrived):
                    self._plans[key].append(known)
                    return known.plan
            with without_mesh():
                arguments, plan = self._plan_anew(call, program, arrived)
            if self._forbidden:
                from shardc.report.refused.forbidden_moves import refuse_planned

                refuse_planned(plan, self._forbidden, self._arguments.where)
        self._plans[key].append(_Known(program, arguments, plan))
        return plan

    def _plan_anew(
        self, call: Call, program: Program, arrived: Sequence[Placement | None]
    ) -> tuple[tuple[Argument, ...], AnyPlan]:
        into, out = self._pins(call, program)
        dynamic = [i for i, x in enumerate(call.leaves) if is_array(x)]
        arguments = tuple(
            Argument(into.pins[i], arrival, call.names[i] in self._options.donate_argnames)
            for i, arrival in zip(dynamic, arrived, strict=True)
        )
        notes, tree, where = (*into.notes, *out.notes), ArgumentsTree(call.tree, tuple(dynamic)), self._arguments.where
        mesh = self._view if self._ranks is None else replace(self._view, avoids=self._forbidden)
        asked = (
            program, mesh, arguments, out.pins, notes, self._view.limit, where, tree, self._options.replicate,
            bool(self._forbidden), self._options.on_host, self._options.imbalance,
        )  # fmt: skip
        if self._ranks is None:
            request = Request(*asked)
            self._refuse_idle_patterns(request)
            return arguments, self._plan_of_program(request)
        from shardc.pipeline.make import make_pipeline_plan
        from shardc.pipelines import PipelinePlan

        assert self._options.pipeline is not None
        asked = PipelineRequest(*asked, whole=self.mesh, meshes=self._ranks, pipeline=self._options.pipeline)
        return arguments, PipelinePlan.of(make_pipeline_plan(asked))

    def _refuse_idle_patterns(self, request: Request) -> None:
        """Raises ArgumentError if a pattern of `offload=` matches no argument, or nothing is known of the hosts."""
        paths, machine = request.program.in_paths, request.mesh.topology
        known = [*(f"{q.partition('/')[0]}/*" for q in paths), *paths]
        wrong = [
            f"the pattern {p!r} matches no argument.{did_you_mean(p, known)}"
            for p in request.on_host
            if not any(map(matcher(p).match, paths))
        ]
        if request.offload != "never" and not machine.host_bandwidth:
            wrong.append(f'the topology {machine.kind} says nothing of its hosts; give it "host_bandwidth" (bytes/s).')
        if wrong:
            raise ArgumentError(all_offenders(f"{request.where}: offload={self._options.on_host!r}:", wrong))

    def _plan_of_program(self, request: Request) -> Plan:
        """The plan of one program: a saved one lowered, or the cheapest that fits."""
        saved, strict = self._options.saved, self._strict
        if saved is not None:
            from shardc.plan.replay import replay

            refuse_unlike(saved, environment())  # whose programs may differ, for no fault of the user's
            return Plan.of(replay(saved, request))
        found = make_plan(request)
        if isinstance(found, DoesNotFit):
            raise MemoryLimitError(found)
        if strict is not None and (lines := sent_besides(found)):
            what = f"{strict} sums each gradient once, after the backward pass; this step sends besides"
            mend = f"in_placements={code_text(self._in_placements)} says where arguments live, and nothing of what"
            raise PlacementError(f"{self._says([all_offenders(what, lines)])}\nLet it: {mend} may be sent.")
        return Plan.of(found)

    def _program(self, call: Call, arrived: Sequence[Placement | None]) -> Program:
        """The program of a call, with its stage boundaries if this is a pipeline; its associative scans are in chunks
        where pins, or arguments as they arrive, split them."""
        if self._options.saved is not None:
            return self._traced(call, tuple(self._options.saved.scans))
        program = self._traced(call)
        into = argument_pins(call, self._arguments, self._in_placements, self._view)
        if not call.types and (mesh := explicit_mesh_of(all_eqns(program.jaxpr), self._view.axes)) is not None:
            call = replace(call, types=argument_types(call, into.pins, arrived, mesh))
            program = self._traced(call)
        if self._options.deterministic or not (scans := scans_of(program)):
            return program
        pins = [into.pins[i] for i, x in enumerate(call.leaves) if is_array(x)]
        at = [None if place is None else Pin(place) for place in arrived]
        pins = [pin or place for pin, place in zip(pins, at, strict=True)]
        chunks = split_scans(scans, devices_along(program, pins, self._view))
        return self._traced(call, chunks) if chunks else program

    def _traced(self, call: Call, scans: Chunks = ()) -> Program:
        marks = self._ranks is not None
        key = (self._key(call), marks, scans, call.types)
        if key not in self._programs:
            program = trace(self._arguments, call, marks, self._options.replicate, scans, self._view.topology.backend)
            made = after_trace(program, self._view, self._options.grain)
            alike = (p for k, p in self._programs.items() if k[:-1] == key[:-1] and is_same_program(p, made))
            self._programs[key] = next(alike, made)
        return self._programs[key]

    def _typed(self, call: Call, arrived: Sequence[Placement | None]) -> Call:
        """The call with shardings in the types of its arrays, if a mesh has Explicit axes."""
        if (mesh := explicit_mesh(call, self._as_given)) is None:
            return call
        into = argument_pins(call, self._arguments, self._in_placements, self._view)
        return replace(call, types=argument_types(call, into.pins, arrived, mesh))

    def _pins(self, call: Call, program: Program) -> tuple[Pins, Pins]:
        """The pins of a call's arguments, and of its results."""
        into = argument_pins(call, self._arguments, self._in_placements, self._view)
        out = result_pins(program, placed_results(call, self._options.out_placements), self._view)
        offenders = [*into.offenders, *out.offenders, *wrong_constraints(program, self._view)]
        if self._options.deterministic:
            offenders += sums_in_parts(program, into.pins, out.pins)
        if offenders:
            raise PlacementError(self._says(offenders))
        return into, out

    def _says(self, offenders: Sequence[str]) -> str:
        return all_offenders(f"{self._arguments.where}, mesh {self._view}:", offenders)

    def remap(self, rank: int, mesh: Mesh) -> Callable[[Any], Any]:
        """Maps one rank of a pipeline onto other devices, of this process or of another one.

        Its stages are compiled again; the executables of the other ranks are kept, and nothing is planned anew. If the
        pipeline runs in several processes, all of them call this.

        Args:
          rank: the rank.
          mesh: its new mesh, with the axes and sizes of the old one.

        Returns:
          A function that moves state to the new devices: `state = step.remap(1, mesh)(state)`. A call with state on the
          old devices is an error.

        Raises:
          PipelineError: this is no pipeline, or has no such rank.
          MeshError: the mesh has other axes, or devices of another rank.
        """
        from shardc.calls.remap import checked_rank, mover, whole_mesh

        where = self._arguments.where
        old, new = checked_rank(rank, mesh, self._ranks, where)
        assert self._ranks is not None and self._options.pipeline is not None
        ranks = [new if r == rank else m for r, m in enumerate(self._ranks)]
        pipeline = self._options.pipeline
        if pipeline.meshes is None:
            self.mesh = whole_mesh(self.mesh, pipeline.axis, ranks)
        else:
            self._options = replace(self._options, pipeline=replace(pipeline, meshes=ranks))
            self.mesh = ranks[0]
        self._ranks = ranks
        made: dict[int, PipelineExecutable] = {}
        for (plan, _), executable in self._executables.items():
            assert not isinstance(executable, Executable)
            made[plan] = executable.remapped(rank, self.mesh, ranks)
        plans: Any = {i: e.plan for i, e in made.items()}
        self._plans = {
            key: [replace(k, plan=plans[id(k.plan)]) for k in known if id(k.plan) in plans]
            for key, known in self._plans.items()
        }
        self._executables = {(id(e.plan), as_it_is_set(self.meshes[0])): e for e in made.values()}
        self._cached_calls = CallCache(self._arguments)
        self._moved_from.append(old)
        return mover(old, new)

    # -- for `shardc.tune` and the command line

    @property
    def options(self) -> Options:
        return self._options

    def plan_on(self, call: Call, mesh: AnyMesh) -> AnyPlan:
        """The plan of a call on another mesh, wherever its arguments are now."""
        return self._same_on(mesh).plan_of(_unplaced(call))

    def compile_on(self, call: Call, mesh: AnyMesh) -> AnyCompiled:
        """A call compiled for another mesh, wherever its arguments are now."""
        return self._same_on(mesh).compile_of(_unplaced(call))

    def _same_on(self, mesh: AnyMesh) -> Function:
        pipeline = self._options.pipeline
        return self.on(mesh, pipeline and replace(pipeline, meshes=None))

    def on(self, mesh: AnyMesh, pipeline: Pipeline | None = None) -> Function:
        """This function on another mesh, or as a pipeline. Traced programs are kept."""
        own = {a: kinds for a in mesh.shape if (kinds := self.forbidden_over(a))}
        made = Function(self._arguments.fn, mesh, replace(self._options, pipeline=pipeline, plan=None, forbid=own))
        made._programs = self._programs
        return made

    def forbidden_over(self, axis: str) -> tuple[str, ...]:
        """The kinds of collectives that may not run over an axis."""
        return tuple(sorted(kind for kind, a in self._forbidden if a == axis))

    def look(self, *args: Any) -> tuple[Program, list[Pin | None]]:
        """The program of a call, with its stage boundaries if this is a pipeline, and the pins of its arguments and
        results."""
        with self._arguments.opened(args, {}) as opened, line_if_long(f"tracing {self._arguments.where}"):
            call = self._arguments.bind(opened.args, opened.kwargs)
            nowhere = [None for x in call.leaves if is_array(x)]
            program = self._program(self._typed(call, nowhere), nowhere)
        into, out = self._pins(call, program)
        return program, [*into.pins, *out.pins]


def _unplaced(call: Call) -> Call:
    """A call whose arrays have types and no places."""
    return replace(call, leaves=tuple(map(abstract, call.leaves)))


@compat.api_boundary
def function(  # noqa: PLR0913  # a public face
    fn: Callable[..., Any] | None = None,
    *unnamed: Never,
    mesh: AnyMesh | Unsaid | None = UNSAID,
    in_placements: Any = AUTO,
    out_placements: Any = AUTO,
    donate_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    pipeline: Pipeline | None = None,
    plan: str | PathLike[str] | SavedPlan | None = None,
    replicate: str | Sequence[str] = (),
    forbid: Forbid = (),
    offload: str | Sequence[str] = "never",
    check: Literal["never", "first"] = "never",
    deterministic: bool | int = False,
    imbalance: float = IMBALANCE,
    **unknown: Any,
) -> Any:
    """Makes a function of one device run on a mesh.

    Args:
      fn: the function: plain JAX, with jax.grad, flax and optax inside.
      *unnamed: none; all else is given by name.
      mesh: a jax Mesh or AbstractMesh, whatever its axis types; not needed with `Pipeline(meshes=...)`. None is one
        device: `fn` itself comes back, once the names in the other arguments are checked.
      in_placements: where arguments live: a dict by argument name, a tuple with an entry for each argument, or one
        placement for all; each a leaf, `shardc.rules`, or a pytree prefix of leaves. A leaf is AUTO or None (the
        compiler chooses; an array that is committed to this mesh keeps its placement), a dict from axis to sbp (with
        `...: AUTO` axes that are not named are chosen, else they are B), a Placement, a tuple with one sbp for each
        mesh axis, a PartitionSpec or a NamedSharding.
      out_placements: the same for the result.
      donate_argnames, donate_argnums: arguments whose buffers results may take; a result of the same path and aval
        keeps such an argument's placement.
      static_argnames, static_argnums: arguments that are constants of the trace; hashable.
      pipeline: runs the loop of `shardc.accumulate` as a pipeline over its microbatches, in stages cut at
        `shardc.stage_boundary`. Its axis of the mesh stands in no placement.
      plan: a plan that `plan.save(path)` wrote: its path, or what `shardc.load_plan` gives. It is lowered as it is,
        without a search, and only for calls of the shapes that it was made for; other placements that are given are
        held against it. Of a file that `compiled.save(path)` wrote the compiled program is taken too, and XLA compiles
        nothing; such a file has pickles in it: load only what you wrote.
      replicate: primitives without a rule that are to be computed whole on every device, by name, though shardc finds
        signatures for them; `"*"` for all.
      forbid: what may not move: axes of the mesh, as `{"dcn"}`, over which nothing does, or a dict from an axis to the
        kinds of collectives that do not, as `{"model": "all_gather"}`. The plan is the best without; the compiled
        program is audited before it runs.
      offload: what lives in the memory of the hosts (`pinned_host`): "never", nothing; "auto", donated arguments that
        results replace and residuals of loops, where no plan fits the device's memory without, or only a slower one;
        or patterns of paths of arguments, `["opt_state/*"]`, which live there in any case, as the results that replace
        them. Not for pipelines.
      check: "first": the first call of each compiled program is held against one device before it returns, as by
        `compiled.check`. "never": no call is.
      deterministic: sums are added in an order that no mesh changes: results are equal to the bit on every mesh of the
        same machines, of one device too, and in any number of processes. An int is the most devices that may share a
        dimension of an operation, a power of two; True is 8. Not for pipelines.
      imbalance: of experts that drop no token: rows of the busiest device over the mean, for which the buffers have
        room. A call with more runs as the program was written, which drops none either. At least 1; more takes more
        memory and sends more. A saved plan keeps its own.

    Returns:
      A `Function`: called like `fn`, with `.plan(...)` and `.compile(...)`.

    Raises:
      ArgumentError: `fn` is no function; a keyword that `function` does not take, as `in_shardings`; a name that is no
        argument of `fn`; a file that is no plan. When it is called: a plan of another
        program, or a compiled program for other releases or another machine, with all that differs; an argument's leaf
        that is neither an array nor a constant.
      CheckError: in a first call, with `check="first"`: its numbers are not those of one device.
      ForbiddenMoveError: when it is called or planned: what is forbidden has to move.
      MeshError: no mesh is given, or None with a pipeline or a plan.
      PlacementError: a placement does not fit the mesh, or, in a call, its value.
      TracingError, MemoryLimitError, PipelineError, StepFailedError: in a call.

    Examples:
      >>> mesh = make_mesh(data=1)
      >>> @function(mesh=mesh, in_placements={"x": {"data": S(0)}})
      ... def double(x):
      ...     return 2 * x
      >>> double(np.arange(3.0)).tolist()
      [0.0, 2.0, 4.0]
    """
    options = Options(
        mesh, in_placements, out_placements, donate_argnames, static_argnames, pipeline, plan, replicate, forbid,
        offload, check, deterministic, imbalance, donate_argnums, static_argnums,
    )  # fmt: skip
    return decorated(function, (fn, *unnamed), unknown, options, function_of)


def function_of(fn: Callable[..., Any], options: Options) -> Any:
    """A `Function`; `fn` itself if the mesh is one device."""
    options = options.named(fn)
    if (mesh := options.mesh_to_use(where_of(fn))) is not None:
        return Function(fn, mesh, options)
    checked_placements(Arguments(fn, options.static_argnames), options, None)
    return fn
