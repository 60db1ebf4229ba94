"""The choices of `shardc.tune`, and the order in which they are planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from shardc.api import Function
from shardc.errors import PipelineError
from shardc.execute.at_work import line_if_long
from shardc.ir.boundary import END, stage_boundary_p
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import AnyMesh, MeshView, make_mesh, view
from shardc.passes.estimate.plan_cost import undivided_seconds
from shardc.passes.trace.trace import Arguments
from shardc.pipeline.cut.cut_loop import find_loop
from shardc.pipeline.options import Pipeline
from shardc.pipeline.schedule.methods import METHODS, make_schedule
from shardc.sbp.placement import Pin
from shardc.tuning.meshes import Roles, Sizes, all_sizes, is_grid, merged_sizes, roles_of, shape_key

PIPE: Final = "pipe"
"""The axis that stages lie along."""
WORTH: Final = 1.25
"""Factor on the estimated time for each axis: a mesh with one axis more takes about five times as long to plan."""


@dataclass(frozen=True, eq=False)
class TunedStep:
    """A function to tune, with its number of microbatches if these are varied."""

    microbatches: int | None
    function: Function
    args: tuple[Any, ...]

    @cached_property
    def seen(self) -> tuple[Program, list[Pin | None]]:
        return self.function.look(*self.args)

    @cached_property
    def ideal(self) -> float:
        """Seconds of the function's computation, divided evenly over all devices."""
        mesh = view(self.function.mesh)
        return sum(undivided_seconds(self.seen[0].jaxpr, mesh).values()) / mesh.size

    def roles(self, axes: Sequence[str]) -> Roles:
        named = roles_of(axes, *self.seen)
        return {PIPE: PIPE} | {a: (role, self.function.forbidden_over(a)) for a, role in named.items()}

    def __str__(self) -> str:
        return Arguments(self.function.__wrapped__, ()).where  # pyright: ignore[reportFunctionMemberAccess]


@dataclass(frozen=True)
class MeshChoice:
    """A mesh, and how a step runs on it: a candidate that is not planned yet.

    Attributes:
      step: the function.
      sizes: the mesh.
      pipeline: the pipeline; None: one program.
      loop: number of microbatches of the step's loop; None: it has no loop.
      bubble: time of a call divided by its time without the bubble of the pipeline, for equally long stages.
      after: mesh and pipeline of a choice that is planned before this one although this one is no refinement of it: the
        same mesh under another schedule, or a pipeline of fewer ranks.
    """

    step: TunedStep
    sizes: Sizes
    pipeline: Pipeline | None
    loop: int | None
    bubble: float = 1.0
    after: tuple[Sizes, Pipeline] | None = None

    @property
    def level(self) -> int:
        """Number of axes longer than 1."""
        return sum(n > 1 for _, n in self.sizes)


def meshes(step: TunedStep, axes: Sequence[str], devices: int) -> list[MeshChoice]:
    """The choices without a pipeline."""
    return [MeshChoice(step, sizes, None, step.microbatches) for sizes in all_sizes(devices, axes)]


def pipelines(
    step: TunedStep, axes: Sequence[str], devices: int, ranks: Sequence[int], schedules: Sequence[str]
) -> list[MeshChoice]:
    """The choices with a pipeline that the function, its number of microbatches and the schedules allow.

    Raises:
      PipelineError: the function does not have exactly one loop of microbatches.
    """
    names = (PIPE, *axes)
    ones: dict[str, Any] = dict.fromkeys(names, 1)
    probe = step.function.on(make_mesh(topology="cpu", **ones), Pipeline(axis=PIPE))
    program, _ = probe.look(*step.args)
    loop = find_loop(program, str(step))
    cuts = {e.params["cut"] for e in all_eqns(loop.body) if e.primitive is stage_boundary_p and e.params["cut"] != END}
    found: list[MeshChoice] = []
    fewer: list[int] = []
    m = loop.length
    for p in sorted(ranks):
        possible = [s for s in schedules if _has_stages(s, p, m, len(cuts) + 1 if cuts else None)]
        made = [Pipeline(axis=PIPE, schedule=s, stages="marked" if cuts else "auto") for s in possible]
        for pipeline in made:
            for inner in all_sizes(devices // p, axes):
                sizes, after = ((PIPE, p), *inner), None
                if pipeline is not made[0]:
                    after = sizes, made[0]
                elif fewer and sum(n > 1 for _, n in inner) <= 1:
                    after = _with_ranks(sizes, fewer[-1]), pipeline
                found.append(MeshChoice(step, sizes, pipeline, m, (m + p - 1) / m, after))
        fewer += [p] if made else []
    return found


def _with_ranks(sizes: Sizes, ranks: int) -> Sizes:
    """The mesh with fewer ranks. Its axis longer than 1, or else its first axis, gets longer by the same factor."""
    (_, now), *inner = sizes
    axis = next((a for a, n in inner if n > 1), inner[0][0])
    return (PIPE, ranks), *((a, n * now // ranks if a == axis else n) for a, n in inner)


def _has_stages(schedule: str, ranks: int, microbatches: int, stages: int | None) -> bool:
    """Whether the schedule exists for these ranks and microbatches, with this number of stages if one is given."""
    if schedule == "auto":
        return stages is None or stages == ranks
    try:
        made = make_schedule(schedule, ranks, microbatches)
    except PipelineError:
        return False
    return METHODS[schedule].weight_versions == 1 and (stages is None or made.stages == stages)


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MeshSearch:
    """A best-first search over choices.

    Attributes:
      choices: all choices.
      mesh_of: makes the mesh of given sizes.
      axes: names of the axes.
      distinct: the first of each group of equivalent choices, by the group's key.
      seconds: time of the planned choices: by the plan, or twice the estimate if there is no plan.
    """

    choices: Sequence[MeshChoice]
    mesh_of: Callable[[Sizes], AnyMesh]
    axes: Sequence[str]
    distinct: dict[Any, MeshChoice] = field(default_factory=dict[Any, MeshChoice])
    seconds: dict[Any, float] = field(default_factory=dict[Any, float])

    def __post_init__(self) -> None:
        self._keys: dict[tuple[int, Sizes, Pipeline | None], Any] = {}
        views: dict[Sizes, MeshView] = {}
        roles: dict[int, Roles] = {}
        for c in self.choices:
            mesh = views.get(c.sizes) or views.setdefault(c.sizes, view(self.mesh_of(c.sizes)))
            if not is_grid(mesh):
                continue
            of = roles.get(id(c.step)) or roles.setdefault(id(c.step), c.step.roles(self.axes))
            key = (id(c.step), c.pipeline, shape_key(mesh, of))
            self._keys[id(c.step), c.sizes, c.pipeline] = key
            self.distinct.setdefault(key, c)
        self.coarser = {key: self._coarser(c, key) for key, c in self.distinct.items()}

    def _coarser(self, c: MeshChoice, key: Any) -> list[Any]:
        """The keys that are planned before a choice: meshes with two of its axes merged, or its `after`."""
        asked = [(id(c.step), sizes, c.pipeline) for sizes in merged_sizes(c.sizes, self.axes)]
        if c.after is not None:
            asked = [(id(c.step), *c.after)]
        keys = [self._keys[a] for a in asked if a in self._keys]
        return [k for k in dict.fromkeys(keys) if k != key]

    def run(self, tries: int, plan: Callable[[MeshChoice], float]) -> None:
        """Plan at most `tries` choices. `plan` returns the seconds of a choice, infinite if there is no plan."""
        waiting = list(self.distinct)
        console = Console(stderr=True)
        with (
            line_if_long(""),
            Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            task = progress.add_task("planning", total=min(tries, len(waiting)))
            while waiting and len(self.seconds) < tries:
                key = min(waiting, key=lambda k: self.estimate(k) * WORTH ** self.distinct[k].level)
                waiting.remove(key)
                found = plan(self.distinct[key])
                self.seconds[key] = found if found < math.inf else 2 * self.estimate(key)
                progress.advance(task)

    def estimate(self, key: Any) -> float:
        """Estimated seconds of a choice: those of the best coarser choice, with its own bubble.

        Infinite while no coarser choice is planned.
        """
        coarser, c = self.coarser[key], self.distinct[key]
        if not coarser:
            return c.step.ideal * c.bubble
        known = (self.seconds[k] * c.bubble / self.distinct[k].bubble for k in coarser if k in self.seconds)
        return min(known, default=math.inf)
