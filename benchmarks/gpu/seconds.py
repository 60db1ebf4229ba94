"""Section seconds: a plan's seconds, of the calibrated machine, beside those of a call.

A process measures several programs: it compiles them, waits until no other uses the device, and times them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

import shardc
from benchmarks.gpu import machine, programs
from benchmarks.gpu.child import describe, wait_for_turn
from benchmarks.measure import report

ENOUGH = 0.05
"""Seconds of a turn, so that the clock and the launch of the first call do not matter."""


def measure(job: str, options: argparse.Namespace) -> None:
    """`job`: names of programs, with commas between them."""
    mesh = shardc.make_mesh(data=1, calibration=str(options.out / machine.FILE))
    made: list[tuple[str, Any, Callable[[int], float]]] = []
    for name in job.split(","):
        try:
            made.append((name, *compiled(programs.make(name, tiny=options.tiny), mesh)))
        except Exception as error:  # noqa: BLE001  a row of the report; the other programs are measured
            report(program=name, ok=False, error=describe(error))
    wait_for_turn()
    while made:  # each program's arrays are dropped before the next one's are put on the device
        name, plan, call = made.pop(0)
        try:
            seconds = timed(call, turns=3 if options.tiny else 7)
        except Exception as error:  # noqa: BLE001  a row of the report; the other programs are measured
            report(program=name, ok=False, error=describe(error))
        else:
            report(program=name, planned=plan.seconds, parts=vars(plan.time), measured=seconds)


def compiled(program: programs.Program, mesh: Any) -> tuple[Any, Callable[[int], float]]:
    """The plan, and a function that makes so many calls and gives the seconds of one."""
    function = shardc.function(mesh=mesh, **program.options)(program.fn)
    plan = function.plan(*program.shapes)
    function.compile(*program.shapes)
    state: list[Any] = []

    def calls(count: int) -> float:
        if not state:  # here: until its turn a program takes no memory of the device
            state[:] = shardc.put(program.args, mesh, plan.in_placements)
        args = tuple(state)
        begin = time.perf_counter()
        for _ in range(count):
            out = function(*args)
            args = (*out[: program.state], *args[program.state :]) if program.state else args
        jax.block_until_ready(out)
        took = (time.perf_counter() - begin) / count
        state[:] = args
        return took

    return plan, calls


def timed(calls: Callable[[int], float], turns: int) -> float:
    """Median seconds of a call over some turns, each of as many calls as take `ENOUGH`."""
    calls(2)
    count = max(1, min(200, round(ENOUGH / calls(3))))
    return statistics.median(calls(count) for _ in range(turns))
