"""The checkpoints in a directory: which are complete, which one is the last, which may go.

A checkpoint is written to `<step>.partial`. When the manifests of all owners are there, the folder is renamed to
`<step>`: this commits it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardc.checkpoint.manifest import Manifest, StoredLeaf, manifest_path, read_manifest

TOKEN: Final = ".token-"
"""How the name of a file begins that is written to see whether all processes share the directory."""
PARTIAL: Final = ".partial"
"""How the name of a folder ends that is being written, or that an interrupted writer has left."""


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
    folder: Path
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


def folders_in(directory: Path, suffix: str = "") -> dict[int, Path]:
    """The folder of each step, the newest first: the committed ones, or with PARTIAL those that are being written."""
    names = (p.name.removesuffix(suffix) for p in directory.iterdir() if p.is_dir() and p.name.endswith(suffix))
    steps = {int(name) for name in names if name.isdecimal() and str(int(name)) == name}
    return {step: directory / f"{step}{suffix}" for step in sorted(steps, reverse=True)}


def partial_folder(directory: Path, step: int) -> Path:
    """The folder in which the checkpoint of a step is written."""
    return directory / f"{step}{PARTIAL}"


def commit(folder: Path, owners: int) -> None:
    """Give a checkpoint its name if all its owners have written their manifests. Two owners may find so at once."""
    if all(manifest_path(folder, owner).exists() for owner in range(owners)):
        with suppress(FileNotFoundError):
            folder.replace(folder.with_suffix(""))


def foreign(directory: Path) -> list[str]:
    """The folders that are named like steps, and that somebody else has made: none has an owner and its manifest."""

    def is_ours(folder: Path) -> bool:
        inside = list(folder.iterdir())
        return not inside or any(p.name.isdecimal() and p.with_suffix(".json") in inside for p in inside)

    return [folder.name for folder in folders_in(directory).values() if not is_ours(folder)]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read what is known of a checkpoint, complete or not. Its arrays are not read."""
    step = int(folder.stem)
    found: dict[int, Manifest] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            manifest = read_manifest(path)
        except (OSError, ValueError) as error:
            return Checkpoint(step, folder, damage=f"{path.name} cannot be read: {error}")
        found[manifest.owner] = manifest
    if not found:
        return Checkpoint(step, folder, missing="no manifest is there")
    manifests = tuple(found[owner] for owner in sorted(found))
    owners = manifests[0].owners
    absent = [str(o) for o in range(owners) if o not in found]
    if absent:
        return Checkpoint(step, folder, manifests, f"the manifest of owner {', '.join(absent)} of {owners} is missing")
    if any(m.owners != owners or m.step != step for m in manifests) or len(found) > owners:
        return Checkpoint(step, folder, manifests, damage="its manifests do not belong together")
    damage = _damage(folder, manifests)
    parts = parts_by_path(manifests)
    lost = [leaf.path for leaf in manifests[0].leaves if leaf.path not in parts]
    if lost and not damage:
        damage = f"no owner has all of {', '.join(lost)}"
    missing = "its writer was stopped at the end" if folder.suffix == PARTIAL else ""
    return Checkpoint(step, folder, manifests, missing, damage, parts)


def _damage(folder: Path, manifests: Iterable[Manifest]) -> str:
    """The first file that is not as it was written."""
    for m in manifests:
        for name, size in m.files.items():
            path = folder / str(m.owner) / name
            try:
                there = path.stat().st_size
            except OSError:
                return f"{m.owner}/{name} is missing"
            if there != size:
                return f"{m.owner}/{name} has {there} bytes, it had {size}"
    return ""


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


def last_complete(directory: Path) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest complete checkpoint, and the newer ones that are not complete."""
    newer: list[Checkpoint] = []
    every = [*folders_in(directory).items(), *folders_in(directory, PARTIAL).items()]
    for _, folder in sorted(every, reverse=True):
        checkpoint = read_checkpoint(folder)
        if checkpoint.is_complete:
            return checkpoint, newer
        newer.append(checkpoint)
    return None, newer


def tidy(directory: Path, taken: int) -> None:
    """Remove what interrupted writers have left, and set aside as `<step>.damaged` what is newer than step `taken`.

    -1 is before the first step.
    """
    for path in directory.glob(f"{TOKEN}*"):
        path.unlink(missing_ok=True)
    for folder in folders_in(directory, PARTIAL).values():
        shutil.rmtree(folder)
    for step, folder in folders_in(directory).items():
        if step > taken:
            aside = folder.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.replace(aside)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` committed checkpoints, and what is older than one and is not committed."""
    committed = folders_in(directory)
    for folder in list(committed.values())[keep:]:
        remove(folder)
    for step, folder in folders_in(directory, PARTIAL).items():
        if step < max(committed, default=0):
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that at no time a part of it counts as complete."""
    gone = folder.with_suffix(PARTIAL)
    if gone != folder:
        shutil.rmtree(gone, ignore_errors=True)
        folder.replace(gone)
    shutil.rmtree(gone)
