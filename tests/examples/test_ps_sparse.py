"""Rows of tables that are pulled and pushed by id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from examples import dlrm, ps_sparse
from examples.ps_sparse import make, pull, push, sparse_batches, unique_ids

TABLES = (7, 30, 50)


def clicks(seed, rows=8):
    rng = np.random.default_rng(seed)
    while True:
        yield {
            "categories": rng.integers(0, TABLES, (rows, len(TABLES)), dtype=np.int32),
            "numbers": rng.integers(0, 100, (rows, 2)).astype(np.float32),
            "click": rng.integers(0, 2, rows).astype(np.float32),
        }


@pytest.mark.parametrize("capacity", [1, 3, 4, 5, 100])
def test_unique_ids(capacity):
    ids = np.array([[5, 5], [5, 2], [9, 2], [7, 1]])
    found, places, kept = unique_ids(ids, capacity, nobody=10)
    assert kept == {1: 1, 3: 3, 4: 3, 5: 4, 100: 4}[capacity]
    assert found.shape == (capacity,)
    assert found[places[:kept]].tolist() == ids[:kept].tolist()
    different = len(np.unique(ids[:kept]))
    assert (found[different:] == 10).all()
    assert kept == 4 or len(np.unique(ids[: kept + 1])) > capacity


def test_a_row_that_does_not_fit():
    with pytest.raises(ValueError, match="One row has 2 different ids, more than the capacity of 1"):
        unique_ids(np.array([[5, 2]]), 1, nobody=10)


def test_no_row_is_left_out():
    batches = sparse_batches(clicks(0), TABLES, capacity=9)
    offsets = np.cumsum([0, *TABLES[:-1]])
    found = []
    for _ in range(20):
        batch = next(batches)
        kept = batch["kept"] > 0
        assert len(batch["ids"]) == 9
        found += np.column_stack([batch["ids"][batch["categories"]][kept] - offsets, batch["numbers"][kept]]).tolist()
    plain, wanted = clicks(0), []
    while len(wanted) < len(found):
        batch = next(plain)
        wanted += np.column_stack([batch["categories"], batch["numbers"]]).tolist()
    assert found == wanted[: len(found)]
    assert len(found) < 20 * 8


@pytest.mark.parametrize("stale", [0, 2, None])
def test_the_table_is_that_of_one_device(stale):
    """Whole numbers: the order of changes does not matter, and there is no rounding."""
    devices = jax.devices()
    meshes = [Mesh(np.array(devices[2 * i : 2 * i + 2]), ("data",)) for i in range(3)]
    server = Mesh(np.array(devices[6:8]), ("data",))
    table = np.arange(sum(TABLES) * 4, dtype=np.float32).reshape(-1, 4)
    held = shardc.shared({"table": jnp.array(table)}, on=server)
    batches = [sparse_batches(clicks(i), TABLES, capacity=12) for i in range(3)]
    sent = []

    def next_batch(i, k):
        batch = next(batches[int(i)])
        if k < 15:
            sent.append((batch, int(i)))
        return {name: batch[name] for name in ("ids", "categories", "kept")}

    def grad(params, batch):
        rows = params["table"] - jax.lax.stop_gradient(params["table"])  # zeros
        return {"table": rows.at[batch["categories"]].add(batch["kept"][:, None, None])}

    read = shardc.host(next_batch, gives=jax.eval_shape(lambda: {
        n: x for n, x in next(sparse_batches(clicks(0), TABLES, 12)).items() if n in ("ids", "categories", "kept")
    }))  # fmt: skip
    grads = [shardc.function(grad, mesh=m) for m in meshes]

    def step(state, g, ids):
        return push(state, g, ids, rate=-1.0)

    @shardc.flow
    def train(state, k):
        for i, grad in enumerate(grads):
            batch = read(i, k)
            params = held.read(pull, batch["ids"], stale=stale)
            held.change(step, grad(params, batch), batch["ids"], stale=stale)
        return state, ()

    train.run((), range(15))
    train.close()
    assert len(sent) == 45 and held.changes == 45
    for batch, _ in sent:
        kept = batch["kept"] > 0
        np.add.at(table, batch["ids"][batch["categories"]][kept], 1.0)
    assert (np.asarray(held.value["table"]) == table).all()


def test_pulls_see_what_stale_says():
    server = Mesh(np.array(jax.devices()[:2]), ("data",))
    held = shardc.shared({"table": jnp.zeros((5, 1))}, on=server)
    ids = np.array([1, 3, 5], np.int32)

    @shardc.flow
    def train(state, k):
        rows = held.read(pull, ids)
        held.change(push, {"table": jnp.ones((3, 1))}, ids)
        return state, rows["table"]

    _, given = train.run((), range(6))
    train.close()
    np.testing.assert_allclose(
        [np.asarray(x)[:, 0] for x in given], [[-0.1 * k, -0.1 * k, 0] for k in range(6)], rtol=1e-6
    )
    np.testing.assert_allclose(held.value["table"][:, 0], [0, -0.6, 0, -0.6, 0], rtol=1e-6)


@pytest.mark.sampled(0)
def test_bytes_are_in_proportion_to_the_ids():
    cfg = dlrm.CONFIGS["test"]

    def bytes_of(capacity):
        _, train = make(cfg, 3, 0, 32, capacity)
        plan = train.plan((), 0)
        return plan.bytes, plan.explain()

    (small, _), (twice, text), (dense, _) = map(bytes_of, (32, 64, None))
    width, rows = cfg.width, sum(cfg.tables)
    each = 3 * 3 * 4 * width  # 3 workers, to 2 devices and back from one, in float32
    ids = 3 * 2 * 4  # 3 workers, to pull and to push
    assert twice - small == 32 * (each + ids)
    assert dense - twice == (rows - 64) * each - 64 * ids
    assert "pull" in text


@pytest.mark.sampled(0)
def test_main(compiled_fast, monkeypatch, capsys):
    monkeypatch.setattr(ps_sparse, "fake_cpu_devices", lambda _: None)
    arguments = "--config test --mode ssp --rounds 40 --batch 64 --capacity 150"
    assert ps_sparse.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "bytes move in a round" in out
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("round ")]
    assert losses[-1] < losses[0]
