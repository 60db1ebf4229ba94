"""The status line: step, the newest loss that is there, tokens per second; nobody waits for a device."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from shardc import make_mesh
from shardc.checkpoint import progress
from shardc.checkpoint.progress import Progress
from tests.checkpoint.peers import Fake, Run
from tests.checkpoint.test_leaves import far


def line():
    return Fake(Run(1, 1), 0)


def test_steps_losses_and_rates(monkeypatch):
    clock = iter([10.0, 12.0, 12.5])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    said = line()
    shown = Progress(said)
    shown.step(0, 3.0, 100)
    shown.step(1, np.float32(2.0), 100)
    shown.step(2, None, None)
    assert said.said == [(0, 3.0, None), (1, 2.0, 50.0), (2, 2.0, None)]


def test_a_loss_is_shown_when_it_is_there(monkeypatch):
    ready = {}
    monkeypatch.setattr(progress, "_is_there", lambda x: ready.get(float(x), False))
    said = line()
    shown = Progress(said)
    shown.step(0, jnp.float32(3), None)
    ready[3.0] = True
    shown.step(1, jnp.float32(2), None)
    ready[2.0] = True
    shown.step(2, None, None)
    assert [loss for _, loss, _ in said.said] == [None, 3.0, 2.0]


def test_what_is_not_here_is_not_waited_for():
    said = line()
    shown = Progress(said)
    gone = jnp.float32(1)
    gone.delete()
    shown.step(0, far((), make_mesh(a=2)), None)
    shown.step(1, gone, None)
    shown.step(2, jax.block_until_ready(jnp.float32(4)), None)
    assert [loss for _, loss, _ in said.said] == [None, None, 4.0]


def test_without_a_status_line():
    Progress(None).step(0, object(), None)
    Progress(SimpleNamespace(me=0)).step(0, object(), None)
