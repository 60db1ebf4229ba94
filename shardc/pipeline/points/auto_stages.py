"""Stages cut by cost: measures a loop's body, chooses the points between stages, and marks them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from shardc import compat
from shardc.compat import REMAT, Var
from shardc.errors import PipelineError, StageMemoryError, all_offenders
from shardc.ir.boundary import END, stage_boundary_p
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns, bytes_of, local_bytes
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.plan_cost import whole_seconds
from shardc.pipeline.cut.cut_loop import MicrobatchLoop, find_loop
from shardc.pipeline.points.cut_points import Points, find_points
from shardc.pipeline.points.fold_body import FoldedBody, fold_body
from shardc.pipeline.points.mark_stages import mark_stages
from shardc.pipeline.points.owners import Owned, find_owned
from shardc.pipeline.points.split_scans import Ends, Layers, Pieces, find_layers, split_scans, whole_program
from shardc.pipeline.points.stage_memory import StageMemory, stage_memory
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.partition import CutProblem, Cuts, Floats, choose_cuts, in_flight, tightest_cuts
from shardc.pipeline.schedule.schedule import Schedule
from shardc.plan.request import Argument


@dataclass(frozen=True)
class Wanted:
    """What the stages are to be cut for.

    Attributes:
      views: of each stage its mesh.
      arguments: what is known of the program's inputs.
      ordered: the order of the actions, for the costs of the stages, so many microbatches, and with or without a
        backward pass.
      recomputed: the stages that keep their inputs only.
      memory_scale: of each stage what its memory is, to the estimate of it.
      least: seconds that any task costs.
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
    """The program with the boundaries under which a call is fastest and every stage fits its memory.

    What is not pinned, and all activations, count as split over all devices of a stage's mesh. Scans over layers are
    split where a boundary falls between two of their layers.

    Returns:
      the program in pieces, and for each stage the estimated bytes on each of its devices; 0, unknown, for one stage.

    Raises:
      PipelineError: there are boundaries already, or too little work for so many stages.
      StageMemoryError: no cuts fit the memory.
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
    """Where each dimension of layers is to be split, given cuts between single layers."""
    at = {id(e): t for t, e in enumerate(measured.body.eqns)}
    found: list[Ends] = []
    for n, dimension in enumerate(layers):
        ends = {0, dimension.count}
        for scan in units.scans[n]:
            for cut in measured.points.ahead[list(cuts)]:
                ahead = [row for row, eqn in scan if at[id(eqn)] < cut]
                behind = [row for row, eqn in scan if cut <= at[id(eqn)] < measured.body.fold]
                ends |= {max(min(ahead), min(behind))} if ahead and behind else set()
        found.append(tuple(sorted(ends)))
    return found


def _refuse_marks(loop: MicrobatchLoop, where: str) -> None:
    marks = [e for e in all_eqns(loop.body) if e.primitive is stage_boundary_p and e.params["cut"] != END]
    if marks:
        lines = list(dict.fromkeys(compat.source_line(e) for e in marks))
        raise PipelineError(
            all_offenders(
                f'{where}: stages="auto" cuts a model without boundaries, and this one has some. Take them out, or '
                'write stages="marked" to cut there',
                [f"a stage_boundary at {line}" for line in lines],
            )
        )


@dataclass(frozen=True)
class _Measured:
    """The tables of a loop's body."""

    program: Program
    loop: MicrobatchLoop
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
        return self.wanted.ordered(costs, self.loop.microbatches, self.has_backward)

    @cached_property
    def holds(self) -> Sequence[int]:
        """Microbatches that each stage holds at once."""
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
            np.stack([work[v][1] + (work[v][0] if self.again(s) else 0) for s, v in enumerate(views)]),
            points.activation / size, points.gradient / size, points.once / size, points.back,
            np.stack([
                m.needed(self.holds[s], self.again(s)) * self.wanted.memory_scale[s] for s, m in enumerate(memory)
            ]),
            np.asarray([float(v.topology.hbm) for v in views]),
            self.fused, link.latency, link.bandwidth, self.wanted.least,
        )  # fmt: skip

    def estimates(self, cuts: Cuts) -> list[float]:
        """Bytes on each device of each stage."""
        ends = [0, *cuts, len(self.points.ahead) - 1]
        return [
            self.chain.memory[s, i, j] / scale
            for s, ((i, j), scale) in enumerate(zip(pairwise(ends), self.wanted.memory_scale, strict=True))
        ]

    @cached_property
    def fused(self) -> bool:
        """Whether the last stage's forward lies inside its backward."""
        return self.has_backward and not any(e.primitive is stage_boundary_p for e in self.body.eqns)

    def again(self, stage: int) -> bool:
        """Whether a stage computes its forward again."""
        return stage in self.wanted.recomputed and not (self.fused and stage == len(self.wanted.views) - 1)

    @cached_property
    def body_seconds(self) -> Floats:
        """Of each equation, on the first stage's mesh."""
        return self._seconds(self.wanted.views[0])

    def _seconds(self, view: MeshView) -> Floats:
        """Of each equation, its work shared by all devices of a mesh."""
        return np.asarray([whole_seconds(e, view) for e in self.body.eqns]) / view.size

    def _work(self, view: MeshView) -> tuple[Floats, Floats]:
        """(n,) seconds of the forward, and of the backward, in front of each point."""
        total = np.concatenate([[0.0], self._seconds(view).cumsum()])
        return total[self.points.ahead], total[-1] - total[self.points.back]

    def memory(self, stage: int) -> StageMemory:
        """Bytes per device of a stage's mesh."""
        view = self.wanted.views[stage]
        found = self._whole_memory(view).share(view.size)
        last = self.fused and stage == len(self.wanted.views) - 1
        return found.at_once() if last and not self.schedule(StageCosts()).splits_backward else found

    def _whole_memory(self, view: MeshView) -> StageMemory:
        """The same on a device that holds all that the loop makes, but of its state only its part."""
        if view not in self._memories:
            self._memories[view] = stage_memory(self.body, self.points, lambda v: self._state(v, view))
        return self._memories[view]

    @cached_property
    def _memories(self) -> dict[MeshView, StageMemory]:
        return {}

    def _state(self, v: Var, view: MeshView) -> float:
        """Bytes per device that are kept with an input of the body."""
        owned = self.owned.get(v)
        if owned is None or not owned.arguments:
            stacked = v in self.loop.body.invars[self.loop.consts + self.loop.carries :]
            return bytes_of(v) * (self.loop.microbatches if stacked else 1) / view.size
        inputs, arguments = self.program.jaxpr.invars, self.wanted.arguments
        sizes = [_local_bytes(inputs[i], arguments[i], view) for i in owned.arguments]
        share = sizes[0] / bytes_of(inputs[owned.arguments[0]])
        return sum(sizes) + share * sum(bytes_of(self.loop.eqn.outvars[j]) for j in owned.sums)


def _local_bytes(v: Var, argument: Argument, view: MeshView) -> float:
    if argument.pin is None:
        return bytes_of(v) / view.size
    return local_bytes(v, argument.pin.placement, view.sizes)


def _why_not(measured: _Measured) -> PipelineError:
    """Why there are no cuts: what each stage would hold, in the cuts that come nearest."""
    wanted, chain = measured.wanted, measured.chain
    cuts = tightest_cuts(chain)
    if cuts is None:
        return PipelineError(
            f"{wanted.where}: {chain.stages} stages want {chain.stages - 1} cuts; the loop's body has "
            f"{len(measured.points.ahead) - 2} places between operations that take time. {_instead(measured)}"
        )
    return StageMemoryError(
        all_offenders(
            f"{wanted.where}: no {chain.stages} stages fit the memory. Those that come nearest hold, per device,",
            _breakdown(measured, cuts),
        )
        + "\nTake more stages or more devices for each, split parameters and optimizer state over the stages' axes, or "
        'recompute activations (recompute="full"), take a schedule that holds fewer microbatches, or smaller ones.'
    )


def _instead(measured: _Measured) -> str:
    """What to do where there are too few places."""
    body = measured.body
    seconds = measured.body_seconds
    largest = body.eqns[int(seconds.argmax())]
    if largest.primitive.name in REMAT and seconds.max() > seconds.sum() / len(measured.wanted.views):
        return (
            f"Most of the work is rematerialised as one block ({compat.source_line(largest)}), which runs as a whole "
            'on one stage: put jax.checkpoint around the layers, or leave it to shardc.Pipeline(recompute="full").'
        )
    return "Take fewer stages."


def _breakdown(measured: _Measured, cuts: Cuts) -> list[str]:
    chain, lines = measured.chain, list[str]()
    ends = [0, *cuts, len(measured.points.ahead) - 1]
    for s, (i, j) in enumerate(pairwise(ends)):
        memory, held, again = measured.memory(s), measured.holds[s], measured.again(s)
        total, room = chain.memory[s, i, j], chain.room[s]
        lines.append(
            f"stage {s}: {_text(total)} of {_text(room)}{'' if total <= room else ', too much'}: parameters, their "
            f"gradients and optimizer state {_text(memory.state[i, j])}, activations of {held} microbatches "
            f"{_text(memory.activations(held, again)[i, j])}, while it computes {_text(memory.working[i, j])}"
        )
    return lines


def _text(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
