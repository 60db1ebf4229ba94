"""Random meshes and placements."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import AUTO, B, P, S
from tests.harnesses.cases import Case

MESHES: tuple[dict[str, int], ...] = ({"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2})

mesh_of = functools.cache(lambda number: shardc.make_mesh(**MESHES[number]))


@dataclass(frozen=True)
class Draw:
    """A mesh, a pin (or AUTO) for each argument, and a pytree of them for the result."""

    mesh: int
    ins: tuple[Any, ...]
    outs: Any

    def __str__(self) -> str:
        leaves = jax.tree.leaves(self.outs, is_leaf=is_pin)
        return f"mesh {MESHES[self.mesh]}, in {_text(self.ins)}, out {_text(leaves)}"


def is_pin(x: object) -> bool:
    return x is AUTO or isinstance(x, dict)


def draw_for(case: Case, args: Sequence[Any], want: Any, *numbers: int) -> Draw:
    """The draw of a case that `numbers` (the seed, which draw of how many) stand for."""
    rng = np.random.default_rng(case.seed(*numbers))
    mesh = int(rng.integers(len(MESHES)))
    pin = lambda x: _pin(x, mesh, rng)  # noqa: E731
    return Draw(mesh, tuple(jax.tree.map(pin, list(args))), jax.tree.map(pin, want))


def _pin(x: Any, mesh: int, rng: np.random.Generator) -> Any:
    if rng.random() < 0.25:
        return AUTO
    sbps = [B, *map(S, range(np.ndim(x))), *([P] if _may_be_partial(x) else [])]
    axes = rng.permutation(list(MESHES[mesh]))  # the order in which they cut
    return {str(axis): sbps[rng.integers(len(sbps))] for axis in axes}


def _may_be_partial(x: Any) -> bool:
    """A number that is finite: an infinity less itself is none."""
    dtype = jnp.asarray(x).dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == np.bool_:
        return False
    return bool(np.isfinite(np.asarray(x).astype(np.complex128)).all())


def _text(pins: Sequence[Any]) -> str:
    return "(" + ", ".join("AUTO" if p is AUTO else _dict_text(p) for p in pins) + ")"


def _dict_text(pin: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{a}: {'P' if s is P else s}" for a, s in pin.items()) + "}"
