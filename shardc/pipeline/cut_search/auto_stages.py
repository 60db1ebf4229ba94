"""Cuts stages by cost: estimates the costs of a loop's body, chooses the points between stages, and marks them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from shardc import compat
from shardc.compat import Var
from shardc.errors import PipelineError, StageMemoryError, all_offenders
from shardc.ir.boundary import END, stage_boundary_p
from shardc.ir.loop import Loop
from shardc.ir.nested import REMAT
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns, bytes_of, local_bytes
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.plan_cost import undivided_seconds
from shardc.pipeline.cut.cut_loop import find_loop
from shardc.pipeline.cut_search.cut_points import Points, find_points
from shardc.pipeline.cut_search.fold_body import FoldedBody, fold_body
from shardc.pipeline.cut_search.mark_stages import mark_stages
from shardc.pipeline.cut_search.owners import Owned, find_owned
from shardc.pipeline.cut_search.split_scans import Ends, Layers, Pieces, find_layers, split_scans, whole_program
from shardc.pipeline.cut_search.stage_memory import StageMemory, stage_memory
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.partition import CutProblem, Cuts, Floats, choose_cuts, in_flight, tightest_cuts
from shardc.pipeline.schedule.schedule import Schedule
from shardc.plan.request import Argument


@dataclass(frozen=True)
class Wanted:
    """The request for stages.

    Attributes:
      views: the mesh of each stage.
      arguments: pins and arrivals of the program's inputs.
      ordered: a function from the costs of the stages, the number of microbatches, and whether there is a backward
        pass, to the order of the actions.
      recomputed: the stages that keep only their inputs.
      memory_scale: for each stage the factor from its estimated memory to its memory.
      least: the least seconds of a task.
      where: the function, for errors.
    """

    views: Sequence[MeshView]
    arguments: Sequence[Argument]
    ordered: Callable[[StageCosts, int, bool], Schedule]
    recomputed: Collection[int]
    memory_scale: Sequence[float]
    least: float
    where: str


def cut_automatically(program: Program, wanted: Wanted) -> tuple[Pieces, Sequence[float]]:
    """The program with the boundaries under which a call is fastest and every stage fits in memory.

    Values that are not pinned, and all activations, are counted as split over all devices of a stage's mesh. Scans over
    layers are split if a boundary lies between two of their layers.

    Returns:
      The program in pieces, and the estimated bytes on each device of each stage; 0 (unknown) for a single stage.

    Raises:
      PipelineError: there are boundaries already, or too little work for this number of stages.
      StageMemoryError: no cuts fit in memory.
    """
    loop = find_loop(program, wanted.where)
    _refuse_marks(loop, wanted.where)
    pieces = whole_program(program)
    if len(wanted.views) == 1:
        return pieces, (0.0,)
    layers = find_layers(program, loop)
    if layers:
        units = split_scans(program, loop, layers, [tuple(range(found.count + 1)) for found in layers])
        measured = _measured(units, wanted)
        cuts = _cuts(measured)
        pieces = split_scans(program, loop, layers, _ends(layers, units, measured, cuts))
    measured = _measured(pieces, wanted)
    cuts = _cuts(measured)
    marked = mark_stages(pieces.program, measured.body, measured.points, cuts)
    return replace(pieces, program=marked), measured.estimates(cuts)


def _measured(pieces: Pieces, wanted: Wanted) -> _Measured:
    of_pieces = [wanted.arguments[p.number] for p in pieces.inputs]
    return _Measured(pieces.program, find_loop(pieces.program, wanted.where), replace(wanted, arguments=of_pieces))


def _cuts(measured: _Measured) -> Cuts:
    cuts = choose_cuts(measured.chain, measured.schedule)
    if cuts is None:
        raise _why_not(measured)
    return cuts


def _ends(layers: Sequence[Layers], units: Pieces, measured: _Measured, cuts: Cuts) -> list[Ends]:
    """The pieces of each dimension of layers, given cuts between single layers."""
    at = {e: t for t, e in enumerate(measured.body.eqns)}
    found: list[Ends] = []
    for n, dimension in enumerate(layers):
        ends = {0, dimension.count}
        for scan in units.scans[n]:
            for cut in measured.points.ahead[list(cuts)]:
                ahead = [row for row, eqn in scan if at[eqn] < cut]
                behind = [row for row, eqn in scan if cut <= at[eqn] < measured.body.fold]
                ends |= {max(min(ahead), min(behind))} if ahead and behind else set()
        found.append(tuple(sorted(ends)))
    return found


def _refuse_marks(loop: Loop, where: str) -> None:
    marks = [e for e in all_eqns(loop.body) if e.primitive is stage_boundary_p and e.params["cut"] != END]
    if marks:
        lines = list(dict.fromkeys(compat.source_line(e) for e in marks))
        raise PipelineError(
            all_offenders(
                f'{where}: stages="auto" cuts a model without boundaries, but this one has some. Remove them, or '
                'set stages="marked" to cut there',
                [f"a stage_boundary at {line}" for line in lines],
            )
        )


@dataclass(frozen=True)
class _Measured:
    """The tables of costs of a loop's body."""

    program: Program
    loop: Loop
    wanted: Wanted

    @cached_property
    def body(self) -> FoldedBody:
        return fold_body(self.loop)

    @cached_property
    def owned(self) -> Mapping[Var, Owned]:
        return find_owned(self.program, self.loop)

    @cached_property
    def points(self) -> Points:
        owners: dict[int, list[Var]] = {}
        for v, owned in self.owned.items():
            for j in owned.sums:
                owners.setdefault(j, []).append(v)
        return find_points(self.body, self.body_seconds, owners)

    @property
    def has_backward(self) -> bool:
        return self.body.fold < len(self.body.eqns)

    def schedule(self, costs: StageCosts) -> Schedule:
        return self.wanted.ordered(costs, self.loop.length, self.has_backward)

    @cached_property
    def holds(self) -> Sequence[int]:
        """The peak of the microbatches that each stage holds."""
        return in_flight(self.schedule(StageCosts()))

    @cached_property
    def chain(self) -> CutProblem:
        views = self.wanted.views
        work = {v: self._work(v) for v in set(views)}
        memory = [self.memory(s) for s in range(len(views))]
        link, size = views[0].link, min(v.size for v in views)
        points = self.points
        return CutProblem(
            np.stack([work[v][0] for v in views]),
            np.stack([work[v][1] + (work[v][0] if self.recomputes(s) else 0) for s, v in enumerate(views)]),
            points.activation / size, points.gradient / size, points.once / size, points.back,
            np.stack([
                m.needed(self.holds[s], self.recomputes(s)) * self.wanted.memory_scale[s] for s, m in enumerate(memory)
            ]),
            np.asarray([float(v.topology.hbm) for v in views]),
            self.fused, link.latency, link.bandwidth, self.wanted.least,
        )  # fmt: skip

    def estimates(self, cuts: Cuts) -> list[float]:
        """Estimated bytes on each device of each stage."""
        ends = [0, *cuts, len(self.points.ahead) - 1]
        return [
            self.chain.memory[s, i, j] / scale
            for s, ((i, j), scale) in enumerate(zip(pairwise(ends), self.wanted.memory_scale, strict=True))
        ]

    @cached_property
    def fused(self) -> bool:
        """Whether the last stage's forward lies inside its backward."""
        return self.has_backward and not any(e.primitive is stage_boundary_p for e in self.body.eqns)

    def recomputes(self, stage: int) -> bool:
        """Whether a stage recomputes its forward."""
        return stage in self.wanted.recomputed and not (self.fused and stage == len(self.wanted.views) - 1)

    @cached_property
    def body_seconds(self) -> Floats:
        """The seconds of each equation on the first stage's mesh."""
        return self._seconds(self.wanted.views[0])

    def _seconds(self, view: MeshView) -> Floats:
        """The seconds of each equation if its work is divided over all devices of a mesh."""
        seconds, found = undivided_seconds(self.loop.body, view), np.zeros(len(self.body.eqns))
        for e, t in zip(self.body.eqns, self.body.worked, strict=True):
            found[t] += seconds[e] / view.size
        return found

    def _work(self, view: MeshView) -> tuple[Floats, Floats]:
        """(n,) seconds of the forward, and of the backward, before each point."""
        total = np.concatenate([[0.0], self._seconds(view).cumsum()])
        return total[self.points.ahead], total[-1] - total[self.points.back]

    def memory(self, stage: int) -> StageMemory:
        """The memory of a stage per device of its mesh."""
        view = self.wanted.views[stage]
        found = self._whole_memory(view).share(view.size)
        last = self.fused and stage == len(self.wanted.views) - 1
        return found.at_once() if last and not self.schedule(StageCosts()).splits_backward else found

    def _whole_memory(self, view: MeshView) -> StageMemory:
        """The memory of every possible stage, as if one device held all of the loop's values but only its part of the
        state."""
        if view not in self._memories:
            self._memories[view] = stage_memory(self.body, self.points, lambda v: self._state(v, view))
        return self._memories[view]

    @cached_property
    def _memories(self) -> dict[MeshView, StageMemory]:
        return {}

    def _state(self, v: Var, view: MeshView) -> float:
        """Bytes per device of an input of the body and the values that are kept with it."""
        owned = self.owned.get(v)
        if owned is None or not owned.arguments:
            return bytes_of(v) * (self.loop.length if v in self.loop.rows else 1) / view.size
        inputs, arguments = self.program.jaxpr.invars, self.wanted.arguments
        sizes = [_local_bytes(inputs[i], arguments[i], view) for i in owned.arguments]
        share = sizes[0] / bytes_of(inputs[owned.arguments[0]])
        return sum(sizes) + share * sum(bytes_of(self.loop.carries[j].end) for j in owned.sums)


def _local_bytes(v: Var, argument: Argument, view: MeshView) -> float:
    if argument.pin is None:
        return bytes_of(v) / view.size
    return local_bytes(v, argument.pin.placement, view.sizes)


def _why_not(measured: _Measured) -> PipelineError:
    """The error if there are no cuts, with the memory of each stage in the cuts that come closest."""
    wanted, chain = measured.wanted, measured.chain
    cuts = tightest_cuts(chain)
    if cuts is None:
        return PipelineError(
            f"{wanted.where}: {chain.stages} stages need {chain.stages - 1} cuts; the loop's body has "
            f"{len(measured.points.ahead) - 2} places between operations that take time. {_instead(measured)}"
        )
    return StageMemoryError(
        all_offenders(
            f"{wanted.where}: no cut into {chain.stages} stages fits in memory. The cut that comes closest needs, per "
            "device,",
            _breakdown(measured, cuts),
        )
        + "\nUse more stages or more devices for each, split parameters and optimizer state over the stages' axes, "
        'recompute activations (recompute="full"), or use smaller microbatches or a schedule that holds fewer of them.'
    )


def _instead(measured: _Measured) -> str:
    """The fix if there are too few places."""
    body = measured.body
    seconds = measured.body_seconds
    largest = body.eqns[int(seconds.argmax())]
    if largest.primitive.name in REMAT and seconds.max() > seconds.sum() / len(measured.wanted.views):
        return (
            f"Most of the work is rematerialised as one block ({compat.source_line(largest)}), which runs as a whole "
            'on one stage: put jax.checkpoint around each layer, or use shardc.Pipeline(recompute="full") instead.'
        )
    return "Use fewer stages."


def _breakdown(measured: _Measured, cuts: Cuts) -> list[str]:
    chain, lines = measured.chain, list[str]()
    ends = [0, *cuts, len(measured.points.ahead) - 1]
    for s, (i, j) in enumerate(pairwise(ends)):
        memory, held, recomputes = measured.memory(s), measured.holds[s], measured.recomputes(s)
        total, room = chain.memory[s, i, j], chain.room[s]
        lines.append(
            f"stage {s}: {_text(total)} of {_text(room)}{'' if total <= room else ', too much'}: parameters, their "
            f"gradients and optimizer state {_text(memory.state[i, j])}, activations of {held} microbatches "
            f"{_text(memory.activations(held, recomputes)[i, j])}, while it computes {_text(memory.working[i, j])}"
        )
    return lines


def _text(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
