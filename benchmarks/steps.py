"""One training step on fake CPU devices: `python -m benchmarks.steps gpt2/fsdp/data=8`. Started by run.py."""

from __future__ import annotations

import argparse

import jax
import numpy as np

import shardc
from benchmarks.cases import Case
from benchmarks.measure import Loop, by_turns, losses_of, moved, operations, report
from benchmarks.peer import jitted


def measure(case: Case, turns: int) -> None:
    cfg, zoo = case.config, case.zoo
    init_fn, step_fn = zoo.make_step(cfg)
    args = jax.tree.map(np.asarray, (*jax.jit(init_fn)(jax.random.key(0)), next(zoo.batches(cfg, case.rows, 0))))
    mesh = shardc.make_mesh(**dict(case.mesh))
    ours = shardc.function(mesh=mesh, **case.options)(step_fn)
    plan = ours.plan(*args)
    compiled = ours.compile(*args)
    audit = compiled.audit()
    peer = jitted(step_fn, plan, mesh, case.options)
    peer_hlo = peer.lower(*args).compile().as_text()
    loops = [Loop(fn, *state_and_batch(shardc.put(args, mesh, plan.in_placements))) for fn in (ours, peer)]
    pair = by_turns(*loops, turns)
    losses = [losses_of(loop) for loop in loops]
    hlo = compiled.hlo()
    report(
        case=str(case),
        time=pair,
        ours={"bytes": moved(hlo), "operations": operations(hlo), "planned": plan.bytes_per_device},
        peer={"bytes": moved(peer_hlo), "operations": operations(peer_hlo)},
        audit=audit.ok,
        difference=float(np.max(np.abs(losses[0] / losses[1] - 1))),
    )


def state_and_batch(args: tuple) -> tuple:
    return args[:-1], args[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=Case.parse)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    measure(options.case, options.turns)
