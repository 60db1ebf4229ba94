"""The flow of policy, judge and learner against the same functions called one after the other."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from examples import rlhf

CFG = rlhf.CONFIGS["test"]


@pytest.mark.sampled(0)
def test_the_learner_finds_the_chances_that_the_policy_wrote():
    start, _ = rlhf.make_learner(CFG)
    policy = start(jax.random.key(3))["policy"]
    (prompt_N, key), *_ = rlhf.prompts(CFG, range(1))
    written = jax.jit(rlhf.make_writer(CFG))(policy, prompt_N, key)
    assert written["tokens"].shape == (CFG.rows, CFG.length)
    again = jax.jit(partial(rlhf.log_chances, cfg=CFG))(policy["params"], written["tokens"])
    np.testing.assert_allclose(written["chance"], again, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(written["tokens"][:, 0], prompt_N)


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("compiled_fast")
def test_the_policy_writes_with_the_version_before_and_all_equals_one_device():
    train, start = rlhf.make_flow(CFG, rlhf.Meshes.of(shardc.devices()))
    items = rlhf.prompts(CFG, range(4))
    state, given = train.run(start(), items)
    write, (begin, learn) = jax.jit(rlhf.make_writer(CFG)), rlhf.make_learner(CFG)
    kinds = np.arange(CFG.kinds)
    liked = jnp.float32(kinds[None] == (kinds[:, None] + 1) % CFG.kinds)
    want = before = begin(jax.random.key(0))
    for i, ((prompt_N, key), got) in enumerate(zip(items, given, strict=True)):
        written = write(before["policy"], prompt_N, key)
        before = want
        want, said = jax.jit(learn)(want, written, rlhf.judge(liked, written["tokens"]))
        assert int(got["by"]) == int(said["by"]) == max(0, i - 1)
        np.testing.assert_allclose(got["reward"], said["reward"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    train.close()
