"""The figures of a running step: its time beside the planned one, operations per second, memory, who waits."""

from __future__ import annotations

from typing import Any

import jax

from shardc.machine.mesh import view
from shardc.passes.estimate.flops import least_seconds
from shardc.pipeline.plan import MpmdPlan
from shardc.plans import PlanFace


def step_figures(step: Any, seconds: float | None) -> dict[str, float]:
    """The figures of a step besides its results, by the name of their column.

    Args:
      step: a function, a compiled one, or a flow, each with the plan that it ran last; of anything else only the memory
        is known.
      seconds: measured, of one call; None: not known yet.
    """
    plan = _plan_of(step)
    program = plan if _is_program(plan) else None
    found = {} if seconds is None else {"step_seconds": seconds}
    if plan is not None:
        found["planned_seconds"] = plan.seconds
    if program is not None and seconds and program.flops:
        meshes = [view(m) for m in plan.request.meshes] if isinstance(plan, MpmdPlan) else [program.mesh]
        found["tflops"] = program.flops.total() / seconds / 1e12
        if all(m.topology.kind != "cpu" for m in meshes):  # fake devices share the cores of one machine
            found["mfu"] = least_seconds(program.flops, meshes) / seconds
    if (used := memory_in_use()) is not None:
        found["memory_bytes"] = used
    elif program is not None:
        found["planned_memory_bytes"] = program.memory.peak
    return found


def memory_in_use() -> int | None:
    """The most bytes that one of this process's devices has had in use; None if the backend does not count them."""
    counted = [s["peak_bytes_in_use"] for d in jax.local_devices() if (s := d.memory_stats()) is not None]
    return max(counted, default=None)


def waiting_text(step: Any) -> str:
    """`rank 1 waits 43%`: the rank of a pipeline that waits most, in its last call if that was measured, else as
    planned; empty for everything else."""
    plan = _plan_of(step)
    if not isinstance(plan, MpmdPlan):
        return ""
    measured = step.latest.measured_waits
    shares = measured or [t.wait / plan.seconds for t in plan.rank_times]
    most = max(range(len(shares)), key=shares.__getitem__)
    return f"rank {most} waits {shares[most]:.0%}{'' if measured else ', planned'}"


def _plan_of(step: Any) -> Any:
    return getattr(getattr(step, "latest", None), "plan", None)


def _is_program(plan: Any) -> bool:
    """Whether it is the plan of a program or a pipeline, and not of a flow."""
    return isinstance(plan, PlanFace)
