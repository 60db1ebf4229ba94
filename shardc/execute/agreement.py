"""The agreement of processes on one executable: they run the same program, on equal values where these are whole.

first call     function, arguments, values, machine, releases, settings and plan are compared before it runs
later calls    the function, its plan and checksums of values that are given whole go to the others: another call of
               theirs is an error at once, another value when the next call begins
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from jax.sharding import Mesh

from shardc.arrays.placed import is_placed
from shardc.execute.process_group import ProcessGroup, environment, given_whole, type_text, value_facts
from shardc.machine.devices import processes_of
from shardc.pipeline.options import PipelineRequest
from shardc.plan.plan import PlacedProgram
from shardc.runtime.calls import processes_text

if TYPE_CHECKING:
    from shardc.pipeline.plan import MpmdPlan


class Agreement:
    """The agreement of processes on a plan that they run.

    Args:
      plan: the plan.
      group: gives the processes.
      digest: gives the plan's digest.
      placed: whether placements of arguments are compared: not if each lives in one of the processes.
    """

    def __init__(
        self,
        plan: PlacedProgram | MpmdPlan,
        group: Callable[[], ProcessGroup | None],
        digest: Callable[[], str],
        placed: bool = True,
    ) -> None:
        self.plan, self._group, self._digest, self._placed = plan, group, digest, placed
        self._agreed: ProcessGroup | None = None
        self._calls = 0

    @property
    def members(self) -> tuple[int, ...]:
        """The processes that run the plan."""
        group = self._group()
        return () if group is None else group.members

    def check(self, arrays: Sequence[Any]) -> None:
        """Check a call before it is made.

        Args:
          arrays: its flat arguments that are arrays.

        Raises:
          DisagreementError: the processes differ, in this first call, or in values of the call before this one.
        """
        group, program = self._group(), self.plan.program
        paths, name = program.in_paths, program.name
        wanted = zip(arrays, program.given_avals, strict=False)
        if group is None or any(getattr(x, "shape", ()) != aval.shape for x, aval in wanted):
            return  # a cached call that does not fit is not made
        self._calls += 1
        if self._agreed is not group:
            group.agree(f"{name}, first call", self._facts(arrays), where_known=not self._placed)
            self._agreed, self._calls = group, 1
            return
        group.compare_launch(name, self._calls, self._digest_text, _value_facts(paths, arrays))

    @cached_property
    def _digest_text(self) -> str:
        return f"digest {self._digest()}"

    def agree_on_plan(self) -> None:
        """Agree on the plan alone: before it is compiled, which may be long before the first call.

        Raises:
          DisagreementError: the processes have other plans.
        """
        group = self._group()
        if group is not None:
            group.agree(f"{self.plan.program.name}, compiled", self._plan_facts())

    def _facts(self, arrays: Sequence[Any]) -> dict[str, str]:
        paths = self.plan.program.in_paths
        text = _argument_text if self._placed else type_text
        types = {f"argument {p}": text(x) for p, x in zip(paths, arrays, strict=False)}
        captured = self.plan.program.captured
        of_captured = value_facts([f"captured array {i}" for i, _ in enumerate(captured)], captured)
        return {**types, **_value_facts(paths, arrays), **of_captured, **self._plan_facts()}

    def _plan_facts(self) -> dict[str, str]:
        mesh = self.plan.mesh
        machine = hashlib.sha256(repr(mesh).encode()).hexdigest()[:8]
        return {
            **environment(),
            **_rank_facts(self.plan),
            "the mesh": ", ".join(f"{a}={n}" for a, n in mesh.whole_axes),
            "the machine (topology or calibration)": f"{mesh.topology.kind}, digest {machine}",
            "the plan": self._digest_text,
        }


def _rank_facts(plan: PlacedProgram | MpmdPlan) -> dict[str, str]:
    """Which processes run each rank of a pipeline: a process that was started again knows of no `Function.remap`."""
    request = getattr(plan, "request", None)
    meshes = request.meshes if isinstance(request, PipelineRequest) else ()
    return {
        f"where rank {rank} runs": processes_text(processes_of(mesh.devices.flat))
        for rank, mesh in enumerate(meshes)
        if isinstance(mesh, Mesh)
    }


class _Thread(threading.local):
    """Whether the calls of a thread are known to be equal in all processes."""

    are_known = False


_thread: Final = _Thread()


@contextmanager
def known_calls() -> Generator[None]:
    """A context for calls that are equal in all processes as the steps of a network are: they are not compared, and may
    have another order than those of other threads."""
    before, _thread.are_known = _thread.are_known, True
    try:
        yield
    finally:
        _thread.are_known = before


def check_call(executable: object, arrays: Sequence[Any]) -> None:
    """`Agreement.check` for an executable that runs in several processes; nothing for others, nor in `known_calls`."""
    agreement: Agreement | None = getattr(executable, "agreement", None)
    if agreement is not None and not _thread.are_known:
        agreement.check(arrays)


def _value_facts(paths: Sequence[str], arrays: Sequence[Any]) -> dict[str, str]:
    """A checksum of each value that is given whole. No program of several processes takes an array that is committed to
    devices of one: such a call is not made."""
    pairs = zip(paths, arrays, strict=False)
    taken = [(p, x) for p, x in pairs if not is_placed(x) and not getattr(x, "committed", False)]
    return value_facts([p for p, _ in taken], [x for _, x in taken])


def _argument_text(x: Any) -> str:
    if given_whole(x):
        return f"{type_text(x)}, given whole"
    return f"{type_text(x)}, placed {x.placement if is_placed(x) else x.sharding.spec}"
