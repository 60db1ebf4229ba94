"""shardc: a sharding compiler for JAX.

Write a training step for one device; say where a few global arrays live: split `S(i)`, broadcast `B` or partial `P`
over the axes of a mesh; shardc places every other value, inserts the collectives that this costs, and runs the result.
"""

import jax

from shardc.versions import VERSION, check_jax

check_jax(jax.__version__)

from shardc.api import function
from shardc.arrays.placed import PlacedArray, StackedArray
from shardc.calls.placing import constrain, fetch, put, rows_here
from shardc.checkpoint.checkpoints import checkpoints
from shardc.errors import (
    ArgumentError,
    CheckpointError,
    ClusterError,
    DisagreementError,
    MeshError,
    PeerLostError,
    PipelineError,
    PipelineTaskError,
    PlacementError,
    ShardcError,
    ShardcWarning,
    SignatureError,
    StepFailedError,
    TracingError,
)
from shardc.ir.boundary import stage_boundary
from shardc.ir.trips import trips
from shardc.ir.user_operation import signature
from shardc.machine.devices import devices
from shardc.machine.mesh import make_mesh
from shardc.passes.trace.accumulate import accumulate
from shardc.passes.trace.fully_sharded import fsdp
from shardc.passes.trace.pins import rules
from shardc.pipeline.plan import Pipeline
from shardc.pipeline.schedule.schedule import Schedule
from shardc.plan.data_parallel import data_parallel
from shardc.plan.saved_plan import SavedPlan, load_plan
from shardc.plans import MemoryLimitError, PipelinePlan, Plan
from shardc.report.show import show
from shardc.sbp.discover import discover
from shardc.sbp.placement import AUTO, B, P, Placement, S
from shardc.tune.tune import tune

__all__ = [
    "AUTO",
    "ArgumentError",
    "B",
    "CheckpointError",
    "ClusterError",
    "DisagreementError",
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
    "fetch",
    "fsdp",
    "function",
    "load_plan",
    "make_mesh",
    "put",
    "rows_here",
    "rules",
    "show",
    "signature",
    "stage_boundary",
    "trips",
    "tune",
]
__version__ = VERSION
