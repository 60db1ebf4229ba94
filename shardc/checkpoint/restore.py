"""The leaves of a checkpoint, read as the leaves of the tree that is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np
from numpy.typing import NDArray

from shardc.arrays.place import Place
from shardc.checkpoint import orbax
from shardc.checkpoint.leaves import decode, described, named_leaves, stored_dtype
from shardc.checkpoint.manifest import DamagedError, StoredLeaf
from shardc.checkpoint.steps import READERS, Checkpoint, StoredRows
from shardc.checkpoint.targets import Target, target_of
from shardc.errors import CheckpointError, all_offenders, did_you_mean
from shardc.sbp.way import Index

AHEAD: Final = 256 << 20
"""Bytes of pieces that are being read, or wait for their turn, before no further one is begun."""


def check_fits(checkpoint: Checkpoint, tree: Any) -> None:
    """Raise CheckpointError, with all differences, if a checkpoint does not hold the leaves of a tree."""
    asked = dict(named_leaves(tree))
    saved = {leaf.path: leaf for leaf in checkpoint.leaves}
    lines = [line for path, x in asked.items() if (line := _difference(path, x, saved))]
    lines += [f"{path}: {leaf} in the checkpoint, not asked for" for path, leaf in saved.items() if path not in asked]
    if lines:
        head = (
            f"The checkpoint {checkpoint.folder} is of another program. Give `or_else` the tree that was saved, or "
            "another directory:"
        )
        raise CheckpointError(all_offenders(head, lines))


def _difference(path: str, x: Any, saved: Mapping[str, StoredLeaf]) -> str:
    asked = _described(path, x)
    there = saved.get(path)
    if there is None:
        return f"{path}: {asked} asked for, not in the checkpoint.{did_you_mean(path, saved)}"
    if _is_same(asked, there, x):
        return ""
    return f"{path}: {there} in the checkpoint, {asked} asked for"


def _described(path: str, x: Any) -> StoredLeaf:
    return described(path, jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Place) else x)


_KINDS: Final = {"bool": np.bool_, "int": np.integer, "float": np.floating, "complex": np.complexfloating}


def _is_same(asked: StoredLeaf, saved: StoredLeaf, x: Any) -> bool:
    """Whether a saved leaf can be restored as one that is asked for. A step makes an array of a Python number, and a
    float32 of NumPy's float64 unless JAX's x64 is on."""
    if asked.kind == saved.kind == "array":
        as_jax_sees = str(jax.dtypes.canonicalize_dtype(x.dtype)) if isinstance(x, np.ndarray | np.generic) else ""
        return asked.shape == saved.shape and saved.dtype in (asked.dtype, as_jax_sees)
    if {asked.kind, saved.kind} == {"array", "value"}:
        array, value = (asked, saved) if asked.kind == "array" else (saved, asked)
        kind = _KINDS.get(value.dtype)
        number = kind is not None and not array.dtype.startswith("key<")
        return number and array.shape == () and bool(jax.dtypes.issubdtype(np.dtype(array.dtype), kind))
    return (asked.kind, asked.dtype) == (saved.kind, saved.dtype)


def restore(checkpoint: Checkpoint, tree: Any) -> Any:
    """The tree of a checkpoint that fits: each leaf of the type and at the placement of that of `tree`.

    Only pieces that this process needs are read, and each is put on its device as soon as its turn has come.
    """
    pairs = named_leaves(tree)
    saved = {leaf.path: leaf for leaf in checkpoint.leaves}
    targets = [target_of(x, saved[path]) for path, x in pairs]

    try:
        # NumPy only in these threads: JAX's settings, such as x64, may be set for the calling one alone.
        with ThreadPoolExecutor(READERS, "shardc checkpoint reader") as pool:
            ahead = _Ahead(
                checkpoint, pool, [(saved[path], t.needs()) for (path, _), t in zip(pairs, targets, strict=True)]
            )
            leaves = [_made(t, _Pieces(ahead, saved[path])) for (path, _), t in zip(pairs, targets, strict=True)]
    finally:
        orbax.forget()
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _made(target: Target, pieces: _Pieces) -> Any:
    if isinstance(target, Place) and not target.on_host:
        return target.read(pieces.__getitem__)
    return target.made_of(pieces)


class _Ahead:
    """The boxes of all leaves, read in their order, but so that few are on the host: those that are taken late wait.

    Args:
      needs: the boxes of each leaf.
    """

    def __init__(
        self, checkpoint: Checkpoint, pool: ThreadPoolExecutor, needs: Sequence[tuple[StoredLeaf, Sequence[Index]]]
    ) -> None:
        self._checkpoint, self._pool = checkpoint, pool
        self.boxes = {leaf.path: frozenset(boxes) for leaf, boxes in needs}
        self._order = iter([(leaf, box) for leaf, boxes in needs for box in boxes])
        self._taken = set[tuple[str, Index]]()
        self._reading: dict[tuple[str, Index], tuple[int, Future[NDArray[Any]]]] = {}
        self._fill()

    def _fill(self) -> None:
        while sum(size for size, _ in self._reading.values()) < AHEAD and (following := next(self._order, None)):
            leaf, box = following
            if (leaf.path, box) not in self._taken:
                size = math.prod(stop - start for start, stop in box) * _itemsize(leaf)
                self._reading[leaf.path, box] = size, self._pool.submit(_piece, self._checkpoint, leaf, box)

    def take(self, leaf: StoredLeaf, box: Index) -> NDArray[Any]:
        """A box, which is forgotten here."""
        self._taken.add((leaf.path, box))
        found = self._reading.pop((leaf.path, box), None)
        self._fill()
        return _piece(self._checkpoint, leaf, box) if found is None else found[1].result()


def _itemsize(leaf: StoredLeaf) -> int:
    return 8 if leaf.dtype.startswith("key<") else stored_dtype(leaf.dtype).itemsize


class _Pieces(Mapping[Index, NDArray[Any]]):
    """The boxes of a leaf, each of which is read when it is asked for, or a little before."""

    def __init__(self, ahead: _Ahead, leaf: StoredLeaf) -> None:
        self._ahead, self._leaf = ahead, leaf

    def __getitem__(self, box: Index) -> NDArray[Any]:
        if box not in self._ahead.boxes[self._leaf.path]:
            raise KeyError(box)
        return self._ahead.take(self._leaf, box)

    def __iter__(self) -> Iterator[Index]:
        return iter(self._ahead.boxes[self._leaf.path])

    def __len__(self) -> int:
        return len(self._ahead.boxes[self._leaf.path])


def _piece(checkpoint: Checkpoint, leaf: StoredLeaf, index: Index) -> NDArray[Any]:
    """A box of a logical array, put together from the stored arrays that hold its rows."""
    if not index:
        (part,) = checkpoint.parts[leaf.path]
        return decode(_stored(checkpoint, leaf, part, ()), leaf.dtype)
    (start, stop), *rest = index
    found: list[NDArray[Any]] = []
    for part in checkpoint.parts[leaf.path]:
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high:
            rows = ((low - part.first, high - part.first), *rest)
            found.append(_stored(checkpoint, leaf, part, rows))
    return decode(orbax.joined(found), leaf.dtype)


def _stored(checkpoint: Checkpoint, leaf: StoredLeaf, part: StoredRows, index: Index) -> NDArray[Any]:
    """A piece of a stored array.

    Raises:
      DamagedError: it cannot be read, or is of another type than the leaf.
    """
    found = orbax.read(checkpoint.folder / str(part.owner), part.name, index)
    is_like = leaf.dtype.startswith("key<") or (found.dtype, found.ndim) == (stored_dtype(leaf.dtype), len(index))
    if not is_like:
        raise DamagedError(f"the array {part.name} of owner {part.owner} is of another type than {leaf.path}: {leaf}")
    return found
