"""The checkpoints in a directory: complete ones, half-written ones, damaged ones; what goes and what stays."""

import shutil

import pytest

from shardc.checkpoint.manifest import DamagedError, Manifest, RowBlock, StoredLeaf, files_of, write_manifest
from shardc.checkpoint.steps import (
    PARTIAL,
    StoredRows,
    check_files,
    commit,
    folders_in,
    foreign,
    last_complete,
    parts_by_path,
    prune,
    read_checkpoint,
    remove,
    tidy,
)


def write(directory, step, owners=1, only=None, rows=4):
    """A checkpoint of one array whose rows are split over its owners, as far as `only` these have written it."""
    folder = directory / f"{step}{PARTIAL}"
    for owner in range(owners) if only is None else only:
        data = folder / str(owner)
        data.mkdir(parents=True)
        (data / "data").write_bytes(b"12345")
        each = rows // owners
        leaf = StoredLeaf("w", "array", "float32", (rows, 2), blocks=(RowBlock("0", owner * each, (owner + 1) * each),))
        write_manifest(Manifest(step, owner, owners, (leaf,), files_of(data), "", "1", "2"), folder)
    commit(folder, owners)
    return folder if only is not None else directory / str(step)


def others(directory):
    """A checkpoint of another run."""
    return write(directory / "others", 5)


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def test_the_newest_complete_one_is_the_last(tmp_path):
    for step in (9, 19, 109):
        write(tmp_path, step)
    (tmp_path / "notes").mkdir()
    assert list(folders_in(tmp_path)) == [109, 19, 9]
    found, newer = last_complete(tmp_path)
    assert (found.step, newer) == (109, [])


def test_none(tmp_path):
    assert last_complete(tmp_path) == (None, [])


def test_it_is_complete_when_all_owners_have_written(tmp_path):
    write(tmp_path, 1, owners=2)
    write(tmp_path, 2, owners=3, only=[1])
    found, (newer,) = last_complete(tmp_path)
    assert found.step == 1
    assert newer.missing == "the manifest of owner 0, 2 of 3 is missing"
    assert [p.owner for p in found.parts["w"]] == [0, 1]


def _truncate(folder):
    (folder / "0" / "data").write_bytes(b"123")


def _delete(folder):
    (folder / "0" / "data").unlink()


def _garble(folder):
    (folder / "0.json").write_text("{")


def _mix(folder):
    write_manifest(Manifest(5, 1, 2, (), {}, "", "1", "2"), folder)


DAMAGES = {
    _truncate: "0/data has 3 bytes, it had 5",
    _delete: "0/data is missing",
    _garble: "0.json cannot be read: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    _mix: "its manifests do not belong together",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_a_damaged_one_is_taken(tmp_path, damage):
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    found, (newer,) = last_complete(tmp_path)
    assert found.step == 1 and newer.step == 2
    assert newer.damage == DAMAGES[damage] and not newer.is_complete


@pytest.mark.parametrize("me", [0, 1])
def test_files_are_read_by_one_process_each(tmp_path, me):
    folder = write(tmp_path, 1, owners=2)
    found, _ = last_complete(tmp_path)
    check_files(found, me, 2)
    (folder / str(me) / "data").write_bytes(b"1234u")
    check_files(found, 1 - me, 2)
    for there in (True, False):
        with pytest.raises(DamagedError, match=rf"^{me}/data is not as it was written$"):
            check_files(found, me, 2)
        if there:
            (folder / str(me) / "data").unlink()


def test_what_was_found_when_files_were_read_is_damage(tmp_path):
    for step in (1, 2):
        write(tmp_path, step)
    found, (newer,) = last_complete(tmp_path, {2: "0/data is not as it was written"})
    assert (found.step, newer.step, newer.damage) == (1, 2, "0/data is not as it was written")


def test_many_owners_that_are_missing_are_not_all_named(tmp_path):
    write(tmp_path, 2, owners=10, only=[1], rows=10)
    write_manifest(Manifest(3, 1, 10**7, (), {}, "", "1", "2"), write(tmp_path, 3, owners=2, only=[0]))
    (tmp_path / "3.partial" / "0.json").unlink()
    assert [c.missing for c in last_complete(tmp_path)[1]] == [
        f"the manifest of owner 0, 2, 3, 4, 5, 6, 7, 8, ... of {n} is missing" for n in (10**7, 10)
    ]


# -- symbolic links


@pytest.mark.parametrize("way", ["tidy", "prune", "remove", "a link that is set aside", "aside is a link"])
def test_what_a_link_points_to_stays(tmp_path, way):
    target, mine = others(tmp_path), tmp_path / "mine"
    before = sorted(p.relative_to(target).as_posix() for p in target.rglob("*"))
    mine.mkdir()
    link = mine / {"tidy": "2.partial", "aside is a link": "2.damaged"}.get(way, "2")
    link.symlink_to(target)
    if way == "aside is a link":
        _truncate(write(mine, 2))
    if way in ("prune", "remove"):
        write(mine, 3)
        remove(link) if way == "remove" else prune(mine, 1)
        assert names(mine) == ["3"]
    else:
        tidy(mine, 1)
        assert names(mine) == ([] if way == "tidy" else ["2.damaged"])
        assert (mine / "2.damaged").is_symlink() == (way == "a link that is set aside")
    assert sorted(p.relative_to(target).as_posix() for p in target.rglob("*")) == before


def test_links_inside_of_a_checkpoint_are_not_followed(tmp_path):
    target, folder = others(tmp_path), write(tmp_path / "mine", 2)
    (folder / "1").symlink_to(target)
    remove(folder)
    assert names(tmp_path / "mine") == [] and names(target) == ["0", "0.json"]


def test_nothing_is_committed_through_a_link(tmp_path):
    target, mine = others(tmp_path), tmp_path / "mine"
    folder = write(mine, 2, owners=2, only=[0])
    (mine / "2").symlink_to(target)
    with pytest.raises(OSError):
        commit(folder, 1)
    assert names(mine) == ["2", "2.partial"] and names(target) == ["0", "0.json"]


def test_links_that_point_nowhere(tmp_path):
    for name in ("2", "3.partial"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
    assert foreign(tmp_path) == []
    assert [c.missing for c in last_complete(tmp_path)[1]] == ["no manifest is there"] * 2
    tidy(tmp_path, 1)
    assert names(tmp_path) == ["2.damaged"]


def test_rows_that_no_owner_has_are_damage(tmp_path):
    folder = write(tmp_path, 1, owners=2)
    leaf = StoredLeaf("w", "array", "float32", (4, 2), blocks=(RowBlock("0", 0, 2),))
    for owner in (0, 1):
        write_manifest(Manifest(1, owner, 2, (leaf,), {}, "", "1", "2"), folder)
    assert read_checkpoint(tmp_path / "1").damage == "no owner has all of w"


def test_of_two_owners_the_lower_is_read():
    def manifest(owner, *blocks):
        leaf = StoredLeaf("w", "array", "float32", (6,), blocks=blocks)
        return Manifest(1, owner, 3, (leaf, StoredLeaf("e", "array", "int8", (0,))), {}, "", "1", "2")

    found = parts_by_path([manifest(0), manifest(1, RowBlock("a", 0, 4)), manifest(2, RowBlock("b", 0, 6))])
    assert found == {"w": (StoredRows(1, "a", 0, 4, 0), StoredRows(2, "b", 4, 6, 0)), "e": ()}


def test_it_is_committed_when_the_last_owner_has_written(tmp_path):
    folder = write(tmp_path, 3, owners=2, only=[0])
    assert folder.name == "3.partial" and read_checkpoint(folder).missing == "the manifest of owner 1 of 2 is missing"
    write_manifest(Manifest(3, 1, 2, (), {}, "", "1", "2"), folder)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.missing == "its writer was stopped at the end" and last_complete(tmp_path)[0] is None
    commit(folder, 2)
    commit(folder, 2)  # the other owner has found the same
    assert names(tmp_path) == ["3"]


def test_tidy_removes_half_written_ones_and_sets_damaged_ones_aside(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2, owners=2, only=[1])
    _truncate(write(tmp_path, 3))
    (tmp_path / "4.partial" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / ".token-1").touch()
    (tmp_path / "notes").touch()
    tidy(tmp_path, 1)
    assert names(tmp_path) == ["1", "3.damaged", "notes"]
    _truncate(write(tmp_path, 3))
    tidy(tmp_path, 1)  # a second one of this number takes its place
    assert names(tmp_path) == ["1", "3.damaged", "notes"]


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    for step in (1, 2, 4, 6):
        write(tmp_path, step)
    write(tmp_path, 3, owners=2, only=[0])
    write(tmp_path, 5, owners=2, only=[0])
    write(tmp_path, 7, owners=2, only=[0])  # still being written
    prune(tmp_path, 2)
    assert names(tmp_path) == ["4", "6", "7.partial"]


def test_nothing_goes_before_a_newer_one_is_complete(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2, owners=2, only=[0])
    prune(tmp_path, 1)
    assert names(tmp_path) == ["1", "2.partial"]


def test_a_removal_that_is_interrupted_leaves_no_complete_one(tmp_path, monkeypatch):
    folder, real = write(tmp_path, 1, owners=2), shutil.rmtree

    def die(path, **more):
        if more:
            return real(path, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        remove(folder)
    monkeypatch.undo()
    assert names(tmp_path) == ["1.partial"] and last_complete(tmp_path)[0] is None
    write(tmp_path, 2)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["2"]


def test_what_others_have_made_stays(tmp_path):
    """Folders of others may be named like steps: in ours is a manifest, what orbax has written, or nothing."""
    for name in ("100/array", "5/0.png", "6/0/1.json", "2024/12/photo", "7/0.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "0005").mkdir()
    for name in ("4", "8/0", "9/0/ocdbt.process_0", "11/1/ocdbt.process_0"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path, 2)
    shutil.rmtree(write(tmp_path, 3) / "0")
    assert list(folders_in(tmp_path)) == [2024, 100, 11, 9, 8, 7, 6, 5, 4, 3, 2]
    assert foreign(tmp_path) == ["2024", "100", "7", "6", "5"]
