"""shardc: a sharding compiler for JAX.

Write a training step for one device; say where a few global arrays live: split `S(i)`, broadcast `B` or partial `P`
over the axes of a mesh; shardc places every other value, inserts the collectives that this costs, and runs the result.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from shardc.versions import VERSION, check_jax

check_jax(version("jax"))  # JAX itself is loaded with the first name: `shardc --help` needs none

if TYPE_CHECKING:
    from shardc.api import function
    from shardc.arrays.placed import PlacedArray, StackedArray
    from shardc.calls.placing import constrain, fetch, put, rows_here
    from shardc.checkpoint.checkpoints import checkpoints
    from shardc.errors import (
        ArgumentError,
        CheckError,
        CheckpointError,
        ClusterError,
        DisagreementError,
        FlowError,
        ForbiddenMoveError,
        MeshError,
        PeerLostError,
        PipelineError,
        PipelineTaskError,
        PlacementError,
        RoundFailedError,
        ShardcError,
        ShardcWarning,
        SignatureError,
        StepFailedError,
        TracingError,
    )
    from shardc.flows import Flow, FlowPlan, every, flow, host, late, shared
    from shardc.gangs import Gang
    from shardc.ir.boundary import stage_boundary
    from shardc.ir.nested import trips
    from shardc.ir.user_operation import signature
    from shardc.live.meter import progress
    from shardc.machine.devices import devices
    from shardc.machine.mesh import make_mesh
    from shardc.passes.accumulate.accumulate import accumulate
    from shardc.passes.trace.fully_sharded import fsdp
    from shardc.passes.trace.pins import rules
    from shardc.pipeline.options import Pipeline
    from shardc.pipeline.schedule.schedule import Schedule
    from shardc.pipelines import PipelinePlan
    from shardc.plan.data_parallel import data_parallel
    from shardc.plan.saved_plan import SavedPlan, load_plan
    from shardc.plans import MemoryLimitError, Plan
    from shardc.report.show import show
    from shardc.sbp.discover import discover
    from shardc.sbp.placement import AUTO, B, P, Placement, S
    from shardc.tuning.tune import tune

__all__ = [
    "AUTO",
    "ArgumentError",
    "B",
    "CheckError",
    "CheckpointError",
    "ClusterError",
    "DisagreementError",
    "Flow",
    "FlowError",
    "FlowPlan",
    "ForbiddenMoveError",
    "Gang",
    "MemoryLimitError",
    "MeshError",
    "P",
    "PeerLostError",
    "Pipeline",
    "PipelineError",
    "PipelinePlan",
    "PipelineTaskError",
    "PlacedArray",
    "Placement",
    "PlacementError",
    "Plan",
    "RoundFailedError",
    "S",
    "SavedPlan",
    "Schedule",
    "ShardcError",
    "ShardcWarning",
    "SignatureError",
    "StackedArray",
    "StepFailedError",
    "TracingError",
    "accumulate",
    "checkpoints",
    "constrain",
    "data_parallel",
    "devices",
    "discover",
    "every",
    "fetch",
    "flow",
    "fsdp",
    "function",
    "host",
    "late",
    "load_plan",
    "make_mesh",
    "progress",
    "put",
    "rows_here",
    "rules",
    "shared",
    "show",
    "signature",
    "stage_boundary",
    "trips",
    "tune",
]
__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Loads a name with its module when it is first used: a step on one mesh needs a third of the modules."""
    if name in ("equinox", "flax"):
        return import_module(f"shardc.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'shardc' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_MODULES = {
    "AUTO": "shardc.sbp.placement",
    "ArgumentError": "shardc.errors",
    "B": "shardc.sbp.placement",
    "CheckError": "shardc.errors",
    "CheckpointError": "shardc.errors",
    "ClusterError": "shardc.errors",
    "DisagreementError": "shardc.errors",
    "Flow": "shardc.flows",
    "FlowError": "shardc.errors",
    "ForbiddenMoveError": "shardc.errors",
    "FlowPlan": "shardc.flows",
    "Gang": "shardc.gangs",
    "MemoryLimitError": "shardc.plans",
    "MeshError": "shardc.errors",
    "P": "shardc.sbp.placement",
    "PeerLostError": "shardc.errors",
    "Pipeline": "shardc.pipeline.options",
    "PipelineError": "shardc.errors",
    "PipelinePlan": "shardc.pipelines",
    "PipelineTaskError": "shardc.errors",
    "PlacedArray": "shardc.arrays.placed",
    "Placement": "shardc.sbp.placement",
    "PlacementError": "shardc.errors",
    "Plan": "shardc.plans",
    "RoundFailedError": "shardc.errors",
    "S": "shardc.sbp.placement",
    "SavedPlan": "shardc.plan.saved_plan",
    "Schedule": "shardc.pipeline.schedule.schedule",
    "ShardcError": "shardc.errors",
    "ShardcWarning": "shardc.errors",
    "SignatureError": "shardc.errors",
    "StackedArray": "shardc.arrays.placed",
    "StepFailedError": "shardc.errors",
    "TracingError": "shardc.errors",
    "accumulate": "shardc.passes.accumulate.accumulate",
    "checkpoints": "shardc.checkpoint.checkpoints",
    "constrain": "shardc.calls.placing",
    "data_parallel": "shardc.plan.data_parallel",
    "devices": "shardc.machine.devices",
    "discover": "shardc.sbp.discover",
    "every": "shardc.flows",
    "fetch": "shardc.calls.placing",
    "flow": "shardc.flows",
    "fsdp": "shardc.passes.trace.fully_sharded",
    "function": "shardc.api",
    "host": "shardc.flows",
    "late": "shardc.flows",
    "load_plan": "shardc.plan.saved_plan",
    "make_mesh": "shardc.machine.mesh",
    "progress": "shardc.live.meter",
    "put": "shardc.calls.placing",
    "rows_here": "shardc.calls.placing",
    "rules": "shardc.passes.trace.pins",
    "shared": "shardc.flows",
    "show": "shardc.report.show",
    "signature": "shardc.ir.user_operation",
    "stage_boundary": "shardc.ir.boundary",
    "trips": "shardc.ir.nested",
    "tune": "shardc.tuning.tune",
}
