"""Manifests: written whole or not at all, read as they were written."""

import json
import os
from pathlib import Path

import pytest

from shardc.checkpoint.manifest import (
    Manifest,
    RowBlock,
    StoredLeaf,
    files_of,
    manifest_path,
    read_manifest,
    write_manifest,
)

LEAVES = (
    StoredLeaf("params/w", "array", "float32", (4, 3), False, "", (RowBlock("0.0", 0, 2), RowBlock("0.1", 2, 4))),
    StoredLeaf("n", "value", "int", value="3"),
    StoredLeaf("name", "static", "object"),
)


def made(owner=0, step=7, **changes):
    fields = {"owners": 1, "leaves": LEAVES, "files": {"d/x": 3}, "plan": "abc", "shardc": "1", "jax": "2", **changes}
    return Manifest(step=step, owner=owner, **fields)


def test_read_as_written(tmp_path):
    write_manifest(made(owner=2), tmp_path)
    assert read_manifest(manifest_path(tmp_path, 2)) == made(owner=2)
    assert os.listdir(tmp_path) == ["2.json"]


def test_an_interrupted_write_leaves_the_old_one(tmp_path, monkeypatch):
    write_manifest(made(), tmp_path)

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_manifest(made(step=8), tmp_path)
    assert read_manifest(manifest_path(tmp_path, 0)).step == 7


def test_another_owner_may_rename_the_folder_as_soon_as_the_manifest_is_there(tmp_path, monkeypatch):
    folder, known = tmp_path / "7.partial", Path.replace
    folder.mkdir()

    def replace(path, target):
        known(path, target)
        known(folder, tmp_path / "7")

    monkeypatch.setattr(Path, "replace", replace)
    write_manifest(made(), folder)
    assert read_manifest(manifest_path(tmp_path / "7", 0)) == made()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1}', '{"format": 1, "leaves": [{}]}']
)
def test_what_is_no_manifest_is_an_error(tmp_path, text):
    path = manifest_path(tmp_path, 0)
    path.write_text(text)
    with pytest.raises(ValueError):
        read_manifest(path)


def test_a_cut_manifest_is_an_error(tmp_path):
    write_manifest(made(), tmp_path)
    path = manifest_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(json.JSONDecodeError):
        read_manifest(path)


def test_files_of_a_folder(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"")
    assert files_of(tmp_path) == {"d/x": 3, "y": 0}


def test_texts():
    assert [str(x) for x in LEAVES] == ["float32[4,3]", "a Python int", "a Python object"]
    assert [x.is_empty for x in (*LEAVES, StoredLeaf("e", "array", "int8", (0, 3)))] == [False, True, True, True]
