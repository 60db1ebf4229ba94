"""The manifest of a part of a checkpoint: which leaves its owner has written, and in which files.

In the folder of a checkpoint each owner has a folder that orbax writes, and a manifest that is written last. The
checkpoint is complete when the manifests of all owners are there. The manifest has a digest of each file, and its first
line one of the lines that follow: a flipped bit anywhere is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardc.checkpoint.objects import AnyPath, ObjectPath
from shardc.errors import CheckpointError
from shardc.typed_json import parsed, typed
from shardc.versions import VERSION

FORMAT: Final = 2
WITHOUT_DIGESTS: Final = 1
"""The format before, which is read: its files have sizes alone."""

_BEGINNINGS: Final = (b'{"digest": ', b'{"format": ')
"""How a manifest begins, in this format and the one before."""

VALUES: Final[Mapping[str, Any]] = {"bool": "True".__eq__, "int": int, "float": float, "complex": complex, "str": str}
"""Types of leaves that stand in the manifest itself, and how their text is read."""


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written: the one before is taken."""


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
class StoredFile:
    """A file in an owner's folder.

    Attributes:
      size: in bytes.
      digest: SHA-256 in hexadecimal; empty if it was written without.
    """

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of one owner.

    Attributes:
      owners: how many owners the checkpoint has.
      leaves: all leaves of the tree, also those that other owners have.
      files: those in the owner's folder, by path.
      plan: digest of the plan; empty if none was given.
      shardc, jax: versions that wrote it.
    """

    step: int
    owner: int
    owners: int
    leaves: tuple[StoredLeaf, ...]
    files: Mapping[str, StoredFile]
    plan: str
    shardc: str
    jax: str


def manifest_path(folder: AnyPath, owner: int) -> AnyPath:
    return folder / f"{owner}.json"


def files_of(folder: AnyPath) -> dict[str, StoredFile]:
    """The files below a folder. They are read whole, at some GB/s. Objects of a store are not: they have checksums of
    their own, and a missing one is noticed when it is read."""
    if isinstance(folder, ObjectPath):
        return {}
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {p.relative_to(folder).as_posix(): StoredFile(p.stat().st_size, digest_of(p)) for p in paths}


def digest_of(path: Path) -> str:
    """The digest of a file, without the lock of Python."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(rest: str) -> str:
    """The first line of a manifest, by which the rest is known to be as it was written."""
    return f'{{"digest": "{hashlib.sha256(rest.encode()).hexdigest()}",'


def write_manifest(manifest: Manifest, folder: AnyPath) -> None:
    """Write a manifest in one move: it is there whole, or not at all. Once it is there another owner may rename the
    folder."""
    name = manifest_path(folder, manifest.owner).name
    rest = json.dumps({"format": FORMAT, **asdict(manifest)})[1:]
    text = f"{_first_line(rest)}\n{rest}"
    if isinstance(folder, ObjectPath):
        (folder / name).write_text(text)
        return
    path = folder / name
    fresh = path.with_suffix(".json.tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    opened = os.open(folder, os.O_RDONLY)
    try:
        fresh.replace(path)
        os.fsync(opened)
    finally:
        os.close(opened)


def read_manifest(path: AnyPath) -> Manifest:
    """Read a manifest.

    Raises:
      ValueError: it is none, or is not as it was written.
      CheckpointError: a newer shardc has written it.
    """
    text = path.read_text("utf-8")
    data: Any = parsed(text)
    made = data.pop("format", None) if isinstance(data, dict) else None
    first, _, rest = text.partition("\n")
    if type(made) is int and made > FORMAT and first == _first_line(rest):
        raise CheckpointError(
            f"{path} has format {made} and was written by shardc {data.get('shardc')}. This is shardc {VERSION}, which "
            f"reads formats up to {FORMAT}: install the newer one, or give another directory."
        )
    if made not in (WITHOUT_DIGESTS, FORMAT):
        raise ValueError(f"no manifest of format {FORMAT}")
    if made == FORMAT and first != _first_line(rest):
        raise ValueError("it is not as it was written")
    try:
        if made == WITHOUT_DIGESTS:
            sizes = typed(Mapping[str, int], data["files"])
            data["files"] = {name: {"size": size, "digest": ""} for name, size in sizes.items()}
        else:
            del data["digest"]
        manifest: Manifest = typed(Manifest, data)
        _check(manifest, path)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"no manifest of format {made}: {error}") from error
    return manifest


def is_manifest(path: Path) -> bool:
    """Whether a file was a manifest once, as its beginning says."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_BEGINNINGS[0])) in _BEGINNINGS
    return False


def _check(manifest: Manifest, path: AnyPath) -> None:
    """Raise an error for what no writer writes: ValueError, KeyError, TypeError or SyntaxError."""
    if not 0 <= manifest.owner < manifest.owners or manifest_path(path.parent, manifest.owner) != path:
        raise ValueError(f"owner {manifest.owner} of {manifest.owners}")
    for name in manifest.files:
        if not name.isprintable() or name[:1] == "/" or ".." in name.split("/"):
            raise ValueError(f"a file is named {name!r}")
    for leaf in manifest.leaves:
        _check_leaf(leaf)


def _check_leaf(leaf: StoredLeaf) -> None:
    if leaf.kind == "value":
        VALUES[leaf.dtype](leaf.value)
    elif leaf.kind == "array" and not leaf.dtype.startswith("key<"):
        np.dtype(leaf.dtype)
    elif leaf.kind not in ("array", "static"):
        raise ValueError(f"{leaf.path} is {leaf.kind!r}")
    if any(n < 0 for n in leaf.shape) or any(not 0 <= b.start < b.stop <= leaf.rows for b in leaf.blocks):
        raise ValueError(f"{leaf.path} has other rows")
