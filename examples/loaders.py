"""Digits by the loader of another library: its position is in the checkpoint, and goes on with any number of processes.

    python -m examples.loaders --library grain                       # torch, datasets, tensorflow
    python -m shardc run --processes 2 --devices 4 -m examples.loaders --checkpoints DIR
    python -m shardc run --processes 4 --devices 2 -m examples.loaders --checkpoints DIR --steps 80    # goes on

Which rows are in batch i depends on the seed alone, never on the number of processes; each process reads the rows of it
that its devices need. So the number of the next batch is all that there is to save.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

import shardc
from examples import data, mlp
from examples.data import Batch
from examples.train import fake_cpu_devices, positive
from shardc import S
from shardc.runtime.cluster import current

ROWS = 64  # of a batch


class BatchOrder:
    """The numbers of the rows that this process needs, `mine` of each batch, from batch `first` on; each epoch has an
    order of its own."""

    def __init__(self, size: int, mine: slice, first: int, seed: int = 0) -> None:
        self.size, self.mine, self.first, self.seed = size, mine, first, seed

    def __iter__(self) -> Iterator[list[int]]:
        for i in itertools.count(self.first):
            epoch, at = divmod(i, self.size // ROWS)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            yield order[at * ROWS : (at + 1) * ROWS][self.mine].tolist()


def grain_batches(columns: Batch, mine: slice, first: int) -> Iterator[Batch]:
    """Threads read ahead; `iterator.get_state()` is {"next_index": the number of the next batch}."""
    import grain  # noqa: PLC0415 one of several libraries

    rows = grain.MapDataset.range(len(columns["label"])).seed(0).shuffle().repeat().batch(ROWS, drop_remainder=True)
    mapped = rows.map(lambda numbers: {name: x[numbers[mine]] for name, x in columns.items()})
    iterator = iter(mapped.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))
    iterator.set_state({"next_index": first})
    return iterator


def torch_batches(columns: Batch, mine: slice, first: int) -> Iterator[Batch]:
    """A DataLoader; with `num_workers=` its processes read ahead."""
    from torch.utils.data import DataLoader, Dataset  # noqa: PLC0415

    class Rows(Dataset):
        def __len__(self) -> int:
            return len(columns["label"])

        def __getitem__(self, i: int) -> Batch:
            return {name: x[i] for name, x in columns.items()}

    for batch in DataLoader(Rows(), batch_sampler=BatchOrder(len(Rows()), mine, first)):
        yield {name: np.asarray(x) for name, x in batch.items()}  # the tensor's own memory


def datasets_batches(columns: Batch, mine: slice, first: int) -> Iterator[Batch]:
    """A Dataset of Hugging Face that is on disk: it is read at any rows."""
    from datasets import Dataset  # noqa: PLC0415

    dataset = Dataset.from_dict({name: list(x) for name, x in columns.items()}).with_format("numpy")
    for numbers in BatchOrder(len(dataset), mine, first):
        batch = dataset[numbers]
        yield {name: batch[name].astype(x.dtype) for name, x in columns.items()}


def tensorflow_batches(columns: Batch, mine: slice, first: int) -> Iterator[Batch]:
    """A tf.data.Dataset has no number to begin with: what was read before is skipped."""
    import tensorflow as tf  # noqa: PLC0415

    dataset = tf.data.Dataset.range(len(columns["label"])).shuffle(len(columns["label"]), seed=0).repeat()
    rows = dataset.batch(ROWS, drop_remainder=True).skip(first)  # the numbers of rows, and not yet the rows
    taken = rows.map(lambda numbers: {name: tf.gather(x, numbers[mine]) for name, x in columns.items()})
    return taken.prefetch(4).as_numpy_iterator()


LIBRARIES: dict[str, Callable[[Batch, slice, int], Iterator[Batch]]] = {
    "grain": grain_batches,
    "torch": torch_batches,
    "datasets": datasets_batches,
    "tensorflow": tensorflow_batches,
}


def prefetched(batches: Iterable[Any], put: Callable[[Any], Any], ahead: int = 2) -> Iterator[Any]:
    """Batches on the mesh, of which some are on their way before they are asked for."""
    waiting: deque[Any] = deque()
    for batch in batches:
        waiting.append(put(batch))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.loaders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", default="grain", choices=sorted(LIBRARIES))
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--checkpoints", metavar="DIR")
    options = parser.parse_args(argv)
    if current() is None:  # shardc run has said how many devices there are
        fake_cpu_devices(8)
    mesh, places = shardc.make_mesh(data=len(jax.devices())), {"data": S(0)}
    init, step_fn = mlp.make_step(mlp.CONFIGS["tiny"])

    def step(state, batch):
        *state, loss = step_fn(*state, batch)
        return tuple(state), loss

    train_step = shardc.function(step, mesh=mesh, in_placements={"batch": places}, donate_argnames="state")
    saving = shardc.checkpoints(options.checkpoints, every=10) if options.checkpoints else nullcontext()
    with saving as saved:
        start = lambda: init(jax.random.key(0))  # noqa: E731
        state, first = saved.last(or_else=start) if saved else (start(), 0)
        (mine,) = shardc.rows_here((ROWS,), mesh, places)
        batches = LIBRARIES[options.library](data.digits()[0], mine, first)
        ready = prefetched(batches, lambda batch: shardc.put(batch, mesh, places, here=True))
        for i, batch in enumerate(itertools.islice(ready, options.steps - first), first):
            state, loss = train_step(state, batch)
            if saved:
                saved.step(i, state)
            if i % 10 == 9:
                print(f"step {i + 1}: loss {float(loss):.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
