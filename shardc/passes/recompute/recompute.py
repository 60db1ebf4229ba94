"""What a program computes again, so as not to keep it: chosen where memory is short, and named, for plans to say it.

What loops stack for later loops is `drop_residuals`, what is written out `drop_values`. Both cost seconds and free
bytes, so that one price a byte chooses among them. What is computed again in any case, as keeping it takes longer, is
`choose_residuals`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var, bodies_of
from shardc.ir.box import Boxed, box_p
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import Habits
from shardc.passes.estimate.live_ranges import scopes_at
from shardc.passes.estimate.memory import Profile
from shardc.passes.estimate.plan_cost import alone_seconds, tally
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.recompute.choose_residuals import Loop, loops_of, placed
from shardc.passes.recompute.recompute_residuals import Again, Slices, drop_residuals, find_residuals
from shardc.passes.recompute.recompute_values import Crossing, drop_values


@dataclass(frozen=True, slots=True)
class Choice:
    """What is computed again.

    Attributes:
      stacks: residuals of loops.
      instead: what the steps of these loops make, and is stacked in their place.
      values: what is written out, and the first of what is made behind the point from which on that is read.
    """

    stacks: tuple[Var, ...] = ()
    instead: tuple[Var, ...] = ()
    values: Mapping[Var, Var] = field(default_factory=dict[Var, Var])

    def __bool__(self) -> bool:
        return bool(self.stacks or self.values)


@dataclass(frozen=True, slots=True)
class Repeated:
    """What was computed again in a program: its names in the one before, and what does so (`Again`)."""

    names: tuple[str, ...] = ()
    again: Again = field(default_factory=dict[Var, "Var | None"])


LOWEST, DEAR, DEAREST = 1e-4, 4.0, 1e4
"""Prices, in seconds a byte of the whole program: the lowest that is tried, the highest, and the highest where all is
asked for: there may be cheaper ways to free what is dear."""
HALVINGS: Final = 12
"""Of the room between two prices."""


class Offers:
    """What a plan could compute again.

    Args:
      boxed, profile: the plan, and what it takes in memory.
      mesh, habits: of the devices.

    Attributes:
      most: bytes that all of it frees.
      worth: bytes that are freed at the price of a byte when all seconds of the plan are shared out among its bytes.
    """

    def __init__(self, boxed: Boxed, profile: Profile, mesh: MeshView, habits: Habits) -> None:
        self.loops = list(loops_of(boxed.jaxpr, placed(boxed, mesh, habits)))
        scopes = [] if habits.eager else scopes_at(boxed.jaxpr, int(profile.bytes.argmax()))
        crossings = [Crossing(boxed, profile, *scope, mesh, habits) for scope in scopes if scope[1]]
        self.crossings = [c for c in crossings if c.bytes and c.since is not None]
        self.typical = tally(boxed, mesh).time.total / max(1, profile.peak)
        self.most, self.worth = self._free(self.typical * DEAREST), self._free(self.typical)

    def choose(self, wanted: float, dearest: float = math.inf) -> tuple[Choice, float]:
        """What frees so many bytes in the least time, or all that does at a price; all that can be where infinite is
        asked for. And how many bytes it frees.

        Only the first equations pay the price at which it is enough: layers cost alike, and not all may be needed.

        Args:
          wanted: bytes.
          dearest: the highest price of a byte of what is written out.
        """
        low, high = self.typical * LOWEST, self.typical * (DEAR if math.isfinite(wanted) else DEAREST)
        if self._free(high, dearest) > wanted:
            for _ in range(HALVINGS):
                middle = math.sqrt(low * high)
                low, high = (low, middle) if self._free(middle, dearest) >= wanted else (middle, high)
        freed = self._free(high, dearest)

        def first(place: Loop | Crossing, less: float, more: float) -> int:
            """How many of its equations pay the higher price."""
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
        low, high = min(low, dearest), min(high, dearest)
        for c in self.crossings:
            if c.since is not None:
                values |= dict.fromkeys(c.choose(low, high, first(c, low, high))[0], c.since)
        return Choice(tuple(stacks), tuple(instead), values), freed

    def _free(self, price: float, dearest: float = math.inf) -> float:
        in_loops = sum(loop.choose(price)[-1] for loop in self.loops)
        return in_loops + sum(c.choose(min(price, dearest))[-1] for c in self.crossings)


def compute_again(jaxpr: Jaxpr, choice: Choice, named: Jaxpr | None = None) -> tuple[Jaxpr, Repeated]:
    """The program that computes again what was chosen, and what does that.

    Args:
      jaxpr: canonical, without any of it.
      choice: of its values.
      named: the same program with nothing in front of it, whose operations count for names.
    """
    choice = _that_follows(jaxpr, choice)  # where a boxing makes a row of what a loop carries, the row itself does not
    if not choice and not choice.instead:
        return jaxpr, Repeated()
    names = names_of(named or jaxpr, choice)
    jaxpr, stacks = drop_residuals(jaxpr, choice.stacks, choice.instead)
    left = {v for e in all_eqns(jaxpr) for v in e.outvars} if choice.values else set[Var]()
    jaxpr, again = drop_values(jaxpr, {v: since for v, since in choice.values.items() if since in left})
    return jaxpr, Repeated(names, {**again, **stacks})


# --- names, and what a plan says -------------------------------------------------------------------------------------


def names_of(jaxpr: Jaxpr, choice: Choice) -> tuple[str, ...]:
    """Names that mean the same in every process: `12.3` is result 3 of operation 12, a residual, and `+57.0` what is
    stacked in the place of such; `12.3>57.0` is a value for what reads it from the operation on that makes `57.0`."""
    known = _names(jaxpr)
    return (
        *(known[v] for v in choice.stacks),
        *(f"+{known[v]}" for v in choice.instead),
        *(f"{known[v]}>{known[since]}" for v, since in choice.values.items()),
    )


def choice_named(jaxpr: Jaxpr, names: Collection[str]) -> Choice:
    """The choice that names mean; what there is not, or does not follow from what is kept, is left out."""
    known = {name: v for v, name in _names(jaxpr).items()}
    pairs = [(known.get(v), known.get(since)) for v, _, since in (name.partition(">") for name in names)]
    values = {v: since for v, since in pairs if v is not None and since is not None}
    instead = tuple(known[name[1:]] for name in names if name[:1] == "+" and name[1:] in known)
    stacks = tuple(v for v, since in pairs if v is not None and since is None)
    return _that_follows(jaxpr, Choice(stacks, instead, values))


def _that_follows(jaxpr: Jaxpr, choice: Choice) -> Choice:
    """The choice without what is no residual, or does not follow from what is kept."""
    if not choice.stacks:
        return choice
    makers = {r.stack: r.maker for r in find_residuals(jaxpr)}
    stacks = [v for v in choice.stacks if v in makers]
    slices = {id(maker): Slices(maker, stacks) for maker in makers.values()}
    for some in slices.values():
        some.keep(choice.instead)
    return replace(choice, stacks=tuple(v for v in stacks if slices[id(makers[v])].of(v) is not None))


def _names(jaxpr: Jaxpr) -> dict[Var, str]:
    return {v: f"{n}.{j}" for n, eqn in enumerate(all_eqns(jaxpr)) for j, v in enumerate(eqn.outvars)}


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What a plan computes again, so as not to keep it.

    Attributes:
      names: of it in the program before.
      count: of values.
      bytes: that they would take on a device.
      seconds: that computing them takes, in one call.
      sources: lines that made them.
    """

    names: tuple[str, ...]
    count: int
    bytes: int
    seconds: float
    sources: tuple[str, ...]


def recomputed(boxed: Boxed, mesh: MeshView, habits: Habits, repeated: Repeated) -> Recomputed | None:
    """What the equations that compute again do in a plan; None if there are none.

    Args:
      boxed: the plan's program.
      mesh, habits: of the devices.
      repeated: of it.
    """
    if not repeated.names:
        return None
    again = repeated.again
    sources = dict[str, None]()
    seconds, sizes = 0.0, dict[Var, int]()

    def scope(jaxpr: Jaxpr, trips: int) -> None:
        nonlocal seconds
        mine: list[Eqn] = []
        made: dict[Var, None] = {}
        read: set[Var] = {a for a in jaxpr.outvars if not compat.is_literal(a)}
        for eqn in jaxpr.eqns:
            for body in bodies_of(eqn):
                scope(body, trips * compat.trips_of(eqn))
            boxes_one = eqn.primitive is box_p and not compat.is_literal(eqn.invars[0]) and eqn.invars[0] in made
            if boxes_one or any(v in again for v in eqn.outvars):
                mine.append(eqn)
                made |= dict.fromkeys(eqn.outvars)
            else:
                read.update(a for a in eqn.invars if not compat.is_literal(a))
            for stack, v in ((again.get(v), v) for v in eqn.outvars):
                if stack is not None:
                    rows = stack.aval.size // max(1, v.aval.size)
                    sizes[stack] = rows * piece_bytes(v.aval, boxed.placements[v], mesh.sizes, habits)
                    sources[compat.source_line(eqn)] = None
        if mine:
            seconds += trips * alone_seconds(mine, [v for v in made if v in read], boxed, mesh)

    scope(boxed.jaxpr, 1)
    return Recomputed(repeated.names, len(sizes), sum(sizes.values()), seconds, tuple(filter(None, sources)))
