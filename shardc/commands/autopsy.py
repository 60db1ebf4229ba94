"""The command `autopsy`."""

from __future__ import annotations

from pathlib import Path

import click

from shardc.launch.health.autopsy import autopsy, read_flights
from shardc.report.tables import report_text, terminal_width


@click.command("autopsy")
@click.option("--before", is_flag=True, help="Of the start before the last one.")
@click.argument("directory", type=Path)
def autopsy_command(directory: Path, before: bool) -> None:
    """Say why a run ended or hangs, from what its processes recorded in DIRECTORY (that of `run --log`)."""
    click.echo(report_text(autopsy(read_flights(directory, before)), terminal_width()))
