"""The commands that print a plan: `plan`, `explain`, `why`, `show`, `diff`, `report`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import click

from shardc.commands.source import FirstCall, ScriptCommand, Source, mesh_option, script_options
from shardc.errors import ArgumentError, number_text
from shardc.flows import FlowPlan
from shardc.pipeline.plan import MpmdPlan
from shardc.plan.saved_plan import SavedPlan
from shardc.report.diff import diff_saved, saved_of
from shardc.report.explain import optimality_text, summary_of
from shardc.report.show import planned_sections, saved_sections
from shardc.report.tables import Section, report_text, seconds_text, terminal_width


@click.command("plan", cls=ScriptCommand)
@script_options
@mesh_option
@click.option("--save", metavar="FILE", help="Write the plan as JSON, for shardc.function(plan=FILE).")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def plan_command(source: Source, save: str | None, as_json: bool) -> None:
    """Print the figures of a plan: time, bytes, memory, what moves.

    The plan is that of the first call of FUNCTION in SCRIPT; without FUNCTION, of the first function of shardc that is
    called. The script runs up to that call, and ends there. SCRIPT may be a saved plan too.
    """
    width = terminal_width()
    if save and not save.endswith(".json"):
        raise ArgumentError(f"--save {save}: a saved plan has to be a .json file.")

    def text(call: FirstCall) -> str:
        plan = call.plan()
        if save:
            call.of_one_function("a saved plan")
            plan.save(save)
        if as_json:
            return json.dumps(figures_of(plan))
        return plan.explain(width=width) if isinstance(plan, FlowPlan) else report_text(summary_of(plan), width)

    saved = source.saved
    if saved is None:
        click.echo(source.at_first_call(text))
    else:
        click.echo(json.dumps(_saved_figures(saved)) if as_json else report_text([_saved_head(saved)], width))


@click.command("explain", cls=ScriptCommand)
@script_options
@mesh_option
@click.option("--pins", is_flag=True, help="Add what each pin costs against leaving its values to the compiler.")
@click.option("--after", metavar="PASS", help="Print the program after this pass instead (shardc passes lists them).")
def explain_command(source: Source, pins: bool, after: str | None) -> None:
    """Print the report of a plan: what lives where, what moves, why, how many bytes, which line.

    The plan is that of the first call of FUNCTION in SCRIPT; without FUNCTION, of the first function of shardc that is
    called. The script runs up to that call, and ends there.
    """
    width = terminal_width()

    def text(call: FirstCall) -> str:
        if pins or after:
            call.of_one_function("--pins or --after")
            return call.plan().explain(pins=pins, after=after, width=width)
        return call.plan().explain(width=width)

    click.echo(source.at_first_call(text))


@click.command("why", cls=ScriptCommand)
@script_options
@mesh_option
@click.argument("name")
def why_command(source: Source, name: str) -> None:
    """Print why one value lies where it does, and what the plan would cost if it lay elsewhere.

    NAME is any name that a report prints: the path of an argument or result (params/w), modules and primitive of an
    operation (blocks_0/attn/dot_general), the end or a part of such a name, or a line (model.py:41); * matches any
    text.
    """
    width = terminal_width()

    click.echo(source.at_first_call(lambda call: call.plan().explain(why=name, width=width)))


@click.command("show", cls=ScriptCommand)
@script_options
@mesh_option
@click.argument("path", required=False)
def show_command(source: Source, path: str | None) -> None:
    """Print where arguments and results live, and what each device holds of those of PATH.

    PATH is that of an argument or result (params/w); * matches any text. SCRIPT may be a saved plan too.
    """
    width = terminal_width()

    def sections(call: FirstCall) -> list[Section]:
        call.of_one_function("what a device holds")
        return planned_sections(call.plan(), path)

    saved = source.saved
    if saved is not None and path is not None:
        raise ArgumentError(f"{source.text} is a saved plan: what a device holds of {path} needs the script.")
    click.echo(report_text(source.at_first_call(sections) if saved is None else saved_sections(saved), width))


@click.command("diff", cls=ScriptCommand)
@script_options
@mesh_option
@click.argument("other", required=False, metavar="[OTHER]")
def diff_command(source: Source, other: str | None) -> None:
    """Print the differences from the plan of SCRIPT to that of OTHER.

    Each is a script with its function, or a saved plan. Without OTHER: from the plan of a call to that of the same call
    on another mesh or machine, as --mesh and --topology say.
    """
    width = terminal_width()
    here = replace(source, axes=None, topology=None)
    if (other is None) == (here == source):
        raise ArgumentError("give two scripts or saved plans, or one and --mesh or --topology.")

    def plan(call: FirstCall) -> Any:
        call.of_one_function("diff")
        return call.plan()

    if other is None:
        click.echo(here.at_first_call(lambda call: plan(call).diff(plan(replace(call, source=source)), width=width)))
        return
    one, two = (s.saved or s.at_first_call(plan) for s in (here, replace(here, text=other)))
    if isinstance(one, SavedPlan) or isinstance(two, SavedPlan):
        one, two = (p if isinstance(p, SavedPlan) else saved_of(p) for p in (one, two))
        click.echo(diff_saved(one, two, width))
    else:
        click.echo(one.diff(two, width=width))


@click.command("report", cls=ScriptCommand)
@script_options
@mesh_option
@click.option("--save", metavar="FILE", default="plan.html", show_default=True, help="The page.")
def report_command(source: Source, save: str) -> None:
    """Write a page about a plan, to open in a browser. It needs no network.

    The plan is that of the first call of FUNCTION in SCRIPT; without FUNCTION, of the first function of shardc that is
    called. The script runs up to that call, and ends there.
    """
    source.at_first_call(lambda call: call.plan().report(save))
    click.echo(save)


def figures_of(plan: Any) -> dict[str, Any]:
    """The figures of a plan of any kind, for programs: seconds, bytes."""
    if isinstance(plan, FlowPlan):
        return {
            "flow": plan.name, "seconds": plan.seconds, "bytes": plan.bytes,
            "nodes": [{"name": n.name, "seconds": n.work.seconds, "every": n.every} for n in plan.nodes],
            "memory": {name: need for name, need, _ in plan.memory_by_row},
        }  # fmt: skip
    figures: dict[str, Any] = {
        "function": plan.program.name, "mesh": dict(plan.mesh.whole_axes), "topology": plan.mesh.topology.kind,
        "seconds": plan.seconds, "bytes_per_device": _or_null(plan.bytes_per_device), "peak": plan.memory.peak,
        "hbm": plan.mesh.topology.hbm, "gap": plan.gap,
    }  # fmt: skip
    if isinstance(plan, MpmdPlan):
        figures |= {
            "stages": len(plan.stages), "schedule": plan.schedule.name, "microbatches": plan.schedule.microbatches,
            "bubble": plan.simulate().bubble, "transfers": [{"bytes": t.bytes} for t in plan.transfers],
        }  # fmt: skip
    figures["collectives"] = [
        {
            "stage": stage,
            "kind": c.kind,
            "axes": list(c.axes),
            "count": c.count,
            "bytes": _or_null(c.bytes),
            "source": c.source,
        }
        for stage, c in plan.moves
    ]
    return figures


def _or_null(size: float) -> float | None:
    """A number of bytes for JSON, which has no nan: None if it is unknown."""
    return None if math.isnan(size) else size


def _saved_figures(saved: SavedPlan) -> dict[str, Any]:
    return {"function": saved.function, "mesh": dict(saved.mesh), "seconds": saved.seconds, "gap": saved.gap}


def _saved_head(saved: SavedPlan) -> Section:
    axes = ", ".join(f"{a}={n}" for a, n in saved.mesh.items())
    count = "borders alone" if saved.rows is None else number_text(sum(r.is_operation for r in saved.rows), "operation")
    lines = [
        f"about {seconds_text(saved.seconds)}; {optimality_text(saved.gap)}",
        f"{number_text(len(saved.arguments), 'argument')}, {number_text(len(saved.results), 'result')}, {count}",
    ]
    return Section(f"{saved.function} on {axes}, as {saved.name} has it", lines=lines)
