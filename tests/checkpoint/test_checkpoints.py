"""`shardc.checkpoints` as a user calls it: in one process, and with the other processes of a run as threads."""

import json
import logging
import os
import shutil
import signal
import threading
import time
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import shardc
from shardc import PlacedArray, Placement, S, StackedArray, make_mesh
from shardc.arrays.place import put_leaf
from shardc.checkpoint import checkpoints as face
from shardc.checkpoint import manifest, orbax
from shardc.checkpoint.lock import NAME, DirectoryLock
from shardc.checkpoint.steps import read_checkpoint
from shardc.errors import ArgumentError, CheckpointError, PeerLostError
from tests.checkpoint.peers import Fake, Run, all_processes, as_process, use_fakes
from tests.checkpoint.test_leaves import elsewhere, far
from tests.checkpoint.test_targets import words
from tests.runtime.watchdog import within


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    use_fakes(monkeypatch)


def names(directory):
    return sorted(p.name for p in directory.iterdir() if p.name != NAME)


def like(x):
    """All that has to be the same of two leaves, but their value."""
    facts = [getattr(x, name, None) for name in ("dtype", "shape", "placement", "weak_type", "committed", "sharding")]
    return [type(x), *facts]


def check_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert like(a) == like(b), path
        if isinstance(a, jax.Array | np.ndarray | np.generic):
            np.testing.assert_array_equal(words(a), words(b))
        else:
            assert a == b or a != a, path


def saved_and_restored(directory, state, target=None):
    with shardc.checkpoints(directory) as saved:
        saved.step(0, state)
        got, start = saved.last(or_else=state if target is None else target)
    assert start == 1
    return got


class Pair(NamedTuple):
    left: object
    right: object


def states():
    mesh = make_mesh(a=4, b=2)
    table = np.arange(78, dtype=np.float32).reshape(13, 6)
    stages = [jax.sharding.Mesh(jax.devices()[i : i + 4], ("a",)) for i in (0, 4)]
    rows = [put_leaf(r, m, Placement({"a": S(0)})) for r, m in zip((table[:7], table[7:]), stages, strict=True)]
    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    yield (
        "placed",
        {
            "uneven": put_leaf(table, mesh, Placement({"a": S(0)})),
            "partial": put_leaf(table, mesh, Placement.parse("{a: S(1), b: P(sum)}")),
            "plain": jax.device_put(table, jax.NamedSharding(mesh, jax.P(None, "b"))),
            "stacked": StackedArray(rows),
        },
    )
    yield (
        "types",
        {
            "keys": [jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), 5)],
            "bfloat16": jnp.arange(5, dtype=jnp.bfloat16),
            "int4": jnp.arange(-8, 8).astype(jnp.int4),
            "bool": jnp.array([True, False]),
            "scalars": [jnp.float32(2), jnp.asarray(1), np.float64(7), np.array(3, np.int8)],
            "numbers": [3, -(2**70), 0.1, float("nan"), 1 + 2j, True, "text"],
            "none": None,
            "empty": [jnp.zeros((0, 3)), np.zeros((4, 0), np.int8), {}, ()],
            "host": np.arange(3.0),
        },
    )
    yield "optax", (params, optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(1, 0, 9))).init(params))
    yield "linen", TrainState.create(apply_fn=len, params=flax.core.freeze(params), tx=optax.sgd(0.1, momentum=0.9))
    yield "nnx state", nnx.state(model)
    yield "nnx split", Pair(*nnx.split(model))
    yield "nnx optimizer", nnx.state(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    yield "static", {"f": len, "w": jnp.ones(2)}
    yield "no arrays", {"n": 3}


@pytest.mark.parametrize("name", [name for name, _ in states()])
def test_what_comes_back_is_what_was_saved(tmp_path, name):
    state = dict(states())[name]
    check_same(saved_and_restored(tmp_path, state), state)


@pytest.mark.parametrize("target", ["uneven", "partial", "plain", "stacked"])
@pytest.mark.parametrize("source", ["uneven", "partial", "plain", "stacked"])
def test_any_placement_to_any_other(tmp_path, source, target):
    arrays = dict(states())["placed"]
    other = jax.tree.map(lambda x: x * 0, arrays[target]) if target == "plain" else arrays[target]
    got = saved_and_restored(tmp_path, {"x": arrays[source]}, {"x": other})["x"]
    assert like(got) == like(arrays[target])
    np.testing.assert_array_equal(np.asarray(got), np.asarray(arrays[source]))


def test_to_another_mesh_and_to_the_host(tmp_path):
    x = np.arange(26, dtype=np.float32).reshape(13, 2)
    uneven = put_leaf(x, make_mesh(a=4), Placement({"a": S(0)}))
    other = put_leaf(np.zeros_like(x), make_mesh(c=3), Placement({"c": S(0)}))
    got = saved_and_restored(tmp_path / "1", uneven, other)
    assert isinstance(got, PlacedArray) and got.mesh == other.mesh
    np.testing.assert_array_equal(np.asarray(got), x)
    got = saved_and_restored(tmp_path / "2", uneven, np.zeros_like(x))
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, x)


# -- the loop


def test_a_loop_goes_on_where_it_was(tmp_path):
    def loop(n):
        with shardc.checkpoints(tmp_path, every=3, keep=2) as saved:
            state, start = saved.last(or_else={"w": jnp.zeros(2)})
            for i in range(start, n):
                state = {"w": state["w"] + i}
                saved.step(i, state, loss=state["w"][0], tokens=10)
            return start, float(state["w"][0]), saved.note

    assert loop(8) == (0, 28.0, "")
    assert names(tmp_path) == ["2", "5"]
    assert loop(13) == (6, 78.0, "")
    assert names(tmp_path) == ["11", "8"]


def test_steps_are_written_if_every_divides_the_next(tmp_path):
    with shardc.checkpoints(tmp_path, every=4, keep=9) as saved:
        for i in range(10):
            saved.step(i, {"n": i})
    assert names(tmp_path) == ["3", "7"]


def test_the_copy_is_made_before_step_returns(tmp_path):
    """What the next step does to arrays of the host, or with donated buffers, does not reach the file."""
    poison = jax.jit(lambda x: x * jnp.nan, donate_argnums=0)
    state = {"host": np.arange(4.0), "device": jax.device_put(jnp.arange(2.0**16), jax.devices()[1])}
    wanted = jax.tree.map(np.array, state)
    with shardc.checkpoints(tmp_path) as saved:
        saved.step(0, state)
        state["host"][:] = np.nan
        state["device"] = poison(state["device"])
        got, _ = saved.last(or_else=wanted)
    check_same(got, wanted)


def test_buffers_that_a_shardc_function_takes_are_saved_before(tmp_path):
    mesh = make_mesh(a=4)

    @shardc.function(mesh=mesh, in_placements={"x": {"a": S(0)}}, donate_argnames=("x",))
    def poison(x):
        return x * jnp.nan

    values = np.arange(13 * 2**12, dtype=np.float32).reshape(13, -1)
    x = put_leaf(values, mesh, Placement({"a": S(0)}))
    with shardc.checkpoints(tmp_path) as saved:
        for i in range(3):
            saved.step(i, {"x": x})
            poison(x)
            got, _ = saved.last(or_else={"x": x})  # deleted: it says where the state lives all the same
            x = got["x"]
    np.testing.assert_array_equal(np.asarray(x), values)


def test_a_function_that_makes_the_state_is_called_only_if_there_is_none(tmp_path):
    calls = []

    def init():
        calls.append(1)
        return {"w": jnp.zeros((13, 2)), "n": jnp.int32(0)}

    mesh = make_mesh(a=4)
    placements = {"w": {"a": S(0)}, "n": {}}
    with shardc.checkpoints(tmp_path) as saved:
        fresh, start = saved.last(or_else=init, mesh=mesh, placements=placements)
        assert start == 0 and isinstance(fresh["w"], PlacedArray) and len(calls) == 1
        saved.step(0, {"w": fresh["w"], "n": fresh["n"] + 1})
        got, start = saved.last(or_else=init, mesh=mesh, placements=placements)
        assert start == 1 and int(got["n"]) == 1 and len(calls) == 2  # once more, traced for its shapes
        assert like(got["w"]) == like(fresh["w"]) and like(got["n"]) == like(fresh["n"])
        plain, _ = saved.last(or_else=init)
        assert isinstance(plain["w"], jax.Array) and not plain["w"].committed
        with pytest.raises(ArgumentError, match="both mesh= and placements="):
            saved.last(or_else=init, mesh=mesh)


def test_run_is_the_loop(tmp_path):
    def one_step(i, state):
        params, n = state
        params = {"w": params["w"] + i}
        return ((params, n + 1), params["w"].sum()) if i % 2 else (params, n + 1)  # a pair that is a state, or not

    def init():
        return {"w": jnp.zeros(2)}, jnp.int32(0)

    with shardc.checkpoints(tmp_path, every=3) as saved:
        saved.run(one_step, init, steps=7)
    with shardc.checkpoints(tmp_path, every=3) as saved:
        params, n = saved.run(one_step, init, steps=11)
    assert int(n) == 11 and float(params["w"][0]) == sum(range(11))


# -- bad input


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "shardc.checkpoints: every=0: a whole number of 1 or more is needed."),
        ({"every": 2.0, "keep": -1}, "shardc.checkpoints: every=2.0, keep=-1: a whole number of 1 or more is needed."),
    ],
)
def test_bad_numbers(tmp_path, options, text):
    with pytest.raises(ArgumentError) as error:
        shardc.checkpoints(tmp_path, **options)
    assert str(error.value) == text


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    saved = shardc.checkpoints(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"shardc.checkpoints: .*/file cannot be written: "), saved:
        pass


def test_outside_of_with(tmp_path):
    saved = shardc.checkpoints(tmp_path)
    for call in (lambda: saved.step(0, {}), lambda: saved.last({})):
        with pytest.raises(ArgumentError, match=r"use it inside of `with shardc.checkpoints"):
            call()
    with saved, pytest.raises(ArgumentError, match="is in use: enter it once"):
        saved.__enter__()


def test_steps_go_forward(tmp_path):
    with shardc.checkpoints(tmp_path, every=5) as saved:
        saved.step(4, {"n": 1})
        for again in (4, 3):
            with pytest.raises(ArgumentError) as error:
                saved.step(again, {"n": 1})
            assert str(error.value) == (
                f"saved.step({again}): step 4 is there already. Begin with `state, start = saved.last(or_else=...)` "
                "and step `start`, or give another directory."
            )
        saved.step(9, {"n": 2})
    with shardc.checkpoints(tmp_path) as saved, pytest.raises(ArgumentError, match="step 9 is there already"):
        saved.step(0, {"n": 1})  # without `last` it would write over another run


def test_another_program(tmp_path):
    with shardc.checkpoints(tmp_path) as saved:
        saved.step(0, {"w": jnp.zeros((2, 3)), "old": 1})
        with pytest.raises(CheckpointError) as error:
            saved.last(or_else={"w": jnp.zeros((3, 2)), "new": 1})
        assert str(error.value).splitlines()[1:] == [
            "  new: a Python int asked for, not in the checkpoint.",
            "  w: float32[2,3] in the checkpoint, float32[3,2] asked for",
            "  old: a Python int in the checkpoint, not asked for",
        ]
        assert saved.last(or_else={"w": jnp.zeros((2, 3)), "old": 1})[1] == 1


def test_a_first_state_that_was_donated(tmp_path):
    state = {"w": jnp.zeros(3), "b": {"c": jnp.ones(2)}, "n": 1}
    state["b"]["c"].delete()
    with shardc.checkpoints(tmp_path) as saved:
        with pytest.raises(CheckpointError) as error:
            saved.last(or_else=state)
        assert str(error.value) == (
            f"There is no checkpoint in {tmp_path} yet, and these arrays of the first state were donated. Give a "
            "function that makes the state:\n  b/c"
        )


def test_arrays_that_cannot_be_saved(tmp_path):
    with shardc.checkpoints(tmp_path) as saved:
        with pytest.raises(CheckpointError, match="x: ndarray of object"):
            saved.step(0, {"x": np.array([None])})
        saved.step(1, {"x": np.zeros(1)})
    assert names(tmp_path) == ["1"]


def _newest_file(folder):
    return max((p for p in (folder / "0").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _truncate(folder):
    path = _newest_file(folder)
    path.write_bytes(path.read_bytes()[:-1])
    return "has", True


def _delete(folder):
    _newest_file(folder).unlink()
    return "is missing", True


def _manifest_is_gone(folder):
    (folder / "0.json").unlink()
    return "no manifest is there", True


def _owner_is_gone(folder):
    shutil.rmtree(folder / "0")
    return " is missing", True


def _all_is_gone(folder):
    shutil.rmtree(folder / "0")
    return _manifest_is_gone(folder)


def _most_is_gone(folder):
    """Of what orbax has written its directory of data is left, and the description of the arrays."""
    (folder / "0.json").unlink()
    (folder / "0" / "manifest.ocdbt").unlink()
    return "no manifest is there", True


def _no_manifest(folder):
    (folder / "0.json").unlink()
    folder.rename(f"{folder}.partial")
    return "no manifest is there", False


def _cut_manifest(folder):
    path = folder / "0.json"
    path.write_bytes(path.read_bytes()[:-9])
    return "0.json cannot be read", True


def _flip(folder):
    path = _newest_file(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return "is not as it was written", True


def _swap(folder):
    path = folder / "0.json"
    text = path.read_text()
    path.write_text(text.replace('"name": "0"', '"name": "9"'))
    assert path.read_text() != text
    return "0.json cannot be read: it is not as it was written", True


STAY = [_truncate, _delete, _manifest_is_gone, _owner_is_gone, _all_is_gone, _most_is_gone, _cut_manifest, _flip, _swap]
"""What damages a checkpoint that was complete."""


@pytest.mark.parametrize("damage", [*STAY, _no_manifest])
def test_the_one_before_a_half_written_one_is_taken(tmp_path, caplog, damage):
    with shardc.checkpoints(tmp_path) as saved:
        for i in range(2):
            saved.step(i, {"x": np.random.default_rng(i).normal(size=100)})
    why, stays = damage(tmp_path / "1")
    with caplog.at_level(logging.WARNING, "shardc"), shardc.checkpoints(tmp_path) as saved:
        state, start = saved.last(or_else={"x": np.zeros(100)})
        assert saved.note.startswith("The checkpoint of step 1 is not complete: ") and why in saved.note
        assert saved.note.endswith("; that of step 0 is taken.") and saved.note in caplog.text
        np.testing.assert_array_equal(state["x"], np.random.default_rng(0).normal(size=100))
        assert start == 1 and names(tmp_path) == ["0", "1" if stays else "1.partial"]  # who only looks removes nothing
        saved.step(1, state)
        assert saved.last(or_else=state)[1] == 2 and saved.note == ""
    assert names(tmp_path) == ["0", "1", *(["1.damaged"] if stays else [])]


def test_a_checkpoint_of_the_format_before(tmp_path):
    with shardc.checkpoints(tmp_path) as saved:
        saved.step(0, {"x": np.arange(3.0)})
    path = tmp_path / "0" / "0.json"
    data = json.loads(path.read_text())
    del data["digest"]
    sizes = {name: file["size"] for name, file in data["files"].items()}
    path.write_text(json.dumps(data | {"format": 1, "files": sizes}))
    with shardc.checkpoints(tmp_path) as saved:
        state, start = saved.last(or_else={"x": np.zeros(3)})
        assert saved.note == "The checkpoint of step 0 has no digests: nobody knows if bits of it flipped."
        np.testing.assert_array_equal(state["x"], np.arange(3.0))
        saved.step(start, state)
        saved.last(or_else=state)
        assert saved.note == ""


def test_what_the_store_cannot_read_is_not_taken(tmp_path, monkeypatch):
    """Two checkpoints whose files are as they were written, of which the store says that they are not right."""
    with shardc.checkpoints(tmp_path, keep=3) as saved:
        for i in range(3):
            saved.step(i, {"x": np.full(3, float(i))})
    real = orbax.read

    def read(folder, name, index):
        if folder.parent.name in ("1", "2"):
            return real(folder, name, ((0, 9),))
        return real(folder, name, index)

    monkeypatch.setattr(orbax, "read", read)
    with shardc.checkpoints(tmp_path) as saved:
        state, start = saved.last(or_else={"x": np.zeros(3)})
        assert start == 1 and state["x"].tolist() == [0.0] * 3
        lines = saved.note.splitlines()
        assert [line[:41] for line in lines] == [f"The checkpoint of step {i} is not complete: "[:41] for i in (2, 1)]
        assert all(line.endswith("; that of step 0 is taken.") and "cannot be read" in line for line in lines)
        saved.step(1, state)
    assert names(tmp_path) == ["0", "1", "1.damaged", "2.damaged"]


# -- who may read


@pytest.mark.parametrize(("options", "wanted"), [({}, 0o700), ({"mode": 0o750}, 0o750)])
def test_folders_are_their_owners_unless_the_user_says_otherwise(tmp_path, options, wanted):
    """The files lie in them."""
    (tmp_path / "there").mkdir(0o755)
    for directory, mode in ((tmp_path / "new", wanted), (tmp_path / "there", 0o755)):
        with shardc.checkpoints(directory, **options) as saved:
            saved.step(0, {"x": np.ones(3), "n": 1})
            saved.step(1, {"n": 1})
        modes = [p.stat().st_mode & 0o777 for p in (directory, directory / "0", directory / "1")]
        assert modes == [mode, wanted, wanted]


@pytest.mark.parametrize(("mode", "said"), [(750, "0o1356"), (0o640, "0o640"), (-1, "-0o1"), ("750", "'750'")])
def test_permissions_that_are_none(tmp_path, mode, said):
    with pytest.raises(ArgumentError) as error:
        shardc.checkpoints(tmp_path, mode=mode)
    assert str(error.value) == f"shardc.checkpoints: mode={said}: permissions from 0o700 to 0o777 are needed."


# -- symbolic links


def test_a_step_of_another_run_that_is_linked(tmp_path):
    """It is taken, and it stays when it is too old here."""
    old, new = tmp_path / "old", tmp_path / "new"
    with shardc.checkpoints(old) as saved:
        saved.step(2, {"x": np.arange(3.0)})
    before = sorted(old.rglob("*"))
    (new / "files").mkdir(parents=True)
    (new / "2").symlink_to(old / "2")
    (tmp_path / "link").symlink_to(new)
    with shardc.checkpoints(tmp_path / "link", keep=1) as saved:
        state, start = saved.last(or_else={"x": np.zeros(3)})
        assert start == 3 and state["x"].tolist() == [0.0, 1.0, 2.0]
        for i in range(start, start + 2):
            saved.step(i, state)
    assert names(new) == ["4", "files"] and sorted(old.rglob("*")) == before


def test_none_is_complete(tmp_path):
    """The first run was interrupted while it wrote."""
    with shardc.checkpoints(tmp_path) as saved:
        saved.step(0, {"x": 1})
    _no_manifest(tmp_path / "0")
    with shardc.checkpoints(tmp_path) as saved:
        assert saved.last(or_else={"x": 5}) == ({"x": 5}, 0)
        assert saved.note == "The checkpoint of step 0 is not complete: no manifest is there; none is taken."


@pytest.mark.parametrize("damage", STAY)
def test_if_all_are_damaged_the_user_is_asked(tmp_path, damage):
    """A run of weeks does not begin anew without a word; nothing is removed or set aside."""
    folder = tmp_path / "ckpt"
    with shardc.checkpoints(folder) as saved:
        for i in range(2):
            saved.step(i, {"x": np.arange(30.0) + i})
    (folder / "0" / "0.json").unlink()
    why, _ = damage(folder / "1")
    (folder / "2.partial").mkdir()
    before = names(folder)
    for _ in range(2):
        with shardc.checkpoints(folder) as saved, pytest.raises(CheckpointError) as error:
            saved.last(or_else={"x": np.zeros(30)})
        text = str(error.value).partition("\n---")[0]
        head, first, second, *_, fix = text.splitlines()
        assert head == f"shardc.checkpoints: no checkpoint in {folder} is as it was written:"
        assert first.startswith("  step 1: ") and why in first and second == "  step 0: no manifest is there"
        assert fix.endswith(f"To begin anew at step 0, move the directory away: mv {folder} {folder}.damaged")
        assert names(folder) == before
    folder.rename(f"{folder}.damaged")
    with shardc.checkpoints(folder) as saved:
        assert saved.last(or_else={"x": np.zeros(30)})[1] == 0


def test_if_all_are_damaged_all_processes_are_asked(tmp_path):
    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            saved.last(or_else={"x": np.zeros(3)})

    with shardc.checkpoints(tmp_path) as saved:
        saved.step(4, {"x": np.ones(3)})
    (tmp_path / "4" / "0.json").unlink()
    assert all("  step 4: no manifest is there" in str(error) for error in all_processes([body] * 2))


def test_a_checkpoint_of_a_newer_shardc(tmp_path):
    """It is not damaged: it is not set aside, and no older one is taken in its place."""
    with shardc.checkpoints(tmp_path) as saved:
        for i in range(2):
            saved.step(i, {"x": i})
    path = tmp_path / "1" / "0.json"
    rest = path.read_text().partition("\n")[2].replace('"format": 2', '"format": 3').replace('"leaves"', '"trees"')
    path.write_text(f"{manifest._first_line(rest)}\n{rest}")
    with shardc.checkpoints(tmp_path) as saved, pytest.raises(CheckpointError) as error:
        saved.last(or_else={"x": 5})
    assert f"{path} has format 3 and was written by shardc {shardc.__version__}. This is shardc " in str(error.value)
    assert names(tmp_path) == ["0", "1"]


# -- runs that are asked to end


def test_a_process_alone_saves_at_its_next_step_after_sigterm(tmp_path):
    with pytest.raises(SystemExit) as end, shardc.checkpoints(tmp_path, every=10**6) as saved:
        for i in range(100):
            if i == 3:
                signal.raise_signal(signal.SIGTERM)
            saved.step(i, {"x": i})
    assert (end.value.code, i, names(tmp_path)) == (143, 3, ["3"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with shardc.checkpoints(tmp_path) as saved:
        assert saved.last(or_else={"x": 0}) == ({"x": 3}, 4)
        saved.step(4, {"x": 4})


def test_all_processes_save_one_step_and_end(tmp_path):
    """Of a loop of `saved.run`, in which a lost peer is mended and an end that is asked for is not."""
    heard = threading.Barrier(3)

    def body(cluster):
        def one_step(i, state):
            if i == 2 + cluster.me:  # process 2 is two steps ahead
                begun.append(cluster.last_step.ask())
                heard.wait(20)
                cluster.last_step.end_after(max(begun))
            return {"x": state["x"] + 1}

        with shardc.checkpoints(tmp_path, every=10**6) as saved:
            try:
                saved.run(one_step, lambda: {"x": np.zeros(())}, steps=100)
            except SystemExit as end:
                return end.code, end.step
        return None

    begun = []
    assert all_processes([body] * 3) == [(143, 4)] * 3 and sorted(begun) == [2, 3, 4]
    assert names(tmp_path) == ["4"]


def test_of_two_loops_both_save_before_the_process_ends(tmp_path):
    with (
        pytest.raises(SystemExit) as end,
        shardc.checkpoints(tmp_path / "a", every=10**6) as a,
        shardc.checkpoints(tmp_path / "b", every=10**6) as b,
    ):
        for i in range(100):
            a.step(i, {"x": i})
            if i == 3:
                signal.raise_signal(signal.SIGTERM)
            b.step(i, {"x": i})
    assert end.value.code == 143
    assert names(tmp_path / "b") == ["3"] and names(tmp_path / "a") == ["4"]


# -- two runs in one directory


def test_a_second_run_may_read_and_not_write(tmp_path, monkeypatch):
    monkeypatch.setattr(face, "APPEARS", 0.2)
    with shardc.checkpoints(tmp_path) as first, shardc.checkpoints(tmp_path) as second:
        first.step(0, {"x": 1})
        first.last(or_else={"x": 0})
        assert second.last(or_else={"x": 0}) == ({"x": 1}, 1)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"another run writes to .*: this process itself"):
                second.step(1, {"x": 2})
        first.step(1, {"x": 2})
    assert names(tmp_path) == ["0", "1"] and os.listdir(tmp_path / "1")


def test_who_has_looked_before_another_run_wrote_starts_again(tmp_path):
    """Else its first step would set aside what the other one has written."""
    with shardc.checkpoints(tmp_path) as saved:
        saved.step(0, {"x": 1})
    with shardc.checkpoints(tmp_path) as late:
        state, start = late.last(or_else={"x": 0})
        with shardc.checkpoints(tmp_path) as other:
            other.step(1, {"x": 2})
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match=r"another run has written step 1 to .* since this one has looked"
            ):
                late.step(start, state)
        assert late.last(or_else={"x": 0}) == ({"x": 2}, 2)
        late.step(2, {"x": 3})
    assert names(tmp_path) == ["1", "2"]


def test_of_several_processes_the_first_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(face, "APPEARS", 0.2)
    other = DirectoryLock(tmp_path)
    other.take(0)

    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            saved.step(0, {"x": 1})

    assert all("another run writes to " in str(error) for error in all_processes([body] * 2))
    other.free()
    assert all_processes([body] * 2) == [None, None]
    assert os.listdir(tmp_path) == ["0"]


def test_litter_of_a_killed_run_goes(tmp_path):
    for name in ("7.partial/0.orbax-checkpoint-tmp/d", "3.partial/1.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "3.partial" / "0.json.tmp").touch()
    (tmp_path / ".token-0123").touch()
    with shardc.checkpoints(tmp_path, every=2) as saved:
        saved.step(0, {"x": 1})  # there is no complete one: this is the first run
        assert names(tmp_path) == []
        saved.step(1, {"x": 1})
    assert names(tmp_path) == ["1"] and names(tmp_path / "1") == ["0", "0.json"]


def a_plan(**mesh):
    f = shardc.function(jnp.tanh, mesh=make_mesh(data=4, model=2, **mesh), in_placements={"data": S(0)})
    return f.plan(jnp.ones((8, 8)))


def test_another_plan_is_said(tmp_path):
    plan = a_plan()
    with shardc.checkpoints(tmp_path, plan=plan) as saved:
        saved.step(0, {"x": 1})
        assert saved.last(or_else={"x": 1})[1] == 1 and saved.note == ""
    with shardc.checkpoints(tmp_path, plan="abc") as saved:
        assert saved.last(or_else={"x": 0}) == ({"x": 1}, 1)
        assert saved.note == f"The checkpoint of step 0 was written under plan {plan.digest}, not abc."
    with shardc.checkpoints(tmp_path) as saved:
        saved.last(or_else={"x": 0})
        assert saved.note == ""


def test_other_memory_is_no_other_plan(tmp_path):
    plans = [a_plan(hbm=hbm) for hbm in ("4GB", "8GB")]
    assert plans[0].explain() != plans[1].explain()
    for plan in plans:
        with shardc.checkpoints(tmp_path, plan=plan) as saved:
            state, start = saved.last(or_else={"x": 0})
            assert saved.note == ""
            saved.step(start, state)
    assert start == 1


# -- errors of the body and of the writer


def test_the_error_of_the_writer_comes_out_at_the_next_step(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    with shardc.checkpoints(tmp_path) as saved:
        saved.step(0, {"x": 1})
        within(30, saved._writer.wait)
        monkeypatch.setattr(face, "write_manifest", full)
        saved.step(1, {"x": 1})
        within(30, saved._writer.wait)
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match=r"step 1 could not be written .*disk full"):
            saved.step(2, {"x": 1})
        assert saved.last(or_else={"x": 1})[1] == 1


def test_the_error_of_the_writer_comes_out_at_the_end(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(face, "write_manifest", full)
    saved = shardc.checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 0 could not be written .*disk full"), saved:
        saved.step(0, {"x": 1})


def test_a_directory_that_goes_away(tmp_path):
    directory = tmp_path / "c"

    def loop():
        with shardc.checkpoints(directory) as saved:
            saved.step(0, {"x": np.ones(3)})
            saved._writer.wait()
            shutil.rmtree(directory)
            directory.touch()
            for i in range(1, 4):
                saved.step(i, {"x": np.ones(3)})

    with pytest.raises(CheckpointError, match="step 1 c"):
        within(60, loop)


def test_an_error_of_the_body_goes_out_and_nothing_more_is_written(tmp_path, caplog):
    def loop():
        with shardc.checkpoints(tmp_path) as saved:
            saved.step(0, {"x": np.ones(3)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        within(60, loop)
    assert names(tmp_path) == ["0"] and read_checkpoint(tmp_path / "0").is_complete


def test_an_error_of_the_body_does_not_wait_for_ever(tmp_path, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(face, "GRACE", 0.1)
    monkeypatch.setattr(face, "write_manifest", lambda *_: may_end.wait(60) and None)

    def loop():
        with shardc.checkpoints(tmp_path) as saved:
            saved.step(0, {"x": np.ones(3)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        within(10, loop)
    may_end.set()


def test_a_slow_writer_does_not_hold_the_run(tmp_path, monkeypatch):
    may_end = threading.Event()
    known = face.write_manifest
    monkeypatch.setattr(face, "write_manifest", lambda *a: may_end.wait(60) and known(*a))

    def loop():
        with shardc.checkpoints(tmp_path, every=3) as saved:
            for i in range(5):  # the second one to write would wait
                saved.step(i, {"x": np.ones(3)})
            assert not read_checkpoint(tmp_path / "2").is_complete
            may_end.set()

    within(60, loop)
    assert read_checkpoint(tmp_path / "2").is_complete


# -- several processes


def stage_of(cluster, mesh, w, n):
    """The state of a pipeline of two stages as one of its islands sees it."""
    here = put_leaf(w[cluster.me], mesh, Placement({"a": S(0)}))
    return {"stages": [here if s == cluster.me else far((5, 2), elsewhere(s)) for s in (0, 1)], "n": np.int32(n)}


def meshes():
    return [jax.sharding.Mesh(jax.devices()[i : i + 4], ("a",)) for i in (0, 4)]


def tables(i):
    return [np.arange(10, dtype=np.float32).reshape(5, 2) + 100 * i + 50 * s for s in (0, 1)]


def write_two(directory, steps=3, **options):
    def body(cluster):
        with shardc.checkpoints(directory, **options) as saved:
            start = saved.last(or_else=stage_of(cluster, meshes()[cluster.me], tables(0), 0))[1]
            for i in range(start, steps):
                saved.step(i, stage_of(cluster, meshes()[cluster.me], tables(i), i))
        return start

    return all_processes([body, body])


def test_each_island_writes_what_it_has(tmp_path):
    assert write_two(tmp_path) == [0, 0]
    assert names(tmp_path) == ["1", "2"]
    assert names(tmp_path / "2") == ["0", "0.json", "1", "1.json"]
    manifests = [json.loads((tmp_path / "2" / f"{o}.json").read_text()) for o in (0, 1)]
    assert [[bool(x["blocks"]) for x in m["leaves"]] for m in manifests] == [[True, True, False], [True, False, True]]
    assert [m["owners"] for m in manifests] == [2, 2]


def test_each_island_reads_what_it_has(tmp_path):
    write_two(tmp_path)

    def body(cluster):
        like = stage_of(cluster, meshes()[cluster.me], tables(0), 0)
        with shardc.checkpoints(tmp_path) as saved:
            state, start = saved.last(or_else=like)
        other = 1 - cluster.me
        assert state["stages"][other] is like["stages"][other]
        return start, int(state["n"]), np.asarray(state["stages"][cluster.me])

    for stage, (start, n, w) in enumerate(all_processes([body, body])):
        assert (start, n) == (3, 2)
        np.testing.assert_array_equal(w, tables(2)[stage])


@pytest.mark.parametrize("processes", [1, 3])
def test_another_number_of_islands_takes_it_whole(tmp_path, processes):
    write_two(tmp_path)

    def body(cluster):
        like = {"stages": [np.zeros((5, 2), np.float32)] * 2, "n": np.int32(0)}
        with shardc.checkpoints(tmp_path) as saved:
            state, start = saved.last(or_else=like)
            saved.step(start, state)
        return state

    for state in all_processes([body] * processes):
        assert state["n"] == 2
        np.testing.assert_array_equal(state["stages"], tables(2))
    assert len(json.loads((tmp_path / "3" / "0.json").read_text())["leaves"]) == 3


def test_a_step_that_one_island_has_not_written_is_not_taken(tmp_path):
    write_two(tmp_path)
    (tmp_path / "2" / "1.json").unlink()
    (tmp_path / "2").rename(tmp_path / "2.partial")

    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            _, start = saved.last(or_else=stage_of(cluster, meshes()[cluster.me], tables(0), 0))
        return start, saved.note

    note = "The checkpoint of step 2 is not complete: the manifest of owner 1 of 2 is missing; that of step 1 is taken."
    assert all_processes([body, body]) == [(2, note)] * 2
    assert write_two(tmp_path, 4) == [2, 2]
    assert names(tmp_path) == ["2", "3"]


def test_an_error_in_one_process_is_an_error_in_all(tmp_path):
    write_two(tmp_path)

    def body(cluster):
        like = stage_of(cluster, meshes()[cluster.me], tables(0), 0)
        if cluster.me == 1:
            like["more"] = 1
        with shardc.checkpoints(tmp_path) as saved:
            saved.last(or_else=like)

    first, second = map(str, all_processes([body, body]))
    assert second.endswith("more: a Python int asked for, not in the checkpoint.")
    assert first == f"process 1: {second}"


@pytest.mark.parametrize("owner", [0, 1])
def test_all_take_the_one_before_what_one_finds_damaged(tmp_path, owner):
    write_two(tmp_path)
    file = _newest_file(tmp_path / "2") if owner == 0 else next((tmp_path / "2" / "1").rglob("d/*"))
    file.write_bytes(bytes(reversed(file.read_bytes())))

    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            state, start = saved.last(or_else=stage_of(cluster, meshes()[cluster.me], tables(0), 0))
        return start, saved.note, np.asarray(state["stages"][cluster.me])

    name = file.relative_to(tmp_path / "2").as_posix()
    note = f"The checkpoint of step 2 is not complete: {name} is not as it was written; that of step 1 is taken."
    for stage, (start, said, w) in enumerate(all_processes([body, body])):
        assert (start, said) == (2, note)
        np.testing.assert_array_equal(w, tables(1)[stage])


def test_all_take_the_one_before_what_one_cannot_read(tmp_path, monkeypatch):
    write_two(tmp_path)
    real = orbax.read

    def read(folder, name, index):
        broken = folder.parts[-2:] == ("2", "1")  # in process 1 alone
        return real(folder, "nothing" if broken else name, index)

    monkeypatch.setattr(orbax, "read", read)

    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            start = saved.last(or_else=stage_of(cluster, meshes()[cluster.me], tables(0), 0))[1]
        return start, saved.note

    (first, note), second = all_processes([body, body])
    assert first == 2 and second == (2, note)
    assert "the array nothing cannot be read" in note and note.endswith("; that of step 1 is taken.")


def test_a_directory_of_its_own_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(face, "appears", lambda path: path.exists())

    def body(cluster):
        with shardc.checkpoints(tmp_path / str(cluster.me)):
            pass

    # The names of agreements have the directory: here each process has one of the same name on its own disk.
    monkeypatch.setattr(face.Checkpoints, "_name", lambda self, what: what)
    first, second = all_processes([body, body])
    assert isinstance(first, CheckpointError) and isinstance(second, CheckpointError)
    assert str(second) == (
        f"shardc.checkpoints: {tmp_path / '1'} is not the directory that process 0 has. It has to be on a file system "
        "that all hosts share."
    )
    assert str(first) == f"process 1: {second}"
    assert names(tmp_path / "0") == []


def test_a_directory_that_process_0_cannot_write(tmp_path):
    (tmp_path / "file").touch()

    def body(cluster):
        with shardc.checkpoints(tmp_path / "file"):
            pass

    errors = all_processes([body, body])
    assert [type(e) for e in errors] == [CheckpointError] * 2 and "cannot be written" in str(errors[1])


def test_what_is_slow_to_appear_is_waited_for(tmp_path):
    threading.Timer(0.2, (tmp_path / "x").touch).start()
    assert face.appears(tmp_path / "x", 10) and not face.appears(tmp_path / "y", 0.1)


def test_a_run_goes_on_after_the_loss_of_a_peer(tmp_path):
    """Process 1 dies in step 7; it is started again, and both take the last common step."""
    run, seen = Run(2, 2), [[], []]
    died = threading.Event()

    def one_step(i, state, cluster, deadly):
        if deadly and i == 7:
            run.lose(1)
            died.set()
            raise SystemError("killed")  # the thread of a killed process
        cluster.gather("step", str(i))  # a pipeline: nobody is ahead
        seen[cluster.me].append(i)
        w = np.asarray(state["stages"][cluster.me]) + i
        return {**stage_of(cluster, meshes()[cluster.me], [w, w], i), "n": np.int32(state["n"] + i)}, float(w[0, 0])

    def body(cluster, deadly=False):
        zero = [np.zeros((5, 2), np.float32)] * 2
        with shardc.checkpoints(tmp_path, every=3, keep=2) as saved:
            init = stage_of(cluster, meshes()[cluster.me], zero, 0)
            state = saved.run(lambda i, s: one_step(i, s, cluster, deadly), init, steps=12)
        return int(state["n"]), float(np.asarray(state["stages"][cluster.me])[0, 0])

    def process_1(cluster):
        assert isinstance(as_process(cluster, lambda c: body(c, deadly=True)), SystemError)
        assert died.wait(30)
        run.start_again()
        return as_process(Fake(run, 1), body)

    assert all_processes([body, process_1], run=run) == [(sum(range(12)), float(sum(range(12))))] * 2
    assert seen[0] == [*range(7), *range(6, 12)] and seen[1] == seen[0]
    assert names(tmp_path) == ["11", "8"]


def test_a_second_loss_while_the_run_begins_again(tmp_path):
    run, count = Run(1, 1), []

    class Unlucky(Fake):
        def gather(self, name, text):
            if len(count) == 1 and name.endswith("look"):
                count.append(1)
                raise PeerLostError("again", 1)
            return super().gather(name, text)

        def rejoin(self):
            self.counts = {}

    def one_step(i, state):
        if i == 3 and not count:
            count.append(1)
            raise PeerLostError("once", 1)
        return {"n": state["n"] + i}

    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            return saved.run(one_step, {"n": 0}, steps=5)

    assert within(60, as_process, Unlucky(run, 0), body) == {"n": 10}
    assert count == [1, 1]


def test_a_loss_on_entry_is_mended_too(tmp_path):
    lost = []

    class Unlucky(Fake):
        def gather(self, name, text):
            if name.endswith("begin") and not lost:
                lost.append(1)
                raise PeerLostError("process 1 is lost: killed.", 1)
            return super().gather(name, text)

        def rejoin(self):
            self.counts = {}

    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            return saved.run(lambda i, state: {"n": state["n"] + i}, {"n": 0}, steps=5)

    assert within(60, as_process, Unlucky(Run(1, 1), 0), body) == {"n": 10} and lost
    assert names(tmp_path) == ["3", "4"]


def test_a_loss_at_the_end_of_a_run_is_mended_too(tmp_path, caplog):
    """One has done all steps when the other dies: it has to come back."""
    lost = []

    class Unlucky(Fake):
        def gather(self, name, text):
            if name.endswith("end") and not lost:
                lost.append(1)
                raise PeerLostError("process 1 is lost: killed.", 1)
            return super().gather(name, text)

        def rejoin(self):
            self.counts = {}

    def body(cluster):
        with shardc.checkpoints(tmp_path, every=3) as saved:
            state = saved.run(lambda i, state: {"n": state["n"] + i}, {"n": 0}, steps=5)
        return state, cluster.names

    state, names_ = within(60, as_process, Unlucky(Run(1, 1), 0), body)
    assert lost and state == {"n": 10}
    assert "process 1 is lost: killed.\nThe run goes on from the last common checkpoint." in caplog.text
    assert sum(name.endswith("end") for name in names_) == 1  # the end of the `with` asks for nothing more


def test_a_loss_that_nobody_mends_goes_out(tmp_path, caplog):
    class Final(Fake):
        def rejoin(self):
            raise PeerLostError("process 1 is lost: killed. It stays lost: no restarts are left.", 1)

    def one_step(i, state):
        raise PeerLostError("process 1 is lost: killed.", 1)

    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            saved.run(one_step, {"n": 0}, steps=5)

    error = within(60, as_process, Final(Run(1, 1), 0), body)
    assert isinstance(error, PeerLostError) and "stays lost" in str(error)
    error = within(60, as_process, None, body)
    assert isinstance(error, PeerLostError) and str(error) == "process 1 is lost: killed."
    assert "goes on" not in caplog.text


def test_the_status_line_is_told(tmp_path):
    def body(cluster):
        with shardc.checkpoints(tmp_path) as saved:
            saved.step(0, {"n": 1}, loss=2.5, tokens=100)
            first = {**cluster.loop.facts}
            saved.step(1, {"n": 1}, loss=1.5, tokens=100)
            return first, cluster.loop.facts

    first, second = as_process(Fake(Run(1, 1), 0), body)
    assert first.pop("saved", 0) == 0 and second.pop("saved") in (0, 1)  # each is written meanwhile
    assert first == {"step": 1, "loss": 2.5}
    assert second.pop("tokens") > 0 and second == {"step": 2, "loss": 1.5}


def test_a_step_costs_little_if_nothing_is_written(tmp_path):
    state = {str(i): jnp.zeros(2) for i in range(1000)}
    with shardc.checkpoints(tmp_path, every=10**6) as saved:
        saved.step(0, state)
        began = time.perf_counter()
        for i in range(1, 1001):
            saved.step(i, state)
        assert time.perf_counter() - began < 0.5  # 5 us each, a hundredth of this
    assert names(tmp_path) == []


def test_the_last_complete_checkpoint_is_reported(tmp_path):
    """The launcher takes new hosts then: nothing that counts is lost."""

    def body(cluster):
        with shardc.checkpoints(tmp_path, every=2) as saved:
            for i in range(4):
                saved.step(i, {"w": np.ones(3)})
        return cluster.loop.facts.get("saved")

    assert all_processes([body] * 3) == [3, None, None]
