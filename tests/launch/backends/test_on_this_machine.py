"""Runs on this machine as a user starts them: output, ends, losses, restarts."""

import os
import pty
import re
import signal
import subprocess
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.launching import command, logged, named, script, started, text_of, wait_for

PSUM = """\
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
n = len(jax.devices())
rows = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
x = jax.make_array_from_callback((n,), rows, lambda i: np.arange(n, dtype=np.float32)[i])
print("sum", float(jax.jit(lambda x: x.sum())(x)), jax.process_count(), len(jax.local_devices()))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("islands", "line"), [(1, "sum 6.0 2 2"), (2, "sum 1.0 1 2")])
def test_a_sum_over_the_devices_of_an_island(tmp_path, islands, line, run, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody answers there
    path = script(tmp_path, PSUM, head="")
    done = run(path, "--processes", 2, "--devices", 2, "--islands", islands)
    assert (done.code, done.out, done.err) == (0, f"{line}\n", "")


def test_output_appears_once_and_arguments_arrive(tmp_path, run):
    path = script(
        tmp_path,
        """
        import threading
        print("out", c.me, sys.argv[1:], sys.path[0], __name__)
        print("err", c.me, file=sys.stderr)
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\n[Gloo] other\\n")
        print(c.gather("names", f"process {c.me}"), c.config.islands, c.config.restarts)
        """,
    )
    done = run(path, "--processes", 2, "--log", tmp_path / "logs", arguments=["--lr", "1", "--", "x"])
    assert (done.code, done.err) == (0, "err 0\n")
    assert done.out == (
        f"out 0 ['--lr', '1', '--', 'x'] {tmp_path} __main__\n[Gloo] other\n['process 0', 'process 1'] 1 0\n"
    )
    for p in (0, 1):
        log = (tmp_path / "logs" / f"process-{p}.log").read_text()
        assert log.count("\n") == 5
        assert f"out {p}" in log
        assert f"err {p}\n" in log


def test_a_module_and_a_line_that_is_not_ended_yet(tmp_path):
    """Output comes at once, not when the process ends."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    script(
        tmp_path / "package",
        "print(sys.argv[1:])\nprint('[wait', end=' ', flush=True)\nc.gather('a', sys.stdin.read())",
    )
    words = command("package.script", "--processes", 1, "-m", arguments=["7"])
    with started(words, "package.script", cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "['7']\n"
        assert process.stdout.read(6) == "[wait "
        assert process.poll() is None
        assert process.communicate("now", timeout=30) == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("raise ValueError('on fire')", 1, "process 1| ValueError: on fire"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 is lost: killed by SIGKILL."),
        pytest.param("sys.exit(7)", 7, "process 1 ended with exit code 7.", marks=pytest.mark.sampled(0)),
        pytest.param("sys.exit('no data')", 1, "process 1| no data", marks=pytest.mark.sampled(0)),
    ],
)
def test_exit_code_and_first_error_come_through(tmp_path, how, code, last, run):
    path = script(tmp_path, f"c.gather('all', '')\nif c.me == 1:\n    {how}\nc.gather('never', '')\n")
    done = run(path, "--processes", 2, "--islands", 2)
    why = last.partition("| ")[2].replace("no data", "ended with exit code 1") or last[len("process 1 ") : -1]
    why = why.removeprefix("is lost: ")
    *first, follows = done.err.splitlines()
    assert (done.code, done.out, first[-1]) == (code, "", last)
    assert follows == f"process 0| PeerLostError: process 1 is lost: {why}."
    if "raise" in how:
        assert first[0] == "process 1| Traceback (most recent call last):"
        assert first[1] == f'process 1|   File "{path}", line 6, in <module>'  # frames of the script only


def test_an_error_of_all_is_shown_once(tmp_path, run):
    body = """
    from shardc.runtime.calls import refuse_unlike
    refuse_unlike('the step', [0, 1], [{'mesh': t} for t in c.gather('the step', str(c.me))])
    """
    path = script(tmp_path, body)
    done = run(path, "--processes", 2, "--islands", 2, "--restarts", 1)
    assert done.code == 76
    assert done.err.count("Traceback") == 1
    assert done.err.count("mesh: process 0: 0; process 1: 1") == 1
    short = r"^process \d\| DisagreementError: the step: the processes of this run differ in"
    assert len(re.findall(short, done.err, re.MULTILINE)) == 1


def test_an_error_in_one_process_of_a_jax_runtime_does_not_wait_in_a_barrier(tmp_path, run):
    path = script(tmp_path, "if c.me == 0:\n    raise ValueError('on fire')\ntime.sleep(100)")
    done = run(path, "--processes", 2, "--devices", 1)
    assert done.code == 1
    assert done.err.count("ValueError: on fire") == 1
    assert done.seconds < 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("restarts", "code"), [(1, 0), (0, 137)])
def test_a_loss_after_the_end_of_all_scripts_fails_no_run_that_can_mend_losses(tmp_path, run, restarts, code):
    text = "import atexit\nif c.me == 1:\n    atexit.register(os.kill, os.getpid(), signal.SIGKILL)\nprint('done')"
    done = run(script(tmp_path, text), "--processes", 2, "--islands", 2, "--restarts", restarts)
    lost = "process 1 is lost (killed by SIGKILL); all scripts had ended\n"
    assert (done.code, done.out) == (code, "done\n")
    assert done.err == (lost if restarts else "process 1 is lost: killed by SIGKILL.\n")


INTERRUPTED = """
import atexit
(open(f"{sys.argv[1]}/{c.me}", "w")).close()
if c.me == 1:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.system("sleep 1000 &")
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.sampled(0))])
def test_ctrl_c(tmp_path, number):
    path = script(tmp_path, INTERRUPTED)
    with started(command(path, "--processes", 2, arguments=[tmp_path]), str(path)) as process:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        begin = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=5)
        assert time.monotonic() - begin < 5
        assert (process.returncode, out) == (128 + number if number == signal.SIGTERM else 130, "")
        assert named(str(path)) == []
    assert err.endswith("KeyboardInterrupt\n")
    assert "shardc/launch" not in err


SAVES = """
import numpy as np, shardc
with shardc.checkpoints(sys.argv[1], every=10**6) as saved:
    state, start = saved.last(or_else={"n": np.zeros(3)})
    for i in range(start, 10**6):
        state = {"n": state["n"] + 1}
        saved.step(i, state)
        print(start, i, *state["n"], flush=True)
        time.sleep(0.01 * (1 + c.me))
"""


@pytest.mark.parametrize("islands", [1, pytest.param(2, marks=pytest.mark.sampled(0))])
def test_after_sigterm_all_processes_save_one_step(tmp_path, islands):
    path, folder = script(tmp_path, SAVES), tmp_path / "saved"
    words = command(path, "--processes", 2, "--islands", islands, "--devices", 1, arguments=[folder])
    last = -1
    for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm's --signal=USR1@60
        with started(words, str(path)) as process:
            for _ in range(5):
                line = process.stdout.readline().split()
            for pid in named(str(path)):  # the scripts too, as Slurm and systemd do
                os.kill(pid, number)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 143, err
        assert int(line[0]) == last + 1  # no step was lost
        (last,) = [int(p.name) for p in folder.iterdir() if p.name != f"{last}"]
        assert [line for line in err.splitlines() if "preemption_notifier" not in line] == [  # jaxlib's, at SIGTERM
            "this run was asked to end: all processes save at their next step, within 25 s",
            f"all processes have saved step {last}, and ended",
        ]


def test_children_end_when_the_launcher_is_killed_and_go_on_when_it_is_stopped(tmp_path):
    path = script(
        tmp_path,
        """
        for i in range(100000):
            with open(f"{sys.argv[1]}/{c.me}", "w") as file:
                file.write(f"{i} {c.config.store}")
            print("step", i, "x" * 100)
            time.sleep(0.01)
        """,
    )
    steps = [tmp_path / "0", tmp_path / "1"]

    def step_of(file):
        return int((text_of(file).split() or ["-1"])[0])

    with started(command(path, "--processes", 2, "--islands", 2, arguments=[tmp_path]), str(path)) as process:
        wait_for(lambda: all(step_of(f) > 3 for f in steps))
        os.kill(process.pid, signal.SIGSTOP)
        before = [step_of(f) for f in steps]
        wait_for(lambda: all(step_of(f) > b + 100 for f, b in zip(steps, before, strict=True)))
        private = os.path.dirname(steps[0].read_text().partition("unix:")[2])
        assert os.stat(private).st_mode & 0o777 == 0o700
        os.kill(process.pid, signal.SIGKILL)
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: not named(str(path)), 10)
        wait_for(lambda: not os.path.exists(private), 10)


HOLDS = """
import subprocess
c.gather("all", "")
if c.me == 1:
    {before}
    sys.setswitchinterval(1000)
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        pass
c.gather("again", "")
print("end")
"""


def group(leader):
    """The processes of a group that have not ended."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            if os.getpgid(pid) == leader and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                found.append(pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
def test_what_a_killed_launcher_has_started_ends_even_if_python_is_locked_or_stopped(tmp_path, number):
    path = script(tmp_path, HOLDS.format(seconds=60, before="subprocess.Popen(['sleep', '1000'])"))
    mark = tmp_path / "locked"
    with started(command(path, "--processes", 2, "--islands", 2, arguments=[mark]), str(path)) as process:
        child = int(wait_for(lambda: text_of(mark)))
        assert len(group(child)) == 2
        os.kill(child, number)
        process.kill()
        wait_for(lambda: group(child) == [], 2)


def test_a_computation_that_holds_pythons_lock_is_no_silence(tmp_path, run):
    path = script(tmp_path, HOLDS.format(seconds=6, before=""))
    options = ["--processes", 2, "--islands", 2, "--silence", 2]
    done = run(path, *options, arguments=[tmp_path / "locked"])
    assert (done.code, done.out, done.err) == (0, "end\n", "")


def test_a_process_that_is_stopped_before_it_joins_is_lost(tmp_path):
    path = script(tmp_path, "")
    words = command(path, "--processes", 2, "--islands", 2, "--silence", 3)
    with started(words, str(path)) as process:
        # a fork of the launcher that has not begun its program yet would stop the launcher too
        children = wait_for(lambda: len(found := set(named(str(path))) & set(named("launch.child"))) == 2 and found)
        os.kill(max(children), signal.SIGSTOP)
        begin = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - begin < 3 + 1 + 3 + 1  # and three seconds of grace
        assert process.returncode == 75
        assert "is lost: it was stopped for 3 s before it had joined the run.\n" in err


RESTARTED = """
print("start", c.epoch, c.config.restarts)
if c.epoch == 0 and c.me == 1:
    c.gather("all", "")
    os.kill(os.getpid(), {signal})
try:
    c.gather("all", "")
    c.gather("again", "")
except Exception as error:
    print(error)
    if not {rejoins}:
        raise
    c.rejoin()
    print("rejoined", c.epoch, c.config.restarts)
    c.gather("all", "")
    c.gather("again", "")
print("end")
"""


SLOW = pytest.mark.sampled(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("islands", "rejoins"), [(1, False), (2, True), pytest.param(2, False, marks=SLOW)])
def test_a_killed_process_is_started_again(tmp_path, islands, rejoins, run):
    path = script(tmp_path, RESTARTED.format(signal=9, rejoins=rejoins and islands == 2))
    done = run(path, "--processes", 2, "--islands", islands, "--restarts", 3, "--log", tmp_path)
    assert (done.code, done.err) == (0, "process 1 is lost (killed by SIGKILL); started again, 2 restarts are left\n")
    lines = done.out.splitlines()
    assert (lines[0], lines[-1]) == ("start 0 3", "end")
    if islands == 2:
        assert lines[1] == "process 1 is lost: killed by SIGKILL."
    assert ("rejoined 1 2" if rejoins and islands == 2 else "start 1 2") in done.out  # lines of two may be joined
    log = logged(tmp_path / "process-1.log")
    assert log == "start 0 3\n== process 1, start 2\nstart 1 2\nend\n"


def test_a_stopped_process_is_lost(tmp_path, run):
    path = script(tmp_path, RESTARTED.format(signal=int(signal.SIGSTOP), rejoins=True))
    done = run(path, "--processes", 2, "--islands", 2, "--restarts", 1, "--silence", 2)
    assert (done.code, done.out.splitlines()[-2:]) == (0, ["rejoined 1 0", "end"])
    assert done.err == "process 1 is lost (no sign of life for 2 s); started again, 0 restarts are left\n"


@pytest.mark.sampled(0)
def test_a_restart_does_not_compile_again(tmp_path, run):
    path = script(
        tmp_path,
        PSUM
        + """
import glob
if c.epoch == 0:
    c.gather("sum", "")
    os.kill(os.getpid(), 9)
print("programs", bool(glob.glob(f"{jax.config.jax_compilation_cache_dir}/*")))
""",
    )
    done = run(path, "--processes", 2, "--devices", 2, "--restarts", 1)
    assert (done.code, done.out) == (0, "sum 6.0 2 2\nsum 6.0 2 2\nprograms True\n")


def test_a_terminal_stays_a_terminal(tmp_path):
    """A script sees a terminal if its user does, and the live line does not mix with its lines."""
    path = script(
        tmp_path,
        """
        if c.me == 0:
            print(sys.stdout.isatty(), os.get_terminal_size().columns)
        c.loop.measured(12, loss=3.2, rate=5300.0)
        with c.waits.during([1 - c.me], "at x"):
            time.sleep(3)
        print("end")
        """,
    )
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (30, 130))
    try:
        with started(command(path, "--processes", 2), str(path), stdout=slave, stderr=slave) as process:
            os.close(slave)
            seen = b""
            while True:
                try:
                    piece = os.read(master, 1 << 16)
                except OSError:
                    break
                seen += piece
            process.wait(30)
    finally:
        os.close(master)
    text = seen.decode()
    assert text.startswith("True 130\r\n")
    waits = " | ".join(rf"process {p} waits for process {1 - p} \(at x, \d s\)" for p in (0, 1))
    assert re.search(rf"step 12 \| loss 3\.20 \| 5,300 tokens/s \| {waits}", text)
    assert "\r\x1b[2Kend\r\n" in text
    assert text.endswith(("end\r\n", "\x1b[2K"))


@pytest.mark.sampled(0)
def test_values_that_differ_in_the_last_call_are_an_error_and_in_no_checkpoint(tmp_path, run):
    body = """
    import jax, numpy as np, shardc
    f = shardc.function(lambda x: 2 * x, mesh=shardc.make_mesh(data=2))
    with shardc.checkpoints(sys.argv[1], every=int(sys.argv[2])) as saved:
        for i in range(3):
            y = f(np.full(8, float(i == 2 and c.me)))
            saved.step(i, y)
    """
    path = script(tmp_path, body)
    for every, left in ((2, ["1"]), (3, [])):
        saved = tmp_path / f"{every}"
        done = run(path, "--processes", 2, "--devices", 1, arguments=[saved, every])
        assert done.code == 76
        assert "call 3: the processes of this run differ in" in done.err and "the value of x: process 0: " in done.err
        assert sorted(p.name for p in saved.iterdir()) == left
