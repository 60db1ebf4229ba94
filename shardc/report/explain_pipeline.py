"""`plan.explain()` of a pipeline."""

from __future__ import annotations

from shardc.pipeline_plan import PipelinePlan
from shardc.report.explain import explain


def explain_pipeline(plan: PipelinePlan) -> str:
    """The schedule, and each stage's own plan."""
    return "\n\n".join([repr(plan), str(plan.schedule), *(explain(s.plan) for s in plan.stages)])
