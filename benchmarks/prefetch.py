"""What gathering a layer's weights a step of the loop ahead could save: `python -m benchmarks.prefetch gpt3 llama405b`.

Nothing runs and nothing is compiled. Of each loop of a plan the gathers of what it takes a row of in each step, and how
long a step waits for them at most if all begin with it: products in front of their readers hide the rest. Of those
begun a step ahead none is waited for, but what a loop carries is copied. See docs/design/prefetch.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

import shardc
from benchmarks.large_models import LARGE, pins_of
from benchmarks.tables import new_table
from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p
from shardc.ir.loop import Loop
from shardc.ir.nested import REMAT, bodies_of, trips_of
from shardc.ir.walk import local_bytes
from shardc.passes.estimate.plan_cost import plan_cost
from shardc.plans import Plan


@dataclass(frozen=True)
class Waits:
    """Of one step of a loop.

    Attributes:
      trips: how many steps, in one call.
      gathers: seconds of all gathers of rows.
      waited: seconds that no product hides if they begin with the step, one after the other.
      bytes: of what they give, on a device.
    """

    trips: int
    gathers: float
    waited: float
    bytes: int


def waits_of(plan: Plan) -> list[Waits]:
    """Of all loops of a plan that gather rows."""
    found = [_waits(plan, eqn, trips) for eqn, trips in _scans(plan.boxed.jaxpr, 1)]
    return [w for w in found if w.gathers]


def _scans(jaxpr: Jaxpr, times: int) -> Iterator[tuple[Eqn, int]]:
    """The loops of a jaxpr that runs so often, each with its steps in one call."""
    for eqn in jaxpr.eqns:
        inside = times * trips_of(eqn)
        if eqn.primitive.name == "scan":
            yield eqn, inside
        for body in bodies_of(eqn):
            yield from _scans(body, inside)


def _waits(plan: Plan, scan: Eqn, trips: int) -> Waits:
    loop = Loop.of(scan)
    body, sizes = loop.body, plan.mesh.sizes
    there: dict[Var, float] = dict.fromkeys(loop.rows, 0.0)  # of rows and what is gathered of them: when it is there
    now = links = waited = 0.0
    size = 0
    for eqn, read in _inlined(body, {}):
        alone = compat.new_jaxpr(_variables(eqn.invars), eqn.outvars, [eqn], body)
        time = plan_cost(Boxed(alone, plan.boxed.placements), plan.mesh).time
        only = read[0] if len(read) == 1 and len(eqn.outvars) == 1 and read[0] in there else None
        if only is not None and eqn.primitive is box_p and time.moving:
            links += time.moving
            size += local_bytes(eqn.outvars[0], eqn.params["dst"], sizes)
            there[eqn.outvars[0]] = links
        elif only is not None and not time.compute and eqn.outvars[0].aval.size <= only.aval.size:
            there[eqn.outvars[0]] = there[only]
        else:
            late = max((there.get(v, 0.0) - now for v in read), default=0.0)
            waited += max(0.0, late)
            now += max(0.0, late) + time.compute
    return Waits(trips, links, waited, size)


def _inlined(jaxpr: Jaxpr, names: dict[Var, Var]) -> Iterator[tuple[Eqn, list[Var]]]:
    """The equations of a body and of what it rematerialises, each with what it reads, by the body's own names."""
    for eqn in jaxpr.eqns:
        read = [names.get(v, v) for v in _variables(eqn.invars)]
        if eqn.primitive.name in REMAT:
            (inner,) = bodies_of(eqn)
            pairs = [(v, a) for v, a in zip(inner.invars, eqn.invars, strict=True) if not compat.is_literal(a)]
            names |= {v: names.get(a, a) for v, a in pairs}
            yield from _inlined(inner, names)
        else:
            yield eqn, list(dict.fromkeys(read))


def _variables(atoms: list[Atom]) -> list[Var]:
    return list(dict.fromkeys(a for a in atoms if not compat.is_literal(a)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(LARGE)}; default: gpt3")
    parser.add_argument("--topology", help="instead of the model's slice of v5p, such as h100:8x64")
    options = parser.parse_args()
    table = new_table("Gathers of rows, plan fsdp", "model", "machine", "step s", "gathers s", "waited for s",
                      "copied s", "carried GiB")  # fmt: skip
    for name in options.models or ["gpt3"]:
        large = LARGE[name]
        machine = options.topology or large.topology
        mesh = shardc.make_mesh(topology=machine, **large.mesh)
        plan = shardc.function(mesh=mesh, **pins_of(name, "fsdp"))(large.step).plan(*large.arguments())
        found, bandwidth = waits_of(plan), plan.mesh.topology.memory_rate
        parts = [sum(w.trips * seconds for w, seconds in zip(found, column, strict=True)) for column in (
            [w.gathers for w in found], [w.waited for w in found], [2 * w.bytes / bandwidth for w in found]
        )]  # fmt: skip
        carried = max((w.bytes for w in found), default=0)
        table.add_row(name, machine, f"{plan.seconds:.4g}", *(f"{x:.3f} ({x / plan.seconds:.2%})" for x in parts),
                      f"{carried / 2**30:.2f}")  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
