"""A loader ends the run with its epochs; what is trained is what a plain loop trains; it reads ahead as planned."""

import jax
import numpy as np
import pytest

import shardc
from examples import data, loader, mlp

CFG = mlp.CONFIGS["test"]


def ran(credits, epochs, every):
    """State, what rounds gave, and what was told, of a run whose reader was never further ahead than planned."""
    reader, said = loader.Reader(epochs), []
    train, state = loader.make_flow(CFG, shardc.make_mesh(data=2), reader, credits, every, said.append)
    try:
        plan = train.plan(state)
        state, given = train.run(state, record=True)
    finally:
        train.close()
    assert len(given) == reader.rounds == 30 * epochs  # the reader has ended it
    steps, reads = ({s.round: s for s in given.spans if str(s.label) == name} for name in ("step", "read"))
    assert all(reads[r].start > steps[r - credits].start for r in range(credits, reader.rounds))
    read = next(i for i, e in enumerate(plan.edges) if e.giver.name == "read" and e.taker.name == "step")
    assert plan.network.channels[read].registers == credits
    assert given.chart.tracks[1].timeline.peaks[read] <= credits
    return state, given, said


@pytest.mark.sampled(0)
def test_it_learns_in_some_epochs():
    _, given, said = ran(4, 12, 20)
    reports = [r for r, g in enumerate(given) if g["right"] is not None]
    assert reports == list(range(19, 360, 20)) and len(said) == len(reports)
    assert given[reports[-1]]["right"] > 0.9


def test_losses_are_those_of_a_plain_loop():
    state, given, _ = ran(1, 1, 10)
    init_fn, step_fn = mlp.make_step(CFG)
    step, plain = jax.jit(step_fn), jax.jit(init_fn)(jax.random.key(0))
    losses = []
    for batch, _ in zip(data.digit_batches(data.digits()[0], loader.ROWS), given, strict=False):
        *plain, loss = step(*plain, batch)
        losses.append(loss)
    np.testing.assert_allclose([g["loss"] for g in given], losses, rtol=1e-4)
    np.testing.assert_allclose(*(x[0]["head"]["kernel"] for x in (state, plain)), rtol=1e-3, atol=1e-4)
