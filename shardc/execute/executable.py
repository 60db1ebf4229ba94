"""A plan compiled for the devices of its mesh."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardc import compat
from shardc.arrays.fetch import values
from shardc.arrays.gone import refuse_gone
from shardc.arrays.place import Place, places, put_whole
from shardc.arrays.placed import handed_over, is_placed
from shardc.errors import ArgumentError, MeshError, StepFailedError, all_offenders
from shardc.execute.agreement import Agreement
from shardc.execute.at_work import line_if_long
from shardc.execute.name_nan import name_first
from shardc.execute.process_group import group_of_mesh
from shardc.execute.saved_code import cache_hits, code_of, facts_of, loaded
from shardc.ir.host_callback import CALLBACKS, kept_text, raise_kept
from shardc.ir.memory_move import MEMORY_KIND
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.machine.ahead import is_absent
from shardc.machine.devices import is_remote, processes_of
from shardc.machine.launch_order import in_launch_order, ordered_devices
from shardc.machine.mesh import AnyMesh, cut_mesh, without_mesh
from shardc.passes.audit.audit import Audit, audit
from shardc.passes.audit.hlo_overlap import find_overlaps
from shardc.passes.audit.hlo_schedule import Scheduled, read_schedule
from shardc.passes.lower.lower import Lowering
from shardc.passes.trace.trace import settings
from shardc.plan.digest import digest_of
from shardc.plan.plan import PlacedProgram
from shardc.plan.saved_plan import MachineCode, SavedPlan
from shardc.sbp.layout import bits_of, physical_spec
from shardc.sbp.placement import local_shape
from shardc.sbp.signature import is_extended


def looks_for_nans() -> bool:
    """Whether JAX is set to look for NaN or infinity in the results of a program."""
    return any(_looked_for())


def _looked_for() -> tuple[bool, bool]:
    """Whether JAX looks for NaN, and whether it looks for infinity."""
    return bool(getattr(jax.config, "jax_debug_nans", False)), bool(getattr(jax.config, "jax_debug_infs", False))


def other_runtimes_text(mesh: Mesh) -> str:
    """The end of an error about a mesh with devices of other JAX runtimes."""
    who = ", ".join(map(str, processes_of(mesh.devices.flat)))
    return (
        f"has devices of processes {who}, whose JAX runtimes know nothing of each other, and a program runs in one of "
        "them. Start the run without --islands; or give each rank of a pipeline a mesh of one runtime: make the "
        "pipeline's axis the first one of the mesh, and a multiple of the islands."
    )


class OtherCallError(ArgumentError):
    """The arguments do not fit the plan."""


def report_failure(program: Program, args: Sequence[Any], error: Exception) -> None:
    """Raises StepFailedError if a failed call has destroyed donated arguments; it names them."""
    if text := gone_text(program, args):
        raise StepFailedError(f"{program.name} failed while it ran: {error}{text}") from error


def gone_text(program: Program, args: Sequence[Any]) -> str:
    """Names the donated arguments that a failed call has destroyed; empty if there are none."""
    gone = [
        path for path, x in zip(program.in_paths, args, strict=False) if isinstance(x, jax.Array) and x.is_deleted()
    ]
    return f"\n  lost (donated): {', '.join(gone)}\n  all other arguments are unchanged." if gone else ""


def drop(leaves: Sequence[Any], numbers: Iterable[int]) -> None:
    """Delete the arrays with these numbers."""
    for i in numbers:
        if i < len(leaves) and isinstance(x := leaves[i], jax.Array) and not x.is_deleted():
            x.delete()


class Executable:
    """A compiled plan. A call takes the flat arguments that are arrays, and returns the flat results.

    Attributes:
      moves_arguments: False: arrays that live elsewhere than planned are refused.
      unchecked: whether the next call is to be checked, because it is the first (`check="first"`).
      absent: whether it is compiled for a machine that is not there.
    """

    moves_arguments = False
    unchecked = False
    _from_cache: Sequence[str] = ()

    def __init__(self, plan: PlacedProgram, mesh: AnyMesh, token: bool = False, saved: SavedPlan | None = None) -> None:
        """Compile a plan.

        Args:
          plan: the plan.
          mesh: the mesh, with devices.
          saved: the plan as it was saved; its code is loaded, if it has some, and nothing is compiled.
          token: append a zero-byte result to those of `run`. It is never donated, and becomes ready when the program
            has finished.
        """
        if not isinstance(mesh, Mesh):
            raise MeshError(
                f"{plan.program.name} is planned for {plan.mesh}, a mesh without devices; make the mesh without "
                "`topology=` to run it."
            )
        if is_remote(mesh.devices.flat):
            raise MeshError(f"{plan.program.name}: its mesh ({plan.mesh}) {other_runtimes_text(mesh)}")
        self.plan, self.mesh, self._saved = plan, mesh, saved
        self.absent = is_absent(mesh)
        self._sizes = plan.mesh.sizes
        self._inputs = places(plan.program.in_avals, mesh, plan.whole_inputs)
        self._outputs = places(plan.program.out_avals, mesh, plan.whole_outputs)
        self._empty_out = [i for i, a in enumerate(plan.program.out_avals) if 0 in a.shape and plan.outputs[i].items_]
        self.in_shardings = _shardings(self._inputs, plan.host_inputs)
        self._out_shardings = _shardings(self._outputs, plan.host_outputs)
        # JAX gives each result the first donated buffer of its shape, and copies a result that gets another one's. So
        # the donated inputs and their results come first in the jitted function, in the same order.
        taken = plan.donations
        self._donated = sorted(taken.values())
        self._in_order = _first(taken.values(), len(plan.inputs))
        self._out_order = _first(taken, len(plan.outputs))
        self._out_place = sorted(range(len(self._out_order)), key=self._out_order.__getitem__)
        self._reordered = bool(taken)
        self._ordered = ordered_devices(mesh)
        self._token, self._has_token = token, token or bool(self._ordered)
        # JAX 0.10 uses another layout for these as arguments of a compiled object than as results
        self._below_a_byte = any(bits_of(a.dtype) < 8 for a in plan.program.in_avals)
        self.settings = settings()
        self._low = Lowering(plan.boxed, plan.mesh)
        self._calls_back = any(e.primitive.name in CALLBACKS for e in all_eqns(plan.boxed.jaxpr))
        whole = NamedSharding(mesh, PartitionSpec())
        jit = functools.partial(
            jax.jit,
            self._ordered_function(),
            in_shardings=tuple(self.in_shardings[i] for i in self._in_order),
            out_shardings=[*(self._out_shardings[i] for i in self._out_order), *[whole] * self._has_token],
        )
        self._jitted, self._keeping = jit(donate_argnums=tuple(range(len(taken)))), jit()
        self._all_plain = all(p.is_plain for p in self._outputs)
        first = len(self._inputs) - len(plan.program.captured)
        captured = () if self.absent else [self.enter(i, x) for i, x in enumerate(plan.program.captured, first)]
        self._captured = [put_whole(x, s) for x, s in zip(captured, self.in_shardings[first:], strict=False)]

    @cached_property
    def agreement(self) -> Agreement | None:
        """The agreement on this plan of the processes that run it; None if it runs in one."""
        if group_of_mesh(self.mesh) is None:
            return None
        plan, mesh = self.plan, self.mesh
        return Agreement(plan, lambda: group_of_mesh(mesh), lambda: digest_of([plan]))  # it does not hold this object

    def local(self, low: Lowering, pieces: Sequence[Any]) -> list[Any]:
        """The pieces of the results on a device, from those of the inputs."""
        plan = self.plan
        given = [lax.squeeze(x, (0,)) if p.partial_axes else x for x, p in zip(pieces, plan.inputs, strict=True)]
        results = low.run(plan.boxed.jaxpr, given)
        done: list[Any] = []
        for k, (x, p, aval) in enumerate(zip(results, plan.outputs, plan.program.out_avals, strict=True)):
            if k in plan.host_outputs:
                done.append(x)
                continue
            x = low.hide_padding(jax.numpy.asarray(x, aval.dtype), tuple(aval.shape), p)
            x = compat.as_aval(x, aval)
            done.append(lax.expand_dims(x, (0,)) if p.partial_axes else x)
        return done

    def sharded(self, local: Callable[[Sequence[Any]], Any], out_specs: Any) -> Callable[..., list[Any]]:
        """The function of physical arrays that runs `local` on the pieces of each device."""
        plan = self.plan
        avals = plan.program.in_avals
        all_empty = all(0 in a.shape and isinstance(a.dtype, np.dtype) for a in avals)  # Shardy takes no such operands

        def made() -> list[Any]:
            held = [local_shape(a.shape, p, self._sizes) for a, p in zip(avals, plan.inputs, strict=True)]
            pieces = [jax.numpy.zeros(s, a.dtype) for s, a in zip(held, avals, strict=True)]
            return local([x[None] if p.partial_axes else x for x, p in zip(pieces, plan.inputs, strict=True)])

        mapped = jax.shard_map(
            made if all_empty else lambda *pieces: local(pieces),
            mesh=cut_mesh(self.mesh, plan.mesh),
            in_specs=() if all_empty else tuple(physical_spec(p) for p in plan.inputs),
            out_specs=out_specs,
            check_vma=False,
        )
        return lambda *args: mapped(*(() if all_empty else args))

    def _ordered_function(self) -> Any:
        """The function to compile: its donated arguments, and the results that take their buffers, come first."""
        sharded = self.sharded(lambda xs: self.local(self._low, xs), [physical_spec(p) for p in self.plan.outputs])

        def ordered(*args: Any) -> list[Any]:
            out = sharded(*(x for _, x in sorted(zip(self._in_order, args, strict=True), key=lambda pair: pair[0])))
            return [*(out[i] for i in self._out_order), *[jax.numpy.zeros(0, bool)] * self._has_token]

        ordered.__name__ = self.plan.program.name
        return ordered

    def is_plain_input(self, i: int) -> bool:
        """Whether JAX can express the placement of input `i`."""
        return self._inputs[i].is_plain

    def enter(self, i: int, x: Any) -> Any:
        """The physical array of argument `i`."""
        place = self._inputs[i]
        if is_placed(x):
            if not self.lives_as_planned(i, x) or x.shape != place.shape:
                raise OtherCallError(f"{x!r} does not fit the plan.")
            return self._to_memory(i, x.physical)
        if place.is_plain:
            return self._to_memory(i, x)
        if np.shape(x) != place.shape:
            raise TypeError("not the call that was compiled")  # the caller then makes the call without the cache
        self._refuse_gone("arguments that are gone", {i: x})
        return self._to_memory(i, place.enter(x))

    def _to_memory(self, i: int, x: Any) -> Any:
        """The array in the memory, of the device or of its host, where the plan has argument `i`."""
        wanted = self.in_shardings[i]
        if not isinstance(x, jax.Array) or not x.committed or x.sharding.memory_kind == wanted.memory_kind:
            return x
        with without_mesh():
            return jax.device_put(x, wanted)

    def lives_as_planned(self, i: int, x: Any) -> bool:
        """Whether array `i` has the plan's placement, or none yet."""
        if is_placed(x):
            return x.placement == self._inputs[i].placement and x.mesh == self.mesh
        if not self._inputs[i].is_plain or not getattr(x, "committed", False):
            return True  # the call puts it there
        wanted = self.in_shardings[i]
        return x.sharding.with_memory_kind(wanted.memory_kind).is_equivalent_to(wanted, x.ndim)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the plan.

        Raises:
          OtherCallError: the arguments have other types or placements than in the plan.
          GoneError: arguments were donated to an earlier call.
          StepFailedError: it failed after donated buffers were taken.
        """
        args = self.entered(leaves)
        self._drop_moved(leaves, args)
        return self.launch(args)

    def entered(self, leaves: Sequence[Any]) -> list[Any]:
        """The physical arguments of a call.

        Raises:
          OtherCallError: the arguments have other types or placements than in the plan.
        """
        plan = self.plan
        wrong = [
            f"{path}: planned at {place.at or 'B'}, but passed as {x.placement if is_placed(x) else x.sharding}; move "
            "it with shardc.put"
            for i, (path, place, x) in enumerate(zip(plan.program.in_paths, self._inputs, leaves, strict=False))
            if not self.lives_as_planned(i, x)
        ]
        if wrong:
            raise OtherCallError(all_offenders(f"{plan.program.name}: not the call that was compiled:", wrong))
        return [self.enter(i, x) for i, x in enumerate(leaves)]

    def _drop_moved(self, leaves: Sequence[Any], args: Sequence[Any]) -> None:
        """Delete donated arrays that were copied to another memory, so that they take no memory while the plan runs."""
        times = Counter(map(id, leaves))
        for i in () if looks_for_nans() else self._donated:
            x = leaves[i] if i < len(leaves) else None
            if (
                isinstance(x, jax.Array)
                and x.committed
                and times[id(x)] == 1
                and _memory_kind(x) != _memory_kind(args[i])
            ):
                _ = self.compiled  # a plan that cannot be compiled takes nothing
                jax.block_until_ready(args[i])
                x.delete()

    def launch(self, args: Sequence[Any]) -> list[Any]:
        """Run the plan on physical arrays."""
        if self._donated:
            args = self._with_own_buffers(args)
        try:
            found = self.run([*args, *self._captured])
        except (RuntimeError, ValueError, TypeError, FloatingPointError) as error:
            others = {i: x for i, x in enumerate(args) if i not in self._donated}  # this call takes none of them
            self._refuse_gone("arguments that are gone", others)
            report_failure(self.plan.program, args, error)
            if isinstance(error, ValueError) and self.agreement is not None and self._fit(args):
                raise StepFailedError(
                    f"{self.plan.program.name} failed while it ran in several processes: {error}\n"
                    "  its arguments are unchanged. Did another process end?"
                ) from error
            raise
        return self.leave(found)

    def leave(self, found: list[Any]) -> list[Any]:
        """The results that physical arrays stand for."""
        if self._empty_out:
            found = [self._cut_empty(i, x) if i in self._empty_out else x for i, x in enumerate(found)]
        if self._all_plain:
            return found
        return [place.leave(x) for x, place in zip(found, self._outputs, strict=True)]

    def drop_donated(self, leaves: Sequence[Any]) -> None:
        """Delete the donated arguments of a call whose program ran on copies."""
        drop(leaves, self._donated)

    @property
    def captured(self) -> list[Any]:
        """The physical arrays that the program closes over: its last inputs."""
        return self._captured

    def _refuse_gone(self, what: str, args: Mapping[int, Any]) -> None:
        """Raise GoneError if arguments, by number, were donated to an earlier call."""
        program = self.plan.program
        refuse_gone(f"{program.name}: {what}", [(program.in_paths[i], x) for i, x in args.items()])

    def _with_own_buffers(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, with copies of donated arrays that are passed twice: JAX would end the process."""
        given = [i for i in self._donated if i < len(args)]
        self._refuse_gone("donated arguments that are gone", {i: args[i] for i in given})
        if len(set(map(id, args))) == len(args):
            return args
        own, left = list(args), Counter(map(id, args))
        for i in given:
            if isinstance(own[i], jax.Array) and left[id(args[i])] > 1:
                left[id(args[i])] -= 1
                with without_mesh():
                    own[i] = args[i].copy()
        return own

    def with_copies(self, args: Sequence[Any]) -> list[Any]:
        """Physical arguments, with copies of those that a call takes."""
        with without_mesh():
            return [x.copy() if i in self._donated else x for i, x in enumerate(args)]

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The physical results of physical arguments, including captured ones."""
        args = [handed_over(x, self.mesh) if isinstance(x, np.ndarray | np.generic) else x for x in args]
        ordered = [args[i] for i in self._in_order] if self._reordered else args
        if looks_for_nans():
            out = self._looking_for_nans(ordered)
        elif self._below_a_byte:
            self._refuse_unlike(args)
            out = self._begin(self._jitted, self._on_devices(ordered))
        else:
            out = self._begin(self.compiled, ordered)
        if self._calls_back:
            jax.block_until_ready(out)
            self._raise_kept()
        if self._has_token and not self._token:
            out = out[:-1]
        if not self._reordered:
            return out
        return [*(out[i] for i in self._out_place), *out[len(self._out_place) :]]

    def traced(self, arrays: Sequence[Any]) -> list[Any]:
        """The results of a call in an outer jit: the program is a part of another one, or of what `jax.export`
        writes.

        Raises:
          ArgumentError: JAX cannot say the placement of an argument or result.
        """
        program, plan = self.plan.program, self.plan
        into = zip(program.in_paths, plan.whole_inputs, self._inputs, strict=False)
        out = zip(program.out_paths, plan.whole_outputs, self._outputs, strict=True)
        wrong = [
            f"{path}: {p} splits {tuple(place.shape)} unevenly, or has terms of a sum on each device."
            for path, p, place in (*into, *out)
            if not place.is_plain
        ]
        if wrong:
            raise ArgumentError(
                all_offenders(f"{program.name}: not in jax.jit, where JAX has to place arguments and results:", wrong)
            )
        args = [*arrays, *self._captured]
        made = self._without_gradient(*(args[i] for i in self._in_order))
        return [made[i] for i in self._out_place]

    @cached_property
    def _without_gradient(self) -> Callable[..., list[Any]]:
        def refuse(primals: Any, tangents: Any) -> NoReturn:
            name = self.plan.program.name
            raise ArgumentError(
                f"{name}: a compiled program has no gradient; differentiate the function {name} itself."
            )

        made = jax.custom_jvp(self._keeping)
        made.defjvp(refuse)
        return made

    def _begin(self, program: Callable[..., list[Any]], args: Sequence[Any]) -> list[Any]:
        """Launch a program of this plan, in the order of all programs on its devices."""
        return in_launch_order(self._ordered, lambda: program(*args), lambda out: out[-1])

    def _raise_kept(self) -> None:
        """Raise the error of a callback, in all processes that run the program."""
        group = group_of_mesh(self.mesh)
        if group is None:
            raise_kept(self._low.raised)
            return
        what = f"{self.plan.program.name}, after its callbacks"
        said = group.gather(what, {"error": kept_text(self._low.raised)})
        raise_kept(self._low.raised)
        for process, text in zip(group.members, (each["error"] for each in said), strict=True):
            if text:
                raise jax.errors.JaxRuntimeError(f"INTERNAL: CpuCallback error in process {process}: {text}")

    def _on_devices(self, args: Sequence[Any]) -> Sequence[Any]:
        """Arguments in the executable's order, as a jitted function takes them: it takes no NumPy arrays for devices of
        several processes."""
        if self.agreement is None:
            return args
        at = [self.in_shardings[i] for i in self._in_order]
        return [put_whole(x, s) for x, s in zip(args, at, strict=True)]

    def _fit(self, args: Sequence[Any]) -> bool:
        """Whether physical arguments have the shapes, types and placements of the plan."""
        types = [(np.shape(x), getattr(x, "dtype", None)) for x in args] == self._physical_types[: len(args)]
        return types and all(self.lives_as_planned(i, x) for i, x in enumerate(args))

    def _refuse_unlike(self, args: Sequence[Any]) -> None:
        """Raise TypeError, as JAX's compiled object does, if physical arguments have other shapes or types."""
        if [(np.shape(x), getattr(x, "dtype", None)) for x in args] != self._physical_types:
            raise TypeError(f"{self.plan.program.name}: not the call that was compiled")

    @cached_property
    def _physical_types(self) -> list[tuple[tuple[int, ...], Any]]:
        return [(a.shape, a.dtype) for a in self._physical_avals()]

    def _looking_for_nans(self, args: Sequence[Any]) -> list[Any]:
        """The results of physical arguments, without donation.

        Raises:
          FloatingPointError: a result contains a NaN or an infinity; the error names the operation that makes the
            first one.
        """
        at = [self.in_shardings[i] for i in self._in_order]
        with without_mesh():
            args = jax.device_put(list(args), at) if self.agreement is None else self._on_devices(args)
            found, text = self._run_and_look(args)
            if not text:
                return found
            given = sorted(zip(self._in_order, values(list(args)), strict=True), key=lambda pair: pair[0])
            named = name_first(self.plan, [self._inputs[i].value(x) for i, x in given], *_looked_for())
        raise FloatingPointError(named or text)

    def _run_and_look(self, args: Sequence[Any]) -> tuple[list[Any], str]:
        """The results, and a text if there is a NaN or an infinity in them, in all processes."""
        group = group_of_mesh(self.mesh)
        if group is None and not self.plan.boxed.host:
            try:
                return self._keeping(*args), ""
            except FloatingPointError as error:
                return [], str(error)
        # JAX's own check runs the collectives again, in those processes alone that hold the NaN; and it runs a move
        # between memories again and again
        with jax.debug_nans(False), jax.debug_infs(False):
            found = self._begin(self._keeping, args)
        kinds = [kind for kind, wanted in zip(("nan", "inf"), _looked_for(), strict=True) if wanted]
        here = next((k for k in kinds if any(map(functools.partial(_holds, k), found))), "")
        what = f"{self.plan.program.name}, looking for NaN"
        said = [{"kind": here}] if group is None else group.gather(what, {"kind": here})
        kind = next((each["kind"] for each in said if each["kind"]), "")
        return found, f"invalid value ({kind}) encountered in {self.plan.program.name}" if kind else ""

    def _cut_empty(self, i: int, x: jax.Array) -> jax.Array:
        """An empty split result. A jitted function returns it with all rows on each device, which cannot be read."""
        if is_extended(x.dtype):
            return x
        with without_mesh():
            zeros = compat.as_aval(jax.numpy.zeros(x.shape, x.dtype), x.aval)
            return put_whole(zeros, self._out_shardings[i])

    def _physical_avals(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(p.physical_shape, p.dtype, sharding=s, weak_type=p.aval.weak_type and p.is_plain)
            for p, s in zip(self._inputs, self.in_shardings, strict=True)
        ]

    @cached_property
    def lowered(self) -> Any:
        """JAX's lowered object, with JAX's settings of the thread that first reads this."""
        avals = self._physical_avals()
        with without_mesh():
            return self._jitted.lower(*[avals[i] for i in self._in_order])

    @cached_property
    def compiled(self) -> Any:
        """JAX's compiled object."""
        return self._compiled[0]

    @property
    def xla_options(self) -> Mapping[str, str]:
        """The options of XLA with which the program is compiled: those of the plan, or none if XLA refuses them."""
        return self._compiled[1]

    @property
    def _wanted_options(self) -> Mapping[str, str]:
        return {} if self.mesh.devices.flat[0].platform == "cpu" else self.plan.xla_options

    @property
    def code(self) -> MachineCode:
        """The compiled program as it is saved.

        Raises:
          ArgumentError: it calls Python, or no backend can write it.
        """
        name = self.plan.program.name
        if self._calls_back or self._below_a_byte:
            what = "calls Python, which is in this process" if self._calls_back else "takes arrays of less than a byte"
            raise ArgumentError(f"{name} {what}: its compiled program cannot be saved; compiled.plan.save(path) can.")
        if self._saved is not None and self._saved.code is not None:
            return self._saved.code
        _ = self.compiled
        if self._from_cache:  # XLA:CPU writes what it has read there without its code
            with compat.compiles_again(for_all=True):
                return Executable(self.plan, self.mesh, self._token).code
        return code_of(self.compiled, self._facts(), self.xla_options, name)

    def _facts(self) -> dict[str, str]:
        return facts_of(self.lowered.as_text(), self._wanted_options, self.mesh)

    def _loaded(self, saved: SavedPlan, code: MachineCode) -> tuple[Any, Mapping[str, str]]:
        if self.absent:
            name = self.plan.program.name
            raise MeshError(f"{saved.name} has a compiled program of {name}, to run it: the mesh has no devices.")
        counts = len(self._inputs), len(self._outputs) + self._has_token
        return loaded(saved, code, self._facts(), self.mesh, counts), code.options

    @cached_property
    def _compiled(self) -> tuple[Any, Mapping[str, str]]:
        if self._saved is not None and self._saved.code is not None:
            return self._loaded(self._saved, self._saved.code)
        again = compat.compiles_again() if self.absent else contextlib.nullcontext()
        with (
            without_mesh(),
            line_if_long(f"compiling {self.plan.program.name}"),
            again,
            cache_hits() as self._from_cache,
        ):
            if options := self._wanted_options:
                try:
                    return self.lowered.compile(compiler_options=dict(options)), options
                except jax.errors.JaxRuntimeError as error:
                    if "compile option" not in str(error):
                        raise
            return self.lowered.compile(), {}

    def hlo(self) -> str:
        """The optimized HLO of the program that runs."""
        return self.compiled.as_text()

    def memory_stats(self) -> Any:
        """XLA's memory analysis: argument, output, temporary and code sizes in bytes per device."""
        return self.compiled.memory_analysis()

    def audit(self) -> Audit:
        """Compare the collectives in the compiled HLO with the plan's."""
        plan, text, platform = self.plan, self.hlo(), self.mesh.devices.flat[0].platform
        overlaps = () if platform == "cpu" else find_overlaps(plan.overlaps, [text], plan.mesh)
        refused = self._wanted_options if not self.xla_options else {}
        found = audit(plan.collectives, text, self._sizes, platform=platform, cuts=plan.mesh.cuts)
        return replace(found, overlaps=overlaps, options=self.xla_options, refused=refused)

    def schedule(self) -> list[Scheduled]:
        """The collectives of the compiled program, and what it runs beside them."""
        return read_schedule([self.hlo()])


def _holds(kind: str, x: jax.Array) -> bool:
    """Whether a piece of an array on a device of this process holds a NaN, or an infinity."""
    if not jax.numpy.issubdtype(x.dtype, np.inexact):
        return False
    look = jax.numpy.isnan if kind == "nan" else jax.numpy.isinf
    return any(bool(look(shard.data).any()) for shard in x.addressable_shards)


def _memory_kind(x: Any) -> str | None:
    return (x.physical if is_placed(x) else x).sharding.memory_kind


def _shardings(places: Sequence[Place], on_host: Collection[int]) -> list[NamedSharding]:
    found = [p.sharding for p in places]
    return [s.with_memory_kind(MEMORY_KIND) if i in on_host else s for i, s in enumerate(found)]


def _first(chosen: Iterable[int], count: int) -> list[int]:
    """The numbers below `count`, `chosen` first."""
    head = list(chosen)
    return [*head, *sorted(set(range(count)) - set(head))]
