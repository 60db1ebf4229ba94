"""Checkpoints on object stores: in the memory of this process, and on a server of S3."""

import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S, make_mesh
from shardc.checkpoint import objects, orbax
from shardc.checkpoint.objects import directory_at
from shardc.errors import ArgumentError, CheckpointError
from tests.checkpoint.peers import use_fakes

PLACES = {"w": {"model": S(1)}, "half": {}, "key": {}, "host": {}, "n": {}}


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    use_fakes(monkeypatch)


@pytest.fixture
def memory(request):
    return f"memory://tests/{request.node.name}"


def init():
    host = np.arange(3, dtype=np.int32)
    return {"w": jnp.zeros((4, 8)), "half": jnp.ones(6, "bfloat16"), "key": jax.random.key(3), "host": host, "n": 0}


def run(url, steps, every=2):
    """A loop on a mesh up to so many steps; where it began."""
    with shardc.checkpoints(url, every=every) as saved:
        state, start = saved.last(init, mesh=make_mesh(model=4), placements=PLACES)
        for i in range(start, steps):
            state = {**state, "w": state["w"] + i, "n": state["n"] + 1}
            saved.step(i, state)
    return start


def check(url, start):
    """Restore onto one device, and compare."""
    with shardc.checkpoints(url) as saved:
        state, at = saved.last(init)
    assert (at, int(state["n"])) == (start, start)
    np.testing.assert_array_equal(state["w"], np.full((4, 8), sum(range(start)), np.float32))
    assert state["half"].dtype == jnp.bfloat16 and (state["half"] == 1).all()
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(jax.random.key(3))).all()
    np.testing.assert_array_equal(state["host"], np.arange(3))
    return saved.note


def keys(url):
    return [key.decode() for key in directory_at(url)._store.list().result()]


def lengthen(url):
    """Write, go on, and see that two are left, and all of others is gone."""
    assert run(url, 6) == 0
    assert run(url, 9) == 6
    assert check(url, 8) == ""
    assert sorted(p.name for p in directory_at(url).iterdir()) == ["5", "7"]
    assert len({key.split("/")[1] for key in keys(url) if "/" in key}) == 2


@pytest.mark.parametrize("read", [orbax.READ, 8], ids=["whole", "in parts"])
def test_a_run_goes_on(memory, read, monkeypatch):
    monkeypatch.setattr(orbax, "READ", read)
    lengthen(memory)
    directory = directory_at(memory)

    # half-written: a link that nobody has renamed
    (directory / "9.partial").mkdir()
    ((directory / "9.partial") / "0.json").write_text("{")
    # an object is lost, and a bit flips: the checkpoint before is taken, and the damaged one is set aside
    store, lost = directory._store, next(key for key in keys(memory) if key.startswith("data/7") and "/c/" in key)
    store.write(lost, None).result()
    note = check(memory, 6)
    assert "step 9 is not complete" in note and "step 7 is not complete" in note and "is missing" in note
    flipped = next(key for key in keys(memory) if key.startswith("data/5") and key.endswith("/c/0"))
    right = store.read(flipped).result().value
    store.write(flipped, bytes([*right[:-1], right[-1] ^ 1])).result()
    with pytest.raises(CheckpointError, match=r"(?s)step 7: .*step 5: .*Digest mismatch"):
        check(memory, 6)
    store.write(flipped, right).result()
    assert run(memory, 8) == 6
    assert sorted(p.name for p in directory.iterdir()) == ["5", "7", "7.damaged"]


@pytest.mark.sampled(0)
def test_a_run_goes_on_on_s3(monkeypatch):
    monkeypatch.setattr(orbax, "READ", 8)  # ranges of objects
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        at = "http://{}:{}".format(*server.get_host_and_port())
        urllib.request.urlopen(urllib.request.Request(f"{at}/bucket", method="PUT")).close()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
        monkeypatch.setattr(objects, "SECONDS", 20.0)
        lengthen(f"s3://bucket/runs/a?endpoint={at}&aws_region=us-east-1")
        with (
            pytest.raises(CheckpointError, match=r"(?s)s3://none/a cannot be written: .*NoSuchBucket"),
            shardc.checkpoints(f"s3://none/a?endpoint={at}&aws_region=us-east-1"),
        ):
            pass
    finally:
        server.stop()


def test_the_run_that_came_before_is_kept_out(memory):
    state = {"w": jnp.zeros(3)}
    with (
        pytest.raises(CheckpointError, match=f"another run writes to {memory} now: process "),
        shardc.checkpoints(memory) as before,
    ):
        before.step(0, state)
        before._writer.wait()
        with shardc.checkpoints(memory) as after:
            after.step(1, state)
            after._writer.wait()
            before.step(1, state)
            before._writer.wait()
            before.step(2, state)
    assert sorted(p.name for p in directory_at(memory).iterdir())[:2] == ["0", "1"]


def test_a_folder_of_two_names_loses_one():
    """A writer that is killed while it commits leaves both."""
    directory = directory_at("memory://tests/two-names")
    folder = directory / "3.partial"
    folder.mkdir()
    folder.mkdir(exist_ok=True)
    (folder / "0.json").write_text("here")
    (directory / "3").write_text(folder.contents)
    folder.rmtree()
    assert ((directory / "3") / "0.json").read_text() == "here" and not folder.exists()
    with pytest.raises(FileNotFoundError):
        ((directory / "4") / "0.json").read_text()


@pytest.mark.parametrize(
    "url, says",
    [
        ("s33://bucket/a", "Did you mean .s3."),
        ("s3:/bucket/a", "'s3:/bucket/a' has lost a slash; give the text s3://..., no Path"),
        ("gs://B/a", "Invalid GCS bucket name.*write gs://BUCKET/PATH"),
        ("s3://bucket/a?region=x", 'extra members: "region"'),
    ],
)
def test_wrong_urls(url, says):
    with pytest.raises(ArgumentError, match=says):
        shardc.checkpoints(url)


def test_a_url_of_a_file_is_its_path(tmp_path):
    assert directory_at(f"file://{tmp_path}") == tmp_path


@pytest.mark.parametrize(
    "shape, shard, chunk",
    [
        ((8, 8), (8, 8), [8, 8]),
        ((1 << 20, 64), (1 << 18, 64), [1 << 18, 64]),
        ((1 << 20, 256), (1 << 18, 256), [1 << 16, 256]),
        ((100003, 1000), (100003, 1000), [16668, 1000]),  # a prime: the last chunk is smaller
        ((200006, 1000), (100003, 1000), [100003, 167]),  # a prime that two devices share: only columns are cut
        ((), (), []),
    ],
)
def test_chunks_lie_in_one_shard(shape, shard, chunk):
    assert orbax.chunk_shape(shape, shard, 4) == chunk
    part = orbax.part_shape(chunk, 4)
    assert 4 * np.prod(part) <= orbax.READ or part[0] % 2
    assert not any(n % p for n, p in zip(chunk, part, strict=True))
