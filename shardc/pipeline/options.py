"""How a function is run as a pipeline, and the request for its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardc.errors import PipelineError
from shardc.machine.mesh import AnyMesh, MeshView, view
from shardc.plan.request import Request


@dataclass(frozen=True)
class Pipeline:
    """How a function is run as a pipeline over microbatches.

    Attributes:
      axis: the mesh axis whose positions are the pipeline's ranks. It never stands in a placement.
      schedule: a name (`gpipe`, `1f1b`, `zb-h1`, ...), `"auto"`, a grid as text, a Schedule, or a function of
        (ranks, microbatches, chunks, costs) that gives one.
      chunks: stages for each rank; None: what the schedule wants.
      credits: registers of each channel: `"auto"`, the fewest that keep the schedule's best time, or where memory has
        no room for these those that cost the least time; or a number for all.
      recompute: `"none"`, `"full"`: each stage keeps its input only and computes its forward again in its backward;
        a sequence of these, one for each stage; or `"auto"`: full where a stage would not fit.
      stages: `"marked"`: at `shardc.stage_boundary`. `"auto"`: where a call is fastest and each stage fits its memory,
        by the cost model; the function must have no `shardc.stage_boundary` then.
      meshes: for ranks of unequal size their meshes, instead of `axis`.

    Raises:
      PipelineError: `axis` is no text, or `meshes` is one mesh.
    """

    axis: str = "pipe"
    schedule: Any = "1f1b"
    chunks: int | None = None
    credits: Any = "auto"
    recompute: Any = "auto"
    stages: str = "marked"
    meshes: Sequence[AnyMesh] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PipelineError(f'Pipeline(axis={self.axis!r}): write the name of an axis of the mesh, as axis="pipe".')
        if isinstance(self.meshes, Mesh | AbstractMesh):
            raise PipelineError(
                "Pipeline(meshes=...) wants a mesh for each rank, in a list, and got one mesh; give one mesh with an "
                'axis for the ranks as shardc.function(mesh=..., pipeline=shardc.Pipeline(axis="pipe")).'
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineRequest(Request):
    """A request for the plan of a pipeline: its program has its marks, its mesh is that of the first rank, and its pins
    keep all axes, as ranks may have other idle ones.

    Attributes:
      whole: the mesh of all ranks together.
      meshes: of each rank.
      pipeline: how it is run.
    """

    whole: AnyMesh
    meshes: Sequence[AnyMesh]
    pipeline: Pipeline

    def __post_init__(self) -> None:
        """Nothing: the request of each stage leaves the idle axes of its mesh out."""

    @property
    def views(self) -> tuple[MeshView, ...]:
        """The planner's view of each rank's mesh."""
        return tuple(replace(view(m), avoids=self.mesh.avoids) for m in self.meshes)
