"""The command line, `shardc` or `python -m shardc`: `run` runs a script in several processes; `doctor` checks this
installation; `schedule` shows a pipeline's schedule, without devices; `calibrate` measures the devices of this machine;
`passes` and `rules` list those."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from shardc.doctor import examine
from shardc.errors import PipelineError, ShardcError
from shardc.launch.options import add_run
from shardc.launch.run import run_command
from shardc.machine.mesh import make_mesh
from shardc.pipeline.schedule.check import checked
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import METHODS, FoundSchedule, SearchLimits, find_schedule, make_schedule
from shardc.pipeline.schedule.network import CHANNELS, network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import Timeline, find_deadlock, peak_activations, simulate
from shardc.report.chart import Chart, Track
from shardc.report.chart_text import chart_text
from shardc.report.passes import passes_text
from shardc.report.picture import draw_picture
from shardc.report.rules import rules_text
from shardc.report.tables import WIDTH, Section, number_text, report_text
from shardc.report.trace_file import write_trace
from shardc.runtime.actor import Channel, Network
from shardc.versions import VERSION

_BROKEN_PIPE: Final = 141
"""The exit code of a command that nobody reads any more, as a shell has it: 128 + SIGPIPE."""
_COLOURS: Final = (
    (r"(?<=[ |])\d*F\d+-*", "blue"),
    (r"(?<=[ |])\d*[BI]\d+-*", "green"),
    (r"(?<=[ |])\d*W\d+-*", "yellow"),
)
_EPILOG: Final = """\
letters: 2F0 is stage 2, forward, microbatch 0; B a full backward, I the input gradient, W the weight gradient:
         B = I + W. If each rank has one stage, the drawing omits the stage number. A dot is idle time.
example: python -m shardc schedule zb-h1 --stages 4 --microbatches 16
"""
_RANKS, _MICROBATCHES = 4, 8
"""The ranks and microbatches that a schedule is shown for by default, if it is named as an argument."""
_NO_REGISTERS: Final = """\
The pipeline deadlocks: rank {0} waits for itself. It is at 0F0, its first action, and waits for a register of its own
stash, which has none. Each stash and each edge needs at least 1 register; --credits auto finds the fewest that keep the
makespan."""


@dataclass(frozen=True)
class _Outcome:
    schedule: Schedule
    timeline: Timeline | None
    deadlock: str | None
    found: FoundSchedule | None
    net: Network
    registers_shown: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 on success, 1 for a schedule that deadlocks, 2 for invalid options."""
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, as `head`, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return _BROKEN_PIPE


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and args.run is not run_command:  # a run has other pipes too
            raise
        message = f"{error.filename}: {error.strerror}."
    except (ShardcError, UnicodeDecodeError) as error:
        message = str(error)
    print(f"{parser.prog} {args.command}: {message}", file=sys.stderr)
    return 2


def _schedule_command(args: argparse.Namespace) -> int:
    result = _plan(args)
    if args.save:
        Path(args.save).write_text(result.schedule.to_csv(), encoding="utf-8")
    if result.timeline is not None:
        chart = _chart(result.schedule, result.timeline)
        if args.svg:
            draw_picture(chart, args.svg)
        if args.trace:
            write_trace(chart, args.trace)
    if args.json:
        print(json.dumps(_figures(result)))
    else:
        _show(result)
    return 1 if result.deadlock else 0


def _calibrate_command(args: argparse.Namespace) -> int:
    from shardc.tuning.calibrate import calibrate  # noqa: PLC0415  # it starts JAX's backend
    from shardc.tuning.calibration_text import calibration_text  # noqa: PLC0415

    mesh = make_mesh(**args.mesh)
    assert isinstance(mesh, Mesh)
    sizes = {"sizes": args.sizes} if args.sizes else {}
    found = calibrate(mesh, turns=args.turns, **sizes)
    if args.save:
        Path(args.save).write_text(found.topology.to_json() + "\n", encoding="utf-8")
    print(found.topology.to_json() if args.json else calibration_text(found))
    return 0


def _doctor_command(args: argparse.Namespace) -> int:
    text, problems = examine(args.calibration, args.wait)
    print(text)
    return 1 if problems else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line, without the usage text."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    called = "shardc" if Path(sys.argv[0]).stem == "shardc" else "python -m shardc"
    parser = _Parser(prog=called, description="Tools of shardc.", epilog=f"{called} COMMAND --help explains a command.")
    parser.add_argument("--version", action="version", version=f"shardc {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    add_run(commands).set_defaults(run=run_command)
    schedule = commands.add_parser(
        "schedule",
        help="show a pipeline schedule: its grid over time, bubble, activations and messages",
        description="Draws a pipeline schedule over time and prints its cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = schedule.add_argument
    names = f"{', '.join(METHODS)}, or auto, which searches (default: 1f1b)"
    add("name", nargs="?", metavar="NAME", help=names)
    few = "(with a NAME by default {})"
    add("--stages", type=_positive, metavar="N", help=f"number of ranks of the pipeline {few.format(_RANKS)}")
    add("--microbatches", type=_positive, metavar="M", help=f"microbatches of a step {few.format(_MICROBATCHES)}")
    add("--schedule", metavar="NAME", help="the same as NAME")
    add("--chunks", type=_positive, metavar="V", help="stages on each rank (default: given by the schedule)")
    costs = (
        "times of a stage's forward, input gradient, weight gradient (default: 1,1,1); of each stage: 1,1,1;2,1,1;..."
    )
    add("--costs", type=_costs, default=StageCosts(), metavar="F,B,W", help=costs)
    add("--latency", type=_time, default=0.0, metavar="T", help="time of a message between two ranks (default: 0)")
    add("--memory", type=_positive, metavar="K", help="for auto: the most activations that a rank may hold, in chunks")
    registers = (
        "registers of every stash and edge: a number, or auto, the fewest that keep the makespan (default: unbounded)"
    )
    add("--credits", type=_credits, metavar="C", help=registers)
    file = "read the schedule from a file: torch's compute-only CSV (.csv), or a grid as str() prints it"
    add("--file", metavar="FILE", help=file)
    add("--save", metavar="FILE", help="write the schedule as CSV")
    add("--svg", metavar="FILE", help="draw the schedule over time into an .svg or .png file")
    add("--trace", metavar="FILE", help="write a trace for https://ui.perfetto.dev; a unit of time is 1 us")
    add("--json", action="store_true", help="print one JSON object")
    schedule.set_defaults(run=_schedule_command)
    _add_calibrate(commands)
    check = commands.add_parser("doctor", help="check this installation: versions, devices, environment")
    check.add_argument("--calibration", metavar="FILE", help="check a file of calibrate too")
    wait = "time that JAX has to start (default: 60)"
    check.add_argument("--wait", type=_time, default=60.0, metavar="SECONDS", help=wait)
    check.set_defaults(run=_doctor_command)
    passes = commands.add_parser("passes", help="list the passes in order: what each takes, gives and does")
    passes.set_defaults(run=lambda _: print(passes_text()) or 0)
    rules = commands.add_parser("rules", help="list the rules: for each primitive how it may be split, and the file")
    rules.set_defaults(run=lambda _: print(rules_text()) or 0)
    return parser


def _add_calibrate(commands: Any) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure this machine: matrix products, memory, collectives along each axis of a mesh",
        description="Measures the devices that JAX finds, and writes a topology that make_mesh reads.",
        epilog='then: shardc.make_mesh(data=4, model=2, calibration="here.json")\n',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = calibrate.add_argument
    add("--mesh", type=_mesh, required=True, metavar="AXES", help="axes and their sizes: data=4,model=2")
    add("--save", metavar="FILE", help="write the topology to a .json file")
    turns = "repetitions of each measurement; the median is used (default: 5)"
    add("--turns", type=_positive, default=5, metavar="N", help=turns)
    sizes = "bytes that a device holds before a collective (default: 4096,65536,1048576)"
    add("--sizes", type=_sizes, metavar="BYTES", help=sizes)
    add("--json", action="store_true", help="print the topology instead of the table")
    calibrate.set_defaults(run=_calibrate_command)


def _mesh(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(axis.isidentifier() and n.isdecimal() and int(n) for axis, _, n in pairs):
        raise argparse.ArgumentTypeError(f'"{text}" is not a mesh; write data=4,model=2')
    return {axis: int(n) for axis, _, n in pairs}


def _sizes(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _number(text: str, kind: type[int] | type[float], least: float, wanted: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = kind(-1)
    if not least <= number < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is not {wanted}')
    return number


def _positive(text: str) -> int:
    return _number(text, int, 1, "a whole number of 1 or more")


def _time(text: str) -> float:
    return _number(text, float, 0, "a time of 0 or more")


def _credits(text: str) -> int | str:
    return text if text == "auto" else _number(text, int, 0, 'a whole number of 0 or more, or "auto"')


def _costs(text: str) -> StageCosts:
    rows = [[_number(c, float, 0, "a cost of 0 or more") for c in row.split(",")] for row in text.split(";")]
    if any(len(row) != 3 for row in rows):
        raise argparse.ArgumentTypeError(f'"{text}" has to be three numbers F,B,W')
    return StageCosts.read(rows)


def _plan(args: argparse.Namespace) -> _Outcome:
    """The schedule that the options ask for, and its simulation."""
    schedule, found = _schedule(args)
    costs = StageCosts.read(args.costs, schedule.stages)

    def link(channel: Channel) -> tuple[float, float]:
        return args.latency, 0.0

    registers = args.credits if isinstance(args.credits, int) else None
    net = network(schedule, registers=dict.fromkeys(CHANNELS, registers))
    deadlock = _NO_REGISTERS.format(schedule.rank_of[0]) if registers == 0 else find_deadlock(net)
    if deadlock is None and args.credits == "auto":
        net = net.with_registers(auto_credits(net, costs, link))
    timeline = None if deadlock else simulate(net, costs, link)
    return _Outcome(schedule, timeline, str(deadlock) if deadlock else None, found, net, args.credits is not None)


def _schedule(args: argparse.Namespace) -> tuple[Schedule, FoundSchedule | None]:
    named = [*filter(None, ("NAME" * bool(args.name), "--schedule" * bool(args.schedule), "--file" * bool(args.file)))]
    if len(named) > 1:
        raise PipelineError(f"{' and '.join(named)} exclude each other: both name a schedule; give one of them.")
    if args.file:
        text = Path(args.file).read_text(encoding="utf-8-sig")
        is_csv = Path(args.file).suffix.lower() == ".csv"
        schedule = Schedule.from_csv(text, Path(args.file).stem) if is_csv else Schedule.parse(text)
        checked(schedule)
        ranks, microbatches = args.stages or schedule.ranks, args.microbatches or schedule.microbatches
        return make_schedule(schedule, ranks, microbatches, args.chunks), None
    return _named_schedule(args, args.name or args.schedule or "1f1b")


def _named_schedule(args: argparse.Namespace, name: str) -> tuple[Schedule, FoundSchedule | None]:
    ranks, microbatches = args.stages, args.microbatches
    if args.name:
        ranks, microbatches = ranks or _RANKS, microbatches or _MICROBATCHES
    missing = [o for o, n in (("--stages", ranks), ("--microbatches", microbatches)) if n is None]
    if missing:
        many = len(missing) > 1
        raise PipelineError(
            f"{' and '.join(missing)} {'are' if many else 'is'} missing; give {'them' if many else 'it'}, or read a "
            "schedule with --file."
        )
    if args.memory and name != "auto":
        raise PipelineError("--memory is for --schedule auto; the memory of other schedules is fixed.")
    if name == "auto":
        found = find_schedule(
            ranks, microbatches, args.chunks or 1,
            costs=args.costs, latency=args.latency, limits=SearchLimits(args.memory),
        )  # fmt: skip
        return found.schedule, found
    if name not in METHODS:
        name = name.strip().lower()
    return make_schedule(name, ranks, microbatches, args.chunks, costs=args.costs), None


def _title(schedule: Schedule) -> str:
    p, m, v = schedule.ranks, schedule.microbatches, schedule.chunks
    text = f"{schedule.name}: {number_text(p, 'rank')}, {number_text(m, 'microbatch')}"
    return f"{text}, {v} stages on each rank" if v > 1 else text


def _chart(schedule: Schedule, timeline: Timeline) -> Chart:
    return Chart(_title(schedule), (Track("simulated", timeline),), schedule.rank_of, seconds=False)


def _figures(result: _Outcome) -> dict[str, Any]:
    schedule, timeline, found = result.schedule, result.timeline, result.found
    figures: dict[str, Any] = {
        "schedule": schedule.name,
        "stages": schedule.ranks,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "makespan": timeline and _rounded(timeline.makespan),
        "bubble": timeline and _rounded(timeline.bubble),
        "bubble_per_rank": timeline and [_rounded(b) for b in timeline.bubble_per_rank],
        "peak_activations": timeline and list(peak_activations(schedule, timeline)),
        "messages": timeline and timeline.messages,
        "deadlock": result.deadlock,
    }
    if result.registers_shown:
        figures["registers"] = {c.name: c.registers for c in result.net.channels}
    if found:
        figures |= {"bound": _rounded(found.bound), "gap": found.gap, "tried": found.tried}
    return figures


def _rounded(time: float) -> float:
    """The time without rounding errors of float sums."""
    return round(time, 9) + 0.0


def _show(result: _Outcome) -> None:
    if result.timeline is None:
        print(f"{_title(result.schedule)}\n\n{result.deadlock}")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    text = Text(chart_text(_chart(result.schedule, result.timeline), width))
    for pattern, colour in _COLOURS:
        text.highlight_regex(pattern, colour)
    Console(highlight=False).print(text, soft_wrap=True)
    print()
    print(_table(result, result.timeline))


def _table(result: _Outcome, timeline: Timeline) -> str:
    """The figures as text: those of each rank, then those of the whole schedule."""
    rows = [
        ("busy", *(f"{_rounded(b):.9g}" for b in timeline.busy)),
        ("bubble, first to last action", *(f"{_rounded(b):.9g}" for b in timeline.bubble_per_rank)),
        ("peak activations, in chunks", *map(str, peak_activations(result.schedule, timeline))),
    ]
    share = timeline.bubble / timeline.makespan if timeline.makespan else 0.0
    whole = [
        f"makespan: {_rounded(timeline.makespan):.9g}",
        f"bubble, makespan minus busy: {_rounded(timeline.bubble):.9g} ({share:.1%})",
        f"messages between ranks: {timeline.messages}",
    ]
    if result.found:
        found = result.found
        gap = "proved optimal" if found.gap < 1e-9 else f"an optimal schedule is at most {found.gap:.1%} faster"
        whole.append(f"lower bound of makespan: {_rounded(found.bound):.9g}, {gap} ({found.tried} tried)")
    for kind in CHANNELS if result.registers_shown else ():
        counts = [str(c.registers) for c in result.net.channels if re.match(rf"{kind}\b", c.name)]
        if counts:
            whole.append(f"registers, {kind.replace('_', ' ')}: {' '.join(counts)}")
    columns = ("", *(f">rank {r}" for r in range(result.schedule.ranks)))
    return report_text((Section("Each rank", columns, rows), Section("The whole schedule", lines=whole)))


if __name__ == "__main__":
    sys.exit(main())
