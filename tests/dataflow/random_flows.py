"""Random flows: nodes on meshes and on the host, wired with delays, rates, credits and donations."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import shardc
from shardc import S
from shardc.arrays.place import Place
from shardc.dataflow.round import Round
from shardc.sbp.placement import Placement
from tests.dataflow.interpreter import MISSING

LENGTH = 8
AVAL = jax.ShapeDtypeStruct((LENGTH,), float)
PLACES = [None, None, (0, 1), (0, 2), (1, 2), (2, 2), (4, 4), (6, 2)]
"""The host, and meshes: the first device, and how many."""
RATES = [1, 1, 1, 1, 2, 3, 6]


@dataclass
class DrawnCall:
    """A call: where, how often, what of its arguments is donated, and where they come from: `("state", i)`,
    `("item",)`, `("made", call, result)`; a second number is a delay."""

    place: tuple[int, int] | None
    every: int
    donate: tuple[str, ...]
    credits: int | None
    given: list[tuple[tuple, int]] = field(default_factory=list)


@dataclass
class Draw:
    """A flow: its calls, the sources of the new state, and those of what the round gives."""

    credits: int
    calls: list[DrawnCall]
    state: list[tuple[tuple, int]]
    outs: list[tuple[tuple, int]]

    def body(self, call, late):
        """The function of a round. `call(number, call, a, b)` gives two values."""

        def step(state, item):
            made = []

            def read(source):
                (kind, *which), delay = source
                x = {"state": lambda i: state[i], "item": lambda: item, "made": lambda c, i: made[c][i]}[kind](*which)
                first = None if kind == "state" else np.full(LENGTH, 0.25)
                return late(x, delay, first=first) if delay else x

            for n, c in enumerate(self.calls):
                made.append(call(n, c, *map(read, c.given)))
            return [read(s) for s in self.state], [read(s) for s in self.outs]

        return step


def draw(rng):
    """A random flow."""
    leaves, calls = rng.randint(1, 3), []

    def source(every, most=1 << 30):
        """A source that is there in every so many rounds."""
        late = rng.choice([0, 0, 0, 1, 1, 2, 3, 6])
        kinds = [("state", rng.randrange(leaves)), ("item",)]
        kinds += [("made", n, rng.randrange(2)) for n, c in enumerate(calls) if every % c.every == 0]
        kind = rng.choice(kinds[1:] if len(kinds) > 2 and rng.random() < 0.6 else kinds)
        if kind[0] == "made":
            late -= late % calls[kind[1]].every
        return kind, late

    for _ in range(rng.randint(1, 7)):
        place, every = rng.choice(PLACES), rng.choice(RATES)
        donate = rng.choice([(), (), ("a",), ("a", "b")]) if place else ()
        found = DrawnCall(place, every, donate, rng.choice([None, 1, 4]), [source(every), source(every)])
        calls.append(found)
    state = [source(1) for _ in range(leaves)]
    for i, (kind, _) in enumerate(state):  # leaves that only change places are an error
        if kind[0] == "state":
            state[i] = kind if kind[1] == i else ("item",), 0
    return Draw(rng.randint(1, 3), calls, state, [source(6) for _ in range(rng.randint(0, 3))])


# ---- for the real run


def on_mesh(a, b):
    return jnp.sin(a) + 0.5 * b, a - 0.5 * b


def on_host(a, b):
    return np.cos(a) + 0.25 * b, 0.5 * a


@cache
def mesh(first, count):
    return Mesh(np.array(jax.devices()[first : first + count]), ("data",))


@cache
def function(place, donate):
    """The function of a mesh: a large one splits its arguments."""
    pins = {"a": {"data": S(0)}} if place[1] > 2 else {}
    return shardc.function(on_mesh, mesh=mesh(*place), in_placements=pins, donate_argnames=donate)


@cache
def host(credits):
    return shardc.host(on_host, gives=(AVAL, AVAL), credits=credits)


def flow_of(draw):
    """The flow, of functions that all flows share."""

    def call(_, c, a, b):
        fn = host(c.credits) if c.place is None else function(c.place, c.donate)
        made = (shardc.every(c.every, fn) if c.every > 1 else fn)(a, b)
        return (MISSING, MISSING) if made is MISSING else made

    return shardc.flow(draw.body(call, lambda *args, **keys: shardc.late(*args, **keys)), credits=draw.credits)


# ---- for its network alone


class StubWork:
    """A node that is never run."""

    peak, actor, waits, changes, apart, seconds, process, where = 0, None, (), False, 0, 0.0, None, None

    def __init__(self, place, donated=(), credits=None, results=2):
        self.meshes = () if place is None else (mesh(*place),)
        where = Place(AVAL) if place is None else Place(AVAL, self.meshes[0], Placement({}))
        self.takes, self.gives = [where] * 3, [where] * results
        self.donated, self.credits, self.results = frozenset(donated), credits, [AVAL] * results


def round_of(draw):
    """The traced round, without functions."""
    round = Round("random", "random (flows.py:1)")
    inputs = round.add("inputs", StubWork(None, results=1), [None], [AVAL])

    def call(n, c, a, b):
        work = StubWork(c.place, ["ab".index(name) for name in c.donate], c.credits if c.place is None else None)
        return round.values_of(round.add(f"call{n}", work, [a, b], work.results, c.every))

    state = [AVAL] * len(draw.state)
    round.trace(draw.body(call, shardc.late), state, inputs, jax.tree.structure(0))
    return round
