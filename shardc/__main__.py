"""The command line, `shardc` or `python -m shardc`. Each command is a module of `shardc.commands`, loaded when it is
called: the help of all of them needs none."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from shardc.errors import ShardcError, did_you_mean
from shardc.versions import VERSION

_BROKEN_PIPE: Final = 141
"""The exit code of a command that nobody reads any more, as a shell has it: 128 + SIGPIPE."""
_COMMANDS: Final = {
    "plan": ("plans", "the figures of a plan: time, bytes, memory, what moves"),
    "explain": ("plans", "the report of a plan: what lives where, what moves, and why"),
    "why": ("plans", "why a value lies where it does, and what it costs elsewhere"),
    "show": ("plans", "where arguments and results live, and what a device holds"),
    "diff": ("plans", "the differences between two plans, or to another machine"),
    "report": ("plans", "a page about a plan, to open in a browser"),
    "compile": ("ahead", "compile, for a machine that is there or not: audit, memory, overlap"),
    "tune": ("tune", "choose the mesh: plan a function on all meshes, and rank them"),
    "schedule": ("schedule", "show a pipeline schedule: its grid over time, bubble, messages"),
    "run": ("run", "run a script in several processes"),
    "autopsy": ("autopsy", "say why a run of several processes ended or hangs"),
    "calibrate": ("machine", "measure this machine: matrix products, memory, collectives"),
    "doctor": ("machine", "check this installation: versions, devices, environment"),
    "passes": ("lists", "list the passes in order: what each takes, gives and does"),
    "rules": ("lists", "list the rules: how each primitive may be split, and the file"),
}
"""For each command its module, where it is `<name>_command`, and what it does."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in _COMMANDS:
            ctx.fail(f'There is no command "{cmd_name}".{did_you_mean(cmd_name, _COMMANDS)}')
        return getattr(import_module(f"shardc.commands.{_COMMANDS[cmd_name][0]}"), f"{cmd_name}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, message=f"shardc {VERSION}")
@click.pass_context
def shardc(ctx: click.Context) -> None:
    """Plans of shardc, and the tools around them.

    shardc COMMAND --help explains a command.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 on success, 1 for a schedule that deadlocks, a script that fails or problems that
    were found, 2 for what cannot be done as it is asked for."""
    try:
        try:
            return _main(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, as `head`, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return _BROKEN_PIPE


def _main(words: Sequence[str]) -> int:
    called = "shardc" if Path(sys.argv[0]).stem == "shardc" else "python -m shardc"
    try:
        with shardc.make_context(called, list(words or ["--help"])) as context:
            return shardc.invoke(context) or 0
    except click.exceptions.Exit as end:
        return end.exit_code if words else 2
    except click.UsageError as error:
        name: Any = error.ctx.command_path if error.ctx else called
        message = f"{name}: {error.format_message().removesuffix('.')} (see {name} --help)"
    except OSError as error:
        if isinstance(error, BrokenPipeError) and words[0] != "run":  # a run has other pipes too
            raise
        message = f"{called} {words[0]}: {error.filename}: {error.strerror}."
    except (ShardcError, UnicodeDecodeError) as error:
        message = f"{called} {words[0]}: {error}"
    click.echo(message, err=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
