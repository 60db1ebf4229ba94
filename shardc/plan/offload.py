"""Plans with values in the memory of the host: those that `offload=` names, or those without which a plan fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc.passes.estimate.backend import backend_of
from shardc.passes.memory.offload import HostChoice, OffloadOptions, offload
from shardc.passes.recompute.recompute_residuals import find_residuals
from shardc.passes.trace.pins import matcher
from shardc.plan.plan import Offloaded, SpmdPlan


def options_of(plan: SpmdPlan) -> OffloadOptions:
    """The values of a plan that could live on the host."""
    backend = backend_of(plan.mesh.topology.backend)
    return OffloadOptions(plan.all_on_device, plan.program.in_paths, plan.donations, plan.mesh, backend)


def offloaded_within(plan: SpmdPlan, limit: int) -> SpmdPlan | None:
    """The plan with as few values on the host as are enough for `limit` bytes per device; None if none are."""
    choice = options_of(plan).choose(limit)
    return None if choice is None else with_choice(plan, choice, "to fit in memory")


def most_freed(plan: SpmdPlan) -> int:
    """Bytes of a device that moving all that may move frees."""
    options = options_of(plan)
    return max(0, plan.memory.peak - options.profile(options.all)[1].peak)


def with_named(plan: SpmdPlan, patterns: Sequence[str]) -> SpmdPlan:
    """The plan with the arguments whose paths match a pattern on the host, and the results that replace them."""
    if not patterns:
        return plan
    tied = {i: k for k, i in plan.donations.items()}
    able, matchers = options_of(plan).may_move, list(map(matcher, patterns))
    chosen = {
        i: tied.get(i)
        for i, (path, v) in enumerate(zip(plan.program.in_paths, plan.boxed.jaxpr.invars, strict=True))
        if any(m.match(path) for m in matchers) and able(v)
    }
    return with_choice(plan, HostChoice(chosen), "named by offload=")


def with_choice(plan: SpmdPlan, choice: HostChoice, why: str) -> SpmdPlan:
    """The plan with chosen values on the host."""
    if not choice:
        return plan
    before = plan.all_on_device
    boxed = offload(before, choice, plan.program.in_paths)
    numbers = {r.stack: n for n, r in enumerate(find_residuals(before.jaxpr))}
    names = (*(plan.program.in_paths[i] for i in choice.arguments), *(f"#{numbers[v]}" for v in choice.stacks))
    made = replace(plan, boxed=boxed, offloaded=Offloaded(names, before, why))
    return made if plan.gap is None else replace(made, gap=1 - (1 - plan.gap) * plan.seconds / made.seconds)


def with_names(plan: SpmdPlan, names: Sequence[str], why: str) -> SpmdPlan:
    """The plan with the values on the host that `Offloaded.names` names; without those that it does not have."""
    paths = {path: i for i, path in enumerate(plan.program.in_paths)}
    tied = {i: k for k, i in plan.donations.items()}
    stacks = {f"#{n}": r.stack for n, r in enumerate(find_residuals(plan.boxed.jaxpr))}
    arguments = {paths[name]: tied.get(paths[name]) for name in names if name in paths}
    return with_choice(plan, HostChoice(arguments, tuple(stacks[name] for name in names if name in stacks)), why)
