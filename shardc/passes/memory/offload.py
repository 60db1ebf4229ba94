"""Moves to the host's memory what a program does not need on the device: arguments and residuals of loops.

    m' = f m g                   -->    d = memory_move[device] m; e = f d g; m' = memory_move[host] e
    c, r = scan f c x            -->    c, r = scan f' c x, where f' returns memory_move[host] row
    d = scan g d r z             -->    d = scan g' d r z, where g' reads memory_move[device] row

A moved argument is on the device from its first reader on, and a donated one until the result that takes its buffer is
made; that result lives on the host, too. What only follows from optimizer state runs last, one result after the other,
so that few of these arguments are on the device at a time. Ren et al. 2021, "ZeRO-Offload".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed
from shardc.ir.memory_move import host_values, is_memory_move, memory_move_eqn
from shardc.ir.nested import NESTED, nested_bodies, with_bodies
from shardc.ir.walk import local_bytes, with_atoms
from shardc.machine.mesh import MeshView
from shardc.passes.estimate.backend import PRODUCTS, Backend
from shardc.passes.estimate.live_ranges import scopes_at
from shardc.passes.estimate.memory import GAPS, Profile, profile_boxed
from shardc.passes.estimate.plan_cost import host_seconds
from shardc.passes.recompute.recompute_residuals import find_residuals
from shardc.sbp.signature import is_extended


@dataclass(frozen=True, slots=True)
class HostChoice:
    """The values that live on the host.

    Attributes:
      arguments: by number, each with the number of the result that takes its buffer; None: none does.
      stacks: residuals of loops.
    """

    arguments: Mapping[int, int | None] = field(default_factory=dict[int, "int | None"])
    stacks: tuple[Var, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.arguments or self.stacks)


def offload(boxed: Boxed, choice: HostChoice, paths: Sequence[str]) -> Boxed:
    """The boxed program with the chosen values on the host; `paths`: of its arguments, for people."""
    if not choice:
        return boxed
    jaxpr, made = boxed.jaxpr, _Offloading(boxed, choice.stacks)
    incoming = {jaxpr.invars[i]: paths[i] for i in choice.arguments}
    outgoing = {k: paths[i] for i, k in choice.arguments.items() if k is not None}
    moved = made.scope(jaxpr, incoming, outgoing)
    moved = _updates_last(moved, [v for v in incoming if v not in _read_by_heavy(moved)])
    return replace(boxed, jaxpr=moved, placements=made.placements, host=host_values(moved))


class _Offloading:
    """The rewriter. `placements`: of all values, moved ones included."""

    def __init__(self, boxed: Boxed, stacks: Sequence[Var]) -> None:
        self.placements = dict(boxed.placements)
        lines = {r.stack: compat.source_line(r.maker) for r in find_residuals(boxed.jaxpr)} if stacks else {}
        self.stacks = {v: lines.get(v, "") for v in stacks}

    def scope(self, jaxpr: Jaxpr, incoming: Mapping[Var, str], outgoing: Mapping[int, str]) -> Jaxpr:
        """A jaxpr that moves the inputs `incoming` to the device before they are read, and the results with the
        numbers `outgoing` to the host when they are made. Both with their source."""
        names: dict[Var, Var] = {}
        leaving = {a: source for k, source in outgoing.items() if not compat.is_literal(a := jaxpr.outvars[k])}
        left: dict[Var, Var] = {}
        eqns: list[Eqn] = []

        def enter(atoms: Sequence[Atom]) -> None:
            for a in compat.variables(atoms):
                if a in incoming and a not in names:
                    names[a] = self.move(eqns, a, "device", incoming[a])

        def leave(values: Sequence[Var]) -> None:
            for v in values:
                if v in leaving:
                    left[v] = self.move(eqns, v, "host", leaving[v])

        leave(jaxpr.invars)
        for eqn in map(self.nested, jaxpr.eqns):
            enter(eqn.invars)
            eqns.append(with_atoms(eqn, names))
            leave(eqn.outvars)
        enter([a for k, a in enumerate(jaxpr.outvars) if k not in outgoing])
        results = [
            a if compat.is_literal(a) else left[a] if k in outgoing else names.get(a, a)
            for k, a in enumerate(jaxpr.outvars)
        ]
        return compat.new_jaxpr(jaxpr.invars, results, eqns, jaxpr)

    def move(self, eqns: list[Eqn], x: Var, to: str, source: str) -> Var:
        out = compat.fresh_var(x.aval)
        self.placements[out] = self.placements[x]
        eqns.append(memory_move_eqn(x, out, "host" if to == "host" else "device", source))
        return out

    def nested(self, eqn: Eqn) -> Eqn:
        """An equation whose bodies move their rows of the chosen stacks."""
        if not self.stacks or eqn.primitive.name not in NESTED:
            return eqn
        bodies: list[Jaxpr] = []
        for body in nested_bodies(eqn):
            rows = {v: self.stacks[a] for v, a in body.given(eqn) if not compat.is_literal(a) and a in self.stacks}
            made = {j: self.stacks[eqn.outvars[k]] for j, k in enumerate(body.results) if eqn.outvars[k] in self.stacks}
            bodies.append(self.scope(body.jaxpr, rows, made))
        return eqn.replace(params=with_bodies(eqn, bodies)) if bodies else eqn


# --- the order of updates ---------------------------------------------------------------------------------------------


def _read_by_heavy(jaxpr: Jaxpr) -> set[Var]:
    """The values that a product, a loop or an effect depends on."""
    found = set[Var]()
    for eqn in reversed(jaxpr.eqns):
        heavy = eqn.primitive.name in NESTED or eqn.primitive.name in PRODUCTS or eqn.effects
        if heavy or not found.isdisjoint(eqn.outvars):
            found.update(compat.variables(eqn.invars))
    return found


def _updates_last(jaxpr: Jaxpr, arguments: Sequence[Var]) -> Jaxpr:
    """The jaxpr with all that follows from some arguments at its end, in the order of the results that it is for."""
    follows, first, last = set(arguments), list[Eqn](), list[Eqn]()
    for eqn in jaxpr.eqns:
        late = not follows.isdisjoint(compat.variables(eqn.invars))
        (last if late else first).append(eqn)
        follows.update(eqn.outvars if late else ())
    maker = {v: eqn for eqn in last for v in eqn.outvars}
    leaving = {eqn.invars[0]: eqn for eqn in last if is_memory_move(eqn) and eqn.params["to"] == "host"}
    ordered = dict[Eqn, None]()
    for result in compat.variables(jaxpr.outvars):
        waiting = [maker[result]] if result in maker else []
        while waiting:
            eqn = waiting[-1]
            needed = [maker[a] for a in compat.variables(eqn.invars) if a in maker and maker[a] not in ordered]
            if needed:
                waiting += reversed(needed)
                continue
            waiting.pop()
            ordered[eqn] = None
            ordered |= {leaving[v]: None for v in eqn.outvars if v in leaving}
    return compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, [*first, *ordered], jaxpr)


# --- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HostOffer:
    """A value that could live on the host.

    Attributes:
      choice: that value alone.
      bytes: on a device.
      seconds: to move it in one call.
      needed: of an argument, the first and the last equation between which it is on the device anyway.
    """

    choice: HostChoice
    bytes: int
    seconds: float
    needed: tuple[int, int] | None = None


class OffloadOptions:
    """The values of a plan that could live on the host.

    Args:
      boxed: the plan's program.
      paths: of its arguments.
      donations: for results, the number of the donated argument whose buffer each takes.
      mesh, backend: of the devices.
    """

    def __init__(
        self, boxed: Boxed, paths: Sequence[str], donations: Mapping[int, int], mesh: MeshView, backend: Backend
    ) -> None:
        self.boxed, self.paths, self.donations, self.mesh, self.backend = boxed, paths, donations, mesh, backend

    @cached_property
    def offers(self) -> list[_HostOffer]:
        """The cheapest for its bytes first, among equals the largest."""
        link = self.mesh.topology.host_bandwidth
        found = [*self._arguments(), *self._stacks()] if link else []
        return sorted((o for o in found if o.bytes), key=lambda o: (o.seconds / o.bytes, -o.bytes))

    @property
    def all(self) -> HostChoice:
        return _joined([o.choice for o in self.offers])

    def _arguments(self) -> Iterator[_HostOffer]:
        jaxpr = self.boxed.jaxpr
        made = {v: n for n, e in enumerate(jaxpr.eqns) for v in e.outvars}
        read: dict[Var, int] = {}
        for n, eqn in enumerate(jaxpr.eqns):
            for v in compat.variables(eqn.invars):
                read.setdefault(v, n)
        heavy = _read_by_heavy(jaxpr)
        for k, i in self.donations.items():
            v, result = jaxpr.invars[i], jaxpr.outvars[k]
            if self.may_move(v) and not compat.is_literal(result) and result in made and v in read:
                needed = (read[v], made[result]) if v in heavy else None
                bytes_ = self.bytes(v)
                yield _HostOffer(HostChoice({i: k}), bytes_, 2 * host_seconds(bytes_, self.mesh), needed)

    def _stacks(self) -> Iterator[_HostOffer]:
        for residual in find_residuals(self.boxed.jaxpr):
            if self.may_move(residual.stack):
                bytes_ = self.bytes(residual.stack)
                seconds = 2 * host_seconds(bytes_ * residual.trips, self.mesh)
                yield _HostOffer(HostChoice(stacks=(residual.stack,)), bytes_, seconds)

    def may_move(self, v: Var) -> bool:
        """Whether XLA can keep a value on the host: an array, of numbers, that is no partial sum."""
        placement = self.boxed.placements[v]
        return bool(v.aval.shape) and not is_extended(v.aval.dtype) and not placement.partial_axes

    def bytes(self, v: Var) -> int:
        return local_bytes(v, self.boxed.placements[v], self.mesh.sizes)

    def profile(self, choice: HostChoice) -> tuple[Boxed, Profile]:
        """The program with a choice, and its memory."""
        moved = offload(self.boxed, choice, self.paths)
        return moved, profile_boxed(moved, self.mesh.sizes, self.donations, self.backend)

    def choose(self, limit: int) -> HostChoice | None:
        """The values to move so that a device needs at most `limit` bytes; None if no values are enough.

        Those that are in memory at the peak are taken, until they are as many bytes as are missing; then the peak is
        elsewhere.
        """
        choice, left = HostChoice(), self.offers
        while True:
            moved, profile = self.profile(choice)
            missing = profile.peak - limit
            if missing <= 0:
                return choice if profile.memory.host <= self.mesh.topology.host_memory else None
            taken = _enough(_at_peak(left, moved.jaxpr, profile), missing / GAPS)
            if not taken:
                return None
            left = [o for o in left if o not in taken]
            choice = _joined([choice, *(o.choice for o in taken)])


def _joined(choices: Sequence[HostChoice]) -> HostChoice:
    arguments = {i: k for c in choices for i, k in c.arguments.items()}
    return HostChoice(arguments, tuple(v for c in choices for v in c.stacks))


def _at_peak(offers: Sequence[_HostOffer], jaxpr: Jaxpr, profile: Profile) -> list[_HostOffer]:
    """The offers that free memory at the peak."""
    at = int(profile.bytes.argmax())
    scopes, live = scopes_at(jaxpr, at), set(profile.live_ranges.holdings(at))
    eqns = [e for e in jaxpr.eqns[: scopes[0].now if scopes else 0] if not is_memory_move(e)]
    now = len(eqns)
    return [
        o for o in offers
        if all(v in live for v in o.choice.stacks) and (o.needed is None or not o.needed[0] <= now <= o.needed[1])
    ]  # fmt: skip


def _enough(offers: Sequence[_HostOffer], missing: float) -> list[_HostOffer]:
    """The first offers that are `missing` bytes; in place of the last of them the smallest that is enough."""
    taken = list[_HostOffer]()
    for n, offer in enumerate(offers):
        if offer.bytes >= missing:
            rest = [o for o in offers[n:] if o.bytes >= missing]
            return [*taken, min(rest, key=lambda o: (o.seconds, o.bytes))]
        taken.append(offer)
        missing -= offer.bytes
    return taken
