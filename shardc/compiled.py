"""The result of `Function.compile`: the executable of one plan, called like the function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import jax
import numpy as np

from shardc import compat
from shardc.arrays.fetch import values
from shardc.arrays.placed import as_jax, leaf_aval
from shardc.calls.opened import STRUCTURE
from shardc.calls.openers import OpenArguments
from shardc.errors import ArgumentError, CheckError, MeshError, all_offenders, writing
from shardc.execute.call_cache import CallCache, has_tracers
from shardc.execute.executable import Executable, OtherCallError
from shardc.execute.in_turn import in_turn
from shardc.machine.devices import me, processes_of
from shardc.machine.mesh import without_mesh
from shardc.passes.trace.trace import Call, is_array, settings
from shardc.plan.saved_plan import record, write_compiled
from shardc.plan.verify_signatures import check_found
from shardc.plans import Plan, no_attribute
from shardc.sbp.signature import is_extended

if TYPE_CHECKING:
    from shardc.execute.check.check import Checker
    from shardc.execute.check.report import CheckReport
    from shardc.execute.pipeline_executable import PipelineExecutable
    from shardc.pipeline.plan import MpmdPlan

ExecutableT = TypeVar("ExecutableT", bound="Executable | PipelineExecutable")
PlanT = TypeVar("PlanT", bound="Plan | MpmdPlan")


class CompiledCall(Generic[ExecutableT, PlanT]):
    """The executable of one plan, called like the function.

    Args:
      arguments: the names of the function's arguments.
      made_for: the structure and the constants of the call that was compiled.

    Attributes:
      executable: what runs.
      plan: its plan.
    """

    def __init__(
        self, arguments: OpenArguments, made_for: tuple[Any, dict[str, Any]], executable: ExecutableT, plan: PlanT
    ) -> None:
        self._arguments, self._made_for = arguments, made_for
        self._cached_calls = CallCache(arguments)
        self.executable = executable
        self.plan = plan
        """Its plan."""
        self.audit = executable.audit
        """`audit()`: the collectives of the compiled program against the plan's, an `Audit`."""
        self.hlo = executable.hlo
        """`hlo()`: the text of the optimized HLO."""
        self.memory_stats = executable.memory_stats
        """`memory_stats()`: XLA's memory analysis."""

    @property
    def latest(self) -> ExecutableT:
        return self.executable

    def __repr__(self) -> str:
        return repr(self.plan).replace(type(self.plan).__name__, type(self).__name__, 1)

    def _repr_html_(self) -> str | None:
        from shardc.report.page.small import plan_html

        return plan_html(self.plan)

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._arguments.meets_modules:
            leaves, tree = jax.tree.flatten((args, kwargs))
            if (again := self._cached_calls.run(tree, leaves)) is not None:
                return again[0]
        with self._arguments.opened(args, kwargs) as opened:
            return opened.close(self._call(opened.args, opened.kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of arrays, the cached one if these are of modules: else none is known."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if STRUCTURE in kwargs and (again := self._cached_calls.run(tree, leaves)) is not None:
            return again[0]
        call = self._taken_apart(args, kwargs)
        if has_tracers(leaves):
            made = self._traced([x for x in call.leaves if is_array(x)])
            return jax.tree.unflatten(self.plan.program.out_tree, made)
        call.refuse_shapes(self._arguments.where)
        out = run(self.executable, call)
        self._cached_calls.add(tree, leaves, call, self.executable)  # the call has shown that it fits
        return out

    def _traced(self, arrays: Sequence[Any]) -> list[Any]:
        """A call inside another transformation.

        Raises:
          ArgumentError: what is compiled cannot be called there.
        """
        raise ArgumentError(
            f"{self._arguments.where}: a compiled pipeline is several programs, and runs in no jax.jit, jax.grad or "
            "jax.vmap; call the function itself there, which is then the plain one."
        )

    def _taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The flattened arguments of a call.

        Raises:
          OtherCallError: the plan was compiled for other avals, constants or another argument structure.
        """
        call = self._arguments.bind(args, kwargs)
        self._refuse_others([leaf_aval(x) for x in call.leaves if is_array(x)])
        tree, constants = self._made_for
        now = call.constants
        wrong = [
            f"{path}: another constant than it was compiled for."
            for path in constants
            if constants[path] != now.get(path)
        ]
        if not wrong and call.tree != tree:
            wrong = [f"the arguments have another structure: compiled for {tree}, got {call.tree}."]
        if wrong:
            self._refuse(wrong)
        return call

    def _refuse_others(self, avals: Sequence[Any]) -> None:
        """Raises OtherCallError if a call's avals, or JAX's settings, are not those of the plan."""
        program, weak = self.plan.program, isinstance(self.executable, Executable)
        texts = [
            (path, _aval_text(want, weak), _aval_text(aval, weak))
            for path, aval, want in zip(program.in_paths, avals, program.given_avals, strict=False)
        ]
        wrong = [f"{path}: planned for {want}, got {text}" for path, want, text in texts if text != want]
        if len(avals) != len(program.given_avals):
            wrong.append(f"planned for {len(program.given_avals)} arrays, got {len(avals)}")
        if settings() != self.executable.settings:
            wrong.append("JAX's settings (x64, matmul precision, random numbers, promotion) have changed")
        if wrong:
            self._refuse(wrong)

    def _refuse(self, wrong: Sequence[str]) -> NoReturn:
        raise OtherCallError(all_offenders(f"{self.plan.program.name}: not the call that was compiled:", wrong))


class Compiled(CompiledCall[Executable, Plan]):
    """A compiled plan of one program, called like the function."""

    def report(self, path: str | PathLike[str]) -> None:
        """Writes the page of the plan, as `plan.report`."""
        self.plan.report(path)

    @compat.api_boundary
    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan and the program that XLA has compiled for it, as one file.

        `shardc.function(plan=path)` loads it in another process, if program, plan, releases and machine are the same,
        and says what differs if they are not. If the mesh has devices of several processes, the first of them writes.

        Raises:
          ArgumentError: the program calls Python, or the backend cannot write it; or the path cannot be written.
        """
        code = self.executable.code
        if me() == processes_of(self.executable.mesh.devices.flat)[0] or self.executable.absent:
            with writing(path):
                write_compiled(record(self.plan), code, path)

    @compat.api_boundary
    def check(self, *args: Any, **kwargs: Any) -> CheckReport:
        """Holds the compiled program against one device, border by border. Nothing is donated.

        Takes the program's own results; then the same program with the values before and after each of its collectives
        as further results; then, on one device, the pieces of each device in turn, each from what the pieces before it
        handed over. So the border that is off first is where the fault begins. Callbacks run twice.

        Signatures that were found for operations without a rule are compared with the whole operation besides, on one
        device.

        Returns:
          A `CheckReport`: `.ok`, `.first`, the border that is off first, and a text.

        Raises:
          SignatureError: pieces of an operation without a rule differ from the whole; it names the primitives, and how
            to refuse what was found.
          MeshError: the plan is compiled for a machine that is not there, or for devices of several processes.
        """
        with self._arguments.opened(args, kwargs) as opened:
            call = self._taken_apart(opened.args, opened.kwargs)
        refuse_absent(self.executable)
        arrays = [x for x in call.leaves if is_array(x)]
        signatures = self._check_found(arrays) if self.plan.found else 0
        report, _ = self._checker.check([*self.executable.entered(arrays), *self.executable.captured])
        return replace(report, signatures=signatures)

    @cached_property
    def _checker(self) -> Checker:
        return _checker_of(self.executable)

    def _check_found(self, arrays: Sequence[Any]) -> int:
        arrays = values(arrays)
        leaves = [as_jax(x) if is_extended(leaf_aval(x).dtype) else np.asarray(x) for x in arrays]
        with without_mesh():
            return check_found(self.plan, [*leaves, *self.plan.program.captured], self._arguments.where)

    def _traced(self, arrays: Sequence[Any]) -> list[Any]:
        """A call in an outer jit: the planned program as a part of that."""
        return self.executable.traced(arrays)

    def __getattr__(self, name: str) -> NoReturn:
        no_attribute(self, name, lambda: self.plan.program.name)


def run(executable: Executable | PipelineExecutable, call: Call) -> Any:
    """Runs a call, and gives the result in its structure.

    Raises:
      MeshError: the plan is compiled for a machine that is not there.
    """
    refuse_absent(executable)
    arrays = [x for x in call.leaves if is_array(x)]
    out = in_turn(
        executable, arrays, lambda: _checked(executable, arrays) if executable.unchecked else executable(arrays)
    )
    return jax.tree.unflatten(executable.plan.program.out_tree, out)


def _checker_of(executable: Executable) -> Checker:
    from shardc.execute.check.check import Checker

    return Checker(executable)


def _checked(executable: Executable | PipelineExecutable, arrays: Sequence[Any]) -> list[Any]:
    """The results of a first call that is checked.

    Raises:
      CheckError: they are not those of one device; the arguments are unchanged.
    """
    if isinstance(executable, Executable):
        report, found = _checker_of(executable).check([*executable.entered(arrays), *executable.captured])
        found = executable.leave(found)
    else:
        report, found = executable.check(arrays)
    if not report.ok:
        plan = executable.plan
        raise CheckError(
            f"{plan.program.name} on {plan.mesh}: the numbers of its first call are wrong.\n{report}", report
        )
    executable.unchecked = False
    executable.drop_donated(arrays)
    return found


def refuse_absent(executable: Executable | PipelineExecutable) -> None:
    """Raises MeshError for a call of what is compiled for a machine that is not there."""
    if executable.absent:
        plan = executable.plan
        raise MeshError(
            f"{plan.program.name} is compiled for {plan.mesh}, and has no devices to run on: audit(), hlo() and "
            "memory_stats() are those of that machine. To run it there, make the mesh without topology=."
        )


def _aval_text(aval: Any, weak: bool) -> str:
    dims = ",".join(map(str, aval.shape))
    return f"{aval.dtype}[{dims}]{' (weakly typed)' if weak and aval.weak_type else ''}"
