"""The search for a plan: a request --> the cheapest plan that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from shardc import compat
from shardc.ir.box import Boxed
from shardc.ir.program import Program
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import Backend, backend_of
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.memory_limit import GOOD_ENOUGH, LimitResult, LimitSearch, Trial
from shardc.passes.place.place import Placed, Placer
from shardc.passes.recompute.recompute import (
    Recomputation,
    RecomputeChoice,
    RecomputeOptions,
    recompute,
    recompute_for_speed,
    recomputed,
)
from shardc.plan.borders import match_donated, may_replace, moves, pin_entries, problem_of
from shardc.plan.forbid import avoided_seconds
from shardc.plan.offload import most_freed, offloaded_within, with_named
from shardc.plan.plan import SpmdPlan, Unlimited, copied
from shardc.plan.request import Argument, Request
from shardc.plan.rewrites import REWRITES, RewriteTrial
from shardc.plan.uneven import uneven_results
from shardc.sbp.placement import REPLICATED, Pin
from shardc.solver import ROUNDING, Assignment, relative_gap

NOTHING: Final = Recomputation()


@dataclass(frozen=True, eq=False)
class DoesNotFit:
    """The answer to a request that no plan was found for.

    Attributes:
      request: what was asked.
      limit: bytes that each device has.
      fitted: the search that came nearest to the limit.
      plan: the cheapest plan without the limit.
      offloaded: a plan that fits because values live on the host, which `offload` does not allow.
    """

    request: Request
    limit: int
    fitted: LimitResult
    plan: SpmdPlan
    offloaded: SpmdPlan | None = None


def make_plan(request: Request) -> SpmdPlan | DoesNotFit:
    """The cheapest plan that was found within the request's limit, of the program and of what rewrites make of it."""
    compared = _Compared(request, _plan_as_written(request))
    for rewrite in REWRITES:
        given, before = compared.request, compared.best
        for program in rewrite.programs(given, None):
            other = replace(given, program=program)
            compared = compared.beside(rewrite.name, other, _plan_as_written(other), before)
    compared = compared.with_residuals_kept()
    best, trials = compared.best, compared.trials
    if isinstance(best, DoesNotFit):
        return best
    if trials:
        more = relative_gap(best.seconds, compared.least)
        gap = math.inf if best.gap is None else max(best.gap, more if more > ROUNDING else 0.0)
        best = copied(best, SpmdPlan, gap=gap if math.isfinite(gap) else None, trials=trials)
    uneven = uneven_results(best)
    return best if uneven is None else copied(best, SpmdPlan, uneven=uneven)


@dataclass(frozen=True, eq=False)
class _Compared:
    """The best of the plans that were made of one request's program and of rewritten ones.

    Attributes:
      request: the one that the best plan is of.
      best: that plan.
      trials: the rewrites that were planned.
      least: seconds that none of the other plans' programs can take less than.
    """

    request: Request
    best: SpmdPlan | DoesNotFit
    trials: tuple[RewriteTrial, ...] = ()
    least: float = math.inf

    def beside(
        self, name: str, request: Request, found: SpmdPlan | DoesNotFit, before: SpmdPlan | DoesNotFit
    ) -> _Compared:
        """The better one of the best plan and that of a rewritten program; `before` is the plan without the rewrite."""
        taken = _is_cheaper(found, self.best)
        trials = (*self.trials, RewriteTrial(name, _cost(found)[0], _cost(before)[0], taken))
        least = min(self.least, _least_seconds(self.best if taken else found))
        kept = (request, found) if taken else (self.request, self.best)
        return _Compared(*kept, trials, least)

    def with_residuals_kept(self) -> _Compared:
        """The better one of the best plan and that which recomputes no residuals of loops, if it recomputes some."""
        if isinstance(self.best, DoesNotFit) or self.best.recomputed_for_speed is None:
            return self
        kept = _plan_as_written(self.request, keeps=True)
        better = _is_cheaper(kept, self.best)
        trial = RewriteTrial("recompute_residuals", self.best.seconds, _cost(kept)[0], taken=not better)
        least = min(self.least, _least_seconds(self.best if better else kept))
        return _Compared(self.request, kept if better else self.best, (*self.trials, trial), least)


def _is_cheaper(found: SpmdPlan | DoesNotFit, other: SpmdPlan | DoesNotFit) -> bool:
    """Whether it costs less by more than rounding."""
    (seconds, peak), (others, other_peak) = _cost(found), _cost(other)
    return seconds < others * (1 - ROUNDING) or (seconds == others == math.inf and peak < other_peak)


def _cost(found: SpmdPlan | DoesNotFit) -> tuple[float, int]:
    """Seconds, with those of what is avoided, and for what does not fit the least bytes that were found."""
    return (math.inf, found.fitted.least.peak) if isinstance(found, DoesNotFit) else (_priced(found), 0)


def _priced(plan: SpmdPlan) -> float:
    return plan.seconds + avoided_seconds(plan.parts)


def _least_seconds(found: SpmdPlan | DoesNotFit) -> float:
    """The least that a plan of the same program could take."""
    if isinstance(found, DoesNotFit):
        return math.inf
    return 0.0 if found.gap is None else found.seconds / (1 + found.gap)


def _plan_as_written(request: Request, keeps: bool = False) -> SpmdPlan | DoesNotFit:
    """The cheapest plan that was found for one program, which recomputes residuals of loops for speed; none if it
    `keeps` them."""
    program, for_speed = (request.program, NOTHING) if keeps else recompute_for_speed(request.program, request.mesh)
    placing = Placing.of(replace(request, program=program), for_speed)
    return placing.plan if request.limit is None else placing.within(request.limit)


@dataclass(frozen=True, eq=False)
class Placing:
    """A program that is to be placed on a mesh: once wherever is cheapest, then within any limits on memory."""

    traced: Program
    search: _Search

    @classmethod
    def of(cls, request: Request, for_speed: Recomputation = NOTHING) -> Placing:
        program = request.program
        arguments = [*request.arguments, *[Argument()] * (len(program.in_paths) - len(request.arguments))]
        entered = pin_entries(program, arguments)
        ties = match_donated(entered, arguments)
        wanted: list[Pin | None] = []
        for pin, tie, var in zip(request.results, ties, entered.jaxpr.outvars, strict=True):
            if pin is None and tie is None and compat.is_literal(var):
                pin = Pin(REPLICATED)
            if pin is None and tie is not None and moves(arguments[tie]):
                pin = arguments[tie].pin  # where the next call wants it
            wanted.append(pin)
        asked = replace(request, program=entered, arguments=tuple(arguments), results=tuple(wanted))
        return cls(program, _Search(asked, tuple(ties), for_speed))

    @property
    def plan(self) -> SpmdPlan:
        """The cheapest, whatever memory it takes."""
        return self.search.plan

    def nearest(self, limit: int) -> SpmdPlan:
        """A plan that takes at most so many bytes of each device, or if none was found one that takes least. All that
        it keeps without the limit it keeps."""
        whole = _Within(self.search, limit)
        if whole.fits:
            return self.plan
        fitted = whole.fit()
        return self._instead(whole.plan_of(fitted.best or fitted.least))

    def _instead(self, plan: SpmdPlan) -> SpmdPlan:
        return copied(plan, SpmdPlan, unlimited=Unlimited(self.plan.seconds, self.plan.memory.peak))

    def within(self, limit: int) -> SpmdPlan | DoesNotFit:
        """A plan that takes at most `limit` bytes of each device; it may recompute values instead of keeping them."""
        whole, request = _Within(self.search, limit), self.search.request
        if whole.fits:
            return self.plan
        plans, fitted, missed = _all_within(whole, self.traced)
        offloaded: list[SpmdPlan] = []
        if request.offload == "auto" or (request.offload == "never" and not plans):
            least = [s.plan_of(f.least) for s, f in fitted.items() if f.best is None]
            offloaded = _all_offloaded(whole, [*(s.plan for s in missed), *least])
        if request.offload == "auto":
            plans += offloaded
        if plans:
            return self._instead(min(plans, key=_priced))
        nearest = min(fitted.values(), key=lambda f: f.least.peak)
        return DoesNotFit(request, limit, nearest, self.plan, min(offloaded, key=lambda p: p.seconds, default=None))


def _all_offloaded(whole: _Within, plans: Sequence[SpmdPlan]) -> list[SpmdPlan]:
    """Plans that fit because values live on the host, of plans that do not fit; if there are none, of a plan that fits
    in as many bytes more as moving values of the cheapest plan frees."""
    found = [offloaded_within(plan, whole.limit) for plan in plans]
    if not any(found):
        more = _Within(whole.search, whole.limit + most_freed(whole.plan))
        fitted = more.fit()
        found.append(offloaded_within(more.plan_of(fitted.best or fitted.least), whole.limit))
    return [plan for plan in found if plan is not None]


def _all_within(
    whole: _Within, traced: Program
) -> tuple[list[SpmdPlan], dict[_Within, LimitResult], list[_Within]]:  # fmt: skip
    """Plans that fit, of the program as it is and of programs that recompute values; the searches' results where none
    does at once; and the searches whose cheapest plan does not fit."""
    search, limit = whole.search, whole.limit
    everything_on_device = search.request.offload == "never"
    if everything_on_device and whole.fitting.memory.least_arguments() > limit:  # nothing fits; the error says why
        return [], {whole: whole.fit()}, [whole]
    options = RecomputeOptions(search.plan.boxed, search.plan.profile(), search.mesh, search.backend)
    plans, fitted = list[SpmdPlan](), dict[_Within, LimitResult]()

    def fit(s: _Within) -> None:
        fitted[s] = found = s.fit(alone=not options.most)
        if found.best is not None:
            plans.append(s.plan_of(found.best))

    if options.most < search.plan.memory.peak - limit and whole.may_fit:
        fit(whole)
    least_cost = whole.fitting.least_cost
    missed = [whole]
    hopeless = plans and least_cost(limit + options.most) > (1 - GOOD_ENOUGH) * least_cost(limit)
    if not (hopeless or any(map(_near, plans))):
        missed, found = _recomputing(whole, options, traced)
        plans += found
        smallest = min(missed, key=lambda s: s.plan.memory.peak)
        cheapest = sorted((s for s in missed if s not in fitted and s.may_fit), key=lambda s: s.plan.seconds)[:1]
        for s in dict.fromkeys(s for s in (*cheapest, smallest) if s not in fitted):
            better = s.may_fit and not any(_near(p) or (1 - GOOD_ENOUGH) * p.seconds <= s.plan.seconds for p in plans)
            if better or not plans:
                fit(s)
    return plans, fitted, missed


def _recomputing(whole: _Within, options: RecomputeOptions, traced: Program) -> tuple[list[_Within], list[SpmdPlan]]:
    """Searches for the amount of recomputation. Returns the attempts that do not fit, least recomputation first, and
    the plans that fit. The bytes that a recomputation really frees are known only when the program is planned. Where
    all recomputation is too little, the part that is worth its time is tried first: placements free the rest."""
    limit, peak = whole.limit, whole.plan.memory.peak
    missed, plans, tried, dearest = [whole], list[SpmdPlan](), [RecomputeChoice()], math.inf
    low, high, wanted = 0.0, math.inf, float(peak - limit if peak - limit <= options.most else options.worth)
    for _ in range(TRIES):
        choice, freed = options.choose(wanted, dearest)
        if choice in tried:
            if wanted == math.inf or high < math.inf:
                break
            wanted = math.inf
            continue
        tried.append(choice)
        trial = _Within(whole.search.recomputing(choice, traced), limit)
        if trial.fits:
            plans.append(trial.plan)
            high = min(wanted, options.most)
            if _near(trial.plan) or trial.plan.memory.peak > FULL * limit:
                break
        else:
            missed.append(trial)
            both = choice.stacks and choice.values and dearest == math.inf
            if both and trial.plan.memory.peak > peak - ENOUGH * freed:
                # unrolled values fill another point when they are recomputed, as logits do: loops pay the high prices
                dearest = options.typical
                continue
            low = wanted = max(wanted, freed)
        if high < math.inf:
            wanted = (low + high) / 2
        elif len(missed) <= PATIENT:
            wanted += MORE * (trial.plan.memory.peak - limit)
        else:
            wanted = math.inf
    return missed, plans


def _near(plan: SpmdPlan) -> bool:
    """Whether a plan is proved to cost next to nothing more than the best without a limit."""
    return plan.gap is not None and plan.gap <= GOOD_ENOUGH


TRIES: Final = 6
"""The most amounts of recomputation that are planned for one limit."""


PATIENT: Final = 3
"""Attempts that free too little, after which all that may be is recomputed."""


MORE: Final = 1.25
"""The factor on the bytes over the limit that the next attempt frees in addition."""


ENOUGH: Final = 0.9
"""The part of the chosen bytes that an attempt has to free. If it frees less, the recomputed values fill another
point of the program."""


FULL: Final = 0.95
"""The part of the limit from which on a plan is full enough: no attempt that frees less is planned."""


@dataclass(frozen=True, eq=False)
class _Search:
    """The plans of one program: as it is, or as it recomputes values to save memory. It may have some that are
    recomputed `for_speed` anyway."""

    request: Request
    ties: tuple[int | None, ...]
    for_speed: Recomputation
    recomputation: Recomputation = NOTHING
    bound: float = math.inf

    @property
    def program(self) -> Program:
        return self.request.program

    @property
    def mesh(self) -> MeshView:
        return self.request.mesh

    def recomputing(self, choice: RecomputeChoice, traced: Program) -> _Search:
        """The search for the program that recomputes the chosen values. The cost bound of the program that keeps them
        limits its own bound from above."""
        jaxpr, recomputation = recompute(self.program.jaxpr, choice, traced.jaxpr)
        request = replace(self.request, program=self.program.after("recompute", jaxpr))
        return replace(self, request=request, recomputation=recomputation, bound=self.cheapest.bound)

    @cached_property
    def backend(self) -> Backend:
        return backend_of(self.mesh.topology.backend)

    @cached_property
    def placer(self) -> Placer:
        return Placer(problem_of(self.request, self.ties), self.mesh)

    @cached_property
    def cheapest(self) -> Assignment:
        """The cheapest choices found. A program that computes something again may go without a proof of its own."""
        if self.bound == math.inf:
            return self.placer.tables.best()
        found = self.placer.tables.best(proved=False)
        return replace(found, bound=max(found.bound, min(self.bound, found.cost)))

    @cached_property
    def plan(self) -> SpmdPlan:
        """The cheapest, whatever memory it takes."""
        placed = self.placer.placed(self.cheapest)
        return self.plan_of(placed, insert_boxing(self.placer.problem, placed, self.mesh))

    def plan_of(self, placed: Placed, boxed: Boxed) -> SpmdPlan:
        problem, on_host = self.placer.problem, self.request.on_host
        gap = max(placed.gap, relative_gap(placed.seconds, self.bound))
        plan = SpmdPlan(
            self.program, self.mesh, boxed, tuple(placed.ports[n][-1] for n in problem.sources),
            tuple(placed.ports[n][0] for n in problem.sinks), self.ties, request=self.request,
            gap=gap if math.isfinite(gap) else None,
            recomputed=recomputed(boxed, self.mesh, self.backend, self.recomputation),
            recomputed_for_speed=recomputed(boxed, self.mesh, self.backend, self.for_speed),
        )  # fmt: skip
        return with_named(plan, on_host)


@dataclass(frozen=True, eq=False)
class _Within:
    """A search, and a limit in bytes of each device."""

    search: _Search
    limit: int

    @property
    def plan(self) -> SpmdPlan:
        """The cheapest, whatever memory it takes."""
        return self.search.plan

    @property
    def fits(self) -> bool:
        """Whether the cheapest does."""
        return self.plan.memory.peak <= self.limit

    @cached_property
    def fitting(self) -> LimitSearch:
        """The search for what fits."""
        s = self.search
        return LimitSearch(s.placer, may_replace(s.program, s.ties), s.backend, self.limit)

    @cached_property
    def may_fit(self) -> bool:
        """Whether it would, were every value where it takes least."""
        return self.fitting.memory.least() <= self.limit

    def fit(self, alone: bool = True) -> LimitResult:
        return self.fitting.run(self.search.cheapest, alone)

    def plan_of(self, trial: Trial) -> SpmdPlan:
        return self.search.plan_of(trial.placed, trial.boxed)
