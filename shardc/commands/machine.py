"""The commands about this machine, `calibrate` and `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from jax.sharding import Mesh

from shardc.commands import values
from shardc.doctor import examine
from shardc.machine.mesh import make_mesh
from shardc.report.tables import terminal_width
from shardc.tuning.calibrate import SIZES, calibrate
from shardc.tuning.calibration_text import calibration_text


@click.command("calibrate", epilog='Then: shardc.make_mesh(data=4, model=2, calibration="here.json")')
@click.option(
    "--mesh", "axes", type=values.mesh, required=True, metavar="AXES", help="Axes and their sizes: data=4,model=2."
)
@click.option("--save", metavar="FILE", help="Write the topology to a .json file.")
@click.option(
    "--turns",
    type=values.positive,
    default=5,
    metavar="N",
    show_default=True,
    help="Repetitions of each measurement; the median is used.",
)
@click.option(
    "--sizes",
    type=values.sizes,
    default=",".join(map(str, SIZES)),
    metavar="BYTES",
    show_default=True,
    help="Bytes that a device holds before a collective.",
)
@click.option("--json", is_flag=True, help="Print the topology instead of the table.")
def calibrate_command(axes: dict[str, Any], save: str | None, turns: int, sizes: Sequence[int], json: bool) -> None:
    """Measure the devices that JAX finds, and write a topology that make_mesh reads."""
    mesh = make_mesh(**axes)
    assert isinstance(mesh, Mesh)
    found = calibrate(mesh, turns=turns, sizes=sizes)
    if save:
        Path(save).write_text(found.topology.to_json() + "\n", encoding="utf-8")
    click.echo(found.topology.to_json() if json else calibration_text(found, terminal_width()))


@click.command("doctor")
@click.option("--calibration", metavar="FILE", help="Check a file of calibrate too.")
@click.option(
    "--wait", type=values.time, default=60.0, metavar="SECONDS", show_default=True, help="Time that JAX has to start."
)
def doctor_command(calibration: str | None, wait: float) -> int:
    """Check this installation: versions, devices, environment."""
    text, problems = examine(calibration, wait)
    click.echo(text)
    return 1 if problems else 0
