"""Proofs of signatures that need no mesh.

The inputs are split as the signatures say, every piece of padding is filled with junk, the local piece runs once for
each device of a fake mesh, the results are joined and compared with the operation on the whole inputs.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from shardc.sbp.piece import internal_steps, run_piece
from shardc.sbp.placement import AxisSizes, B, P, Placement, S, local_extent, local_shape
from shardc.sbp.ring import ring_of
from shardc.sbp.signature import Operation, Rule, Setting, Signature, Site, find_rule, neutral_value

Combo = Mapping[str, tuple[int, Signature]]
"""For each axis of the fake mesh its size and the signature along it; the order is the order of cutting."""


@dataclass(frozen=True)
class Equation:
    """One equation, its inputs, and a way to bind its primitive with some parameters replaced."""

    op: Operation
    inputs: tuple[np.ndarray, ...]
    bind: Callable[..., list[Any]]


def equation_of(fn: Callable[..., Any], *args: Any, primitive: str | None = None) -> Equation:
    """The equation of `primitive` (by default the last) in the trace of `fn(*args)`, with its inputs evaluated."""
    closed = jax.make_jaxpr(fn)(*args)
    eqns = closed.jaxpr.eqns
    index = next((i for i, e in enumerate(eqns) if e.primitive.name == primitive), len(eqns) - 1)
    assert primitive in (None, eqns[index].primitive.name), f"no {primitive} in {closed}"
    e = eqns[index]
    asked = [v for v in e.invars if not isinstance(v, core.Literal)]
    names = closed.jaxpr.debug_info.with_unknown_names()
    before = closed.jaxpr.replace(eqns=eqns[:index], outvars=asked, debug_info=names)
    values = iter(core.jaxpr_as_fun(core.ClosedJaxpr(before, closed.consts))(*jax.tree.leaves(args)))

    def bind(*xs: Any, **overrides: Any) -> list[Any]:
        outs = e.primitive.bind(*map(jnp.asarray, map(on_device, xs)), **{**e.params, **overrides})
        return list(outs) if e.primitive.multiple_results else [outs]

    avals = tuple(v.aval for v in e.invars), tuple(v.aval for v in e.outvars)
    inputs = tuple(
        np.asarray(v.val, v.aval.dtype) if isinstance(v, core.Literal) else on_host(next(values)) for v in e.invars
    )
    return Equation(Operation(e.primitive.name, *avals, e.params), inputs, bind)


def placements_of(rule: Rule, op: Operation, combo: Combo) -> tuple[list[Placement], list[Placement]] | None:
    """Operand and result placements of a combination; None if a granule or the one-partial-op law forbids it."""
    for factor, unit in rule.granule.items():
        if unit % math.prod(n for n, s in combo.values() if s.split == factor):
            return None
    for factor, other in rule.around.items():  # pieces go around all devices that share the other factor, or none
        splits = [(n, s.around) for n, s in combo.values() if other == s.split or factor in (s.split, s.around)]
        many = math.prod(n for n, _ in splits)
        if any(a for _, a in splits) and (not all(a for _, a in splits) or rule.granule[factor] % many):
            return None
    sides = [
        [[(axis, getattr(s, side)[i]) for axis, (_, s) in combo.items()] for i in range(len(getattr(op, side)))]
        for side in ("operands", "results")
    ]
    if any(len({s.op for _, s in value if isinstance(s, P)}) > 1 for side in sides for value in side):
        return None
    operands, results = ([Placement(value) for value in side] for side in sides)
    return operands, results


def prove(eqn: Equation, combo: Combo, rng: np.random.Generator, *, traced: bool = False) -> bool:
    """Whether the combination is legal; AssertionError if it is and the joined results are not those of the whole.

    With `traced` the local piece is compiled and sees its coordinates as arrays, as it does on a mesh.
    """
    rule = find_rule(eqn.op)
    placed = placements_of(rule, eqn.op, combo)
    if placed is None:
        return False
    operands, results = placed
    sizes = {axis: n for axis, (n, _) in combo.items()}
    split = [Split(x, p, sizes, rng) for x, p in zip(eqn.inputs, operands, strict=True)]

    lockstep = Lockstep(sizes)

    def piece(coords: Mapping[str, Any], *xs: Any) -> Sequence[Any]:
        where = (coords.__getitem__, eqn.bind, lockstep.wire(coords))
        return run_piece(Site(eqn.op, tuple(operands), tuple(results), sizes, *where), rule, xs)

    setting = Setting(eqn.op, tuple(operands), tuple(results), sizes)
    talks = bool(rule.crossed(setting)) or ring_of(rule, setting) is not None
    run = jax.jit(piece) if traced and not talks else piece
    at = {device: dict(zip(sizes, device, strict=True)) for device in devices(sizes)}
    held = {device: [s.piece(coords) for s in split] for device, coords in at.items()}

    def compute(device: tuple[int, ...]) -> list[np.ndarray]:
        coords = {a: jnp.int32(c) for a, c in at[device].items()} if traced and talks else at[device]
        made = run(coords, *map(on_device, held[device]))
        for aval, placement, y in zip(eqn.op.results, results, made, strict=True):
            assert y.shape == local_shape(aval.shape, placement, sizes)
            assert y.dtype == aval.dtype
        return [on_host(y) for y in made]

    pieces = lockstep.run(compute) if talks else {device: compute(device) for device in at}
    assert lockstep.sent == [(s.kind, s.axes, s.shape, s.dtype) for s in internal_steps(rule, setting)]
    slack = tolerance(*(a.dtype for a in (*eqn.op.operands, *eqn.op.results)))
    for i, whole in enumerate(eqn.bind(*eqn.inputs)):
        for joined in join({d: ys[i] for d, ys in pieces.items()}, whole.shape, results[i], sizes):
            assert_same(joined, on_host(whole), slack)
    return True


class Lockstep:
    """Devices that exchange arrays: one thread for each, which wait for each other."""

    def __init__(self, sizes: AxisSizes) -> None:
        self.sizes, self.sent = sizes, list[tuple[str, tuple[str, ...], tuple[int, ...], Any]]()
        self.slots: dict[tuple[int, ...], np.ndarray] = {}
        self.barrier = threading.Barrier(math.prod(sizes.values()))

    def run(self, compute: Callable[[tuple[int, ...]], list[np.ndarray]]) -> dict[tuple[int, ...], list[np.ndarray]]:
        wide = jax.config.jax_enable_x64  # a thread's own

        def guarded(device: tuple[int, ...]) -> list[np.ndarray]:
            try:
                with jax.enable_x64(wide), jax.disable_jit():  # loops in which they exchange arrays
                    return compute(device)
            except BaseException:
                self.barrier.abort()
                raise

        found = list(devices(self.sizes))
        with ThreadPoolExecutor(len(found)) as pool:
            return dict(zip(found, pool.map(guarded, found), strict=True))

    def wire(self, coords: Mapping[str, Any]) -> _Wire:
        return _Wire(self, {a: int(c) for a, c in coords.items()} if not _traced(coords) else {})


class _Wire:
    def __init__(self, lockstep: Lockstep, at: Mapping[str, int]) -> None:
        self.lockstep, self.at = lockstep, at

    def exchange(self, kind: str, x: Any, axes: tuple[str, ...]) -> list[np.ndarray]:
        """The arrays of all devices along `axes`, in their order."""
        lockstep, me = self.lockstep, tuple(self.at.values())
        lockstep.slots[me] = np.asarray(x)
        lockstep.barrier.wait(60)
        others = itertools.product(*(range(lockstep.sizes[a]) for a in axes))
        found = [lockstep.slots[tuple({**self.at, **dict(zip(axes, c, strict=True))}.values())] for c in others]
        if not any(me):
            one = found[0][0] if kind == "all_to_all" else found[0]
            lockstep.sent.append((kind, axes, one.shape, one.dtype))
        lockstep.barrier.wait(60)
        return found

    def all_gather(self, x: Any, axes: tuple[str, ...]) -> Any:
        return jnp.stack([jnp.asarray(y) for y in self.exchange("all_gather", x, axes)])

    def all_to_all(self, x: Any, axes: tuple[str, ...]) -> Any:
        found = self.exchange("all_to_all", x, axes)
        return jnp.stack([jnp.asarray(y[self._number(axes)]) for y in found])

    def permute(self, x: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
        assert len({s for s, _ in pairs}) == len({t for _, t in pairs}) == len(pairs)
        found = self.exchange("permute", x, axes)
        me = self._number(axes)
        return next((jnp.asarray(found[s]) for s, t in pairs if t == me), jnp.zeros(np.shape(x), x.dtype))

    def _number(self, axes: tuple[str, ...]) -> int:
        """This device's number along `axes`."""
        return int(np.ravel_multi_index([self.at[a] for a in axes], [self.lockstep.sizes[a] for a in axes]))


def _traced(coords: Mapping[str, Any]) -> bool:
    return any(isinstance(c, jax.core.Tracer) for c in coords.values())


def on_host(x: Any) -> np.ndarray:
    """An array as NumPy's; one of random keys as records of their words, under the name of their generator."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(x)
    words = np.asarray(jax.random.key_data(x))
    record = np.dtype([(str(jax.random.key_impl(x)), words.dtype, words.shape[x.ndim :])])
    return np.ascontiguousarray(words).view(np.uint8).view(record).reshape(x.shape)


def on_device(x: Any) -> Any:
    """The random keys of records; any other array as it is."""
    if not isinstance(x, np.ndarray) or x.dtype.names is None:
        return x
    (name,) = x.dtype.names
    return jax.random.wrap_key_data(jnp.asarray(x[name]), impl=name)


def devices(sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Coordinates of all devices."""
    return itertools.product(*(range(n) for n in sizes.values()))


class Split:
    """A value cut in the pieces of a placement: parts along partial axes, then blocks with junk in their padding."""

    def __init__(self, x: np.ndarray, placement: Placement, sizes: Mapping[str, int], rng: np.random.Generator) -> None:
        self.placement, self.sizes, self.rng, self.shape = placement, sizes, rng, x.shape
        count = math.prod(sizes[a] for a in placement.partial_axes)
        self.parts = partial_parts(x, placement.partial_op, count, rng) if placement.partial_op else [x]

    def piece(self, coords: Mapping[str, int]) -> np.ndarray:
        """The piece of the device at `coords`."""
        part = 0
        for a in self.placement.partial_axes:
            part = part * self.sizes[a] + coords[a]
        block = local_shape(self.shape, self.placement, self.sizes)
        here, there = valid_slices(self.shape, self.placement, self.sizes, coords)
        out = junk(block, self.parts[part].dtype, self.rng)
        out[here] = self.parts[part][there]
        return out


def valid_slices(
    shape: Sequence[int], placement: Placement, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The positions of the valid elements of a device in its piece, and in the whole."""
    extents = [local_extent(d, placement.axes_of(i), sizes, coords) for i, d in enumerate(shape)]
    return tuple(slice(0, v) for _, v in extents), tuple(slice(o, o + v) for o, v in extents)


def join(
    pieces: Mapping[tuple[int, ...], np.ndarray], shape: Sequence[int], placement: Placement, sizes: Mapping[str, int]
) -> Iterator[np.ndarray]:
    """The logical values of all copies that the broadcast axes hold."""
    wholes: dict[tuple[int, ...], dict[tuple[int, ...], np.ndarray]] = {}
    for device, piece in pieces.items():
        coords = dict(zip(sizes, device, strict=True))
        copy = tuple(c for a, c in coords.items() if placement[a] == B)
        part = tuple(coords[a] for a in placement.partial_axes)
        whole = wholes.setdefault(copy, {}).setdefault(part, np.zeros(shape, piece.dtype))
        here, there = valid_slices(shape, placement, sizes, coords)
        whole[there] = piece[here]
    reduce = {None: None, "sum": np.add, "max": np.maximum, "min": np.minimum}[placement.partial_op]
    for parts in wholes.values():
        first, *rest = parts.values()
        with np.errstate(all="ignore"):
            for other in rest:
                first = reduce(first, other)
        yield first


def junk(shape: Sequence[int], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Arbitrary contents of padding."""
    dtype = np.dtype(dtype)
    if dtype.names:
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, np.integer):
        return rng.integers(jnp.iinfo(dtype).min, int(jnp.iinfo(dtype).max) + 1, shape, dtype)
    return rng.choice(np.array([np.nan, np.inf, -np.inf, 1e4]), shape).astype(dtype)


def partial_parts(x: np.ndarray, op: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Random arrays whose op-reduction is `x`; neutral elements are among them, and integer sums wrap."""
    if op == "sum":
        parts = [_random_like(x, rng) for _ in range(count - 1)]
        with np.errstate(all="ignore"):
            last = x
            for part in parts:
                last = (last - part).astype(x.dtype)
        return [*parts, last]
    neutral = neutral_value("lowest" if op == "max" else "highest", x.dtype)
    keeper = rng.integers(0, count, x.shape)
    return [np.where(keeper == i, x, _beyond(x, op, neutral, rng)) for i in range(count)]


def _random_like(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if jnp.issubdtype(x.dtype, np.integer):
        return junk(x.shape, x.dtype, rng)
    noise = rng.normal(size=x.shape)
    return (noise + 1j * rng.normal(size=x.shape) if x.dtype.kind == "c" else noise).astype(x.dtype)


def _beyond(x: np.ndarray, op: str, neutral: Any, rng: np.random.Generator) -> np.ndarray:
    """Values that do not change x under `op`: neutral, equal, or (for floats) somewhat beyond it."""
    if jnp.issubdtype(x.dtype, np.floating):
        step = np.abs(rng.normal(size=x.shape)).astype(x.dtype) * 3
        near = x - step if op == "max" else x + step
    else:
        near = x
    return np.where(rng.integers(0, 2, x.shape) == 0, neutral, near).astype(x.dtype)


def tolerance(*dtypes: Any) -> float:
    """Relative error that summation order may cause, from the coarsest float among `dtypes`."""
    floats = [float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, np.inexact)]
    eps = max(floats, default=0.0)
    return 1e-10 if eps < 1e-12 else 64 * eps


def assert_same(got: np.ndarray, want: np.ndarray, slack: float) -> None:
    """Assert equality: exact for integers and booleans, up to `slack` of the largest element for floats."""
    if want.dtype.names or not jnp.issubdtype(want.dtype, np.inexact):
        np.testing.assert_array_equal(got, want)
        return
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    np.testing.assert_allclose(got, want, rtol=slack, atol=slack * scale, equal_nan=True)


def uses(signature: Signature) -> bool:
    """Whether the signature splits anything or has partial values."""
    return any(isinstance(s, S | P) for s in (*signature.operands, *signature.results))
