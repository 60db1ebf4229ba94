"""Manifests: written whole or not at all, read as they were written."""

import hashlib
import json
import os
from pathlib import Path
from random import Random

import pytest

from shardc.checkpoint.manifest import (
    Manifest,
    RowBlock,
    StoredFile,
    StoredLeaf,
    files_of,
    manifest_path,
    read_manifest,
    write_manifest,
)
from shardc.errors import CheckpointError
from tests.mutations import mutated

LEAVES = (
    StoredLeaf("params/w", "array", "float32", (4, 3), False, "", (RowBlock("0.0", 0, 2), RowBlock("0.1", 2, 4))),
    StoredLeaf("n", "value", "int", value="3"),
    StoredLeaf("name", "static", "object"),
)


def made(owner=0, step=7, **changes):
    files = {"d/x": StoredFile(3, "abc")}
    fields = {
        "owners": owner + 1,
        "leaves": LEAVES,
        "files": files,
        "plan": "abc",
        "shardc": "1",
        "jax": "2",
        **changes,
    }
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
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 99}',
        '{"format": 1}',
        '{"format": 2}',
        '{"format": 1, "leaves": [{}]}',
        "[" * 10**6,
    ],
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


def test_a_flipped_bit_anywhere_is_an_error(tmp_path):
    write_manifest(made(), tmp_path)
    path = manifest_path(tmp_path, 0)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(ValueError):
            read_manifest(path)


def write_text(text, path):
    """A manifest of this text, and with the digest of it."""
    rest = text[1:]
    path.write_text(f'{{"digest": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}')


def members(path):
    data = json.loads(path.read_text())
    del data["digest"]
    return data


def test_one_of_the_format_before_has_no_digests(tmp_path):
    write_manifest(made(), tmp_path)
    path = manifest_path(tmp_path, 0)
    path.write_text(json.dumps(members(path) | {"format": 1, "files": {"d/x": 3}}))
    assert read_manifest(path) == made(files={"d/x": StoredFile(3, "")})


WRONG = {
    "files": [[1], {"d/x": 3}, {"../x": {"size": 3, "digest": ""}}, {"/x": {"size": 3, "digest": ""}}, {"\0": {}}],
    "owners": ["two", 0, True],
    "owner": [-1, 1, "0"],
    "step": [None, 1.0, "7"],
    "leaves": [[{}], [LEAVES[0].path], {"a": 1}, None],
    "path": [1, None],
    "kind": ["", "tree", 1],
    "dtype": ["nothing", "f4,(", 3],
    "shape": ["43", [4, "3"], [-1, 3], 4],
    "blocks": [{}, [1], [{"name": "0", "start": 0, "stop": 5}], [{"name": "0", "start": 2, "stop": 2}]],
    "weak": [0, "no"],
}


@pytest.mark.parametrize("name", WRONG)
def test_members_of_another_type_are_an_error(tmp_path, name):
    """Also with the right digest, as of a writer that has a bug."""
    write_manifest(made(), tmp_path)
    path = manifest_path(tmp_path, 0)
    data = members(path)
    for value in WRONG[name]:
        wrong = json.loads(json.dumps(data))
        (wrong if name in wrong else wrong["leaves"][0])[name] = value
        write_text(json.dumps(wrong), path)
        with pytest.raises(ValueError, match=r"^no manifest of format 2: "):
            read_manifest(path)


def test_numbers_that_are_none(tmp_path):
    for dtype, value in (("int", "7; x"), ("float", "x"), ("list", "[]")):
        write_manifest(made(leaves=(StoredLeaf("n", "value", dtype, value=value),)), tmp_path)
        with pytest.raises(ValueError, match="no manifest"):
            read_manifest(manifest_path(tmp_path, 0))


def test_a_mutated_one_with_the_right_digest_is_read_or_an_error(tmp_path):
    write_manifest(made(), tmp_path)
    path, random, errors = manifest_path(tmp_path, 0), Random(0), 0
    text = json.dumps(members(path))
    for _ in range(1000):
        write_text(mutated(text, random).decode(errors="replace"), path)
        try:
            assert isinstance(read_manifest(path), Manifest)
        except ValueError:
            errors += 1
        except CheckpointError as error:  # a format that is not known yet
            assert " was written by shardc " in str(error)
    assert errors > 500


def test_files_of_a_folder(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"")
    digests = [hashlib.sha256(data).hexdigest() for data in (b"123", b"")]
    assert files_of(tmp_path) == {"d/x": StoredFile(3, digests[0]), "y": StoredFile(0, digests[1])}


def test_texts():
    assert [str(x) for x in LEAVES] == ["float32[4,3]", "a Python int", "a Python object"]
    assert [x.is_empty for x in (*LEAVES, StoredLeaf("e", "array", "int8", (0, 3)))] == [False, True, True, True]
