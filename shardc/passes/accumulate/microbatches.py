"""Splits calls of a function into microbatches: leaves are rows of a batch, keys, the same for all, or state.

    args -> rows [m, ...], keys [m], whole, state

Functions in `OPENERS` open objects that functions write to, such as modules of flax.nnx.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardc.compat import short_text
from shardc.errors import ArgumentError, all_offenders, did_you_mean
from shardc.ir.boundary import microbatches_p
from shardc.passes.trace.constants import is_constant
from shardc.passes.trace.trace import (
    held_by_nnx,
    is_array,
    is_nnx,
    is_number,
    leaves_by_path,
    path_text,
    refuse_lost_writes,
    where_of,
)
from shardc.sbp.signature import is_extended

CARRY: Final = "carry:"
"""Prefix of a reduction that names an argument: the result becomes that argument in the next microbatch."""


class Opened(Protocol):
    """Objects among the arguments of a call that functions write to, as arrays."""

    leaves: Sequence[Any]
    paths: Sequence[str]

    def build(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The arguments that hold objects, by name, with new objects that hold `leaves`."""
        ...

    def read(self, built: Mapping[str, Any]) -> Sequence[Any]:
        """The arrays that such objects hold now."""
        ...

    def write(self, leaves: Mapping[int, Any]) -> None:
        """Writes arrays to the objects of the call, by their number."""
        ...


OPENERS: Final[list[Callable[[str, Mapping[str, Any]], Opened | None]]] = []
"""Functions that open the objects of a call; they return None if it has none of their kind."""


@dataclass(frozen=True)
class MicrobatchCall:
    """A call of a function over microbatches.

    Attributes:
      fn: the function.
      where: it and its line, for errors.
      names: of each argument, the positional ones first.
      positional: number of these.
      trees: structure of each argument; None: it holds objects.
      roles: the pool of each leaf of those arguments: "row", "whole", "state" or "static".
      pools: the leaves of each pool; a row has the microbatches in its first dimension.
      carried: the names of arguments whose leaves are state, in their order, and the number of leaves of each.
      sizes: rows of one microbatch in the batches.
      opened: the objects.
    """

    fn: Callable[..., Any]
    where: str
    names: tuple[str, ...]
    positional: int
    trees: tuple[Any, ...]
    roles: tuple[str, ...]
    pools: Mapping[str, list[Any]]
    carried: Mapping[str, int]
    sizes: frozenset[int]
    opened: Opened | None

    @property
    def leaf_names(self) -> list[str]:
        """Names in JAX's words of the rows, then of the leaves that are whole, then of the state: `batch['x']`."""
        trees = [(n, t) for n, t in zip(self.names, self.trees, strict=True) if t is not None]
        numbered = [(n, jax.tree.unflatten(t, range(t.num_leaves))) for n, t in trees]
        named = [n + jax.tree_util.keystr(path) for n, tree in numbered for path, _ in leaves_by_path(tree)]
        pairs = list(zip(named, self.roles, strict=True))
        return [n for role in ("row", "whole", "state") for n, r in pairs if r == role]

    def __call__(self, rows: Sequence[Any], whole: Sequence[Any], state: Sequence[Any], held: Sequence[Any]) -> Any:
        """The function's result, and the arrays that its objects hold after it."""
        pools = {"row": iter(rows), "whole": iter(whole), "state": iter(state), "static": iter(self.pools["static"])}
        leaves = (next(pools[role]) for role in self.roles)
        built = self.opened.build(held) if self.opened is not None else {}
        values = [
            built[name] if tree is None else jax.tree.unflatten(tree, [next(leaves) for _ in range(tree.num_leaves)])
            for name, tree in zip(self.names, self.trees, strict=True)
        ]
        plain = [v for v, tree in zip(values, self.trees, strict=True) if tree is not None]
        before = held_by_nnx(plain)
        at = self.positional
        out = self.fn(*values[:at], **dict(zip(self.names[at:], values[at:], strict=True)))
        refuse_lost_writes(self.where, before, held_by_nnx(plain), (), _NOT_OPENED)
        return out, ([] if self.opened is None else list(self.opened.read(built)))


_NOT_OPENED: Final = "Import shardc.flax: shardc.accumulate then carries what is written from microbatch to microbatch."


@dataclass(frozen=True)
class Split:
    """How `accumulate` splits a call into microbatches; its arguments are these.

    Attributes:
      microbatches: their number.
      in_axes, reduce: pytree prefixes of the arguments and of the results.
      keys: names of the arguments that hold random keys.
    """

    microbatches: int
    in_axes: Any
    reduce: Any
    keys: tuple[str, ...]

    @property
    def carried(self) -> list[str]:
        """Names of the arguments that carried results replace."""
        words = jax.tree.leaves(self.reduce)
        return [w[len(CARRY) :] for w in words if isinstance(w, str) and w.startswith(CARRY)]


def microbatch_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], split: Split
) -> MicrobatchCall:
    """A call of `fn`, split into microbatches.

    Raises:
      ArgumentError: an argument cannot be split as `split` says.
    """
    where, known = where_of(fn), _parameters(fn)
    values = _by_name(where, known, args, kwargs)
    names, carried = list(values), split.carried
    _check_names(where, carried, split.keys, names, known)
    opened = _open(where, {n: v for n, v in values.items() if holds_nnx(v)})
    objects = [n for n, v in values.items() if opened is not None and holds_nnx(v)]
    axes = _axes_for(where, split.in_axes, values, len(args), {*split.keys, *carried, *objects})
    pools = _Pools(where, split, carried)
    trees: list[Any] = []
    for name, value in values.items():
        trees.append(None if name in objects else jax.tree.structure(value))
        if name not in objects:
            for (path, x), axis in zip(leaves_by_path(value), _spread(where, name, axes[name], value), strict=True):
                pools.add(name, path_text(path), x, axis)
    if pools.changing:
        raise ArgumentError(all_offenders(f"accumulate: {where}: invalid arguments", pools.changing))
    if pools.wrong:
        raise ArgumentError(
            all_offenders(f"accumulate: {where}: batches that cannot be split into microbatches", pools.wrong)
        )
    if split.in_axes is None and values and not pools.leaves["row"]:
        raise ArgumentError(
            f"accumulate: {where}: no argument has a batch, by default; name it in in_axes, such as "
            f'in_axes={{"{names[-1]}": 0}}, or in_axes={{}} if none has.'
        )
    # the state of several arguments stands in the order of the arguments
    counts = {n: sum(map(is_array, jax.tree.leaves(values[n]))) for n in names if n in carried}
    return MicrobatchCall(
        fn, where, tuple(names), len(args), tuple(trees), tuple(pools.roles), pools.leaves, counts,
        frozenset(pools.sizes), opened,
    )  # fmt: skip


class _Pools:
    """The leaves of a call's arguments by their role, as far as they are added.

    Attributes:
      leaves: of each pool: "row", "whole", "state", "static".
      roles: the pool of each leaf, in order.
      sizes: rows of one microbatch in the batches.
      wrong: a line for each leaf that cannot be split.
      changing: a line for each leaf that is neither an array nor a constant.
    """

    def __init__(self, where: str, split: Split, carried: Sequence[str]) -> None:
        self.where, self.split, self.carried = where, split, carried
        self.leaves: dict[str, list[Any]] = {"row": [], "whole": [], "state": [], "static": []}
        self.roles: list[str] = []
        self.sizes: set[int] = set()
        self.wrong: list[str] = []
        self.changing: list[str] = []

    def add(self, name: str, inner: str, x: Any, axis: int | None) -> None:
        """Adds a leaf of the argument `name`, whose batch dimension is `axis`."""
        at, m = "/".join(filter(None, (name, inner))), self.split.microbatches
        role, leaf = "whole", x
        if not is_array(x) and not is_constant(x):
            self.changing.append(
                f"{at}: a {type(x).__name__} can change, and one trace is for all microbatches; close over it, as "
                "functools.partial does, or pass its numbers."
            )
        if not is_array(x) or (is_number(x) and (axis is None or isinstance(x, bool))):
            role = "static"
        if name in self.carried and is_array(x):
            role = "state"
        elif name in self.split.keys and is_array(x):
            role, leaf = "row", _split_key(self.where, at, x, m)
        elif axis is not None and role != "static":
            if problem := _why_no_rows(at, x, axis, m):
                self.wrong.append(problem)
                return
            role, leaf = "row", _rows(x, axis, m)
            self.sizes.add(jnp.shape(x)[axis] // m)
        self.roles.append(role)
        self.leaves[role].append(leaf)


def _by_name(where: str, known: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those that `*args` takes numbered: `args/0`."""
    spread = len(args) - sum(1 for n in known if not n.startswith("*"))
    star = next((n[1:] for n in known if n.startswith("*") and not n.startswith("**")), "args")
    names = [n for n in known if not n.startswith("*")][: len(args)] + [f"{star}/{i}" for i in range(max(spread, 0))]
    twice = [n for n in kwargs if n in names]
    if twice:
        raise ArgumentError(f"accumulate: {where}: argument {twice[0]!r} is given twice, by position and by name.")
    return dict(zip([*names, *kwargs], [*args, *kwargs.values()], strict=True))


def _parameters(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, with `*args` and `**kwargs`; none if it has no signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(p.kind, "") + p.name for p in parameters]


def _check_names(
    where: str, carried: Sequence[str], keys: Sequence[str], names: Sequence[str], known: Sequence[str]
) -> None:
    every = list(dict.fromkeys([*names, *known]))
    wrong = [
        f"{what} names {n!r}, which is no argument.{did_you_mean(n, every)}"
        for what, said in (("reduce", carried), ("keys", keys))
        for n in said
        if n not in every
    ]
    wrong += [f"reduce names {n!r}, which is not passed." for n in carried if n in every and n not in names]
    wrong += [f"reduce carries {n!r} {c} times; one result replaces it." for n, c in Counter(carried).items() if c > 1]
    wrong += [f"{n!r} is both carried and split; say one of the two." for n in set(carried) & set(keys)]
    if wrong:
        raise ArgumentError(all_offenders(f"accumulate: {where}({', '.join(known or names)})", wrong))


def holds_nnx(value: Any) -> bool:
    return any(map(is_nnx, jax.tree.leaves(value, is_leaf=is_nnx)))


def _open(where: str, objects: Mapping[str, Any]) -> Opened | None:
    found = (opener(where, objects) for opener in OPENERS) if objects else iter(())
    return next((opened for opened in found if opened is not None), None)


def _is_flag(x: Any) -> bool:
    """Whether an argument is a flag, a number or an option, which has no batch unless `in_axes` says so."""
    return x is None or is_number(x) or (not is_array(x) and jax.tree.structure(x).num_nodes == 1)


def _axes_for(
    where: str, in_axes: Any, values: Mapping[str, Any], positional: int, without: set[str]
) -> dict[str, Any]:
    """The batch dimensions of each argument, as a pytree prefix of it."""
    names = list(values)
    if in_axes is None:
        arrays = [n for n in names if not _is_flag(values[n])]
        batched = {*arrays} - {names[0]} if len(arrays) > 1 else {*arrays}
        return {n: 0 if n in batched and n not in without else None for n in names}
    if isinstance(in_axes, int):
        return {n: None if n in without else in_axes for n in names}
    if isinstance(in_axes, Mapping):
        said = dict(in_axes)
        wrong = [f"{n!r}.{did_you_mean(str(n), names)}" for n in said if n not in names]
        if wrong:
            raise ArgumentError(
                f"accumulate: in_axes names what is no argument of {where} in this call: {', '.join(wrong)}"
            )
    else:
        if len(in_axes) not in (positional, len(names)):
            raise ArgumentError(f"accumulate: in_axes has {len(in_axes)} entries, {where} is called with {len(names)}.")
        said = dict(zip(names, in_axes, strict=False))
        said |= {n: 0 for n in names[len(in_axes) :] if not _is_flag(values[n]) and n not in without}
    wrong = [n for n in without if jax.tree.leaves(said.get(n))]
    if wrong:
        raise ArgumentError(
            f"accumulate: {where}: in_axes says a batch dimension for {', '.join(sorted(wrong))}; keys, carried "
            "arguments and modules have none: write None."
        )
    return {n: said.get(n) for n in names}


def _spread(where: str, name: str, axes: Any, value: Any) -> list[int | None]:
    """The batch dimension of each leaf of an argument."""
    entries, prefix = jax.tree.flatten(axes, is_leaf=lambda x: x is None)
    try:
        parts = prefix.flatten_up_to(value)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"accumulate: {where}: in_axes of {name} is no prefix of it: {error}") from None
    return [a for a, part in zip(entries, parts, strict=True) for _ in jax.tree.leaves(part)]


def _why_no_rows(at: str, x: Any, axis: int, m: int) -> str:
    """The reason why a leaf cannot be split into microbatches; empty: it can."""
    if not -jnp.ndim(x) <= axis < jnp.ndim(x):
        return (
            f"argument {at} has {jnp.ndim(x)} dimensions, and no dimension {axis}. Say None in in_axes for what has no "
            "batch."
        )
    if (rows := jnp.shape(x)[axis]) % m:
        return (
            f"argument {at}: dimension {axis} has {rows} rows, which {m} microbatches do not divide. Take a divisor, "
            "or pad the batch."
        )
    return ""


def _rows(x: Any, axis: int, m: int) -> jax.Array:
    """[m, ...]: the strided microbatches."""
    x = jnp.moveaxis(jnp.asarray(x), axis, 0)
    x = x.reshape(x.shape[0] // m, m, *x.shape[1:]).swapaxes(0, 1)
    return microbatches_p.bind(jnp.moveaxis(x, 1, axis % (x.ndim - 1) + 1))


def _split_key(where: str, at: str, key: Any, m: int) -> jax.Array:
    """[m, ...]: a key, or an array of keys, split for each microbatch."""
    aval = jax.typeof(key)
    typed = is_extended(aval.dtype)
    if not typed and not (aval.dtype == np.uint32 and aval.ndim):
        raise ArgumentError(
            f"accumulate: {where}: keys names {at}, {short_text(aval.shape, aval.dtype)}, which is no random key; pass "
            "jax.random.key(seed)."
        )
    shape = key.shape if typed else key.shape[:-1]
    split = functools.partial(jax.random.split, num=m)
    for _ in shape:
        split = jax.vmap(split, out_axes=1)
    return microbatches_p.bind(split(key))
