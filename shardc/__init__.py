"""shardc: a sharding compiler for JAX.

Write a training step for one device; say where a few global arrays live: split `S(i)`, broadcast `B` or partial `P`
over the axes of a mesh; shardc places every other value, inserts the collectives that this costs, and runs the result.
"""

import jax

from shardc.versions import check_jax

check_jax(jax.__version__)

from shardc.accumulate import accumulate
from shardc.api import constrain, function, put
from shardc.discover import discover
from shardc.errors import (
    ArgumentError,
    MemoryLimitError,
    MeshError,
    PipelineError,
    PlacementError,
    ShardcError,
    ShardcWarning,
    SignatureError,
    StepFailedError,
    TracingError,
)
from shardc.fetch import fetch
from shardc.mesh import make_mesh
from shardc.operation import signature
from shardc.passes.boundary import stage_boundary
from shardc.passes.data_parallel import data_parallel
from shardc.passes.fully_sharded import fsdp
from shardc.passes.pins import rules
from shardc.passes.plan_json import load_plan
from shardc.passes.record import SavedPlan
from shardc.pipeline.schedule import Schedule
from shardc.pipeline_plan import Pipeline
from shardc.placed import PlacedArray, StackedArray
from shardc.sbp.placement import AUTO, B, P, Placement, S
from shardc.show import show
from shardc.trips import trips
from shardc.tune import tune

__all__ = [
    "AUTO",
    "ArgumentError",
    "B",
    "MemoryLimitError",
    "MeshError",
    "P",
    "Pipeline",
    "PipelineError",
    "PlacedArray",
    "Placement",
    "PlacementError",
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
    "constrain",
    "data_parallel",
    "discover",
    "fetch",
    "fsdp",
    "function",
    "load_plan",
    "make_mesh",
    "put",
    "rules",
    "show",
    "signature",
    "stage_boundary",
    "trips",
    "tune",
]
__version__ = "0.1.0"
