"""Input is real, and the same on every run."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from examples import data


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_text_is_deterministic_source_code():
    text = data.text_bytes(300_000)
    assert (text.dtype, text.shape) == (np.uint8, (300_000,))
    np.testing.assert_array_equal(text, data.text_bytes(300_000))
    np.testing.assert_array_equal(text[:1000], data.text_bytes(1000))
    assert b"\ndef " in text.tobytes()


def test_digits_are_split_in_train_and_test():
    train, test = data.digits()
    assert (train["image"].shape, train["label"].shape, test["image"].shape) == (
        (1500, 8, 8, 1),
        (1500,),
        (297, 8, 8, 1),
    )
    assert (train["image"].dtype, train["label"].dtype) == (np.float32, np.int32)
    assert (train["image"].min(), train["image"].max()) == (0.0, 1.0)
    assert set(test["label"]) == set(range(10))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: data.text_batches(data.text_bytes(10_000), 4, 16, seed),
        lambda seed: data.digit_batches(data.digits()[0], 400, seed),
        lambda seed: data.keyed_batches(data.digit_batches(data.digits()[0], 400), seed),
        lambda seed: data.holed_batches(data.text_bytes(10_000), 4, 32, 3, 2, seed),
        lambda seed: data.hidden_batches(data.text_bytes(10_000), 4, 32, seed),
        lambda seed: data.click_batches(data.text_bytes(10_000), 40, (256, 100), seed),
        lambda seed: data.dice_batches(4, 8, seed),
    ],
    ids=["text", "digits", "keyed", "holed", "hidden", "clicks", "dice"],
)
def test_batches_depend_on_the_seed_alone(make):
    first, again, other = (list(islice(make(seed), 5)) for seed in (0, 0, 1))
    assert all(map(equal, first, again))
    assert not any(map(equal, first, other))
    assert not any(map(equal, first, first[1:]))


def test_text_targets_are_the_next_inputs():
    text = np.arange(256, dtype=np.uint8)
    batch = next(data.text_batches(text, batch=3, seq=8))
    assert batch["inputs"].shape == batch["targets"].shape == (3, 8)
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)


def test_every_byte_of_the_text_can_be_drawn():
    batches = data.text_batches(np.arange(10, dtype=np.uint8), batch=64, seq=8)
    assert set(np.unique(next(batches)["targets"])) == set(range(1, 10))


def test_an_epoch_shows_each_row_once():
    rows = {"image": np.arange(10), "label": np.arange(10)}
    seen = np.concatenate([batch["label"] for batch in islice(data.digit_batches(rows, 5), 2)])
    assert sorted(seen) == list(range(10))


def test_a_batch_larger_than_the_data_is_an_error():
    with pytest.raises(ValueError, match="A batch of 11 wants at least as many rows, got 10"):
        next(data.digit_batches({"label": np.arange(10)}, 11))


def test_what_stood_in_the_holes_fits_back_into_them():
    text = np.tile(np.arange(200, dtype=np.uint8), 5)
    batch = next(data.holed_batches(text, batch=40, seq=30, spans=3, span=4))
    assert (batch["inputs"].shape, batch["targets"].shape) == ((40, 21), (40, 15))
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        assert inputs[inputs >= 256].tolist() == targets[::5].tolist() == [256, 257, 258]
        row = []
        for token in inputs.tolist():
            row += [token] if token < 256 else targets[5 * (token - 256) + 1 :][:4].tolist()
        assert row == [(row[0] + i) % 200 for i in range(30)]


def test_every_byte_may_fall_into_a_hole():
    text = np.arange(11, dtype=np.uint8)  # one window of 10 bytes
    holes = next(data.holed_batches(text, batch=200, seq=10, spans=2, span=3))["targets"]
    assert set(np.unique(holes)) == {*range(9), 256, 257}  # after the last hole comes a byte that is kept


def test_too_many_holes_are_an_error():
    with pytest.raises(ValueError, match="3 holes of 4 bytes want a window of 15 or more, got 14"):
        next(data.holed_batches(np.arange(100, dtype=np.uint8), batch=1, seq=14, spans=3, span=4))


def test_of_what_is_hidden_most_is_marked_and_the_rest_is_as_it_was():
    text = np.tile(np.arange(200, dtype=np.uint8), 5)
    batch = next(data.hidden_batches(text, batch=400, seq=40))
    assert {name: x.shape for name, x in batch.items()} == {
        "inputs": (400, 40), "positions": (400, 6), "targets": (400, 6)
    }  # fmt: skip
    shown = np.take_along_axis(batch["inputs"], batch["positions"], axis=1)
    assert (shown == 256).mean() == pytest.approx(0.8, abs=0.03)
    assert (shown == batch["targets"]).mean() == pytest.approx(0.1, abs=0.03)
    whole = batch["inputs"].copy()
    np.put_along_axis(whole, batch["positions"], batch["targets"], axis=1)
    np.testing.assert_array_equal(np.diff(whole) % 200, 1)
    assert all((np.diff(batch["positions"]) > 0).flat)


def test_clicks_are_the_ends_of_words_and_categories_spell_what_is_before():
    text = np.frombuffer(b"ab c(de\nf g" * 20, np.uint8)
    batch = next(data.click_batches(text, batch=300, tables=(256, 10_007)))
    first, second = batch["categories"].T
    assert first.max() < 256
    assert len(set(first)) == len(set(text))
    pairs = {(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)}
    assert len({b for _, b in pairs}) == len(pairs)  # of two bytes the last is known
    assert set(batch["click"]) == {0.0, 1.0}
    assert batch["click"].mean() == pytest.approx(4 / 11, abs=0.1)
    far = np.exp(batch["numbers"])
    np.testing.assert_allclose(far, far.round(), rtol=1e-5)
