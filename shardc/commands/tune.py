"""The command `tune`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any

import click

from shardc.api import Function
from shardc.commands import values
from shardc.commands.source import FirstCall, ScriptCommand, Source, script_options
from shardc.errors import ArgumentError
from shardc.machine.topology import parse_topology
from shardc.report.tables import terminal_width
from shardc.tuning.tune import tune
from shardc.tuning.tuning import Tuning


@click.command("tune", cls=ScriptCommand)
@script_options
@click.option("--tries", type=values.positive, default=12, metavar="N", show_default=True, help="The most plans.")
def tune_command(source: Source, tries: int) -> None:
    """Choose the mesh for a function: plan its call on all meshes of so many devices, and rank the plans.

    The devices are those of --topology, as v5p:4x4x4, or --devices of it, as v5p; without it those that JAX finds, or
    --devices of the CPU.
    Placements stay where the function pins them.
    """
    width = terminal_width()
    source = replace(source, chooses_mesh=True)
    click.echo(source.at_first_call(lambda call: tuned(call, tries)).explain(width=width))


def tuned(call: FirstCall, tries: int) -> Tuning:
    """`shardc.tune` of the function of a call, with its own placements."""
    function = call.of_one_function("tune")
    (taken,), options = call.call, function.options
    given, topology, devices = taken.tree.unflatten(taken.leaves), call.source.topology, None
    if topology is not None and not parse_topology(topology).shape:
        devices = call.source.devices
        if devices is None:
            raise ArgumentError(
                f"--topology {topology} has no number of devices: add a shape, as v5p:4x4x4, or --devices 64."
            )
    return tune(
        _by_position(function, list(given), dict(taken.static)), *given.values(), topology=topology,
        devices=devices, tries=tries, in_placements=options.in_placements, out_placements=options.out_placements,
        donate_argnames=options.donate_argnames, forbid=options.forbid,
    )  # fmt: skip


def _by_position(function: Function, names: Sequence[str], static: Mapping[str, Any]) -> Callable[..., Any]:
    """The function on one device as `tune` takes it: with these arguments by position, and the others fixed."""

    def by_position(*given: Any) -> Any:
        return function.arguments.call({**static, **dict(zip(names, given, strict=True))})

    update_wrapper(by_position, function.arguments.fn)
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    by_position.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return by_position
