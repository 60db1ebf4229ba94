"""What is shown of the output of processes, and what is kept."""

import os
import platform
import pty
import re
import time
from contextlib import suppress

import pytest

from shardc.launch.output import Lines, LogFile, Pump, Screen, Tail, WithoutNoise
from tests.runtime.watchdog import within

NOISE = b"[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"


def shown(*pieces):
    out = []
    filtered = WithoutNoise(out.append)
    for piece in pieces:
        filtered(piece)
    filtered.flush()
    return b"".join(out)


@pytest.mark.parametrize("size", [1, 2, 7, 11, 12, 1000])
def test_noise_is_dropped_however_it_is_cut(size):
    text = b"a\n" + NOISE + b"[Gloo] other\n[G\nb [Gloo] Rank 1\n" + NOISE + b"7\n\nlast"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert shown(*pieces) == b"a\n[Gloo] other\n[G\nb [Gloo] Rank 1\n7\n\nlast"


@pytest.mark.parametrize(
    "mixed",
    [
        b"[Gloo] Rank [Gloo] Rank 01 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
        b" is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n",
        b"[Gloo] Rank 0 is connected to [Gloo] Rank 133 peer ranks. Expected number of connected peer ranks is : 3\n\n",
        b"[Gloo] Rank 0 is[Gloo] Rank 1 peer ranks. Expected number of connected peer ranks is : 3\n3\n",
    ],
)
def test_lines_of_noise_that_are_mixed(mixed):
    assert shown(b"1\n" + mixed + b"3\n") == b"1\n3\n"


def test_the_beginning_of_a_line_is_shown_soon():
    """A script may print `[` and wait for its user."""
    source, sink = os.pipe()
    out = []
    pump = Pump(source, [WithoutNoise(out.append)], "test")
    os.write(sink, b"[Gl")
    within(5, lambda: [time.sleep(0.01) for _ in iter(lambda: b"".join(out) == b"[Gl", True)])
    os.close(sink)
    pump.join(5)


def test_lines_of_two_streams_do_not_mix():
    """Python writes `print("out", 1)` piece by piece if its output is not buffered."""
    log = []
    out, err = Lines(log.append), Lines(log.append)
    for stream, piece in ((out, b"out"), (err, b"err 0\nerr"), (out, b" 1\n"), (err, b" 2\n"), (out, b"no end")):
        stream(piece)
    assert log == [b"err 0\n", b"out 1\n", b"err 2\n"]
    out.flush()
    err.flush()
    assert log[3:] == [b"no end"]


def test_a_tail_keeps_the_last_lines():
    tail = Tail()
    for i in range(100_000):
        tail(b"line %d\r\n" % i)
    assert tail.lines(3) == ["line 99997", "line 99998", "line 99999"]
    assert Tail().lines(3) == []
    assert len(tail.lines(10**6)) < 10_000


def test_a_writer_gets_a_broken_pipe_when_nobody_reads():
    def gone(data):
        raise BrokenPipeError

    source, sink = os.pipe()
    Pump(source, [gone], "test").join(0)
    os.write(sink, b"x")

    def write():
        with pytest.raises(BrokenPipeError):
            while True:
                os.write(sink, b"x")
                time.sleep(0.01)

    within(5, write)
    os.close(sink)


def test_the_live_line_makes_room_for_output():
    master, slave = pty.openpty()
    kept = os.dup(2)
    os.dup2(slave, 2)
    try:
        screen = Screen()
        screen.live("step 1")
        screen.err(b"half")
        screen.live("step 2")
        screen.err(b" line\n")
        screen.live("")
        screen.say("done")
    finally:
        os.dup2(kept, 2)
        os.close(slave)
        os.close(kept)
    seen = b""
    with suppress(OSError):  # the end of a terminal
        while piece := os.read(master, 1 << 16):
            seen += piece
    os.close(master)
    clear = "\r\x1b[2K"
    assert seen.decode() == f"step 1{clear}half line\r\nstep 2{clear}done\r\n"


def test_a_log_has_time_and_host_in_each_line_and_rotates(tmp_path):
    log = LogFile(tmp_path / "process-0.log")
    log.maxBytes = 1000
    for i in range(60):
        log(f"step {i}\nloss\n".encode())
    log.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["process-0.log", *(f"process-0.log.{i}" for i in range(1, 5))]
    assert all(p.stat().st_size <= 1000 and p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())
    lines = (tmp_path / "process-0.log").read_text().splitlines()
    stamp = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {re.escape(platform.node())} "
    assert re.fullmatch(f"{stamp}loss", lines[-1]) and re.fullmatch(f"{stamp}step 59", lines[-2])


def test_a_log_that_cannot_be_written_says_so_once(tmp_path, capsys, monkeypatch):
    log = LogFile(tmp_path / "process-0.log")
    monkeypatch.setattr(log.stream, "write", lambda text: 1 / 0)
    log(b"a\nb\n")
    log.close()
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1
