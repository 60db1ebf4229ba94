"""Random numbers: each device makes the bits of its own piece, equal to those that one device would make.

Threefry hashes a counter: element i of a key's block is `threefry(key, i)`, whatever else is made. Other generators
make a block as a whole; if they make it for each key of an array independently, the keys may be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from shardc import compat
from shardc.sbp.rules.elementwise import pointwise
from shardc.sbp.signature import Operation, Rule, Site, dims, rule

HASHES: Final = frozenset(("threefry2x32", "threefry4x32", "philox2x32", "philox4x32"))
"""Generators that treat each key of an array as they treat it alone. `rbg` does not: the bits of an array
of keys are other bits, and those of a key depend on its neighbours."""
KEYS_OF_THREEFRY: Final = frozenset(("threefry2x32", "rbg"))
"""Generators whose keys are pairs of words, which threefry splits and folds into."""


def _generator(op: Operation) -> str:
    return compat.generator_of(op.operands[0].dtype)


def _counts() -> bool:
    """Whether threefry numbers elements by their index in the whole block, so that each can be made alone."""
    return bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]


@rule("random_bits")
def random_bits(op: Operation) -> Rule | None:
    """A block of bits for each key; its dimensions are split if the generator counts elements."""
    name = _generator(op)
    return _block_for_each(op, _bits_piece, name == "threefry2x32" and _counts()) if name in HASHES else None


@rule("random_split")
def random_split(op: Operation) -> Rule | None:
    """A block of keys for each key."""
    name = _generator(op)
    if name not in HASHES | KEYS_OF_THREEFRY:
        return None
    return _block_for_each(op, _split_piece, name in KEYS_OF_THREEFRY and _counts())


def _block_for_each(op: Operation, local: Any, counted: bool) -> Rule:
    keys = dims(len(op.operands[0].shape), "k")
    block = dims(len(op.results[0].shape) - len(keys))
    return Rule((keys,), ((*keys, *(block if counted else (None,) * len(block))),), local=local)


def _bits_piece(site: Site, keys: Any) -> Sequence[Any]:
    if not _block_is_split(site, keys.ndim):
        return site.bind(keys)
    high, low = _hash(site, keys.ndim, jax.random.key_data(keys))
    dtype, width = site.op.results[0].dtype, site.op.params["bit_width"]
    if width == 64:
        return [lax.shift_left(high.astype(dtype), np.asarray(32, dtype)) | low.astype(dtype)]
    return [(high ^ low).astype(dtype)]


def _split_piece(site: Site, keys: Any) -> Sequence[Any]:
    if not _block_is_split(site, keys.ndim):
        return site.bind(keys)
    words = jax.random.key_data(keys)
    pairs = words.reshape(*keys.shape, -1, 2)
    halves = [_hash(site, keys.ndim, pairs[..., i, :]) for i in range(pairs.shape[-2])]
    made = jnp.stack([word for half in halves for word in half], axis=-1)
    return [jax.random.wrap_key_data(made, impl=compat.generator_of(keys.dtype))]


def _block_is_split(site: Site, lead: int) -> bool:
    return any(dim >= lead for dim in site.results[0].splits)


def _hash(site: Site, lead: int, words: Any) -> Sequence[Any]:
    """Both words of `threefry(key, i)` for each key, of two words, and each element i of this device's piece."""
    shape = site.result_shape()
    inner = [1] * (len(shape) - lead)
    k1, k2 = (jnp.broadcast_to(words[..., i].reshape(*shape[:lead], *inner), shape) for i in (0, 1))
    return threefry2x32_p.bind(k1, k2, *(jnp.broadcast_to(c, shape) for c in counters(site, lead)))


def counters(site: Site, lead: int) -> tuple[Any, Any]:
    """The high and the low word of the number of each element of this device's piece of a block, in row-major order of
    the whole block. The block is the result without its first `lead` dimensions."""
    whole, piece = site.op.results[0].shape[lead:], site.result_shape()[lead:]
    with jax.enable_x64(True):
        number = jnp.zeros(piece, np.uint64)
        for dim in range(len(whole)):
            offset, _ = site.result_extent(0, lead + dim)
            index = lax.broadcasted_iota(np.uint64, piece, dim) + jnp.asarray(offset, np.uint64)
            number = number + index * np.uint64(math.prod(whole[dim + 1 :]) % 2**64)
        return lax.shift_right_logical(number, np.uint64(32)).astype(np.uint32), number.astype(np.uint32)


@rule("random_fold_in")
def random_fold_in(op: Operation) -> Rule | None:
    """A key and a number make a key."""
    return pointwise(op) if _generator(op) in HASHES | KEYS_OF_THREEFRY else None


@rule("random_seed")
def random_seed(op: Operation) -> Rule:
    """A number makes a key; all generators make each key independently."""
    return pointwise(op)


@rule("random_clone")
def random_clone(op: Operation) -> Rule:
    """An identity on keys."""
    return pointwise(op)


@rule("random_wrap")
def random_wrap(op: Operation) -> Rule:
    """The last dimension holds the words of a key."""
    names = dims(len(op.results[0].shape))
    return Rule(((*names, None),), (names,))


@rule("random_unwrap")
def random_unwrap(op: Operation) -> Rule:
    """A key becomes a last dimension of words."""
    names = dims(len(op.operands[0].shape))
    return Rule((names,), ((*names, None),))


@rule("random_gamma")
def random_gamma(op: Operation) -> Rule | None:
    """A sample for each element; each key is split into one key for each element of its block."""
    if _generator(op) not in HASHES | KEYS_OF_THREEFRY:
        return None
    keys = dims(len(op.operands[0].shape))
    block = dims(len(op.results[0].shape))[len(keys) :]
    names = (*keys, *(block if _generator(op) in KEYS_OF_THREEFRY and _counts() else (None,) * len(block)))
    return Rule((keys, names), (names,), local=_gamma_piece)


def _gamma_piece(site: Site, keys: Any, alphas: Any) -> Sequence[Any]:
    if not _block_is_split(site, keys.ndim):
        return site.bind(keys, alphas)
    (own,) = _split_piece(site, keys)
    return [compat.gamma_of_each(own, alphas, site.op.params["log_space"])]


@rule("iota_2x32_shape")
def iota_2x32_shape(op: Operation) -> Rule:
    """The number of each element in row-major order, in two words; a device numbers its own piece."""
    names = dims(len(op.params["shape"]))
    return Rule((), (names, names), local=lambda site: counters(site, 0))
