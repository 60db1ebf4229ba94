"""Buffers, and a codec of numpy arrays."""

import json

import numpy as np


def allocate(count):
    raw = np.empty(count + 64, np.uint8)
    offset = -raw.__array_interface__["data"][0] % 64
    return memoryview(raw[offset : offset + count])


class Codec:
    """Arrays of numbers. Parts of several processes are put together as rows; `ready` is what `is_ready` answers."""

    def __init__(self, ready=True):
        self.ready = ready

    def is_ready(self, value):
        return self.ready

    def pack(self, channel, peer, value):
        x = np.asarray(value)
        return json.dumps([x.dtype.str, x.shape]).encode(), [memoryview(np.ascontiguousarray(x).reshape(-1)).cast("B")]

    def unpack(self, channel, parts):
        found = []
        for _, (about, (buffer,)) in sorted(parts.items()):
            dtype, shape = json.loads(about)
            found.append(np.frombuffer(buffer, np.dtype(dtype)).reshape(shape))
        return found[0] if len(found) == 1 else np.concatenate(found)
