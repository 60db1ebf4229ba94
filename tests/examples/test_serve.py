"""The tokens of examples/serve.py are those of one device, whatever the meshes of prefill and decode."""

import math

import jax
import numpy as np
import pytest

import shardc
from examples.serve import END, Config, Server, init, main

CFG = Config(layers=1, d_model=16, heads=2, vocab=32, longest=16)
PROMPTS = [[5, 7, 9], [3], [1, 2, 3, 4, 5, 6], [8, 8]]


def mesh(begin, **axes):
    return shardc.make_mesh(devices=jax.devices()[begin:][: math.prod(axes.values())], **axes)


@pytest.fixture(scope="module")
def alone():
    params = init(jax.random.key(0), CFG)
    return params, Server(CFG, None, None).serve(params, PROMPTS, 8, jax.random.key(1))[0]


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 4, 1), (4, 2, 2)), ((0, 1, 1), (0, 1, 1)), ((0, 2, 2), (0, 2, 2)), ((0, 2, 2), (4, 4, 1))],
)
def test_tokens_are_those_of_one_device(alone, first, second):
    params, expected = alone
    meshes = [mesh(begin, data=data, model=model) for begin, data, model in (first, second)]
    server = Server(CFG, *meshes)
    written, rate = server.serve(params, PROMPTS, 8, jax.random.key(1))
    np.testing.assert_array_equal(written, expected)
    assert rate > 0
    assert server.planned(params, len(PROMPTS)) > 0


def test_each_row_is_as_if_it_were_alone(alone):
    """Rows of a batch have other random bits, the first one the same."""
    params, expected = alone
    one, _ = Server(CFG, None, None).serve(params, PROMPTS[:1] + PROMPTS[:1] * 3, 8, jax.random.key(1))
    np.testing.assert_array_equal(one[0], expected[0])


def test_a_row_that_has_ended_writes_nothing_more(alone):
    for row in alone[1]:
        ended = np.flatnonzero(row == END)
        assert not len(ended) or not row[ended[0] :].any()


def test_a_prompt_without_room():
    with pytest.raises(ValueError, match="prompts of 1 to 8 tokens leave room for 8 more"):
        Server(CFG, None, None).serve({}, [[1] * 9], 8, jax.random.key(1))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("tokens", [4])
def test_the_program(capsys, tokens):
    main(["--tokens", str(tokens)])
    assert "64 tokens, those of one device: True" in capsys.readouterr().out
