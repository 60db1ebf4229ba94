"""Arrays whose value stays: which are taken as they are, and which are copied."""

from __future__ import annotations

import tempfile

import jax.numpy as jnp
import numpy as np
import pytest

from shardc.arrays.frozen import frozen, is_frozen, read_only


def locked(x):
    x.flags.writeable = False
    return x


def memmap():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(16))
        return np.memmap(file, np.float32, "r", shape=(4,))


class Tensor:
    """An array of another library, as torch's: NumPy takes its memory as it is."""

    def __init__(self):
        self.memory = bytearray(16)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.memory, dtype) if copy else np.frombuffer(self.memory, np.float32)


OWN = np.ones((2, 4), np.float32)
WRITABLE = {
    "its owner writes to it": lambda: np.ones(4, np.float32),
    "a view": lambda: OWN[1],
    "a view that is read-only, of one that is not": lambda: locked(OWN[1]),
    "the same, twice": lambda: locked(locked(OWN[1])[:2]),
    "broadcast": lambda: np.broadcast_to(OWN[0], (8, 4)),
    "memory of others": lambda: np.frombuffer(bytearray(16), np.float32),
    "memory of others that looks read-only": lambda: np.frombuffer(memoryview(bytearray(16)).toreadonly(), np.float32),
    "a file": memmap,
    "a view of a file": lambda: memmap()[1:],
    "a tensor": lambda: np.asarray(Tensor()),
    "imported by DLPack": lambda: np.from_dlpack(np.ones(4, np.float32)),
}
FROZEN = {
    "read-only": lambda: locked(np.ones(4, np.float32)),
    "a view of it": lambda: locked(np.ones(4, np.float32))[1:].reshape(3, 1),
    "of a jax.Array": lambda: np.asarray(jnp.ones(4)),
    "a part of one": lambda: np.asarray(jnp.ones(4))[::2],
    "of bytes": lambda: np.frombuffer(bytes(16), np.float32),
    "a copy": lambda: frozen(OWN),
}


@pytest.mark.parametrize("name", WRITABLE)
def test_what_somebody_may_write_to_is_copied(name):
    x = WRITABLE[name]()
    got = frozen(x)
    assert not is_frozen(x)
    assert is_frozen(got) and type(got) is np.ndarray and not np.shares_memory(x, got)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("name", FROZEN)
def test_what_nobody_writes_to_is_taken_as_it_is(name):
    x = FROZEN[name]()
    assert frozen(x) is x
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1


def test_another_dtype_numbers_and_lists():
    x = locked(np.arange(3.0))
    assert frozen(x, np.float32).dtype == np.float32
    assert [frozen(v, np.int8).tolist() for v in (3, [1, 2], np.int64(4))] == [3, [1, 2], 4]


def test_a_view_that_cannot_be_written_to():
    x = np.ones(4)
    view = read_only(x)
    assert view.base is x and x.flags.writeable
    with pytest.raises(ValueError, match="assignment destination is read-only"):
        view[:] = 0
    assert [read_only(v) for v in ("text", 3, None)] == ["text", 3, None]
