"""Plans as data: a program with a placement for each value, its boxings, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from shardc import compat
from shardc.ir.box import Boxed
from shardc.ir.collective import Collective
from shardc.ir.host_callback import runs_once
from shardc.ir.nested import NESTED
from shardc.ir.program import Program
from shardc.ir.transfer import is_transfer
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.machine.overlaps import RING_OPTIONS
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.memory import Memory, Profile, profile_boxed
from shardc.passes.estimate.overlap import Overlap
from shardc.passes.estimate.plan_cost import HostMove, PlanCost, Time, overlaps_of, plan_cost
from shardc.passes.recompute.recompute import Recomputed
from shardc.passes.trace.find_signatures import found_of
from shardc.plan.borders import Border, may_replace
from shardc.plan.request import Argument, Request
from shardc.plan.rewrites import RewriteTrial
from shardc.sbp.cost import launch_seconds
from shardc.sbp.placement import Placement
from shardc.sbp.signature import has_rule
from shardc.sbp.sub_axes import in_whole_axes

T = TypeVar("T")


@dataclass(frozen=True)
class Gathered:
    """Operations of one primitive that are replicated, because it has no sharding rule."""

    primitive: str
    count: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class FoundSignatures:
    """Operations of one primitive without a sharding rule that are split by automatically found signatures.

    Attributes:
      how: what justifies them: "its batching rule".
      rule: the decorator to paste.
    """

    primitive: str
    how: str
    rule: str
    count: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Unlimited:
    """Figures of the cheapest plan, which does not fit in memory: seconds of a call, and peak bytes of a device."""

    seconds: float
    peak: int


@dataclass(frozen=True)
class Offloaded:
    """The values of a plan that live on the host.

    Attributes:
      names: paths of arguments; `#2`: residual 2 of the loops.
      before: the boxed program that has them on the device.
      why: "offload= names it", or what moving them is for.
    """

    names: tuple[str, ...]
    before: Boxed
    why: str


@dataclass(frozen=True)
class UnevenResults:
    """A cheaper plan, some results of which are split unevenly. Nobody pinned them, so they are plain jax.Arrays.

    Attributes:
      pins: the path of each of these results, and the placement that it has in that plan.
      seconds, bytes: of a call of that plan.
    """

    pins: tuple[tuple[str, Placement], ...]
    seconds: float
    bytes: int


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """A program with a placement for each value on a mesh, and what it costs. Needs no devices.

    Attributes:
      program: the program before boxings were inserted.
      mesh: names, sizes and topology.
      boxed: the program with its boxings.
      inputs, outputs: placements of the arguments and the results.
      ties: for each result the number of the donated input whose buffer it may take; None if none.
    """

    program: Program
    mesh: MeshView
    boxed: Boxed
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    ties: tuple[int | None, ...]

    @property
    def whole_inputs(self) -> tuple[Placement, ...]:
        """The placements of the arguments on the user's mesh."""
        return tuple(in_whole_axes(p, self.mesh) for p in self.inputs)

    @property
    def whole_outputs(self) -> tuple[Placement, ...]:
        """The placements of the results on the user's mesh."""
        return tuple(in_whole_axes(p, self.mesh) for p in self.outputs)

    @cached_property
    def cost(self) -> PlanCost:
        """Collectives and seconds, read off the boxed program."""
        return plan_cost(self.boxed, self.mesh)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Each planned collective: kind, axes, bytes sent per device (all executions), count, source line."""
        return self.cost.collectives

    @cached_property
    def overlaps(self) -> tuple[Overlap, ...]:
        """Each collective that is counted as hidden, the work beside it, and the share that XLA hides of what could be
        hidden on this kind of machine. Their `hidden` add up to `time.overlapped`."""
        return tuple(overlaps_of(self.boxed, self.mesh)) if self.cost.time.overlapped else ()

    @property
    def xla_options(self) -> Mapping[str, str]:
        """The options that XLA is given for this program, where it is compiled for its machine."""
        return RING_OPTIONS if self.mesh.topology.backend == "gpu" and self.cost.time.overlapped_rings else {}

    @cached_property
    def time(self) -> Time:
        """Seconds of one call: computing, memory, each kind of collective, what overlaps, and the launch."""
        arrays = len(self.boxed.jaxpr.invars) + len(self.boxed.jaxpr.outvars)
        return self.cost.time + Time(launch=launch_seconds(arrays, self.mesh))

    @property
    def seconds(self) -> float:
        """Seconds of one call."""
        return self.time.total

    @property
    def compute_seconds(self) -> float:
        """Seconds of one call that a device computes."""
        return self.time.computing

    @property
    def added_seconds(self) -> float:
        """The sum of the equations' seconds, as the search adds them up: nothing is fused, nothing overlaps."""
        return self.cost.added

    @cached_property
    def bytes_per_device(self) -> float:
        """Bytes that each device sends in one call if the branches run that are expected to; nan if one is unknown."""
        return sum(c.bytes for c in self.collectives if c.branch != "other")

    @property
    def worst_bytes_per_device(self) -> float:
        """The same if none of these branches runs, as where sorted rows do not fit their exchange."""
        return sum(c.bytes for c in self.collectives if c.branch != "expected")

    @cached_property
    def memory(self) -> Memory:
        """Bytes that each device holds, as XLA will compile the plan: what it fuses is not counted."""
        return self.profile().memory

    def profile(self) -> Profile:
        """Bytes that each device holds at each point of the program."""
        return profile_boxed(self.boxed, self.mesh.sizes, self.donations, backend_of(self.mesh.topology.backend))

    @property
    def host_moves(self) -> tuple[HostMove, ...]:
        """Each planned move between a device's memory and its host's."""
        return self.cost.host_moves

    @cached_property
    def host_inputs(self) -> frozenset[int]:
        """The numbers of the inputs that live on the host."""
        return frozenset(i for i, v in enumerate(self.boxed.jaxpr.invars) if v in self.boxed.host)

    @cached_property
    def host_outputs(self) -> frozenset[int]:
        """The numbers of the results that live on the host."""
        host = self.boxed.host
        return frozenset(k for k, a in enumerate(self.boxed.jaxpr.outvars) if not compat.is_literal(a) and a in host)

    @property
    def donations(self) -> dict[int, int]:
        """For each result that takes the buffer of a donated input of the same placement, that input."""
        tied = may_replace(self.program, self.ties)
        return {k: i for k, i in tied.items() if self.inputs[i] == self.outputs[k]}

    @property
    def without_rule(self) -> list[compat.Eqn]:
        """Equations without a sharding rule, except those that make scalars only."""
        found: list[compat.Eqn] = []
        for eqn in all_eqns(self.boxed.jaxpr):
            name = eqn.primitive.name
            planned = has_rule(name) or name in _BY_THE_PLANNER or is_transfer(eqn) or runs_once(eqn)
            if not planned and any(v.aval.shape for v in eqn.outvars):
                found.append(eqn)
        return found

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """Operations that are replicated, because they have no sharding rule: `primitive`, `count`, `sources`."""
        found: dict[str, list[str]] = {}
        for eqn in self.without_rule:
            found.setdefault(eqn.primitive.name, []).append(compat.source_line(eqn))
        return tuple(Gathered(n, len(s), tuple(dict.fromkeys(s))) for n, s in sorted(found.items()))

    @cached_property
    def found(self) -> tuple[FoundSignatures, ...]:
        """Operations without a sharding rule that are split by signatures that were found: also `how`, the
        justification, and `rule`, to paste."""
        uses: dict[tuple[str, str, str], list[str]] = {}
        for eqn in all_eqns(self.boxed.jaxpr):
            if (found := found_of(eqn)) is not None:
                uses.setdefault((found.fn.primitive.name, found.fn.how, str(found)), []).append(compat.source_line(eqn))
        return tuple(FoundSignatures(*key, len(s), tuple(dict.fromkeys(s))) for key, s in sorted(uses.items()))


@dataclass(frozen=True, eq=False, kw_only=True)
class SpmdPlan(PlacedProgram):
    """The plan of one SPMD program, as the search gives it: `shardc.plans.Plan` shows it to people.

    Attributes:
      request: what was asked, with the pins as the search took them.
      gap: an upper bound on (seconds - least seconds) / seconds; None where nothing is proved.
      unlimited: the cheapest plan without the memory limit; None if the limit changed nothing.
      recomputed: values that are recomputed to save memory; `program` recomputes them. None: nothing.
      recomputed_for_speed: values of loops that are faster to recompute than to keep.
      offloaded: values that live on the host; `boxed` moves them. None: nothing does.
      trials: the rewrites that were planned besides.
      uneven: the plan with uneven results, if it saves much.
    """

    request: Request
    gap: float | None = None
    unlimited: Unlimited | None = None
    recomputed: Recomputed | None = None
    recomputed_for_speed: Recomputed | None = None
    offloaded: Offloaded | None = None
    trials: tuple[RewriteTrial, ...] = ()
    uneven: UnevenResults | None = None

    @property
    def all_on_device(self) -> Boxed:
        """The boxed program before values were moved to the host."""
        return self.boxed if self.offloaded is None else self.offloaded.before

    @property
    def parts(self) -> tuple[tuple[int, SpmdPlan], ...]:
        return ((0, self),)

    @property
    def in_borders(self) -> list[Border]:
        places, mesh = self.whole_inputs, self.mesh.whole
        values = zip(self.program.in_paths, self.program.in_avals, places, self.request.arguments, strict=True)
        return [
            Border(path, aval, placement, known, mesh, on_host=i in self.host_inputs)
            for i, (path, aval, placement, known) in enumerate(values)
        ]

    @property
    def out_borders(self) -> list[Border]:
        program, pins = self.program, self.request.results
        places, mesh = self.whole_outputs, self.mesh.whole
        values = zip(program.out_paths, program.out_avals, places, pins, self.ties, strict=True)
        return [
            Border(
                path,
                aval,
                at,
                Argument(pin),
                mesh,
                reuses=tie is not None and self.whole_inputs[tie] == at,
                on_host=k in self.host_outputs,
            )
            for k, (path, aval, at, pin, tie) in enumerate(values)
        ]

    @property
    def moves(self) -> list[tuple[int, Collective]]:
        return [(0, c) for c in self.collectives if c.bytes]

    @property
    def arguments(self) -> Sequence[Argument]:
        """The inputs as they were known before planning."""
        return self.request.arguments


_BY_THE_PLANNER = frozenset(("box", "constrain", "memory_move", "sharding_constraint", "shard_map", *NESTED))


def copied(plan: object, kind: type[T], **findings: Any) -> T:
    """A copy of a plan, as a plan of class `kind`, with new values of the fields in `findings`. The computed properties
    of a plan depend on none of these fields, so cached values are copied too."""
    made = object.__new__(kind)
    vars(made).update(vars(plan), **findings)
    return made
