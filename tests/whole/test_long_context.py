"""Attention over blocks of keys: the numbers of one table of scores, and a plan that never has all keys anywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from benchmarks.gold.tokens import attend, with_gradients
from examples.long_context import attend_in_blocks
from shardc import S
from shardc.machine.mesh import parse_bytes

pytestmark = pytest.mark.usefixtures("compiled_fast")

SPLIT = {"token": S(1)}


def arguments(tokens, heads, keys, width, dtype=np.float32, rows=2):
    rng = np.random.default_rng(tokens)
    sizes = (heads, keys, keys, heads)
    return [jnp.asarray(rng.normal(size=(rows, tokens, n, width)), dtype) for n in sizes]


def in_blocks(blocks):
    return with_gradients(partial(attend_in_blocks, blocks=blocks))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "blocks"), [(24, 4, 2, 6), (30, 3, 3, 5), (16, 2, 1, 16), (8, 1, 1, 1)]
)
def test_blocks_give_what_all_keys_at_once_give(tokens, heads, keys, blocks):
    with jax.enable_x64(True):
        args = arguments(tokens, heads, keys, 8, np.float64)
        for mine, whole in zip(in_blocks(blocks)(*args), with_gradients(attend)(*args), strict=True):
            np.testing.assert_allclose(mine, whole, rtol=1e-9, atol=1e-11)


def test_a_split_sequence_within_little_memory():
    """Keys and values are gathered one block after the other then, as much as a ring passes around."""
    tokens, width, devices = 512, 64, 8
    args = arguments(tokens, 2, 1, width, rows=1)
    wanted = with_gradients(attend)(*args)
    temporaries = []
    for hbm, blocks, times in (("1GB", 1, 4), ("600KB", devices, 6)):
        step = shardc.function(
            in_blocks(devices), mesh=shardc.make_mesh(token=devices, hbm=hbm),
            in_placements=dict.fromkeys(("q", "k", "v", "dy"), SPLIT), out_placements=(SPLIT,) * 4,
        )  # fmt: skip
        plan, exe = step.plan(*args), step.compile(*args)
        assert exe.audit().ok
        assert plan.memory.peak <= parse_bytes(hbm)
        assert {c.count for c in plan.collectives if c.kind == "all_gather"} == {blocks}
        assert plan.bytes_per_device == times * (devices - 1) * tokens * width * 4 // devices
        temporaries.append(exe.executable.compiled.memory_analysis().temp_size_in_bytes)
        for mine, whole in zip(step(*args), wanted, strict=True):
            np.testing.assert_allclose(mine, whole, rtol=2e-4, atol=2e-5)
    assert temporaries[1] < 0.6 * temporaries[0]
