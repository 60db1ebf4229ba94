"""The flight recorder: a file of fixed size that keeps the last entries, and outlives its process."""

import json
import os
import signal
import subprocess
import sys

import pytest

from shardc.runtime.status import flight as flight_module
from shardc.runtime.status.flight import ENTRIES, FlightRecorder, before, note_end, read_flight
from shardc.runtime.transport.connection import Frame, FrameKind


@pytest.fixture
def path(tmp_path):
    return tmp_path / "process-1.flight"


def test_the_last_entries_stay_in_their_order(path):
    recorder = FlightRecorder(str(path), 1)
    size = path.stat().st_size
    for i in range(ENTRIES + 17):
        recorder.note(f"at step, call {i}")
    found = read_flight(path)
    assert [e.text for e in found.entries] == [f"at step, call {i}" for i in range(17, ENTRIES + 17)]
    assert [e.number for e in found.entries] == list(range(18, ENTRIES + 18))
    assert path.stat().st_size == size < 200_000
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_killed_process_has_recorded_stays(path):
    script = (
        "import os, sys\nfrom shardc.runtime.status.flight import FlightRecorder\n"
        "r = FlightRecorder(sys.argv[1], 1)\nr.note('at step, call 7')\nr.live('{}', str)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], check=False)
    assert done.returncode == -signal.SIGKILL
    note_end(str(path), code=done.returncode)
    found = read_flight(path)
    assert [e.text for e in found.entries] == ["at step, call 7"]
    assert (found.process, found.status, found.script, found.end["code"]) == (1, "{}", {}, -9)
    assert found.began <= found.entries[0].at <= found.lived == found.last <= found.end["at"]


def test_frames_have_the_names_of_their_channels(path):
    recorder = FlightRecorder(str(path))
    recorder.channels[31] = ["gradient 1->0"]
    recorder.frame("to", 1, Frame(FrameKind.MESSAGE, 31, 5, 0, 3, b"", [memoryview(bytes(64))]))
    recorder.frame("from", 1, Frame(FrameKind.VALUE, 31, 5, 2))
    recorder.frame("to", 1, Frame(FrameKind.TAGGED, about=b"gang 0\0x"))
    for frame in (
        Frame(FrameKind.ALIVE),
        Frame(FrameKind.CREDIT, 31),
        Frame(FrameKind.MESSAGE, 0, about=b"[]"),
        Frame(FrameKind.CLOCK),
    ):
        recorder.frame("to", 1, frame)
    assert [e.text for e in read_flight(path).entries] == [
        "to 1: message gradient 1->0, 3, 64 bytes",
        "from 1: value 1f/2, 0",
        "to 1: tagged gang 0, 0",
    ]


def test_threads_are_written_when_nothing_goes_on(path):
    recorder, asked = FlightRecorder(str(path)), []

    def threads():
        asked.append(len(asked))
        return f"MainThread {len(asked)}"

    for _ in range(10):
        recorder.note("at step")
        recorder.live("{}", threads)
    assert asked == [] and read_flight(path).threads == ""
    for _ in range(14):
        recorder.live("{}", threads)
    assert asked == [0, 1]
    recorder.note("at step")
    assert read_flight(path).threads == ""  # it went on


def test_the_end_of_the_script_keeps_what_it_waited_for(path):
    recorder = FlightRecorder(str(path))
    recorder.live("waits", str)
    recorder.end(why="KeyboardInterrupt", follows=False, said="")
    recorder.live("waits no more", str)
    assert read_flight(path).status == "waits"
    assert read_flight(path).script["why"] == "KeyboardInterrupt"


def test_a_new_start_keeps_the_one_before(path):
    for text in "abc":
        FlightRecorder(str(path)).note(text)
    assert [e.text for e in read_flight(path).entries] == ["c"]
    assert [e.text for e in read_flight(before(path)).entries] == ["b"]


def test_texts_that_are_too_long(path):
    recorder = FlightRecorder(str(path))
    recorder.note("ü" * 100)
    recorder.live(json.dumps("x" * 20_000), str)  # is left out
    found = read_flight(path)
    assert (found.entries[0].text[:56], found.status) == ("ü" * 56, "")


def test_no_room_is_no_reason_not_to_run(path, monkeypatch, caplog):
    monkeypatch.setattr(flight_module.os, "pwrite", lambda descriptor, data, at: 1000)
    FlightRecorder(str(path)).note("x")
    assert f"there is no flight recorder: {path}: No space left on device" in caplog.text
    FlightRecorder("/nowhere/x").note("x")
    FlightRecorder().note("x")
    assert os.path.getsize(path) == 0
    with pytest.raises(ValueError, match=r"process-1\.flight is no file of a flight recorder"):
        read_flight(path)
