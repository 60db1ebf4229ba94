"""Routes of rows between the devices where they are made and those that hold their groups, as plain JAX.

Rows live outside in blocks [devices, rows of a block, ...], and inside, where each device computes the rows of its own
groups, in blocks [replicas, owners, capacity, ...]. Each row goes through a slot of a buffer [replicas, source, target,
slots, ...]; whether all rows find a slot depends on data (`fits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.ir.nested import UNLIKELY
from shardc.passes import IMBALANCE

Row: Final = np.int32


def room(expected: float, places: int, most: int) -> int:
    """The capacity of each of `places` that get `expected` rows, and never more than `most`.

    Bernstein's inequality: rows that come at random overflow one of the places in less than a share of `UNLIKELY` of
    the calls.
    """
    risk = math.log(places / UNLIKELY)
    spread = (risk + math.sqrt(risk * risk + 18 * expected * risk)) / 3
    return max(min(math.ceil(expected + spread), most), 1)


@dataclass(frozen=True, slots=True)
class Grid:
    """The devices among which sorted rows are exchanged.

    Attributes:
      replicas: devices that hold the same groups.
      owners: devices that hold the groups, each an equal number of them.
      groups: their number.
      rows: sorted rows.
      imbalance: rows of the busiest device over the mean, for which there is room.
    """

    replicas: int
    owners: int
    groups: int
    rows: int
    imbalance: float = IMBALANCE

    @property
    def devices(self) -> int:
        return self.replicas * self.owners

    @property
    def own_groups(self) -> int:
        """Groups of a device."""
        return -(-self.groups // self.owners)

    @property
    def capacity(self) -> int:
        """Sorted rows that a device has room for."""
        mean = self.rows / self.devices
        return max(room(self.imbalance * mean, self.devices, self.rows), math.ceil(mean))

    def block(self, rows: int) -> int:
        """Rows of a device outside, of `rows` in all."""
        return -(-rows // self.devices)

    def slots(self, items: int) -> int:
        """Rows that a device may send to another one, of `items` that are sent in all."""
        pairs = self.devices * self.owners
        return room(self.imbalance * items / pairs, pairs, items)


class Places(NamedTuple):
    """Where each sorted row is inside.

    Attributes:
      device: [rows], replica · owners + owner.
      at: [rows], its number among the rows of the device.
      rows: [replicas, owners, capacity], the sorted row at each place; `Grid.rows` if there is none.
      sizes: [replicas, owners, own groups], rows of each group.
      fits: whether each device has room for its rows.
    """

    device: Any
    at: Any
    rows: Any
    sizes: Any
    fits: Any


@dataclass(frozen=True, slots=True)
class Ends:
    """Rows that travel: each between row `outside` of `count` ones, and sorted row `inside`."""

    count: int
    outside: Any
    inside: Any


class Route(NamedTuple):
    """The slots through which rows go.

    Attributes:
      outside: [devices, owners, slots], the row in the block outside; the length of the block if the slot is empty.
      inside: [replicas, owners, source, slots], the row in the block inside; the capacity if the slot is empty.
      fits: whether there is a slot for each row.
    """

    outside: Any
    inside: Any
    fits: Any


def places(grid: Grid, sizes: Any, replica: Any) -> Places:
    """The places of sorted rows, the first `sizes[0]` of which are of group 0; `replica`: where each of them is."""
    sizes = sizes.astype(Row)
    ends = jnp.cumsum(sizes, dtype=Row)
    counts = jnp.zeros(grid.rows + 1, Row).at[ends].add(1, mode="drop")
    group = lax.slice_in_dim(jnp.cumsum(counts, dtype=Row), 0, grid.rows)
    row = lax.iota(Row, grid.rows)
    owner = jnp.where(group < grid.groups, group // grid.own_groups, row % grid.owners)
    device = replica * grid.owners + owner
    table, counts, order = _sorted_into(device, grid.devices, grid.capacity)
    first = jnp.cumsum(counts, dtype=Row) - counts
    at = jnp.zeros(grid.rows, Row).at[order].set(row - first[device[order]], unique_indices=True)
    padded = grid.owners * grid.own_groups
    if grid.replicas == 1:
        own = jnp.pad(sizes, (0, padded - grid.groups))
    else:
        number = jnp.where(group < grid.groups, replica * padded + group, grid.replicas * padded)
        own = jnp.zeros(grid.replicas * padded, Row).at[number].add(1, mode="drop")
    shape = grid.replicas, grid.owners
    fits = jnp.all(counts <= grid.capacity)
    return Places(device, at, table.reshape(*shape, grid.capacity), own.reshape(*shape, grid.own_groups), fits)


def route(grid: Grid, where: Places, ends: Ends, drops: bool = False, alone: bool = False) -> Route:
    """The route of items between rows outside and sorted ones. `drops`: items out of bounds do not travel; else they do
    not fit. `alone`: two items with the same row outside do not fit."""
    block, slots = grid.block(ends.count), grid.slots(ends.outside.shape[0])
    valid = (ends.outside >= 0) & (ends.outside < ends.count) & (ends.inside >= 0) & (ends.inside < grid.rows)
    outside, inside = jnp.clip(ends.outside, 0, ends.count - 1), jnp.clip(ends.inside, 0, grid.rows - 1)
    home, device = outside // block, where.device[inside]
    pairs = grid.devices * grid.owners
    key = jnp.where(valid, home * grid.owners + device % grid.owners, pairs)
    table, counts, _ = _sorted_into(key, pairs, slots)
    table = table.reshape(grid.replicas, grid.owners, grid.owners, slots)
    fits = jnp.all(counts <= slots)
    if not drops:
        fits &= jnp.all(valid)
    if alone:
        uses = jnp.zeros(ends.count, Row).at[jnp.where(valid, outside, ends.count)].add(1, mode="drop")
        fits &= jnp.all(uses < 2)
    if grid.replicas > 1:
        fits &= jnp.all((home // grid.owners == device // grid.owners) | ~valid)
    at = (outside - home * block).at[table].get(mode="fill", fill_value=block)
    to = where.at[inside].at[table.swapaxes(1, 2)].get(mode="fill", fill_value=grid.capacity)
    return Route(at.reshape(grid.devices, grid.owners, slots), to, fits)


def _sorted_into(keys: Any, buckets: int, capacity: int) -> tuple[Any, Any, Any]:
    """The first `capacity` items of each bucket as [buckets, capacity], with the number of items where there is none;
    the number of items of each bucket; and the items in the order of their buckets."""
    items = keys.shape[0]
    number = lax.iota(Row, items)
    _, order = lax.sort((keys, number), num_keys=1, is_stable=True)
    counts = jnp.zeros(buckets, Row).at[keys].add(1, mode="drop")
    first, slot = jnp.cumsum(counts, dtype=Row) - counts, lax.iota(Row, capacity)
    found = order.at[first[:, None] + slot].get(mode="clip")
    return jnp.where(slot < counts[:, None], found, items), counts, order


def send(grid: Grid, way: Route, x: Any, base: Any = None) -> Any:
    """Rows [count, ...] --> their blocks inside; they are added to those of `base`, if there is one."""
    slots = _taken(blocks_of(grid, x), way.outside)
    arrived = _split(grid, slots).swapaxes(1, 2)
    fresh = base is None
    if fresh:
        base = jnp.zeros((grid.replicas, grid.owners, grid.capacity, *x.shape[1:]), x.dtype)
    return jax.vmap(jax.vmap(_writer(not fresh)))(base, way.inside, arrived)


def bring_back(grid: Grid, way: Route, y: Any, base: Any, adds: bool) -> Any:
    """Blocks inside --> their rows in `base` [count, ...], set or added."""
    slots = jax.vmap(jax.vmap(_take))(y, way.inside).swapaxes(1, 2)
    written = jax.vmap(_writer(adds))(blocks_of(grid, base), way.outside, _joined(grid, slots))
    return written.reshape(-1, *base.shape[1:])[: base.shape[0]]


def blocks_of(grid: Grid, x: Any) -> Any:
    """[count, ...] --> [devices, block, ...]"""
    block = grid.block(x.shape[0])
    x = jnp.pad(x, [(0, grid.devices * block - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
    return x.reshape(grid.devices, block, *x.shape[1:])


def _split(grid: Grid, x: Any) -> Any:
    return x.reshape(grid.replicas, grid.owners, *x.shape[1:])


def _joined(grid: Grid, x: Any) -> Any:
    return x.reshape(grid.devices, *x.shape[2:])


def _take(x: Any, rows: Any) -> Any:
    return x.at[rows].get(mode="fill", fill_value=0)


def _taken(x: Any, rows: Any) -> Any:
    return jax.vmap(_take)(x, rows)


def _writer(adds: bool) -> Callable[[Any, Any, Any], Any]:
    def write(base: Any, rows: Any, x: Any) -> Any:
        return base.at[rows].add(x, mode="drop") if adds else base.at[rows].set(x, mode="drop", unique_indices=False)

    return write


def by_position(where: Places, x: Any, dim: int) -> Any:
    """Sorted rows, along `dim` --> their blocks inside, without an exchange: all rows are read."""
    found = jnp.moveaxis(x, dim, 0).at[where.rows].get(mode="fill", fill_value=0)
    return jnp.moveaxis(found, 2, dim + 2)


def in_order(grid: Grid, where: Places, blocks: Any, dim: int) -> Any:
    """Blocks inside --> sorted rows along `dim`, without an exchange: all blocks are read."""
    rows = jnp.moveaxis(blocks, dim + 2, 2)
    rows = rows.reshape(grid.devices * grid.capacity, *rows.shape[3:])
    return jnp.moveaxis(rows[where.device * grid.capacity + where.at], 0, dim)


def folded(grid: Grid, x: Any, dim: int) -> Any:
    """Sorted rows as they are, in an array of the size of blocks."""
    x = jnp.moveaxis(x, dim, 0)
    block = blocks_of(grid, x)
    block = jnp.pad(block, [(0, 0), (0, grid.capacity - block.shape[1]), *[(0, 0)] * (x.ndim - 1)])
    return jnp.moveaxis(_split(grid, block), 2, dim + 2)


def unfolded(grid: Grid, blocks: Any, dim: int) -> Any:
    """The inverse of `folded`."""
    x = _joined(grid, jnp.moveaxis(blocks, dim + 2, 2))[:, : grid.block(grid.rows)]
    return jnp.moveaxis(lax.slice_in_dim(x.reshape(-1, *x.shape[2:]), 0, grid.rows), 0, dim)


def rows_that_count(where: Places, blocks: Any, dim: int) -> Any:
    """The blocks with zeros at places without a row."""
    rows = where.rows < where.device.shape[0]
    real = jnp.expand_dims(rows, [d + 2 for d in range(blocks.ndim - 2) if d != dim])
    return jnp.where(real, blocks, jnp.zeros((), blocks.dtype))
