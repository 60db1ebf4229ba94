"""The checkpoints in a directory: which are complete, which one is the last, which may go.

A checkpoint is written to `<step>.partial`. When the manifests of all owners are there, the folder is renamed to
`<step>`: this commits it. A symbolic link that is named so can be read. It is renamed or removed itself; what it points
to stays as it is. On an object store `objects` has such names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

from shardc.checkpoint.manifest import (
    DamagedError,
    Manifest,
    StoredFile,
    StoredLeaf,
    digest_of,
    is_manifest,
    manifest_path,
    read_manifest,
)
from shardc.checkpoint.objects import AnyPath, ObjectPath
from shardc.checkpoint.orbax import is_written_by_orbax

TOKEN: Final = ".token-"
"""How the name of a file begins that is written to see whether all processes share the directory."""
PARTIAL: Final = ".partial"
"""How the name of a folder ends that is being written, or that an interrupted writer has left."""
READERS: Final = 8
"""Files, or leaves, that are read at the same time."""
NAMED: Final = 8
"""Owners without a manifest that are named."""


@dataclass(frozen=True)
class StoredRows:
    """Rows of a leaf, and the stored array to read them from."""

    owner: int
    name: str
    start: int
    stop: int
    first: int
    """The row of the leaf that is row 0 of the stored array."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
      folder: where it lies.
      manifests: of its owners.
      missing: what an interrupted writer has not written; empty if it came to its end.
      damage: what is no longer as it was written; empty if nothing.
      parts: for each leaf the stored arrays that make it up, in the order of rows.
    """

    step: int
    folder: AnyPath
    manifests: tuple[Manifest, ...] = ()
    missing: str = ""
    damage: str = ""
    parts: Mapping[str, tuple[StoredRows, ...]] = field(default_factory=dict[str, tuple[StoredRows, ...]])

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.damage

    @property
    def leaves(self) -> tuple[StoredLeaf, ...]:
        return self.manifests[0].leaves

    @property
    def plan(self) -> str:
        return self.manifests[0].plan

    @property
    def files(self) -> dict[str, StoredFile]:
        """The files of all owners, by their paths in the folder."""
        return {f"{m.owner}/{name}": file for m in self.manifests for name, file in m.files.items()}


def folders_in(directory: AnyPath, suffix: str = "") -> dict[int, AnyPath]:
    """The folder of each step, or a link, the newest first: the committed ones, or with PARTIAL those that are being
    written."""
    paths = [p for p in directory.iterdir() if p.name.endswith(suffix) and (p.is_dir() or p.is_symlink())]
    names = [p.name.removesuffix(suffix) for p in paths]
    steps = {int(name) for name in names if name.isdecimal() and str(int(name)) == name}
    return {step: directory / f"{step}{suffix}" for step in sorted(steps, reverse=True)}


def partial_folder(directory: AnyPath, step: int) -> AnyPath:
    """The folder in which the checkpoint of a step is written."""
    return directory / f"{step}{PARTIAL}"


def commit(folder: AnyPath, owners: int) -> None:
    """Give a checkpoint its name if all its owners have written their manifests. Two owners may find so at once."""
    if all(manifest_path(folder, owner).exists() for owner in range(owners)):
        with suppress(FileNotFoundError):
            folder.rename(folder.with_suffix(""))  # pyright: ignore[reportArgumentType] - of the same kind


def foreign(directory: AnyPath) -> list[str]:
    """The folders that are named like steps, and that somebody else has made. In one of ours something is left of an
    owner: its manifest, or what orbax has written; or nothing at all is left. On an object store all such are links,
    which nobody else writes."""
    folders = folders_in(directory).values()
    return [folder.name for folder in folders if isinstance(folder, Path) and folder.is_dir() and not _is_ours(folder)]


def _is_ours(folder: Path) -> bool:
    inside = list(folder.iterdir())
    owners = [p for p in inside if p.name.isdecimal() and p.is_dir()]
    return (
        all(p in owners and not any(p.iterdir()) for p in inside)
        or any(p.suffix == ".json" and p.stem.isdecimal() and is_manifest(p) for p in inside)
        or any(p.with_suffix(".json") in inside or is_written_by_orbax(p) for p in owners)
    )


def read_checkpoint(folder: AnyPath) -> Checkpoint:
    """Read what is known of a checkpoint, complete or not. Its arrays are not read.

    Raises:
      CheckpointError: a newer shardc has written it.
    """
    step = int(folder.stem)
    found: dict[int, Manifest] = {}
    for path in sorted(folder.glob("*.json"), key=str):
        try:
            manifest = read_manifest(path)
        except (OSError, ValueError) as error:
            return Checkpoint(step, folder, damage=f"{path.name} cannot be read: {error}")
        found[manifest.owner] = manifest
    if not found:
        return Checkpoint(step, folder, missing="no manifest is there")
    manifests = tuple(found[owner] for owner in sorted(found))
    owners = manifests[0].owners
    absent = list(islice((str(o) for o in range(owners) if o not in found), NAMED + 1))
    if absent:
        absent[NAMED:] = ["..."] * (len(absent) > NAMED)
        return Checkpoint(step, folder, manifests, f"the manifest of owner {', '.join(absent)} of {owners} is missing")
    if any(m.owners != owners or m.step != step for m in manifests) or len(found) > owners:
        return Checkpoint(step, folder, manifests, damage="its manifests do not belong together")
    missing = "its writer was stopped at the end" if folder.suffix == PARTIAL else ""
    made = Checkpoint(step, folder, manifests, missing, "", parts_by_path(manifests))
    return replace(made, damage=_damage(made))


def _damage(checkpoint: Checkpoint) -> str:
    """The first file that is missing or has another size than was written; else the leaves that lack rows."""
    for name, file in checkpoint.files.items():
        path = Path(str(checkpoint.folder), name)
        if not os.path.isfile(path):  # as Path.is_file, without its errors
            return f"{name} is missing"
        if (there := path.stat().st_size) != file.size:
            return f"{name} has {there} bytes, it had {file.size}"
    lost = [leaf.path for leaf in checkpoint.leaves if leaf.path not in checkpoint.parts]
    return f"no owner has all of {', '.join(lost)}" if lost else ""


def check_files(checkpoint: Checkpoint, me: int, processes: int) -> None:
    """Read a share of the files of a checkpoint, that of process `me` of so many.

    Raises:
      DamagedError: one is not as it was written.
    """
    by_size = sorted(checkpoint.files.items(), key=lambda item: (-item[1].size, item[0]))
    mine = [(name, file.digest) for name, file in by_size if file.digest][me::processes]
    with ThreadPoolExecutor(READERS, "shardc checkpoint reader") as pool:
        found = pool.map(_digest, [Path(str(checkpoint.folder), name) for name, _ in mine])
        wrong = [name for (name, digest), there in zip(mine, found, strict=True) if there != digest]
    if wrong:
        raise DamagedError(f"{wrong[0]} is not as it was written")


def _digest(path: Path) -> str:
    try:
        return digest_of(path)
    except OSError:
        return "cannot be read"


def parts_by_path(manifests: Sequence[Manifest]) -> dict[str, tuple[StoredRows, ...]]:
    """The stored arrays that make up each leaf, without leaves that lack rows. Of two owners the lower one is read."""
    there: dict[tuple[str, str, tuple[int, ...]], list[StoredRows]] = {}
    for m in manifests:
        for x in m.leaves:
            parts = [StoredRows(m.owner, b.name, b.start, b.stop, b.start) for b in x.blocks]
            there.setdefault((x.path, x.dtype, x.shape), []).extend(parts)
    made = {x.path: _covering(x.rows, there[x.path, x.dtype, x.shape]) for x in manifests[0].leaves if not x.is_empty}
    empty = {x.path: () for x in manifests[0].leaves if x.is_empty}
    return {**empty, **{path: parts for path, parts in made.items() if parts}}


def _covering(rows: int, there: Sequence[StoredRows]) -> tuple[StoredRows, ...]:
    """Parts that follow one another and hold all rows; none if rows are missing."""
    found: list[StoredRows] = []
    at = 0
    while at < rows:
        part = next((p for p in there if p.start <= at < p.stop), None)
        if part is None:
            return ()
        found.append(StoredRows(part.owner, part.name, at, part.stop, part.first))
        at = part.stop
    return tuple(found)


def last_complete(
    directory: AnyPath, damaged: Mapping[int, str] | None = None
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest complete checkpoint, and the newer ones that are not complete.

    Args:
      damaged: by step what was found already when files were read.
    """
    newer: list[Checkpoint] = []
    every = [*folders_in(directory).items(), *folders_in(directory, PARTIAL).items()]
    for step, folder in sorted(every, reverse=True):
        checkpoint = read_checkpoint(folder)
        if checkpoint.is_complete:
            checkpoint = replace(checkpoint, damage=(damaged or {}).get(step, ""))
        if checkpoint.is_complete:
            return checkpoint, newer
        newer.append(checkpoint)
    return None, newer


def tidy(directory: AnyPath, taken: int) -> None:
    """Remove what interrupted writers have left, and set aside as `<step>.damaged` what is newer than step `taken`.

    -1 is before the first step.
    """
    for path in directory.glob(f"{TOKEN}*"):
        path.unlink(missing_ok=True)
    for folder in folders_in(directory, PARTIAL).values():
        _delete(folder)
    for step, folder in folders_in(directory).items():
        if step > taken:
            _rename(folder, folder.with_suffix(".damaged"))


def prune(directory: AnyPath, keep: int) -> None:
    """Remove all but the newest `keep` committed checkpoints, and what is older than one and is not committed."""
    committed = folders_in(directory)
    for folder in list(committed.values())[keep:]:
        remove(folder)
    for step, folder in folders_in(directory, PARTIAL).items():
        if step < max(committed, default=0):
            remove(folder)


def remove(folder: AnyPath) -> None:
    """Remove a checkpoint. It loses its name first, so that at no time a part of it counts as complete."""
    gone = folder.with_suffix(PARTIAL)
    if gone != folder:
        _rename(folder, gone)
    _delete(gone)


def _rename(folder: AnyPath, to: AnyPath) -> None:
    """Rename a folder, or a link to one, and delete what had the name."""
    _delete(to)
    folder.rename(to)  # pyright: ignore[reportArgumentType] - of the same kind


def _delete(folder: AnyPath) -> None:
    """Delete a folder if it is there; of a symbolic link the link alone."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        folder.rmtree() if isinstance(folder, ObjectPath) else shutil.rmtree(folder)
