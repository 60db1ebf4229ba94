"""DLRM's embedding tables on a parameter server: workers pull and push the rows of the ids of their batch alone.

    python -m examples.ps_sparse --mode ssp --capacity 512

All tables lie one under the other, on the server. A message has `--capacity` rows, whatever the batch has. Where a
batch has more different ids, its first rows go now, the others with the next batch: no row and no id is ever left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardc
from examples import dlrm
from examples.data import Batch, click_batches, text_bytes
from examples.train import fake_cpu_devices, positive
from shardc import S

DEVICES = 2  # of each worker; the server has one


def unique_ids(ids_NJ: np.ndarray, capacity: int, nobody: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The different ids of as many first rows as have no more than `capacity` (C,), filled up with `nobody`; where they
    are there (N, J), 0 for the other rows; and the number of these first rows."""
    firsts = np.unique(ids_NJ, return_index=True)[1]
    is_new = np.isin(np.arange(ids_NJ.size), firsts).reshape(ids_NJ.shape)
    counts = is_new.sum(axis=1).cumsum()
    kept = int((counts <= capacity).sum())
    if not kept:
        raise ValueError(f"One row has {counts[0]} different ids, more than the capacity of {capacity}.")
    unique, places = np.unique(ids_NJ[:kept], return_inverse=True)
    ids, places_NJ = np.full(capacity, nobody, np.int32), np.zeros(ids_NJ.shape, np.int32)
    ids[: len(unique)], places_NJ[:kept] = unique, places.reshape(kept, -1)
    return ids, places_NJ, kept


def sparse_batches(batches: Iterator[Batch], tables: Sequence[int], capacity: int) -> Iterator[Batch]:
    """Batches with `ids` (C,), `categories` as places among these, and `kept` (N,): 1 where a row counts."""
    offsets = np.cumsum([0, *tables[:-1]], dtype=np.int32)
    rest = next(batches)
    rows = len(rest["click"])
    while True:
        while len(rest["click"]) < rows:
            more = next(batches)
            rest = {name: np.concatenate([x, more[name]]) for name, x in rest.items()}
        batch = {name: x[:rows] for name, x in rest.items()}
        ids, places_NJ, kept = unique_ids(batch["categories"] + offsets, capacity, sum(tables))
        yield {**batch, "ids": ids, "categories": places_NJ, "kept": (np.arange(rows) < kept).astype(np.float32)}
        rest = {name: x[kept:] for name, x in rest.items()}


def pull(state, ids_C):
    """The rows of some ids, and all of what is not a table."""
    return {**state, "table": state["table"].at[ids_C].get(mode="fill", fill_value=0)}


def push(state, grads, ids_C, rate=0.1):
    """A step of gradient descent: of the table, in the rows of some ids."""
    table = state["table"].at[ids_C].add(-rate * grads["table"], mode="drop")
    return {**jax.tree.map(lambda p, g: p - rate * g, state, {**grads, "table": state["table"]}), "table": table}


def push_all(state, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, state, grads)


def loss(params, batch):
    """Mean cross entropy of the rows that count. Categories are rows of the one table that is there."""
    tables = [params["table"]] * batch["categories"].shape[1]
    logits_N = dlrm.forward({**params, "tables": tables}, batch["numbers"], batch["categories"])
    losses_N = optax.sigmoid_binary_cross_entropy(logits_N, batch["click"])
    return (losses_N * batch["kept"]).sum() / batch["kept"].sum()


def make(cfg: dlrm.Config, workers: int, stale: int | None, rows: int, capacity: int | None):
    """The server's state, and the flow. Without a capacity the whole table is pulled and pushed."""
    devices = jax.devices()
    meshes = [jax.sharding.Mesh(np.array(devices[DEVICES * i :][:DEVICES]), ("data",)) for i in range(workers)]
    server = jax.sharding.Mesh(np.array(devices[DEVICES * workers :][:1]), ("data",))
    params = dlrm.init(jax.random.key(0), cfg)
    held = shardc.shared({"table": jnp.concatenate(params.pop("tables")), **params}, on=server)
    text = text_bytes()
    clicks = [click_batches(text, rows, cfg.tables, seed=i) for i in range(workers)]
    batches = [sparse_batches(c, cfg.tables, capacity or rows * len(cfg.tables)) for c in clicks]

    def next_batch(worker, round):
        batch = dict(next(batches[int(worker)]))
        if capacity is None:
            batch["categories"] = batch["ids"][batch["categories"]]
        return batch

    def grad(params, batch):
        return jax.value_and_grad(loss)(params, batch)

    read = shardc.host(next_batch, gives=jax.eval_shape(lambda: next(batches[0])))
    by_row = {name: {"data": S(0)} for name in ("numbers", "categories", "click", "kept")}
    grads = [shardc.function(grad, mesh=m, in_placements={"batch": by_row}) for m in meshes]

    @shardc.flow
    def train(state, k):
        losses = []
        for i, grad in enumerate(grads):
            batch = read(i, k)
            ids = batch.pop("ids")
            params = held.read(stale=stale) if capacity is None else held.read(pull, ids, stale=stale)
            found, g = grad(params, batch)
            held.change(*((push_all, g) if capacity is None else (push, g, ids)), stale=stale)
            losses.append(found)
        return state, {"loss": losses}

    return held, train


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ps_sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="tiny", choices=sorted(dlrm.CONFIGS))
    parser.add_argument("--mode", default="bsp", choices=("bsp", "ssp", "asp"))
    parser.add_argument("--stale", type=positive, default=2, help="--mode ssp: rounds")
    parser.add_argument("--batch", type=positive, default=256, help="rows of a worker's batch")
    parser.add_argument("--capacity", type=positive, default=512, help="rows of the table in a message")
    parser.add_argument("--workers", type=positive, default=3)
    parser.add_argument("--rounds", type=positive, default=100)
    options = parser.parse_args(argv)
    if jax.config.jax_platforms in (None, "", "cpu"):
        fake_cpu_devices(DEVICES * options.workers + 1)
    cfg, stale = dlrm.CONFIGS[options.config], {"bsp": 0, "ssp": options.stale, "asp": None}[options.mode]
    _, dense = make(cfg, options.workers, stale, options.batch, None)
    _, train = make(cfg, options.workers, stale, options.batch, options.capacity)
    plan = train.plan((), 0)
    print(plan.explain())
    print(f"{plan.bytes:,} bytes move in a round, and {dense.plan((), 0).bytes:,} with the whole table")
    _, given = train.run((), range(options.rounds))
    train.close()
    for k in range(0, options.rounds, max(1, options.rounds // 6)):
        print(f"round {k + 1:4}  losses {'  '.join(f'{float(x):.4f}' for x in given[k]['loss'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
