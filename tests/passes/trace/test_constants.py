"""What counts as a constant among the leaves of arguments, and which constants share a program."""

from __future__ import annotations

import enum
import fractions
import functools
import pathlib
import re
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import shardc
from shardc.passes.trace.constants import is_constant, key_of, key_of_static

MESH = shardc.make_mesh(data=2)


class Kind(enum.Enum):
    A = 1


class Plain:
    def method(self) -> None: ...

    @shardc.function(mesh=MESH)
    def bound(self) -> None: ...


@dataclass(frozen=True)
class Frozen:
    value: Any = 1
    act: Any = jax.nn.relu


@dataclass(frozen=True, eq=False)
class ByIdentity:
    value: Any


@dataclass(unsafe_hash=True)
class Thawed:
    scale: float = 1.0


class Net(linen.Module):
    config: Any
    kernel_init: Any = linen.initializers.zeros


CONSTANTS = [
    *("text", b"bytes", None, True, 2.5, fractions.Fraction(1, 2), Kind.A, ..., range(3), re.compile("a")),
    *(
        int,
        jnp.float32,
        list[int],
        np.dtype("int8"),
        jnp.dtype("bfloat16"),
        jax.random.key(0).dtype,
        pathlib.PurePath("a"),
    ),
    *(
        len,
        np.add,
        jnp.add,
        jnp.sin,
        jax.nn.relu,
        jax.nn.gelu,
        jax.jit(abs),
        lambda x: x,
        functools.lru_cache(abs),
        jnp,
    ),
    *(functools.partial(abs), functools.partial(jax.nn.softmax, axis=0), shardc.function(abs, mesh=MESH)),
    *(Frozen(), Frozen(("a", frozenset({1}), Frozen())), Frozen.__init__, Frozen().__eq__),
    *(MESH, jax.P("data"), jax.NamedSharding(MESH, jax.P()), jax.devices()[0], jax.tree.structure(0)),
    *(shardc.S(0), shardc.B, shardc.P, shardc.AUTO, shardc.Placement({"data": shardc.S(0)}), jax.lax.add_p),
    *(linen.Dense(3), linen.Dense(3).apply, Net(Frozen()), Net(linen.Dense(2))),
]
OTHERS = [
    *(
        Plain(),
        Plain().method,
        Thawed(),
        [].append,
        iter(()),
        np.random.default_rng(0),
        np.random.default_rng(0).normal,
    ),
    *(Frozen(Plain()), Frozen((Plain(),)), ByIdentity([1]), ByIdentity(np.ones(2)), Net(Plain()), Net(Plain()).apply),
    *(
        functools.partial(Plain().method),
        functools.partial(abs, np.ones(2)),
        {"a": 1},
        [1],
        bytearray(b"a"),
        Plain().bound,
    ),
    *(jax.new_ref(jnp.ones(2)), Plain().bound),
]


@pytest.mark.parametrize(("x", "want"), [(x, True) for x in CONSTANTS] + [(x, False) for x in OTHERS])
def test_constants(x, want):
    assert is_constant(x) == want
    if want:
        assert key_of(x) == key_of(x) and isinstance(hash(key_of(x)), int)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: frozenset({x}), Frozen, Net])
def test_keys_tell_numbers_by_their_types(wrap):
    one, as_float, flag = wrap(1), wrap(1.0), wrap(True)
    assert one == as_float == flag
    assert len({key_of(one), key_of(as_float), key_of(flag)}) == 3
    assert key_of(wrap(1)) == key_of(one)


def test_a_static_argument_is_what_its_hash_and_its_type_say():
    """As for `jax.jit`. The second of each pair got the program of the first one."""

    @dataclass(frozen=True)
    class Option:
        scale: float
        note: Any = field(default_factory=dict, compare=False)

    f = shardc.function(lambda x, by: x * getattr(by, "scale", by), mesh=MESH, static_argnames="by")
    x = jnp.arange(4)
    for a, b in ((2, 2.0), (True, 1.0), (Option(2), Option(3))):
        for by in (a, b, a):
            want = x * getattr(by, "scale", by)
            got = f(x, by)
            assert got.dtype == want.dtype and got.tolist() == want.tolist()
    config = Thawed(2.0)
    before = key_of_static(config)
    assert f(x, config).tolist() == [0, 2, 4, 6]
    config.scale = 5.0
    assert key_of_static(config) != before
    assert f(x, config).tolist() == [0, 5, 10, 15]
