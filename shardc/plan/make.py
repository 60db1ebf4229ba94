"""The search for a plan: a request --> the cheapest plan that fits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from shardc import compat
from shardc.ir.box import Boxed
from shardc.ir.program import Program
from shardc.machine.mesh import MeshView
from shardc.passes import passes_that_run, run
from shardc.passes.estimate.backend import Backend, backend_of
from shardc.passes.place.cut_axes import cut_axes
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.memory_limit import LimitResult, LimitSearch, Trial
from shardc.passes.place.place import Placed, Placer
from shardc.passes.recompute.recompute import RecomputeChoice, RecomputeOptions, recompute_to_fit, recomputed
from shardc.plan.borders import match_donated, may_replace, problem_of
from shardc.plan.forbid import avoided_seconds
from shardc.plan.offload import most_freed, offloaded_within, with_named
from shardc.plan.plan import SpmdPlan, Unlimited, copied
from shardc.plan.request import Argument, Request
from shardc.plan.rewrites import Compared, RewriteTrial, compare
from shardc.plan.uneven import uneven_results
from shardc.sbp.placement import REPLICATED, Pin
from shardc.solver import ROUNDING, Assignment
from shardc.solver.within_limit import BUDGET, GOOD_ENOUGH, CheapestThatFits

RESIDUALS: Final = "recompute_residuals"
"""The pass that is tried and left out."""
CUT: Final = "cut_axes"
"""The pass that is tried on the best plan."""


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
    compared = _or_with_residuals_kept(compare(request, _plan_as_written, lambda p: _cost(p)[0], _is_cheaper))
    compared = _or_with_axes_cut(compared)
    best, trials = compared.best, compared.trials
    if isinstance(best, DoesNotFit):
        return best
    if trials:
        gap = None if best.gap is None else _gap(best.seconds, min(map(_least_seconds, compared.found)))
        free = None if request.limit is None else min(map(_unlimited, compared.found), key=lambda u: u.seconds)
        if free is None or free.seconds >= (1 - ROUNDING) * _unlimited(best).seconds:
            free = best.unlimited
        best = copied(best, SpmdPlan, gap=gap, trials=trials, unlimited=free)
    uneven = uneven_results(best)
    return best if uneven is None else copied(best, SpmdPlan, uneven=uneven)


def _or_with_residuals_kept(compared: Compared[SpmdPlan | DoesNotFit]) -> Compared[SpmdPlan | DoesNotFit]:
    """The comparison with the plan that recomputes no residuals of loops, if the best one recomputes some."""
    request, best = compared.request, compared.best
    if isinstance(best, DoesNotFit) or best.recomputed_for_speed is None:
        return compared
    kept = _plan_as_written(request, best, keeps=True)
    better = _is_cheaper(kept, best)
    trial = RewriteTrial(RESIDUALS, best.seconds, _cost(kept)[0], taken=not better)
    return Compared(request, kept if better else best, (*compared.found, kept), (*compared.trials, trial))


def _or_with_axes_cut(compared: Compared[SpmdPlan | DoesNotFit]) -> Compared[SpmdPlan | DoesNotFit]:
    """The comparison with the plan on a mesh with axes cut in sub-axes, if reshapes of the best one ask for them."""
    best = compared.best
    if isinstance(best, DoesNotFit):
        return compared
    pinned = [(b.placement, b.aval.shape) for b in (*best.in_borders, *best.out_borders) if b.is_fixed]
    if not (counts := cut_axes(best.boxed, best.mesh, _priced(best) - best.time.launch, pinned)):
        return compared
    request = replace(compared.request, mesh=compared.request.mesh.cut(counts))
    cut = _plan_as_written(request, best, keeps=best.recomputed_for_speed is None)
    better = _is_cheaper(cut, best)
    trial = RewriteTrial(CUT, _cost(cut)[0], best.seconds, taken=better)
    found, trials = (*compared.found, cut), (*compared.trials, trial)
    return Compared(request, cut, found, trials) if better else Compared(compared.request, best, found, trials)


def _is_cheaper(found: SpmdPlan | DoesNotFit, other: SpmdPlan | DoesNotFit) -> bool:
    """Whether it costs less by more than rounding."""
    (seconds, peak), (others, other_peak) = _cost(found), _cost(other)
    return seconds < others * (1 - ROUNDING) or (seconds == others == math.inf and peak < other_peak)


def _cost(found: SpmdPlan | DoesNotFit) -> tuple[float, int]:
    """Seconds, with those of what is avoided, and for what does not fit the least bytes that were found."""
    return (math.inf, found.fitted.least.peak) if isinstance(found, DoesNotFit) else (_priced(found), 0)


def _priced(plan: SpmdPlan) -> float:
    return plan.seconds + avoided_seconds(plan.parts)


def _unlimited(found: SpmdPlan | DoesNotFit) -> Unlimited:
    """The cheapest plan of the same program without the limit."""
    plan = found.plan if isinstance(found, DoesNotFit) else found
    return plan.unlimited or Unlimited(plan.seconds, plan.memory.peak)


def _least_seconds(found: SpmdPlan | DoesNotFit) -> float:
    """The least that a plan of the same program could take."""
    if isinstance(found, DoesNotFit):
        return math.inf
    return 0.0 if found.gap is None else found.seconds * (1 - found.gap)


def _gap(seconds: float, least: float) -> float:
    """The part of the seconds by which a plan could be faster at most."""
    more = (seconds - least) / seconds if seconds else 0.0
    return more if more > ROUNDING else 0.0


def _plan_as_written(
    request: Request, known: SpmdPlan | DoesNotFit | None = None, keeps: bool = False
) -> SpmdPlan | DoesNotFit:  # fmt: skip
    """The cheapest plan that was found for one program, which recomputes residuals of loops for speed; none if it
    `keeps` them. The search begins where the known plan of a similar program has its values."""
    passes = passes_that_run("before placing", "one program")
    program = run([p for p in passes if not (keeps and p.name == RESIDUALS)], request.program, request.context)
    request = replace(request, program=program)
    placing = Placing.of(request, known.plan if isinstance(known, DoesNotFit) else known)
    return placing.plan if request.limit is None else placing.within(request.limit)


@dataclass(frozen=True, eq=False)
class Placing:
    """A program that is to be placed on a mesh: once wherever is cheapest, then within any limits on memory."""

    search: _PlanSearch

    @classmethod
    def of(cls, request: Request, known: SpmdPlan | None = None) -> Placing:
        program = request.program
        arguments = [*request.arguments, *[Argument()] * (len(program.in_paths) - len(request.arguments))]
        ties = match_donated(program, arguments)
        wanted: list[Pin | None] = []
        for pin, tie, var in zip(request.results, ties, program.jaxpr.outvars, strict=True):
            if pin is None and tie is None and compat.is_literal(var):
                pin = Pin(REPLICATED)
            if pin is None and tie is not None and arguments[tie].moves:
                pin = arguments[tie].pin  # where the next call wants it
            wanted.append(pin)
        asked = replace(request, arguments=tuple(arguments), results=tuple(wanted))
        return cls(_PlanSearch(asked, tuple(ties), known=known))

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
        fitted = whole.fit_nearest()
        return self._instead(whole.plan_of(fitted.best or fitted.least))

    def _instead(self, plan: SpmdPlan) -> SpmdPlan:
        return copied(plan, SpmdPlan, unlimited=Unlimited(self.plan.seconds, self.plan.memory.peak))

    def within(self, limit: int) -> SpmdPlan | DoesNotFit:
        """A plan that takes at most `limit` bytes of each device; it may recompute values instead of keeping them."""
        whole, request = _Within(self.search, limit), self.search.request
        if whole.fits:
            return self.plan
        fitting = _Fitting(whole)
        fitting.on_device()
        best = fitting.found.best
        if request.offload == "auto" or (request.offload == "never" and best is None):
            fitting.on_host()
        if request.offload == "auto":
            best = fitting.found.best
        if best is not None:
            return self._instead(best)
        nearest = min(fitting.fitted.values(), key=lambda f: f.least.peak)
        return DoesNotFit(request, limit, nearest, self.plan, fitting.found.best)


class _Fitting:
    """The search for the cheapest plan of a program that fits: with prices on memory, with recomputation, with both,
    or with values on the host.

    Args:
      whole: the program that keeps all that it does without the limit.

    Attributes:
      found: the plans that were made.
      missed: the programs whose cheapest plan does not fit, least recomputation first.
      fitted: for those that were searched with prices on memory, the results.
    """

    def __init__(self, whole: _Within) -> None:
        self.whole, self.limit = whole, whole.limit
        self.found = CheapestThatFits[SpmdPlan](self.limit, lambda p: p.memory.peak, _priced)
        self.missed, self.fitted = [whole], dict[_Within, LimitResult]()

    @property
    def is_near(self) -> bool:
        """Whether a plan costs next to nothing more than the fastest without a limit."""
        return self.found.best is not None and not self.found.may_win(self.whole.plan.seconds, GOOD_ENOUGH)

    def on_device(self) -> None:
        """Adds plans without values on the host."""
        whole, limit, search = self.whole, self.limit, self.whole.search
        if search.request.offload == "never" and whole.fitting.memory.least_arguments() > limit:
            self._with_prices(whole, True)  # nothing fits; the error says why
            return
        options = RecomputeOptions(search.plan.boxed, search.plan.profile(), search.mesh, search.backend)
        if options.most < search.plan.memory.peak - limit and whole.may_fit:
            self._with_prices(whole, not options.most)
            least_cost = whole.fitting.least_cost
            hopeless = least_cost(limit + options.most) > (1 - GOOD_ENOUGH) * least_cost(limit)
            if self.found.best is not None and (hopeless or self.is_near):
                return
        self._recomputing(options)
        smallest = min(self.missed, key=lambda s: s.plan.memory.peak)
        rest = [s for s in self.missed if s not in self.fitted]
        cheapest = min((s for s in rest if s.may_fit), key=lambda s: s.plan.seconds, default=smallest)
        for s in dict.fromkeys((cheapest, smallest)):
            better = s.may_fit and not self.is_near and self.found.may_win(s.plan.seconds, GOOD_ENOUGH)
            if s in rest and (better or self.found.best is None):
                self._with_prices(s, not options.most)

    def on_host(self) -> None:
        """Adds plans that fit because values live on the host: of plans that do not fit, or if there are none, of one
        that fits in as many bytes more as moving values of the cheapest plan frees."""
        limit, whole = self.limit, self.whole
        least = [s.plan_of(f.least) for s, f in self.fitted.items() if f.best is None]
        plans = [p for p in (*(s.plan for s in self.missed), *least) if self.found.may_win(p.seconds)]
        found = [offloaded_within(p, limit) for p in plans]
        if found and not any(found):
            more = _Within(whole.search, limit + most_freed(whole.plan))
            fitted = more.fit()
            found.append(offloaded_within(more.plan_of(fitted.best or fitted.least), limit))
        for plan in filter(None, found):
            self.found.add(plan)

    def _with_prices(self, s: _Within, alone: bool) -> None:
        self.fitted[s] = found = s.fit(alone)
        if found.best is not None:
            self.found.add(s.plan_of(found.best))

    def _recomputing(self, options: RecomputeOptions) -> None:
        """Tries amounts of recomputation. The bytes that one really frees are known only when the program is planned.
        Where all recomputation is too little, the part that is worth its time is tried first: placements free the
        rest."""
        limit, peak = self.limit, self.whole.plan.memory.peak
        tried, dearest, low, high = [RecomputeChoice()], math.inf, 0.0, math.inf
        wanted = float(peak - limit if peak - limit <= options.most else options.worth)
        for _ in range(BUDGET):
            choice, freed = options.choose(wanted, dearest)
            if choice in tried:
                if wanted == math.inf or high < math.inf:
                    break
                wanted = math.inf
                continue
            tried.append(choice)
            trial = _Within(self.whole.search.recomputing(choice), limit)
            if trial.fits:
                self.found.add(trial.plan)
                high = min(wanted, options.most)
                if self.is_near or trial.plan.memory.peak > FULL * limit:
                    break
            else:
                self.missed.append(trial)
                both = choice.stacks and choice.values and dearest == math.inf
                if both and trial.plan.memory.peak > peak - FULL * freed:
                    # unrolled values fill another point when they are recomputed, as logits do: loops pay the high
                    # prices
                    dearest = options.typical
                    continue
                low = wanted = max(wanted, freed)
            if high < math.inf:
                wanted = (low + high) / 2
            elif len(self.missed) <= BUDGET // 2:
                wanted += MORE * (trial.plan.memory.peak - limit)
            else:
                wanted = math.inf


MORE: Final = 1.25
"""The factor on the bytes over the limit that the next attempt frees in addition."""


FULL: Final = 0.95
"""The part that counts as all: of the limit, from which on no attempt that frees less is planned; of the chosen bytes
that an attempt has to free, or else the recomputed values fill another point of the program."""


@dataclass(frozen=True, eq=False)
class _PlanSearch:
    """The plans of one program: as it is, or as it recomputes values to save memory.

    Attributes:
      ties: for each result the argument whose placement it takes, if any.
      bound: no plan costs less.
      known: a plan of a similar program, where the search begins.
    """

    request: Request
    ties: tuple[int | None, ...]
    bound: float = math.inf
    known: SpmdPlan | None = None

    @property
    def program(self) -> Program:
        return self.request.program

    @property
    def mesh(self) -> MeshView:
        return self.request.mesh

    def recomputing(self, choice: RecomputeChoice) -> _PlanSearch:
        """The search for the program that recomputes the chosen values. The cost bound of the program that keeps them
        limits its own bound from above."""
        request = replace(self.request, program=recompute_to_fit(self.program, choice))
        return replace(self, request=request, bound=self.cheapest.bound)

    @cached_property
    def backend(self) -> Backend:
        return backend_of(self.mesh.topology.backend)

    @cached_property
    def placer(self) -> Placer:
        return Placer(problem_of(self.request, self.ties), self.mesh)

    @cached_property
    def cheapest(self) -> Assignment:
        """The choices of the least cost that the search found. A program that computes something again may go without a
        proof of its own."""
        if self.bound == math.inf:
            return self.placer.tables.best(self.known and self.placer.near(self.known.boxed.placements))
        found = self.placer.tables.best(proved=False)
        return replace(found, bound=max(found.bound, min(self.bound, found.cost)))

    @cached_property
    def plan(self) -> SpmdPlan:
        """The plan of these choices, or of those near by without rings if it takes fewer seconds, whatever memory it
        takes."""
        plans = map(self._plan_of_choices, [self.cheapest, *self.placer.without_rings(self.cheapest)])
        return functools.reduce(lambda best, other: other if _is_cheaper(other, best) else best, plans)

    def _plan_of_choices(self, found: Assignment) -> SpmdPlan:
        placed = self.placer.placed(found)
        return self.plan_of(placed, insert_boxing(self.placer.problem, placed, self.mesh))

    def plan_of(self, placed: Placed, boxed: Boxed) -> SpmdPlan:
        problem, on_host = self.placer.problem, self.request.on_host
        plan = SpmdPlan(
            self.program, self.mesh, boxed, tuple(placed.ports[n][-1] for n in problem.sources),
            tuple(placed.ports[n][0] for n in problem.sinks), self.ties, request=self.request,
            recomputed=recomputed(boxed, self.mesh, self.backend, self.program.to_fit),
            recomputed_for_speed=recomputed(boxed, self.mesh, self.backend, self.program.for_speed),
        )  # fmt: skip
        bound = min(placed.seconds / (1 + placed.gap), self.bound)
        least = self.placer.least_seconds(bound, placed.seconds, plan.cost.time.total) + plan.time.launch
        return with_named(copied(plan, SpmdPlan, gap=_gap(plan.seconds, least)), on_host)


@dataclass(frozen=True, eq=False)
class _Within:
    """A search, and a limit in bytes of each device."""

    search: _PlanSearch
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

    def fit_nearest(self) -> LimitResult:
        """The result within the limit, or within the least that the arguments take if that is more."""
        least = math.ceil(self.fitting.memory.least_arguments())
        return (self if least <= self.limit else _Within(self.search, least)).fit()

    def plan_of(self, trial: Trial) -> SpmdPlan:
        return self.search.plan_of(trial.placed, trial.boxed)
