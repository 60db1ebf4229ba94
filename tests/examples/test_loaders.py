"""Loaders of other libraries: the same batches from any step on, and in any number of processes."""

from itertools import islice, pairwise

import numpy as np
import pytest

import shardc
from examples import data, loaders
from shardc import ArgumentError

WHOLE = slice(0, loaders.ROWS)


def batches(library, mine, first, count):
    return list(islice(loaders.LIBRARIES[library](data.digits()[0], mine, first), count))


@pytest.mark.parametrize("library", list(loaders.LIBRARIES))
def test_batches_depend_on_their_number_alone(library):
    pytest.importorskip(library)
    train, _ = data.digits()
    epoch = len(train["label"]) // loaders.ROWS
    whole = batches(library, WHOLE, 0, epoch + 3)  # the order of the second epoch is another one
    assert [{name: (x.shape, x.dtype) for name, x in b.items()} for b in whole] == [
        {name: ((loaders.ROWS, *x.shape[1:]), x.dtype) for name, x in train.items()}
    ] * len(whole)
    assert not np.array_equal(whole[0]["image"], whole[epoch]["image"])
    rows = {x.tobytes() for b in whole[:epoch] for x in b["image"]}
    assert len(rows) == epoch * loaders.ROWS  # no row twice in an epoch
    for cuts in ((0, 32, 64), (0, 16, 32, 48, 64)):
        parts = [batches(library, slice(*pair), epoch - 1, 3) for pair in pairwise(cuts)]
        for i, batch in enumerate(whole[epoch - 1 : epoch + 2]):
            for name, x in batch.items():
                np.testing.assert_array_equal(np.concatenate([part[i][name] for part in parts]), x)


def test_batches_are_put_ahead_in_order():
    put = []
    ready = loaders.prefetched(range(5), lambda x: put.append(x) or x, ahead=2)
    assert next(ready) == 0 and put == [0, 1, 2]
    assert list(ready) == [1, 2, 3, 4]


@pytest.mark.sampled(0)  # its page runs the same in each test run
def test_main_goes_on_where_it_was(compiled_fast, tmp_path, monkeypatch, capsys):
    pytest.importorskip("grain")
    monkeypatch.setattr(loaders, "fake_cpu_devices", lambda _: None)
    assert loaders.main(["--steps", "20"]) == 0
    whole = capsys.readouterr().out
    for steps in ("10", "20"):
        assert loaders.main(["--steps", steps, "--checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == whole


def test_tensors_are_told_how():
    torch = pytest.importorskip("torch")
    mesh, tensor = shardc.make_mesh(data=8), torch.ones(8, 2)
    double = shardc.function(lambda x: x * 2, mesh=mesh)
    with pytest.raises(ArgumentError, match=r"a Tensor is an array of another library; pass np.asarray\(x\)"):
        double(tensor)
    with pytest.raises(ArgumentError, match=r"b: a Tensor is an array of another library; give np.asarray of it"):
        shardc.put({"a": 1.0, "b": tensor}, mesh, {})
    assert double(np.asarray(tensor)).sum() == 32
