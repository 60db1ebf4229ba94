"""Scans over layers split into pieces: the split program computes the same, its parameters are in pieces."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import shardc
from shardc import compat
from shardc.ir.walk import all_eqns
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.cut_loop import find_loop
from shardc.pipeline.cut_search.split_scans import find_layers, split_scans

pytestmark = pytest.mark.usefixtures("compiled_fast")

LAYERS, WIDTH = 5, 4


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


def block(x, w):
    return jnp.tanh(x @ w), x.sum()


def loss(params, x, mix=lambda layers: layers, reverse=False):
    layers = mix(params["layers"])
    x, sums = lax.scan(jax.checkpoint(block), x @ params["first"], layers, reverse=reverse)
    return jnp.mean(x**2) + sums.sum()


def step(loss, scale, params, x):
    """Scales by a norm over the rows, and by what only the whole tells."""
    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=2)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - g / norm * scale(g), params, grads), value


STEPS = {
    "plain": partial(step, loss, lambda g: 1.0),
    "reverse": partial(step, partial(loss, reverse=True), lambda g: 1.0),
    "a value of the whole": partial(step, loss, lambda g: 1 + jnp.cumsum(g, 0)),
    "read twice, whole and in pieces": partial(
        step, partial(loss, mix=lambda w: w + jnp.sin(w) * lax.cumsum(jnp.sin(w), 0)), lambda g: 1.0
    ),
    "rolled": partial(step, partial(loss, mix=lambda w: jnp.roll(w, 1, 0) + w), lambda g: 1.0),
}


def run(program, args):
    return jaxpr_as_fun(compat.close(program.jaxpr))(*args, *program.captured)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("ends", [(0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5), (0, 4, 5)])
def test_the_split_program_computes_the_same(name, ends):
    k = np.random.default_rng(0)
    params = {"first": k.normal(size=(WIDTH, WIDTH)), "layers": k.normal(size=(LAYERS, WIDTH, WIDTH))}
    x = k.normal(size=(6, WIDTH))
    arguments = Arguments(STEPS[name], ())
    program = trace(arguments, arguments.bind((params, x), {}), marks=True)
    loop = find_loop(program, "step")
    found = find_layers(program, loop)
    assert [(f.count, len(f.scans)) for f in found] == [(LAYERS, 2)], "forward and backward"
    pieces = split_scans(program, loop, found, [ends])
    leaves = jax.tree.leaves((params, x))
    given = [leaves[p.number] if p.rows is None else leaves[p.number][slice(*p.rows)] for p in pieces.inputs]
    got, want = run(pieces.program, given), run(program, leaves)
    for piece, value in zip(pieces.outputs, got, strict=True):
        whole = want[piece.number]
        np.testing.assert_allclose(value, whole if piece.rows is None else whole[slice(*piece.rows)], rtol=1e-9)
    trips = [e.params["length"] for e in find_loop(pieces.program, "step").body.eqns if e.primitive.name == "scan"]
    assert sorted(trips) == sorted([b - a for a, b in pairwise(ends)] * 2)


def test_a_parameter_lives_in_pieces_from_end_to_end():
    """No equation between reads or makes all rows of it."""
    params = {"first": np.ones((WIDTH, WIDTH)), "layers": np.ones((LAYERS, WIDTH, WIDTH))}
    arguments = Arguments(STEPS["plain"], ())
    program = trace(arguments, arguments.bind((params, np.ones((6, WIDTH))), {}), marks=True)
    loop = find_loop(program, "step")
    pieces = split_scans(program, loop, find_layers(program, loop), [(0, 2, 5)])
    assert pieces.program.in_paths == ("params/first", "params/layers[0:2]", "params/layers[2:5]", "x")
    assert pieces.program.out_paths == ("0/first", "0/layers[0:2]", "0/layers[2:5]", "1")
    stacked = [v for e in all_eqns(pieces.program.jaxpr) for v in e.outvars if v.aval.shape[:1] == (LAYERS,)]
    assert not stacked


def test_scans_over_what_is_no_parameter_are_left_alone():
    def over_time(params, x):
        h, _ = lax.scan(lambda h, row: (jnp.tanh(h @ params + row), None), jnp.zeros(WIDTH), x)
        return h.sum()

    arguments = Arguments(lambda p, x: shardc.accumulate(jax.value_and_grad(over_time), microbatches=2)(p, x), ())
    args = np.ones((WIDTH, WIDTH)), np.ones((6, WIDTH))
    program = trace(arguments, arguments.bind(args, {}), marks=True)
    assert not find_layers(program, find_loop(program, "f"))
