"""The meaning of a flow, in plain Python: its function is called round after round, with arrays, on one device.

`shardc.late` reads a list of what it was given in the rounds before, `shardc.every` leaves its call out, a
`shardc.function` is the function itself. A flow that runs has to give the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from unittest.mock import patch

import jax
import numpy as np

import shardc
from shardc.dataflow.host import Host
from shardc.dataflow.run import ENDLESS

MISSING = "not in this round"
"""The result of a call that `shardc.every` leaves out."""


class Reading:
    """One run of a flow's function, round by round."""

    def __init__(self):
        self.round = 0
        self.calls = 0  # of `late`, in this round
        self.given = defaultdict(list)

    def late(self, x, rounds, *, first=None):
        seen = self.given[self.calls]
        self.calls += 1
        seen.append(x)
        if self.round >= rounds:
            return seen[self.round - rounds]
        return seen[0] if first is None else first

    def every(self, rounds, fn):
        def call(*args):
            return fn(*args) if (self.round + 1) % rounds == 0 else MISSING

        return call


def _host(host, *args):
    args = jax.tree.map(_numpy, args)
    if host.copies is None:
        return host.fn(*args)
    return jax.tree.map(lambda *xs: np.stack(xs), *(host.fn(i, *args) for i in range(host.copies)))


def _numpy(x):
    return x if jax.dtypes.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key) else np.asarray(x)


def plain(fn, state, items=None, rounds=None):
    """The last state, and what each round gave: MISSING for what did not run in it."""
    reading, made = Reading(), []
    items = None if items is None else iter(items)
    with (
        jax.disable_jit(),
        patch.object(shardc, "late", reading.late),
        patch.object(shardc, "every", reading.every),
        patch.object(Host, "__call__", _host),
    ):
        for reading.round in range(ENDLESS if rounds is None else rounds):
            reading.calls = 0
            try:
                state, given = fn(state) if items is None else fn(state, next(items))
            except StopIteration:
                break
            made.append(given)
    return state, made


def assert_same(flow, state, items=None, rounds=None, *, pause=None, **options):
    """A run of a flow gives what its function gives in plain Python. `pause`: the run is one of so many rounds, and one
    of the rest."""
    items = None if items is None else list(items)
    wanted = plain(flow.__wrapped__, state, items, rounds)
    fresh = jax.tree.map(lambda x: x.copy() if hasattr(x, "copy") else x, state)
    if pause is None:
        state, given = flow.run(fresh, items, rounds=rounds, **options)
    else:
        state, first = flow.run(fresh, items and items[:pause], rounds=pause)
        state, given = flow.run(
            state, items and items[pause:], rounds=None if rounds is None else rounds - pause, pending=first.pending
        )
        given = [*first, *given]
    assert_equal((state, list(given)), wanted)
    return state, given


def assert_equal(found, wanted):
    """Equal trees: floats up to their last bits, all else exactly. MISSING stands for Nones."""
    if wanted is MISSING:
        assert jax.tree.leaves(found) == []
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    elif wanted is None:
        assert found is None
    else:
        _assert_equal_arrays(found, wanted)


def _assert_equal_arrays(found, wanted):
    if jax.dtypes.issubdtype(getattr(wanted, "dtype", int), jax.dtypes.prng_key):
        found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
    one, other = np.asarray(found), np.asarray(wanted)
    assert one.shape == other.shape
    if other.dtype.kind in "fc":
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    else:
        np.testing.assert_array_equal(one, other)
