"""The status of a loop: one place, whoever writes to it; nobody waits for a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.live import meter
from shardc.runtime.status import loop as loop_status
from shardc.runtime.status.loop import LoopStatus
from tests.checkpoint.peers import Fake, Run, as_process, use_fakes
from tests.checkpoint.test_leaves import far


class Loss:
    """A loss that is computed when `there` says so."""

    is_fully_addressable, there, size = True, False, 1

    def __init__(self, value):
        self.value = value

    def is_ready(self):
        return self.there

    def is_deleted(self):
        return False

    def __float__(self):
        return self.value


def test_steps_losses_and_rates(monkeypatch):
    clock = iter([10.0, 12.0, 12.5])
    monkeypatch.setattr(loop_status, "monotonic", lambda: next(clock))
    loop = LoopStatus()
    loop.step(1, 3.0, 100)
    assert loop.facts == {"step": 1, "loss": 3.0}
    loop.step(2, np.float32(2.0), 100)
    assert loop.facts == {"step": 2, "loss": 2.0, "tokens": 50.0}
    loop.step(3)
    assert loop.facts == {"step": 3, "loss": 2.0, "tokens": 50.0}


def test_a_loss_is_shown_when_it_is_there():
    loop, losses = LoopStatus(), [Loss(float(i)) for i in range(5)]
    seen = []
    for i, loss in enumerate(losses):
        if i >= 2:
            losses[i - 2].there = True  # the device is two steps behind
        loop.step(i + 1, loss)
        seen.append(loop.facts.get("loss"))
    assert seen == [None, None, 0.0, 1.0, 2.0]


def test_what_is_not_here_is_not_waited_for():
    loop, gone = LoopStatus(), jnp.float32(1)
    gone.delete()
    loop.step(1, far((), shardc.make_mesh(a=2)))
    loop.step(2, gone)
    assert loop.facts == {"step": 2}
    loop.step(3, jax.block_until_ready(jnp.float32(4)))
    assert loop.facts == {"step": 3, "loss": 4.0}


def test_rows_that_are_computed_late_take_nothing_back():
    loop = LoopStatus()
    loop.step(7, loss=0.7, tokens=1)
    loop.measured(3, loss=0.3, rate=None)
    assert loop.facts == {"step": 7, "loss": 0.7}
    loop.measured(6, loss=None, rate=50.0)
    loop.step(8, tokens=1)  # what is measured on the device counts
    assert loop.facts == {"step": 8, "loss": 0.7, "tokens": 50.0}
    loop.saved(7)
    loop.measured(9, loss=0.9, rate=60.0)
    assert loop.facts == {"step": 9, "loss": 0.9, "tokens": 60.0, "saved": 7}


def test_a_loop_that_goes_on_from_a_checkpoint_goes_back():
    loop = LoopStatus()
    loop.step(7, loss=Loss(0.7))
    loop.saved(5)
    loop.begin(6)
    assert loop.facts == {"saved": 5}
    loop.measured(5, loss=1.0, rate=1.0)  # of the loop before
    assert loop.facts.get("step") is None
    loop.step(7, loss=0.8)
    assert loop.facts == {"saved": 5, "step": 7, "loss": 0.8}


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("first", ["progress", "saved"])
def test_progress_and_checkpoints_in_one_loop(tmp_path, monkeypatch, first, more):
    """The status goes forward, and has the loss and the rate of both."""

    use_fakes(monkeypatch)

    def body(cluster):
        monkeypatch.setattr(meter, "current", lambda: cluster)
        seen = []
        with shardc.checkpoints(tmp_path, every=3) as saved:
            state, start = saved.last(or_else={"w": np.ones(2)})
            with shardc.progress(total=6, start=start, every=3, items=100) as p:
                for i in range(start, 6):
                    loss = 1 / (i + 1)
                    calls = [
                        lambda: p(loss=loss),  # noqa: B023  # called in this round
                        lambda: saved.step(i, state, **({"loss": loss, "tokens": 100} if more else {})),  # noqa: B023
                    ]
                    for call in calls if first == "progress" else calls[::-1]:
                        call()
                        seen.append(cluster.loop.facts)
        return seen

    seen = as_process(Fake(Run(1, 1), 0), body)
    assert [facts.get("step") for facts in seen[1::2]] == [1, 2, 3, 4, 5, 6]
    steps = [facts.get("step", 0) for facts in seen]
    assert steps == sorted(steps)
    known = [{"loss", "tokens"} <= facts.keys() for facts in seen]
    assert known == sorted(known) and known[6:] == [True] * 6  # once they are there, they stay
    assert seen[-1]["loss"] == pytest.approx(1 / 6)
