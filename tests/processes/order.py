"""Programs in flight on the same devices of two processes: `python -m shardc run ... order.py SHAPE ...`.

Two functions with all-reduces of different sizes are called, and no program waits for one of the other function. XLA
runs small programs while they are launched; these are larger. Process 0 prints for each shape the largest error.
"""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardc
from shardc import S
from shardc.machine.devices import me, processes_of

ROUNDS, ROWS, REDUCES = 20, 64, 12


def step(x):
    for _ in range(REDUCES):
        x = shardc.constrain(x, {"data": S(0)})
        x = x + jnp.mean(jnp.sin(x), axis=0)
    return x


def array(columns):
    return np.linspace(0, 1, ROWS * columns, dtype=np.float32).reshape(ROWS, columns)


def wanted(x):
    """The value of the step, without JAX."""
    for _ in range(REDUCES):
        x = x + np.mean(np.sin(x), axis=0)
    return x


def error(found, x):
    """The largest error of results that are to have the value `step(x)`."""
    want = wanted(x)
    pieces = [s for y in found for s in y.addressable_shards]
    return max(float(np.max(np.abs(s.data - want[s.index]))) for s in pieces)


LONG, SHORT = array(1_000), array(100)


def on(mesh, data, axes=("data",), fn=step):
    """A function that makes the step on a mesh, and its argument."""
    at = {axis: S(0) for axis in axes}
    return shardc.function(fn, mesh=mesh, in_placements={"x": at}), shardc.put(data, mesh, at)


def every():
    return shardc.make_mesh(data=len(shardc.devices()))


def clients(*calls):
    """The results of calls in a thread each, which waits for its own ones: both have a program in flight."""
    found = [[] for _ in calls]

    def work(call, into):
        for _ in range(ROUNDS):
            into.append(jax.block_until_ready(call()))

    threads = [threading.Thread(target=work, args=each) for each in zip(calls, found, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def gang():
    """Two functions of a gang, a thread each."""
    (one, x), (other, y) = on(every(), LONG), on(every(), SHORT)
    share = shardc.Gang(in_flight=2).share
    one, other = share(one, name="one", seconds=1), share(other, name="other", seconds=1)
    a, b = clients(lambda: one(x), lambda: other(y))
    return max(error(a, LONG), error(b, SHORT))


def callables():
    """A function of a gang, and a callable of JAX."""
    (one, x), (_, y) = on(every(), LONG), on(every(), SHORT)
    share = shardc.Gang(in_flight=2).share
    one, other = share(one, name="one", seconds=1), share(jax.jit(step), name="other", seconds=1)
    a, b = clients(lambda: one(x), lambda: other(y))
    return max(error(a, LONG), error(b, SHORT))


def refused():
    """A callable of a gang whose arguments do not say that it runs in several processes."""
    at = NamedSharding(every(), PartitionSpec("data"))
    call = shardc.Gang().share(jax.jit(step, out_shardings=at), name="call")
    with pytest.raises(shardc.ClusterError, match="Gang: call has run in processes 0, 1, which its arguments do not"):
        call(SHORT)
    return 0.0


def threads():
    """A loop that begins in one thread and goes on in another one."""
    (one, x), (other, y) = on(every(), LONG), on(every(), SHORT)
    a, b = [], []
    for _ in range(ROUNDS):
        a.append(one(x))
        thread = threading.Thread(target=lambda: b.append(other(y)))
        thread.start()
        thread.join()
    return max(error(a, LONG), error(b, SHORT))


def meshes():
    """A function on one device of each process, and one on all of them, in one loop."""
    rows = np.array(shardc.devices()).reshape(2, -1)
    one, x = on(Mesh(rows, ("data", "model")), LONG)
    other, y = on(Mesh(rows[:, 0], ("data",)), SHORT)
    a, b = [], []
    for _ in range(ROUNDS):
        a.append(one(x))
        b.append(other(y))
    return max(error(a, LONG), error(b, SHORT))


def staged(x):
    return step(shardc.stage_boundary(step(x)))


def pipeline():
    """A pipeline whose stages run in two processes each, and a function on the devices of one stage."""
    meshes = [Mesh(row, ("data",)) for row in np.array(shardc.devices()).reshape(2, -1)]
    other, y = on(next(m for m in meshes if me() in processes_of(m.devices.flat)), SHORT)

    def loss(x):
        return jnp.sum(staged(x))

    def train(x):
        return shardc.accumulate(loss, microbatches=2, reduce="sum")(x)

    run = shardc.function(train, pipeline=shardc.Pipeline(meshes=meshes), in_placements={"x": {"data": S(0)}})
    a, b = [], []
    for _ in range(ROUNDS):
        a.append(run(LONG))
        b.append(other(y))
    half = [wanted(wanted(x)) for x in (LONG[: ROWS // 2], LONG[ROWS // 2 :])]
    want = sum(map(np.sum, half))
    return max(error(b, SHORT), *(abs(float(x) / want - 1) for x in a))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name} {globals()[name]():.1e}", flush=True)
