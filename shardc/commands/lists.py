"""The commands `passes` and `rules`."""

from __future__ import annotations

import click

from shardc.report.passes import passes_text
from shardc.report.rules import rules_text
from shardc.report.tables import terminal_width


@click.command("passes")
def passes_command() -> None:
    """List the passes in their order: what each takes, gives and does."""
    click.echo(passes_text(terminal_width()))


@click.command("rules")
def rules_command() -> None:
    """List the rules: for each primitive how it may be split, and the file of the rule."""
    click.echo(rules_text(terminal_width()))
