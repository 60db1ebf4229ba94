"""The borders of a plan: where arguments and results live, and which results take the buffers of donated arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh

from shardc.arrays.place import Place
from shardc.ir.program import Program
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.place.alike_dims import drop_alike_dims
from shardc.passes.place.problem import Problem, Requirement, build_problem
from shardc.plan.request import Argument, Request
from shardc.sbp.placement import Pin, Placement, is_even


@dataclass(frozen=True)
class Border:
    """An argument or a result of a plan, where it lives between calls.

    Attributes:
      path, aval: as the function has it.
      placement: on the mesh.
      known: what was known of it before planning; of a result, its pin.
      mesh: that of its stage.
      stage: 0 in a plan of one program.
      reuses: whether it is a result that takes the buffer of a donated argument, and its placement.
      on_host: whether it lives in the memory of the host.
    """

    path: str
    aval: Any
    placement: Placement
    known: Argument
    mesh: MeshView
    stage: int = 0
    reuses: bool = False
    on_host: bool = False

    @property
    def place(self) -> Place:
        """The place on the mesh, as on one without devices."""
        axes = self.mesh.axes
        return Place(self.aval, AbstractMesh(tuple(n for _, n in axes), tuple(a for a, _ in axes)), self.placement)

    @property
    def bytes(self) -> int:
        """Bytes that each device allocates."""
        return piece_bytes(self.aval, self.placement, self.mesh.sizes, backend_of(self.mesh.topology.backend))

    @property
    def is_fixed(self) -> bool:
        """Whether its placement, or a part of it, was known before planning."""
        return self.known.pin is not None or self.known.arrival is not None

    @property
    def is_padded(self) -> bool:
        return not is_even(self.aval.shape, self.placement, self.mesh.sizes)


def match_donated(program: Program, arguments: Sequence[Argument]) -> list[int | None]:
    """For each result the donated input that it replaces, if any: one of the same type and the same path, without the
    result's position in a tuple."""
    waiting: dict[tuple[str, tuple[int, ...], Any], list[int]] = {}
    for i, (path, var, argument) in enumerate(zip(program.in_paths, program.jaxpr.invars, arguments, strict=False)):
        if argument.donated:
            aval = var.aval
            for key in (path, path.partition("/")[2]):
                waiting.setdefault((key, aval.shape, aval.dtype), []).append(i)
    taken: set[int] = set()
    ties: list[int | None] = []
    for path, var in zip(program.out_paths, program.jaxpr.outvars, strict=True):
        key_paths = dict.fromkeys((path, path.partition("/")[2] if path.partition("/")[0].isdigit() else path))
        candidates = [i for k in key_paths for i in waiting.get((k, var.aval.shape, var.aval.dtype), ())]
        hit = next((i for i in candidates if i not in taken), None)
        if hit is not None:
            taken.add(hit)
        ties.append(hit)
    return ties


def may_replace(program: Program, ties: Sequence[int | None]) -> dict[int, int]:
    """For each result the donated input whose buffer it takes if both have the same placement."""
    results, arguments = enumerate(zip(ties, program.out_avals, strict=True)), program.in_avals
    return {k: tie for k, (tie, aval) in results if tie is not None and arguments[tie].dtype == aval.dtype}


def problem_of(request: Request, ties: Sequence[int | None]) -> Problem:
    """The placement problem of a request. With a plan's own `request` and `ties` it is the problem of that plan."""
    program = request.program
    inputs = [Requirement(a.pin if a.arrival is None else Pin(a.arrival)) for a in request.arguments]
    back: list[int | None] = [None] * len(ties)
    if request.forbids:
        others = [replace(a, donated=i not in ties and not a.moves) for i, a in enumerate(request.arguments)]
        back = match_donated(program, others)
    outputs = [Requirement(*asked) for asked in zip(request.results, ties, back, strict=True)]
    mesh, paths = request.mesh, (program.in_paths, program.out_paths)
    problem = build_problem(request.entered, inputs, outputs, *paths, mesh)
    return drop_alike_dims(problem, len(mesh.axes) - len(mesh.idle))
