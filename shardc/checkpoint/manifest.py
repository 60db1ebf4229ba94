"""The manifest of a part of a checkpoint: which leaves its owner has written, and in which files.

In the folder of a checkpoint each owner has a folder that orbax writes, and a manifest that is written last. The
checkpoint is complete when the manifests of all owners are there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1

VALUES: Final[Mapping[str, Any]] = {"bool": "True".__eq__, "int": int, "float": float, "complex": complex, "str": str}
"""Types of leaves that stand in the manifest itself, and how their text is read."""


@dataclass(frozen=True)
class RowBlock:
    """Rows of a leaf that one stored array holds; of a scalar, row 0 to 1.

    Attributes:
      name: of the stored array.
      start, stop: the rows.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf of a saved tree.

    Attributes:
      path: in the tree.
      kind: `array`; `value`, a Python number or string, whose text is `value`; `static`, which is not saved.
      dtype: of an array, `key<fry>` for random keys; else the name of its type.
      shape: of an array.
      weak: whether its type is weak.
      blocks: what this owner has of it.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    weak: bool = False
    value: str = ""
    blocks: tuple[RowBlock, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" if self.kind == "array" else f"a Python {self.dtype}"

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to store: no elements, or no array."""
        return self.kind != "array" or 0 in self.shape


@dataclass(frozen=True)
class Manifest:
    """The manifest of one owner.

    Attributes:
      owners: how many owners the checkpoint has.
      leaves: all leaves of the tree, also those that other owners have.
      files: bytes of each file in the owner's folder.
      plan: digest of the plan; empty if none was given.
      shardc, jax: versions that wrote it.
    """

    step: int
    owner: int
    owners: int
    leaves: tuple[StoredLeaf, ...]
    files: Mapping[str, int]
    plan: str
    shardc: str
    jax: str


def manifest_path(folder: Path, owner: int) -> Path:
    return folder / f"{owner}.json"


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of each file below a folder."""
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write a manifest in one move: it is there whole, or not at all. Once it is there another owner may rename the
    folder."""
    path = manifest_path(folder, manifest.owner)
    fresh = path.with_suffix(".json.tmp")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(manifest)}, file)
        file.flush()
        os.fsync(file.fileno())
    opened = os.open(folder, os.O_RDONLY)
    try:
        fresh.replace(path)
        os.fsync(opened)
    finally:
        os.close(opened)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
      ValueError: it is none, or of another format.
    """
    data: Any = json.loads(path.read_text("utf-8"))
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ValueError(f"no manifest of format {FORMAT}")
    try:
        return Manifest(leaves=tuple(map(_leaf, data.pop("leaves"))), **data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no manifest of format {FORMAT}: {error}") from error


def _leaf(data: dict[str, Any]) -> StoredLeaf:
    shape, blocks = data.pop("shape"), data.pop("blocks")
    return StoredLeaf(shape=tuple(shape), blocks=tuple(RowBlock(**b) for b in blocks), **data)
