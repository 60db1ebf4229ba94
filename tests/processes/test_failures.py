"""Processes that fail where others wait for them: each is an error with words, never an abort or a hang."""

from __future__ import annotations

import signal
import textwrap

import pytest

from tests.processes.run import run_script

HEAD = """
from tests.processes.plugin import RUN, leave
import os, signal, sys, time, traceback
import jax, jax.numpy as jnp, numpy as np
import shardc
from shardc import S

MESH = shardc.make_mesh(data=jax.device_count())


def run(body):
    try:
        body()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        leave(7)
    leave(0)
"""


def run(folder, body, **options):
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(body) + "\n\nrun(body)\n")
    return run_script(script, **options)


def test_another_shape_in_a_later_call_is_an_error(tmp_path):
    """A process that came alone to a collective of another size was an abort of the interpreter."""
    found = run(
        tmp_path,
        """
        def body():
            f = shardc.function(lambda x: jnp.cumsum(x, 0), mesh=MESH, in_placements={"x": {"data": S(0)}})
            for i in range(4):
                f(np.ones((8 + 8 * (i == 2 and RUN.me == 1), 16), np.float32))
        """,
    )
    (_, first), (code, second) = found
    assert code == 7, second
    assert "DisagreementError" in second and "differ in" in second and "call 3" in second
    assert "terminate called" not in first + second
    assert found[0][0] in (7, None), first  # it learned of it too, or it was ended while it waited


@pytest.mark.sampled(0)
def test_the_death_of_a_process_is_an_error_in_the_other(tmp_path):
    found = run(
        tmp_path,
        """
        def body():
            step = shardc.function(
                lambda w, x: (w - 0.1 * jnp.tanh(x @ w).sum(0), x.sum()), mesh=MESH,
                in_placements={"x": {"data": S(0)}}, donate_argnames=("w",),
            )
            w = shardc.put(np.ones(16, np.float32), MESH, {})
            x = shardc.put(np.ones((64, 16), np.float32), MESH, {"data": S(0)})
            for i in range(1000):
                if RUN.me == 1 and i == 30:
                    os.kill(os.getpid(), signal.SIGKILL)
                w, loss = step(w, x)
                jax.block_until_ready(w)
        """,
        grace=30,
        devices=1,
    )  # with more devices in a process XLA:CPU's threads wait for each other for ever, and who started it ends it
    (code, text), (killed, _) = found
    assert killed == -signal.SIGKILL
    assert code == 7, text
    assert any(f"{kind}: " in text for kind in ("StepFailedError", "JaxRuntimeError", "XlaRuntimeError")), text
