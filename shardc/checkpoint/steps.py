"""The checkpoints in a directory: which are complete, which one is the last, which may go."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardc.checkpoint.manifest import Manifest, StoredLeaf, manifest_path, read_manifest

TOKEN: Final = ".token-"
"""How the name of a file begins that is written to see whether all processes share the directory."""
MARK: Final = ".shardc"
"""The file in each step's folder that says whose it is."""


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


def steps_in(directory: Path) -> list[int]:
    """The steps that have a folder, the newest first."""
    named = (p for p in directory.iterdir() if p.name.isdecimal() and str(int(p.name)) == p.name and p.is_dir())
    return sorted((int(p.name) for p in named), reverse=True)


def make(folder: Path) -> None:
    """Make the folder of a step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def foreign(directory: Path) -> list[str]:
    """The folders that are named like steps, and that somebody else has made."""
    folders = [folder_of(directory, step) for step in steps_in(directory)]
    return [f.name for f in folders if not is_written(f) and not (f / MARK).exists() and any(f.iterdir())]


def folder_of(directory: Path, step: int) -> Path:
    return directory / str(step)


def read_checkpoint(directory: Path, step: int) -> Checkpoint:
    """Read what is known of a checkpoint, complete or not. Its arrays are not read."""
    folder = folder_of(directory, step)
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
    return Checkpoint(step, folder, manifests, "", damage, parts)


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
    for step in steps_in(directory):
        checkpoint = read_checkpoint(directory, step)
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
    for step in steps_in(directory):
        checkpoint = read_checkpoint(directory, step)
        if checkpoint.missing:
            remove(checkpoint.folder)
        elif step > taken:
            aside = checkpoint.folder.with_name(f"{step}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.folder.replace(aside)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and incomplete ones that are older than a complete one."""
    complete = 0
    for step in steps_in(directory):
        folder = folder_of(directory, step)
        if complete >= keep:
            remove(folder)
        elif is_written(folder):
            complete += 1
        elif complete:
            remove(folder)


def is_written(folder: Path) -> bool:
    """Whether the manifests of all owners are there."""
    names = [p.stem for p in folder.glob("*.json")]
    if not names:
        return False
    try:
        owners = read_manifest(manifest_path(folder, int(names[0]))).owners
    except (OSError, ValueError):
        return False
    return len(names) == owners


def remove(folder: Path) -> None:
    """Remove a checkpoint: its manifests first, so that it is at no time complete in part, and its mark last."""
    for path in folder.glob("*.json"):
        path.unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    shutil.rmtree(folder)
