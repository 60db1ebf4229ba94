"""Sibling loops that XLA:TPU fuses, and the live ranges that this extends."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from shardc.passes.estimate.backend import GPU, TPU
from shardc.passes.estimate.live_ranges import live_ranges
from shardc.passes.estimate.memory import profile_memory
from shardc.passes.trace.canonicalize import canonicalize
from shardc.sbp.placement import B, Placement, S

ROWS, COLS, HIDDEN = 64, 128, 1024


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = array(ROWS, COLS), array(COLS, HIDDEN), array(HIDDEN, COLS), array(ROWS, COLS)


def backward(x, up, down, given):
    """The backward pass of relu(x up) down with remat: the hidden layer for the gradient of `down`, then its own
    gradient."""
    made = x @ up
    of_down = jnp.maximum(made, 0.0).T @ given
    of_hidden = jnp.where(made > 0, given @ down.T, 0.0)
    return of_down, of_hidden @ up.T


def one_after_the_other(x, up, down, given):
    """The second loop depends on the first."""
    made = x @ up
    of_down = jnp.maximum(made, 0.0).T @ given
    of_hidden = jnp.where(made > 0, given @ (down + of_down).T, 0.0)
    return of_down, of_hidden @ up.T


def traced(f):
    jaxpr = canonicalize(jax.make_jaxpr(f)(*ARGS))[0]
    return jaxpr, {e.primitive.name: e.outvars[0] for e in reversed(jaxpr.eqns)}


def test_the_earlier_loop_waits_for_the_later():
    jaxpr, first = traced(backward)
    found = live_ranges(jaxpr, {}, TPU)
    (wait,) = found.extended
    assert wait.value is first["max"] and list(wait.ends) == [first["dot_general"]]
    begins = dict(zip(found.values, found.begin.tolist(), strict=True))
    assert wait.begin <= begins[first["select_n"]] < wait.ends[first["dot_general"]]
    assert not live_ranges(jaxpr, {}, GPU).extended


def test_not_if_the_later_follows_from_it():
    assert not live_ranges(traced(one_after_the_other)[0], {}, TPU).extended


def test_what_a_ring_has_made_stays_and_so_does_what_is_computed_from_it():
    """The operand and the result of both loops are live at one time on XLA:TPU: T5-11B for v5p,
    `broadcast_maximum_fusion`."""
    jaxpr, first = traced(backward)

    def peak(split, backend):
        whole = Placement({"model": B})
        placements = dict.fromkeys([*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)], whole)
        for v, dim in split.items():
            placements[v] = Placement({"model": S(dim)})
        return profile_memory(jaxpr, placements, {"model": 4}, backend=backend).peak

    made = first["dot_general"]
    ring, plain = {jaxpr.invars[0]: 0, jaxpr.invars[1]: 1, made: 1}, {jaxpr.invars[1]: 1, made: 1}
    loose = replace(TPU, pieces_stay=False)
    assert peak(plain, TPU) == peak(plain, loose)
    assert peak(ring, TPU) > peak(ring, loose)
