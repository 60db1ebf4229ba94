"""What a plan asks of the runner: a mesh, so many microbatches, and for a pipeline so many stages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

import shardc
from examples.plans.stages import between
from examples.zoo import Model
from shardc.pipeline.schedule.methods import METHODS
from shardc.pipeline.schedule.schedule import Schedule

PER_RANK = 4
"""Microbatches for each rank, if nobody says how many: the bubble of 1F1B is then under a fifth of a step."""


@dataclass(frozen=True)
class Staging:
    """How a model is run.

    Attributes:
      pipeline: for `shardc.function`; None: one program.
      axes: of the mesh.
      hooks: `accumulate` and, where it is cut, `between`: for the model's `make_step`.
    """

    pipeline: shardc.Pipeline | None
    axes: Mapping[str, int]
    hooks: tuple[Callable, ...]


def staging(
    pipeline: shardc.Pipeline | None, options: argparse.Namespace, model: Model, cfg: Any, rows: int
) -> Staging:
    """What the options ask for. `pipeline` is the plan's; on one device the mesh keeps its axes, each of size 1."""
    axes = options.mesh or {"data": options.devices or jax.device_count()}
    if axes == "auto":
        if pipeline is not None:
            raise SystemExit(f"--mesh auto is not for --plan {options.plan}, which says where the model is cut.")
        axes = {"data": options.devices or jax.device_count(), "model": 1}  # until it is chosen
    if pipeline is None:
        if options.schedule or options.chunks or options.stages:
            raise SystemExit(f"--schedule, --chunks and --stages are for --plan pipeline, not for {options.plan}.")
        parts = options.microbatches or 1
        hooks = (partial(shardc.accumulate, microbatches=parts),) if parts > 1 else ()
        return Staging(None, on_one(axes, options), hooks)
    if pipeline.axis not in axes:
        raise SystemExit(f"--plan {options.plan} wants an axis {pipeline.axis} in --mesh: pipe=2,data=2,model=2.")
    if options.scan and options.stages != "auto":
        raise SystemExit("--scan leaves no place between blocks to mark where a stage ends: add --stages auto.")
    pipeline = replace(
        pipeline,
        schedule=schedule_of(options.schedule or pipeline.schedule),
        chunks=options.chunks,
        stages=options.stages or pipeline.stages,
    )
    axes = {**axes, "data": axes.get("data", 1), "model": axes.get("model", 1)}
    parts = options.microbatches or microbatches_of(pipeline, rows, axes)
    axes = on_one(axes, options)
    hooks = [partial(shardc.accumulate, microbatches=parts)]
    if pipeline.stages == "marked":
        assert model.blocks is not None
        try:
            hooks.append(between(model.blocks(cfg), axes[pipeline.axis] * chunks_of(pipeline)))
        except ValueError as error:
            raise SystemExit(f"--plan {options.plan}: {error}. Say --layers, or take a smaller axis pipe.") from None
    return Staging(pipeline, axes, tuple(hooks))


def on_one(axes: Mapping[str, int], options: argparse.Namespace) -> Mapping[str, int]:
    return dict.fromkeys(axes, 1) if options.devices == 1 else axes


def schedule_of(said: Any) -> Any:
    """A schedule by its name; from a file, if it is one: torch's compute-only CSV, or a grid as schedules print."""
    if not isinstance(said, str) or not Path(said).is_file():
        return said
    text = Path(said).read_text(encoding="utf-8")
    return Schedule.from_csv(text, Path(said).stem) if said.endswith(".csv") else Schedule.parse(text)


def chunks_of(pipeline: shardc.Pipeline) -> int:
    """Stages of each rank."""
    named = METHODS.get(pipeline.schedule) if isinstance(pipeline.schedule, str) else pipeline.schedule
    return pipeline.chunks or getattr(named, "chunks", 1)


def microbatches_of(pipeline: shardc.Pipeline, rows: int, axes: Mapping[str, int]) -> int:
    """The schedule's own number; or the largest up to `PER_RANK` for each rank that leaves every device whole rows."""
    if isinstance(pipeline.schedule, Schedule):
        return pipeline.schedule.microbatches
    fits = [m for m in range(1, PER_RANK * axes[pipeline.axis] + 1) if rows % m == 0]
    return max((m for m in fits if rows // m % axes["data"] == 0), default=max(fits))
