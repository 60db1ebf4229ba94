"""Real input that every machine with Python has: handwritten digits and the source of the standard library.

Batches depend on the seed alone, never on where they will live.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from sklearn.datasets import load_digits

Batch: TypeAlias = dict[str, np.ndarray]


def digits(test: int = 297) -> tuple[Batch, Batch]:
    """The 1797 digits of scikit-learn, shuffled, as (train, test): image (N, 8, 8, 1) in [0, 1] and label (N,)."""
    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.target))
    image = (raw.images[order, :, :, None] / 16).astype(np.float32)
    label = raw.target[order].astype(np.int32)
    return {"image": image[test:], "label": label[test:]}, {"image": image[:test], "label": label[:test]}


def text_bytes(limit: int = 4_000_000) -> np.ndarray:
    """The first `limit` bytes of the standard library's modules in order of name, as uint8."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return np.frombuffer(text[:limit], dtype=np.uint8)


def digit_batches(data: Batch, batch: int, seed: int = 0) -> Iterator[Batch]:
    """Batches without end: each epoch in an order of its own, its incomplete last batch left out."""
    rows = len(data["label"])
    if batch > rows:
        raise ValueError(f"A batch of {batch} wants at least as many rows, got {rows}.")
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(rows)
        for start in range(0, rows - batch + 1, batch):
            pick = order[start : start + batch]
            yield {name: column[pick] for name, column in data.items()}


def text_batches(text: np.ndarray, batch: int, seq: int, seed: int = 0) -> Iterator[Batch]:
    """Batches without end of random windows: inputs (batch, seq) and, one byte further on, targets, as int32."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - seq, size=(batch, 1))
        window = text[starts + np.arange(seq + 1)].astype(np.int32)
        yield {"inputs": window[:, :-1], "targets": window[:, 1:]}


def keyed_batches(batches: Iterator[Batch], seed: int = 0) -> Iterator[Batch]:
    """Each batch with a `key` for every row (batch, 2): the bits of a `jax.random` key."""
    rng = np.random.default_rng([seed, 1])
    for batch in batches:
        rows = len(next(iter(batch.values())))
        yield {**batch, "key": rng.integers(2**32, size=(rows, 2), dtype=np.uint32)}


def holed_batches(text: np.ndarray, batch: int, seq: int, spans: int, span: int, seed: int = 0) -> Iterator[Batch]:
    """Batches without end of random windows of `seq` bytes, in which `spans` holes of `span` bytes each have a name.

    Raffel et al. 2020, figure 2: `inputs` (batch, seq - spans * (span - 1)) has the hole's name, 256 and up, in its
    place; `targets` (batch, spans * (span + 1)) says after each name what stood there. All int32.
    """
    kept = seq - spans * span
    if kept < spans:
        raise ValueError(f"{spans} holes of {span} bytes want a window of {spans * (span + 1)} or more, got {seq}.")
    rng = np.random.default_rng(seed)
    names = np.arange(256, 256 + spans, dtype=np.int32)
    for window in text_batches(text, batch, seq, seed):
        row = window["inputs"].copy()
        # the holes' places among the kept bytes: none twice, so that no two holes touch
        places = np.sort(rng.permuted(np.tile(np.arange(kept), (batch, 1)), axis=1)[:, :spans], axis=1)
        starts = places + span * np.arange(spans)
        inside = starts[:, :, None] + np.arange(span)
        holes = np.take_along_axis(row, inside.reshape(batch, -1), axis=1).reshape(batch, spans, span)
        targets = np.concatenate([np.broadcast_to(names[:, None], (batch, spans, 1)), holes], axis=2)
        np.put_along_axis(row, starts, np.broadcast_to(names, (batch, spans)), axis=1)
        keep = np.ones((batch, seq), bool)
        np.put_along_axis(keep, inside[:, :, 1:].reshape(batch, -1), False, axis=1)
        yield {"inputs": row[keep].reshape(batch, -1), "targets": targets.reshape(batch, -1)}


def hidden_batches(text: np.ndarray, batch: int, seq: int, seed: int = 0) -> Iterator[Batch]:
    """Batches without end of random windows of `seq` bytes in which 15% are to be guessed.

    Devlin et al. 2018, section 3.1: of these 80% are replaced by the mark 256, 10% by some byte, 10% left as they are.
    `inputs` (batch, seq), and of each such place `positions` and `targets`, (batch, M). All int32.
    """
    rng = np.random.default_rng([seed, 2])
    hidden = round(0.15 * seq)
    for window in text_batches(text, batch, seq, seed):
        row = window["inputs"].copy()
        places = np.sort(rng.permuted(np.tile(np.arange(seq), (batch, 1)), axis=1)[:, :hidden], axis=1)
        targets = np.take_along_axis(row, places, axis=1)
        other = rng.integers(0, 256, size=places.shape)
        chance = rng.random(places.shape)
        shown = np.where(chance < 0.8, 256, np.where(chance < 0.9, other, targets))
        np.put_along_axis(row, places, shown.astype(np.int32), axis=1)
        yield {"inputs": row, "positions": places.astype(np.int32), "targets": targets}


def click_batches(text: np.ndarray, batch: int, tables: tuple[int, ...], seed: int = 0) -> Iterator[Batch]:
    """Batches without end of places in the text, told as rows of a table of clicks: no real one is on every machine.

    `categories` (batch, J): the last 1, 2, ..., J bytes before the place, hashed to the rows of `tables`. `numbers`
    (batch, 4): the logarithms of how far back are a new line, a byte that is in no word, a blank and a bracket that
    opens. `click` (batch,): 1 where the next byte is in no word. Hashes and numbers are int32 and float32.
    """
    words = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
    outside = ~np.isin(text, np.frombuffer(words, np.uint8))
    here = np.arange(len(text))
    events = (text == ord("\n"), outside, text == ord(" "), text == ord("("))
    distances = [here - np.maximum.accumulate(np.where(event, here, 0)) for event in events]
    numbers = np.log1p(np.stack(distances, axis=1)).astype(np.float32)
    backwards = np.arange(len(tables))
    rng = np.random.default_rng([seed, 3])
    while True:
        place = rng.integers(len(tables), len(text), size=batch)
        last = text[place[:, None] - 1 - backwards].astype(np.uint64)
        spelled = np.cumsum(last * np.uint64(257) ** backwards.astype(np.uint64), axis=1)
        hashed = spelled * np.uint64(2654435761) % np.uint64(2**32) % np.asarray(tables, np.uint64)
        click = outside[place].astype(np.float32)
        yield {"numbers": numbers[place - 1], "categories": hashed.astype(np.int32), "click": click}


def dice_batches(carts: int, times: int, seed: int = 0) -> Iterator[Batch]:
    """Batches without end of chances in [0, 1) as float32: `chance` (carts, times) and `start` (carts, times, 4)."""
    rng = np.random.default_rng([seed, 4])
    while True:
        yield {name: rng.random((carts, times, *more), np.float32) for name, more in (("chance", ()), ("start", (4,)))}
