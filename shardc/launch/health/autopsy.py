"""The autopsy of a run: from the flight recorders of its processes, why it ended or hangs. Reads files only.

The first line is the cause, by the first of these that applies:

    failed    a process raised an error of its own; or its launcher ended it for a reason
    gone      a process gave no sign of life before the others ended: it was killed or stopped, or held Python's lock
    late      others waited for a process that waited for nobody, as `lateness.py` judges
    circle    all waited for one another
    together  nobody waited for another process: all were in the same call
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from shardc.errors import ArgumentError
from shardc.launch.activity import STOPPED, Activity
from shardc.launch.failure import prefixed, why_ended
from shardc.launch.lateness import Lateness
from shardc.report.tables import Section
from shardc.runtime.calls import processes_text
from shardc.runtime.status.flight import Flight, before, read_flight
from shardc.runtime.transport.connection import BEAT

_SHOWN: Final = 4
"""The most processes whose entries stand side by side."""
_NEWEST: Final = 20
"""How many of their newest entries are shown."""
_INTERRUPT: Final = KeyboardInterrupt.__name__
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+).*\n    (?P<code>.*)$', re.MULTILINE)
_THREAD: Final = re.compile(r"^(?P<who>\S.*), most recent call last:\n(?P<frames>(?: .*\n?)*)", re.MULTILINE)
_LIBRARIES: Final = ("/site-packages/", "/lib/python", "/shardc/", "<frozen")


def read_flights(directory: Path, start_before: bool = False) -> list[Flight]:
    """The flights of a directory, by process.

    Args:
      start_before: those of the start before the last one.

    Raises:
      ArgumentError: there is none, or one cannot be read.
    """
    paths = [p for p in directory.glob("process-*.flight") if not p.stem.endswith(".before")]
    paths = [before(p) for p in paths if before(p).exists()] if start_before else paths
    if not paths:
        raise ArgumentError(
            f"{directory} has no files of flight recorders: process-N.flight, of a run with --log {directory}"
            f"{', and of a start before the last one' if start_before else ''}."
        )
    try:
        return sorted((read_flight(p) for p in paths), key=lambda f: f.process)
    except ValueError as error:
        raise ArgumentError(str(error)) from error


def autopsy(flights: Sequence[Flight]) -> list[Section]:
    """The report: the cause, the processes, their last calls side by side, what their threads did."""
    cause, processes = cause_of_end(flights)
    chosen = sorted(flights, key=lambda f: f.process not in processes)[:_SHOWN]
    shown = sorted(chosen, key=lambda f: f.process)
    end = max(f.last for f in flights)
    return [
        Section(cause),
        Section(
            f"Processes at {_clock(end)}",
            ["process", "host", "began", "last sign of life", "waits for", "end"],
            [
                [str(f.process), f.host, _clock(f.began), _clock(f.lived), _facts(f).get("waits", ""), _end_text(f)]
                for f in flights
            ],
        ),
        Section(
            "Last calls and messages, in seconds before the end",
            [">s", *(f"process {f.process}" for f in shown)],
            _side_by_side(shown, end),
        ),
        *(
            Section(f"What process {f.process} did", lines=prefixed(f.process, f.threads.splitlines()).splitlines())
            for f in flights
            if f.threads
        ),
    ]


def cause_of_end(flights: Sequence[Flight]) -> tuple[str, tuple[int, ...]]:
    """Why the run ended or hangs, in a line, and the processes that this is about."""
    own = [f for f in flights if f.script.get("why", _INTERRUPT) != _INTERRUPT and not f.script["follows"]]
    if own:
        first = min(own, key=lambda f: f.script["at"])
        lines = [line.strip() for line in first.script["said"].splitlines()[1:]]
        more = f": {'; '.join(lines)}" if lines else ""
        return f"process {first.process} failed: {first.script['why'].removesuffix(':')}{more}", (first.process,)
    ended = [f for f in flights if f.end.get("why")]
    if ended:
        first = min(ended, key=lambda f: f.end["at"])
        return f"process {first.process} was ended: {first.end['why']}{_place(first)}", (first.process,)
    gone = [f for f in flights if not f.script and _silence(f, flights) > 3 * BEAT]
    if gone and len(gone) < len(flights):
        first = min(gone, key=lambda f: f.last)
        return _gone_text(first, _silence(first, flights)), (first.process,)
    return _waits_text(flights)


def _silence(flight: Flight, flights: Sequence[Flight]) -> float:
    """Seconds without a sign of life before the end of a process; of the run if nobody has seen its end."""
    by_launcher = flight.end.get("by") and flight.end["at"]
    return (by_launcher or max(f.lived for f in flights)) - flight.lived


def _gone_text(flight: Flight, seconds: float) -> str:
    head = f"process {flight.process}"
    last = f"; its last call: {_call(flight)}" if _call(flight) else ""
    if flight.end and not flight.end.get("by"):
        return f"{head} was {why_ended(flight.end['code'])}, which its launcher did not do{last}"
    state = "it is stopped" if _is_stopped(flight) else "it was killed or stopped, or held Python's lock"
    return f"{head} gave no sign of life for {seconds:.0f} s: {state}{last}"


def _is_stopped(flight: Flight) -> bool:
    """Whether a process of this machine is stopped by a signal now."""
    words = b""
    with suppress(OSError):
        words = Path(f"/proc/{flight.pid}/cmdline").read_bytes()
    return b"shardc.launch.child" in words and Activity(flight.pid).look() == STOPPED


def _waits_text(flights: Sequence[Flight]) -> tuple[str, tuple[int, ...]]:
    """Who was waited for; else the call that all were in."""
    known = {f.process: f for f in flights}
    epoch = max((_facts(f).get("epoch", -1) for f in flights), default=-1)
    ended = {f.process for f in flights if f.script and "why" not in f.script}
    lateness = Lateness(BEAT)
    for now in (0.0, 2 * BEAT):  # waits that the second look finds are old enough
        late = lateness.look(now, epoch, {f.process: f.status for f in flights}, ended)
        if late is not None and late.processes:
            one = known.get(late.processes[0])
            where = "" if one is None else _place(one)
            return f"{processes_text(late.processes)} did not come: {late.why}{where}", late.processes
        if late is not None:
            return late.why, ()
    if len(ended) == len(flights):
        return "all scripts have ended", ()
    if ended:
        return f"the scripts of {processes_text(sorted(ended))} have ended, and nobody waited for them", tuple(ended)
    calls = {_call(f) for f in flights}
    where = f"all were in {calls.pop()}" if len(calls) == 1 and "" not in calls else "no call was awaited"
    still = all(f.threads for f in flights)
    what = "its program does not end, or a device hangs" if still else "they went on until they were ended"
    return f"no process waited for another one: {where}; {what}", ()


def _place(flight: Flight) -> str:
    """Where a process stood still: the line of the user's that the first of its threads is in, else its main thread."""
    doing = flight.threads.partition("\n")[0] if flight.threads.startswith("its main thread") else ""
    places: list[tuple[bool, str]] = []
    for thread in _THREAD.finditer(flight.threads):
        frames = [(m, not any(part in m["file"] for part in _LIBRARIES)) for m in _FRAME.finditer(thread["frames"])]
        if of_user := [m for m, is_of_user in frames if is_of_user]:
            m, who = of_user[-1], "" if thread["who"].startswith("MainThread") else f"{thread['who']} "
            places.append((frames[-1][1], f"{who}at {Path(m['file']).name}:{m['line']}, {m['code'].strip()}"))
    at = next((text for is_inner, text in places if is_inner), places[0][1] if places else "")
    return "".join(f"; {text}" for text in (doing, at) if text)


def _call(flight: Flight) -> str:
    """The last call of a process."""
    calls = list(_facts(flight).get("run", {}).get("calls", {}).values())
    noted = next((e.text for e in reversed(flight.entries) if e.text.startswith("at ")), "")
    return (noted or (calls[-1][2] if calls else "")).removeprefix("at ")


def _facts(flight: Flight) -> dict[str, Any]:
    with suppress(ValueError):
        return json.loads(flight.status)
    return {}


def _end_text(flight: Flight) -> str:
    if flight.end.get("by"):
        return f"by {flight.end['by']}, {_clock(flight.end['at'])}"
    if flight.end:
        return f"{why_ended(flight.end['code'])}, {_clock(flight.end['at'])}"
    return f"script {'failed' if flight.script.get('why') else 'ended'}" if flight.script else "not seen"


def _side_by_side(flights: Sequence[Flight], end: float) -> list[list[str]]:
    """The newest entries, one a row, in the column of their process."""
    entries = sorted((e.at, i, e.text) for i, f in enumerate(flights) for e in f.entries)
    rows: list[list[str]] = []
    for at, column, text in entries[-_NEWEST:]:
        row = [f"{at - end:.3f}", *[""] * len(flights)]
        row[1 + column] = text
        rows.append(row)
    return rows


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")
