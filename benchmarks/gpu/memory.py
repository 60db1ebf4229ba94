"""Section memory: a plan's peak beside the most bytes that the device's allocator has given out.

A process measures one program, for the allocator counts from its start. The program is compiled before its arguments
come to the device: what the compiler itself takes, to try kernels, is a figure of its own.
"""

from __future__ import annotations

import argparse

import jax

import shardc
from benchmarks.gpu import programs
from benchmarks.measure import report

NOT_MEASURED = "not measured: the backend has no memory statistics"
HIDDEN = "the compiler's own peak hides the program's"


def allocated(what: str) -> int | None:
    """Bytes by the allocator's count; None where the backend keeps none."""
    return (jax.devices()[0].memory_stats() or {}).get(what)


def measure(job: str, options: argparse.Namespace) -> None:
    program = programs.make(job, tiny=options.tiny)
    mesh = shardc.make_mesh(data=1)
    function = shardc.function(mesh=mesh, **program.options)(program.fn)
    plan = function.plan(*program.shapes)
    xla = function.compile(*program.shapes).memory_stats()
    compiling = allocated("peak_bytes_in_use")
    args = jax.block_until_ready(shardc.put(program.args, mesh, plan.in_placements))
    arguments = allocated("bytes_in_use")
    jax.block_until_ready(function(*args))
    peak = allocated("peak_bytes_in_use")
    held = xla.argument_size_in_bytes + xla.output_size_in_bytes - xla.alias_size_in_bytes
    report(
        program=job, planned=plan.memory.peak, planned_arguments=plan.memory.arguments,
        xla=held + xla.temp_size_in_bytes, compiling=compiling, arguments=arguments, measured=peak,
        note=NOT_MEASURED if peak is None else HIDDEN if peak == compiling else "",
    )  # fmt: skip
