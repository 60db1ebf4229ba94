"""The first line of an autopsy names the cause, for each kind of hang."""

import json

import pytest

from shardc.__main__ import main
from shardc.launch.health import autopsy as autopsy_module
from shardc.launch.health.autopsy import autopsy, cause_of_end
from shardc.runtime.status.flight import Entry, Flight, FlightRecorder
from shardc.runtime.status.waits import Wait

NOW = 1_800_000_000.0
SLEEPS = """\
MainThread, most recent call last:
  File "/home/me/train.py", line 19, in <module>
    time.sleep(1e6)
shardc link 0-1 reads: at its connections"""
WAITS = """\
MainThread, most recent call last:
  File "/home/me/train.py", line 30, in <module>
    loss = float(step(w, x))
  File "/lib/site-packages/shardc/api.py", line 5, in __call__
    wait()
"""
COMPILES = "its main thread is compiling a program"
READER = f"""\
{WAITS}train: reader, most recent call last:
  File "/lib/site-packages/shardc/runtime/worker.py", line 5, in run
    task()
  File "/home/me/train.py", line 9, in read
    file.read()
"""


def status(*waits, call=None, members="0,1", epoch=0):
    named = {} if call is None else {members: [members, call, f"at step, call {call}"]}
    run = {"calls": named, "waits": [Wait(tuple((p, "") for p in ps), why, 9.0).to_json() for ps, why in waits]}
    return json.dumps({"epoch": epoch, "run": run})


def flight(process, said="", **more):
    """A process that was alive until the run was killed."""
    entries = [Entry(i + 1, NOW - 20 + i, f"at step, call {i}") for i in range(3)]
    kept = {"script": {}, "end": {}, "lived": NOW, "threads": "", "entries": entries, "status": said}
    return Flight(process, 2**30 + process, "a", NOW - 60, **{**kept, **more})


def failed(why, said="", follows=False, at=NOW):
    return {"why": why, "said": said or why, "follows": follows, "at": at}


DIFFER = "DisagreementError: step, call 7: the processes of this run differ in"
KINDS = {
    "sleeps, or waits for a lock": (
        [flight(0, status(call=4)), flight(1, status(call=3), threads=SLEEPS)],
        "process 1 did not come: process 0 waits for it at step, call 4; at train.py:19, time.sleep(1e6)",
    ),
    "a thread beside the main one hangs": (
        [flight(0, status(([1], "for a result"))), flight(1, status(), threads=READER)],
        "process 1 did not come: process 0 waits for it for a result; train: reader at train.py:9, file.read()",
    ),
    "it compiles": (
        [flight(0, status(call=4)), flight(1, status(call=3), threads=f"{COMPILES}\n{WAITS}")],
        "process 1 did not come: process 0 waits for it at step, call 4; its main thread is compiling a program; "
        "at train.py:30, loss = float(step(w, x))",
    ),
    "made no call yet": (
        [flight(0, status(call=0)), flight(1, status())],
        "process 1 did not come: process 0 waits for it at step, call 0",
    ),
    "stopped, or holds the lock": (
        [flight(0, status(call=2)), flight(1, status(call=2), lived=NOW - 9)],
        "process 1 gave no sign of life for 9 s: it was killed or stopped, or held Python's lock; "
        "its last call: step, call 2",
    ),
    "killed from outside": (
        [flight(0, status(call=2)), flight(1, lived=NOW - 9, end={"code": -9, "at": NOW - 9})],
        "process 1 was killed by SIGKILL, which its launcher did not do; its last call: step, call 2",
    ),
    "other calls": (
        [flight(0, script=failed(DIFFER, f"{DIFFER}\n  the call: process 0: evaluate; process 1: step")),
         flight(1, script=failed("PeerLostError: process 0 is lost.", follows=True, at=NOW - 1))],
        f"process 0 failed: {DIFFER}: the call: process 0: evaluate; process 1: step",
    ),
    "a script has ended": (
        [flight(0, script=failed("DisagreementError: process 1's script has ended; process 0 waits for it")),
         flight(1, script={"at": NOW - 3})],
        "process 0 failed: DisagreementError: process 1's script has ended; process 0 waits for it",
    ),
    "an error of the script": (
        [flight(0, script=failed("ValueError: on fire")),
         flight(1, script=failed("OSError: no disk", at=NOW - 2))],
        "process 1 failed: OSError: no disk",
    ),
    "its launcher has named it": (
        [flight(0, end={"code": -9, "by": "its launcher", "why": "", "at": NOW}),
         flight(1, threads=SLEEPS, end={"code": -9, "by": "its launcher", "at": NOW - 1,
                "why": "it has not come for 20 s; process 0 waits for it at step, call 4"})],
        "process 1 was ended: it has not come for 20 s; process 0 waits for it at step, call 4; "
        "at train.py:19, time.sleep(1e6)",
    ),
    "all wait for one another": (
        [flight(0, status(([1], "to say x"))), flight(1, status(([0], "to say y")))],
        "processes 0, 1 wait for one another: to say x; to say y",
    ),
    "a program that does not end": (
        [flight(p, status(call=2), threads=WAITS) for p in (0, 1)],
        "no process waited for another one: all were in step, call 2; its program does not end, or a device hangs",
    ),
    "interrupted while one sleeps": (
        [flight(0, status(call=4), script=failed("KeyboardInterrupt")),
         flight(1, status(call=3), threads=SLEEPS, script=failed("KeyboardInterrupt"))],
        "process 1 did not come: process 0 waits for it at step, call 4; at train.py:19, time.sleep(1e6)",
    ),
    "ended well": (
        [flight(p, status(call=2 + p), script={"at": NOW}) for p in (0, 1)],
        "all scripts have ended",
    ),
    "killed while all go on": (
        [flight(p, status(call=2)) for p in (0, 1)],
        "no process waited for another one: all were in step, call 2; they went on until they were ended",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_in_one_line(kind):
    flights, line = KINDS[kind]
    assert cause_of_end(flights)[0] == line
    assert autopsy(flights)[0].title == line and "\n" not in line


def test_the_middle_of_three_and_an_epoch_that_is_over():
    chain = [flight(0, status(([1], "to say x"))), flight(1, status(([2], "to say y"))), flight(2, status())]
    assert cause_of_end(chain) == ("process 2 did not come: process 1 waits for it to say y", (2,))
    old = [flight(0, status(([1], "to say x"))), flight(1, status(epoch=1, call=5)), flight(2, status(epoch=1))]
    assert cause_of_end(old)[1] != (1,)


def test_a_process_of_this_machine_that_is_stopped_is_said_so(monkeypatch):
    monkeypatch.setattr(autopsy_module, "_is_stopped", lambda flight: True)
    flights, _ = KINDS["stopped, or holds the lock"]
    assert cause_of_end(flights)[0].startswith("process 1 gave no sign of life for 9 s: it is stopped; its last")


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["autopsy", str(tmp_path)]) == 2
    assert "has no files of flight recorders: process-N.flight, of a run with --log" in capsys.readouterr().err
    recorders = [FlightRecorder(f"{tmp_path}/process-{p}.flight", p) for p in range(6)]
    for p, recorder in enumerate(recorders):
        for i in range(3 - p % 2):
            recorder.note(f"at step, call {i}")
        recorder.live(status(call=2 - p % 2, members="0-5"), str)
    assert main(["autopsy", str(tmp_path)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "processes 1, 3, 5 did not come: processes 0, 2, 4 wait for them at step, call 2"
    assert sum(line.split()[:1] == [str(p)] for p in range(6) for line in lines) == 6
    columns = next(line.split() for line in lines if "process 1" in line)
    assert columns == ["s", "process", "0", "process", "1", "process", "3", "process", "5"]
    assert main(["autopsy", "--before", str(tmp_path)]) == 2
    (tmp_path / "process-1.flight").write_bytes(b"x")
    capsys.readouterr()
    assert main(["autopsy", str(tmp_path)]) == 2
    assert "is no file of a flight recorder" in capsys.readouterr().err
