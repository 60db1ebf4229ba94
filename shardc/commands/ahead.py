"""The command `compile`: what the compiler of a machine makes of a plan, with or without the machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from shardc.commands.source import FirstCall, ScriptCommand, Source, mesh_option, script_options
from shardc.passes.audit.hlo_schedule import BESIDE, Scheduled
from shardc.pipeline.plan import MpmdPlan
from shardc.report.tables import Section, bytes_text, percent_text, report_text, terminal_width


@click.command("compile", cls=ScriptCommand)
@script_options
@mesh_option
@click.option("--hlo", metavar="FILE", help="Write the optimized HLO.")
def compile_command(source: Source, hlo: str | None) -> None:
    """Compile a call, and print the audit, peak memory as planned and compiled, and what runs beside collectives.

    With --topology XLA compiles for that machine, which need not be there; JAX's plugin for it has to be installed:
    pip install 'shardc[cuda]' or 'shardc[tpu]'. The call is the first one of FUNCTION in SCRIPT; without FUNCTION, of
    the first function of shardc that is called. The script runs up to that call, and ends there.
    """
    width = terminal_width()

    def text(call: FirstCall) -> str:
        compiled = call.compiled()
        if hlo:
            with click.open_file(hlo, "w", encoding="utf-8") as file:
                file.write(compiled.hlo())
        return report_text(sections_of(compiled), width)

    click.echo(source.at_first_call(text))


def sections_of(compiled: Any) -> list[Section]:
    """The facts of a compiled call: its audit, its memory, and its collectives by what runs beside them."""
    plan, executable = compiled.plan, compiled.executable
    several = isinstance(plan, MpmdPlan)
    planned = plan.memory.peak
    peak = executable.memory.peak if several else executable.memory_stats().peak_memory_in_bytes
    memory = f"peak memory of a device: {bytes_text(planned)} planned, {bytes_text(peak)} compiled"
    if several:
        memory += " (of the fullest rank; of the compiler its temporary memory in each task)"
    lines = [*str(compiled.audit()).splitlines(), memory]
    head = Section(f"{plan.program.name} compiled for {plan.mesh}", lines=lines)
    return [head, _schedule(executable.schedule(), "in one execution of each task" if several else "in one call")]


def _schedule(rows: list[Scheduled], when: str) -> Section:
    title = f"Collectives as the compiler schedules them, {when}"
    if not rows:
        return Section(title, lines=["none"])
    total = Counter[str]()
    for row in rows:
        total[row.kind] += row.bytes
    shown = [
        (r.kind, r.beside, str(r.count), bytes_text(r.bytes), percent_text(r.bytes / max(1, total[r.kind])))
        for r in sorted(rows, key=lambda r: (-total[r.kind], r.kind, BESIDE.index(r.beside)))
    ]
    return Section(title, ("kind", "beside", ">executions", ">sent per device", ">of the kind"), shown)
