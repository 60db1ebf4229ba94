"""What a process says of those that it waits for; values beside the messages are tested with whole pipelines."""

import os
import pty
import re
import sys
import termios

from shardc.execute.far_stages import waits_text
from shardc.execute.rank_processes import RankProcesses
from shardc.runtime.stalls import Stall
from tests.launch.launching import environment, started

PLACES = RankProcesses(((0,), (0,), (1, 2), (1, 2)), 0)


def test_whom_a_process_waits_for():
    assert waits_text([], PLACES) == ""
    assert waits_text([Stall(0, "0B1", (1,), 9.0)], PLACES) == ""  # a rank of this process, which waits itself
    stalls = [Stall(0, "0B1", (1,), 9.0), Stall(1, "1B2", (2,), 3.6), Stall(1, "1B2", (3,), 2.0)]
    assert waits_text(stalls, PLACES) == "processes 1, 2 (rank 1 before 1B2, 4 s)"


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
params, loss = f(params, x)
print("loss", float(loss), flush=True)
if current().me == 1:
    time.sleep(5)
params, loss = f(params, x)
print("loss", float(loss))
del f, loss, params
gc.collect()
assert current().waits == {}
"""


def test_the_live_line_says_who_waits_for_whom(tmp_path):
    path = tmp_path / "pipeline.py"
    path.write_text(PIPELINE)
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
