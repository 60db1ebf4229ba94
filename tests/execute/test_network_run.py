"""What a process says of those that it waits for; values beside the messages are tested with whole pipelines."""

import os
import pty
import re
import sys
import termios
import time

import pytest

from shardc.launch.failure import DISAGREE
from tests.launch.launching import environment, logged, run, started

__all__ = ["run"]


PIPELINE = """
import gc, time
import jax, jax.numpy as jnp, numpy as np
import shardc
from shardc.runtime.cluster import current


def loss_of(params, x):
    hidden = shardc.stage_boundary(jnp.tanh(x @ params["up"]))
    return jnp.mean((hidden @ params["down"]) ** 2)


def step(params, x):
    loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=2)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


mesh = shardc.make_mesh(pipe=2, data=1)
f = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline())
params = {"up": np.ones((8, 16), np.float32), "down": np.ones((16, 4), np.float32)}
x = np.ones((4, 8), np.float32)
me = current().me
"""
WAITS = """
params, loss = f(params, x)
print("loss", float(loss), flush=True)
found = f.compile(params, x).audit()
said, carried, link = str(found).split("; ")
assert said.startswith(f"audit of process {me}: planned = found"), found
assert carried.endswith(" sent from mesh to mesh, as planned"), found
assert link.startswith(f"the link to process {1 - me} does "), found
listed = [t.border_bytes for t in f.plan(params, x).transfers if t.source == me]
assert found.crossed == found.planned_crossed == sum(listed), (found, listed)
if me == 1:
    time.sleep(5)
params, loss = f(params, x)
print("loss", float(loss))
del f, loss, params
gc.collect()
assert current().waits.networks == {}
"""


@pytest.mark.sampled(0)
def test_the_live_line_says_who_waits_for_whom(tmp_path):
    path = tmp_path / "pipeline.py"
    path.write_text(PIPELINE + WAITS)
    words = [sys.executable, "-m", "shardc", "run", "--processes", "2", "--devices", "1", "--islands", "2", str(path)]
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (30, 130))
    try:
        with started(words, str(path), env=environment(), stdout=slave, stderr=slave) as process:
            os.close(slave)
            seen = b""
            while True:
                try:
                    piece = os.read(master, 1 << 16)
                except OSError:
                    break
                seen += piece
            assert process.wait(60) == 0, seen.decode()
    finally:
        os.close(master)
    lines = re.findall(r"process \d waits for [^\r\x1b]*", seen.decode())
    assert lines
    assert set(lines) <= {f"process 0 waits for process 1 (rank 0 before 0B0, {n} s)" for n in range(1, 10)}


DIFFERS = """
def call(x):
    try:
        return float(f(params, x)[1])
    except shardc.DisagreementError as error:
        return str(error)

print(call(x + me))
print(call(x.repeat(2 + me, 0)))
print(call(x))
print(call(x + me))
print(call(x))
print(call(x))
print(call(x[: 4 - 2 * me]))
"""


def test_what_differs_between_processes_is_an_error_in_all(tmp_path, run):
    """Each stage reads its own arguments, so that other values in another process would be wrong without a word."""
    path = tmp_path / "pipeline.py"
    path.write_text(PIPELINE + DIFFERS)
    done = run(path, "--processes", 2, "--devices", 1, "--islands", 2, "--log", tmp_path)
    assert done.code == 0, done.err
    assert re.sub("[0-9a-f]{8,}", "#", done.out).splitlines() == [
        "step, first call: the processes of this run differ in",
        "  the value of x: process 0: #; process 1: #",
        "step, first call: the processes of this run differ in",
        "  argument x: process 0: float32[8,8]; process 1: float32[12,8]",
        "  the value of x: process 0: #; process 1: #",
        "  the plan: process 0: digest #; process 1: digest #",
        "256.0",
        "256.0",  # stage 0 has used its own x; the next call tells
        "step, call 2: the processes of this run differ in",
        "  the value of x: process 0: #; process 1: #",
        "256.0",
        "step, call 5: the processes of this run differ in",  # one process has called what it had called before
        "  the call: process 0: step, call 5; process 1: step, first call",
    ]
    assert logged(tmp_path / "process-1.log").splitlines()[:-2] == done.out.splitlines()[:-2]


TIED = """
import jax, jax.numpy as jnp, numpy as np
import shardc


def loss_of(params, x):
    for i in range(4):
        x = jnp.tanh(x @ params["tied"] if i != 1 else x @ params["own"])
        x = shardc.stage_boundary(x) if i < 3 else x
    return jnp.mean(x**2)


def step(params, x):
    loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=2)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


f = shardc.function(step, mesh=shardc.make_mesh(pipe=4, data=1), pipeline=shardc.Pipeline())
rng = np.random.default_rng(0)
params = {name: rng.normal(size=(32, 32)).astype(np.float32) / 6 for name in ("tied", "own")}
x = rng.normal(size=(4, 32)).astype(np.float32)
wanted, one = params, jax.jit(step)
for _ in range(3):
    params, loss = f(params, x)
    wanted, there = one(wanted, x)
    np.testing.assert_allclose(float(loss), float(there), rtol=1e-5)
print({name: str(p)[:11] for name, p in params.items()})
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), shardc.fetch(params), wanted)
"""


def test_an_argument_that_two_ranks_of_another_process_read(tmp_path, run):
    path = tmp_path / "tied.py"
    path.write_text(TIED)
    done = run(path, "--processes", 2, "--devices", 2, "--islands", 2, "--deadline", 20, "--log", tmp_path)
    assert done.code == 0, done.err
    assert logged(tmp_path / "process-1.log") == "{'own': 'RemoteArray', 'tied': 'RemoteArray'}\n"


ENTERS = """
from shardc.arrays.place import Place

real = Place.enter
good, loss = f(params, x)
float(loss)
(exe,) = f._executables.values()
for who, error in [(0, KeyboardInterrupt()), (1, ValueError("no room")), (1, KeyboardInterrupt())]:
    def enter(self, x):
        raise error
    if me == who:
        Place.enter = enter
    begin = time.time()
    try:
        print("loss", float(f(good, x)[1]))
    except BaseException as failed:
        print(f"{type(failed).__name__}: {failed}".splitlines()[0])
    Place.enter = real
    print("at once:", time.time() - begin < 10, "runs", exe._executor.runs)
    print("loss", float(f(good, x)[1]))
network = exe._remote.network
print("kept", [run for run, _ in network._values if run < exe._executor.runs], network._stopped)
"""


def test_a_failure_while_arguments_enter_is_one_of_the_run_in_all(tmp_path, run):
    """The processes count the run alike, so the next one works."""
    path = tmp_path / "enters.py"
    path.write_text(PIPELINE + ENTERS)
    done = run(path, "--processes", 2, "--devices", 1, "--islands", 2, "--deadline", 20, "--log", tmp_path)
    assert done.code == 0, done.err
    said = [done.out.splitlines(), logged(tmp_path / "process-1.log").splitlines()]
    failed = "PipelineError: step: its arguments cannot be put in place: ValueError: no room"
    interrupted = "KeyboardInterrupt: "
    told = "PipelineError: process {}: the run was interrupted: KeyboardInterrupt()."
    assert [lines[::3] for lines in said] == [
        [interrupted, f"PipelineError: process 1: {failed}", told.format(1), "kept [] {}"],
        [told.format(0), failed, interrupted, "kept [] {}"],
    ]
    for lines in said:
        assert lines[1::3] == [f"at once: True runs {n}" for n in (2, 4, 6)]
        assert len(set(lines[2::3])) == 1 and lines[2].startswith("loss ")


ENDS = """
params, loss = f(params, x)
print("loss", float(loss), flush=True)
if me == {ends}:
    time.sleep({after})
    sys.exit()
if me:
    time.sleep(3 - {after})
params, loss = f(params, x)
print("loss", float(loss))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ends", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_a_call_that_another_process_does_not_make(tmp_path, run, ends, after):
    """Its script ends before or after the call begins here."""
    path = tmp_path / "pipeline.py"
    path.write_text("import sys\n" + PIPELINE + ENDS.format(ends=ends, after=after))
    done = run(path, "--processes", 2, "--devices", 1, "--islands", 2)
    assert done.code == DISAGREE
    text = (
        f"process {ends}'s script has ended; process {1 - ends} waits for it at step, call 2. Each process has to make "
    )
    assert done.err.count(text) == 1, done.err


ALONE = """
import time
import jax, jax.numpy as jnp, numpy as np
import shardc
from shardc.runtime.cluster import current

places = {{"x": {{"data": shardc.S(0)}}}}
f = shardc.function(lambda x: jnp.sum(x * 2), mesh=shardc.make_mesh(data=2), in_placements=places)
x = np.ones((4, 8), np.float32)
print(float(f(x)), flush=True)
time.sleep({0} if current().me == 0 else {1})
if current().me == 0:
    print(float(f(x)))
"""
VAIN = "process 1's script has ended; process 0 waits for it at <lambda>, call 2. Each process has to"


def test_a_collective_that_another_process_does_not_make(tmp_path, run):
    """Its script has ended before the call begins here."""
    path = tmp_path / "alone.py"
    path.write_text(ALONE.format(3, 0))
    done = run(path, "--processes", 2, "--devices", 1)
    assert (done.code, done.err.count(VAIN)) == (DISAGREE, 1), done.err


def test_a_collective_that_waits_in_jax(tmp_path, run):
    """The script of the other process ends when the call has begun here: nothing interrupts it, and the run ends."""
    path = tmp_path / "alone.py"
    path.write_text(ALONE.format(0, 3))
    begin = time.monotonic()
    done = run(path, "--processes", 2, "--devices", 1)
    assert (done.code, done.err.count(VAIN)) == (DISAGREE, 1), done.err
    assert time.monotonic() - begin < 30
