"""Chooses what a program recomputes instead of keeping it, where memory is short, and names it for plans.

Residuals of loops are recomputed by `recompute_residuals`, values outside of loops by `recompute_values`. Both cost
seconds and free bytes, so one price a byte chooses among them. Before that, whatever the memory, `recompute_for_speed`
has taken what is faster to recompute than to keep.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p
from shardc.ir.nested import bodies_of, trips_of
from shardc.ir.program import Program, Recomputation
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.passes import Context
from shardc.passes.estimate.backend import Backend
from shardc.passes.estimate.live_ranges import scopes_at
from shardc.passes.estimate.memory import Profile
from shardc.passes.estimate.plan_cost import alone_seconds, plan_cost
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.recompute.choose_residuals import ResidualLoop, choose_residuals, loops_of, placed_costs
from shardc.passes.recompute.recompute_residuals import Slices, find_residuals, recompute_residuals
from shardc.passes.recompute.recompute_values import LiveAtPeak, recompute_values


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """The values to recompute.

    Attributes:
      stacks: residuals of loops.
      instead: values of the steps of these loops, to be stacked in their place.
      values: values outside of loops; each with the first value made behind the point from which on its readers read
        the recomputed one.
    """

    stacks: tuple[Var, ...] = ()
    instead: tuple[Var, ...] = ()
    values: Mapping[Var, Var] = field(default_factory=dict[Var, Var])

    def __bool__(self) -> bool:
        return bool(self.stacks or self.values)


LOWEST, HIGH, HIGHEST = 1e-4, 4.0, 1e4
"""Prices, relative to the average seconds a byte of the plan: the lowest that is tried, the highest, and the highest if
all is to be recomputed. Above a price there may be cheaper ways to free memory."""
BISECTIONS: Final = 12
"""Bisection steps between two prices."""


class RecomputeOptions:
    """The values that a plan could recompute.

    Args:
      boxed, profile: the plan, and its memory.
      mesh, backend: of the devices.

    Attributes:
      most: bytes that recomputing all of them frees.
      worth: bytes that are freed at the typical price.
      typical: the seconds of the plan over its bytes.
    """

    def __init__(self, boxed: Boxed, profile: Profile, mesh: MeshView, backend: Backend) -> None:
        self.loops = list(loops_of(boxed.jaxpr, placed_costs(boxed, mesh, backend)))
        scopes = [] if backend.eager else scopes_at(boxed.jaxpr, int(profile.bytes.argmax()))
        peaks = [LiveAtPeak(boxed, profile, scope, mesh, backend) for scope in scopes if scope.now]
        self.peaks = [c for c in peaks if c.bytes and c.since is not None]
        self.typical = plan_cost(boxed, mesh).time.total / max(1, profile.peak)
        self.most, self.worth = self._free(self.typical * HIGHEST), self._free(self.typical)

    def choose(self, wanted: float, highest: float = math.inf) -> tuple[RecomputeChoice, float]:
        """The cheapest recomputations that free `wanted` bytes (`inf`: as many as possible), and the bytes they free.

        Only the first equations pay the price at which that is enough: layers cost the same, and not all may be needed.

        Args:
          wanted: bytes.
          highest: the highest price of a byte of values outside of loops.
        """
        low, high = self.typical * LOWEST, self.typical * (HIGH if math.isfinite(wanted) else HIGHEST)
        if self._free(high, highest) > wanted:
            for _ in range(BISECTIONS):
                middle = math.sqrt(low * high)
                low, high = (low, middle) if self._free(middle, highest) >= wanted else (middle, high)
        freed = self._free(high, highest)

        def first(place: ResidualLoop | LiveAtPeak, less: float, more: float) -> int:
            """The number of its equations that pay the higher price."""
            nonlocal freed
            least, most, others = 0, place.count, freed - place.choose(more)[-1]
            while freed > wanted and most - least > 1:
                middle = (least + most) // 2
                enough = others + place.choose(less, more, middle)[-1] >= wanted
                least, most = (least, middle) if enough else (middle, most)
            freed = others + place.choose(less, more, most)[-1]
            return most

        stacks, instead, values = list[Var](), list[Var](), dict[Var, Var]()
        for loop in self.loops:
            less, more, _ = loop.choose(low, high, first(loop, low, high))
            stacks += less
            instead += more
        low, high = min(low, highest), min(high, highest)
        for c in self.peaks:
            if c.since is not None:
                values |= dict.fromkeys(c.choose(low, high, first(c, low, high))[0], c.since)
        return RecomputeChoice(tuple(stacks), tuple(instead), values), freed

    def _free(self, price: float, highest: float = math.inf) -> float:
        in_loops = sum(loop.choose(price)[-1] for loop in self.loops)
        return in_loops + sum(c.choose(min(price, highest))[-1] for c in self.peaks)


def recompute(jaxpr: Jaxpr, choice: RecomputeChoice) -> tuple[Jaxpr, Recomputation]:
    """The program with the chosen recomputations, and what they are.

    Args:
      jaxpr: canonical, without any of them.
      choice: of its values.
    """
    choice = _that_follows(jaxpr, choice)  # a row that is a boxed carry in the plan is the carry itself here
    if not choice and not choice.instead:
        return jaxpr, Recomputation()
    names = names_of(jaxpr, choice)
    jaxpr, stacks = recompute_residuals(jaxpr, choice.stacks, choice.instead)
    left = {v for e in all_eqns(jaxpr) for v in e.outvars} if choice.values else set[Var]()
    jaxpr, values = recompute_values(jaxpr, {v: since for v, since in choice.values.items() if since in left})
    return jaxpr, Recomputation(names, {**values, **stacks})


def recompute_for_speed(program: Program, context: Context) -> Program:
    """The program that recomputes residuals of loops where that is faster than to keep them. It is an estimate, before
    anything is placed on the mesh; or it is as in a saved plan."""
    jaxpr, known = program.jaxpr, context.known
    if known is None:
        choice = RecomputeChoice(*choose_residuals(jaxpr, context.view))
    else:
        choice = choice_named(jaxpr, known.recomputed_for_speed)
    jaxpr, found = recompute(jaxpr, choice)
    return replace(program.after("recompute_residuals", jaxpr), for_speed=found)


def recompute_again(program: Program, context: Context) -> Program:
    """The program that recomputes to save memory what it does in a saved plan."""
    names = () if context.known is None else context.known.recomputed
    return recompute_to_fit(program, choice_named(program.jaxpr, names)) if names else program


def recompute_to_fit(program: Program, choice: RecomputeChoice) -> Program:
    """The program with recomputations that were chosen to save memory."""
    jaxpr, found = recompute(program.jaxpr, choice)
    return replace(program.after("recompute", jaxpr), to_fit=found)


# --- names, and what a plan says -------------------------------------------------------------------------------------


def names_of(jaxpr: Jaxpr, choice: RecomputeChoice) -> tuple[str, ...]:
    """Names that are the same in every process: `12.3` is result 3 of operation 12, a residual; `+57.0` is stacked in
    the place of residuals; `12.3>57.0` is a value that is recomputed for its readers from the operation on that makes
    `57.0`."""
    known = _names(jaxpr)
    return (
        *(known[v] for v in choice.stacks),
        *(f"+{known[v]}" for v in choice.instead),
        *(f"{known[v]}>{known[since]}" for v, since in choice.values.items()),
    )


def choice_named(jaxpr: Jaxpr, names: Collection[str]) -> RecomputeChoice:
    """The choice that names mean, without values that do not exist or do not follow from what is kept."""
    known = {name: v for v, name in _names(jaxpr).items()}
    pairs = [(known.get(v), known.get(since)) for v, _, since in (name.partition(">") for name in names)]
    values = {v: since for v, since in pairs if v is not None and since is not None}
    instead = tuple(known[name[1:]] for name in names if name[:1] == "+" and name[1:] in known)
    stacks = tuple(v for v, since in pairs if v is not None and since is None)
    return _that_follows(jaxpr, RecomputeChoice(stacks, instead, values))


def _that_follows(jaxpr: Jaxpr, choice: RecomputeChoice) -> RecomputeChoice:
    """The choice without values that are no residuals, do not follow from what is kept, or are boxings of the plan."""
    if not choice.stacks:
        return choice
    made = {v for e in all_eqns(jaxpr) for v in e.outvars}
    choice = replace(choice, instead=tuple(v for v in choice.instead if v in made))
    makers = {r.stack: r.maker for r in find_residuals(jaxpr)}
    stacks = [v for v in choice.stacks if v in makers]
    slices = {maker: Slices(maker, stacks) for maker in makers.values()}
    for some in slices.values():
        some.keep(choice.instead)
    return replace(choice, stacks=tuple(v for v in stacks if slices[makers[v]].of(v) is not None))


def _names(jaxpr: Jaxpr) -> dict[Var, str]:
    return {v: f"{n}.{j}" for n, eqn in enumerate(all_eqns(jaxpr)) for j, v in enumerate(eqn.outvars)}


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The values that a plan recomputes instead of keeping them.

    Attributes:
      names: in the program before.
      count: of values.
      bytes: that keeping them would take on a device.
      seconds: to recompute them in one call.
      sources: lines that made them.
    """

    names: tuple[str, ...]
    count: int
    bytes: int
    seconds: float
    sources: tuple[str, ...]


def recomputed(boxed: Boxed, mesh: MeshView, backend: Backend, recomputation: Recomputation) -> Recomputed | None:
    """The cost of a plan's recomputing equations; None if there are none.

    Args:
      boxed: the plan's program.
      mesh, backend: of the devices.
      recomputation: the recomputed values of the program.
    """
    if not recomputation.names:
        return None
    variables = recomputation.variables
    sources = dict[str, None]()
    seconds, sizes = 0.0, dict[Var, int]()

    def scope(jaxpr: Jaxpr, trips: int) -> None:
        nonlocal seconds
        mine: list[Eqn] = []
        made: dict[Var, None] = {}
        read: set[Var] = {a for a in jaxpr.outvars if not compat.is_literal(a)}
        for eqn in jaxpr.eqns:
            for body in bodies_of(eqn):
                scope(body, trips * trips_of(eqn))
            boxes_one = eqn.primitive is box_p and not compat.is_literal(eqn.invars[0]) and eqn.invars[0] in made
            if boxes_one or any(v in variables for v in eqn.outvars):
                mine.append(eqn)
                made |= dict.fromkeys(eqn.outvars)
            else:
                read.update(a for a in eqn.invars if not compat.is_literal(a))
            for stack, v in ((variables.get(v), v) for v in eqn.outvars):
                if stack is not None:
                    rows = stack.aval.size // max(1, v.aval.size)
                    sizes[stack] = rows * piece_bytes(v.aval, boxed.placements[v], mesh.sizes, backend)
                    sources[compat.source_line(eqn)] = None
        if mine:
            seconds += trips * alone_seconds(mine, [v for v in made if v in read], boxed, mesh)

    scope(boxed.jaxpr, 1)
    return Recomputed(recomputation.names, len(sizes), sum(sizes.values()), seconds, tuple(filter(None, sources)))
