"""Values that JAX carries from process to process, from device to device.

    python -m shardc run --processes 2 --islands 1 --devices 4 --carrier put -m tests.processes.puts NAME ...

runs cases by name. Process 0 prints `ok NAME` for each. Most of them send from process 0 to the last process; of three
processes the second one only counts, or sends too.
"""

import itertools
import sys
import threading
import time
from functools import partial
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardc
from shardc import P, S
from shardc.arrays.place import Place
from shardc.execute.ways import Way, Ways
from shardc.machine.mesh import border
from shardc.machine.puts import open_puts
from shardc.runtime.cluster import current
from shardc.runtime.transport.connection import Frame, FrameKind
from shardc.sbp.placement import Placement

RUN = current()
ME, LAST = RUN.me, RUN.processes - 1
OF = [[d for d in shardc.devices() if d.process_index == p] for p in range(RUN.processes)]
MESHES = {
    "first": Mesh(np.array(OF[0]), ("x",)),
    "last": Mesh(np.array(OF[LAST]), ("x",)),
    "two of the last": Mesh(np.array(OF[LAST][:2]), ("x",)),
    "square": Mesh(np.array(OF[LAST]).reshape(2, 2), ("x", "y")),
    "both": Mesh(np.array(OF[0][:2] + OF[LAST][:2]), ("x",)),
    "both, other devices": Mesh(np.array(OF[LAST][2:] + OF[0][2:]), ("x",)),
}
AXES = {"x": S(0)}, {"x": S(1)}, {"x": P()}, {}
VALUES = {
    "f32": np.arange(56, dtype=np.float32).reshape(8, 7),
    "uneven": np.arange(35, dtype=np.int32).reshape(7, 5),
    "one row": np.arange(4, dtype=np.float32).reshape(1, 4),
    "no row": np.zeros((0, 4), np.float32),
    "scalar": np.float32(3),
    "bf16": np.arange(32).reshape(4, 8).astype(jnp.bfloat16),
    "f8": np.arange(32).reshape(4, 8).astype(jnp.float8_e4m3fn),
    "int4": (np.arange(32).reshape(8, 4) % 7 - 3).astype(jnp.int4),
    "bool": np.arange(32).reshape(8, 4) % 3 == 0,
    "large": np.arange(1 << 19, dtype=np.float32).reshape(1 << 9, 1 << 10),
}
LARGE = np.arange(1 << 16, dtype=np.float32)
CASES = {}
numbers = itertools.count(100)


def case(fn):
    CASES[fn.__name__] = fn
    return fn


class Inbox:
    """A network that keeps what comes."""

    def __init__(self):
        self.puts, self.number, self.frames = open_puts(RUN), next(numbers), SimpleQueue()
        for p in range(RUN.processes):
            if p != ME:
                RUN.link(p).add(self.number, self)
        RUN.gather("an inbox is open", "")

    def receive(self, peer, frame):
        self.frames.put((peer, frame))

    def lose(self, error):
        """Handle the loss of a process: who waits for it raises."""

    def send(self, ways, left, peer, key=0):
        about, buffers = ways.pack(peer, left)
        frame = Frame(FrameKind.MESSAGE, self.number, 0, 0, key, about, buffers)
        (partial(self.puts.send, peer) if buffers else RUN.link(peer).send)(frame)

    def get(self):
        return self.frames.get(timeout=30)


ROWS = {"x": S(0)}


def ways_of(x, giver="first", given=ROWS, taker="last", taken=ROWS, copied=False):
    aval = jax.ShapeDtypeStruct(np.shape(x), x.dtype)
    here, there = Place(aval, MESHES[giver], Placement(given)), Place(aval, MESHES[taker], Placement(taken))
    return Ways([Way(here, there, border(here.mesh, there.mesh), copied)], False)


def entered(ways, x):
    return ways.ways[0].given.enter(x)


@case
def values():
    box, names, sent = Inbox(), itertools.cycle(VALUES), 0
    ends = itertools.product(("first", "both"), ("last", "two of the last", "square", "both, other devices"))
    for (giver, taker), given, taken in itertools.islice(itertools.product(ends, AXES, AXES), 0, None, 3):
        x = VALUES[name := next(names)]
        dim = {a: s for a, s in given.items() if s != S(1) or np.ndim(x) > 1}
        into = {a: s for a, s in taken.items() if s != S(1) or np.ndim(x) > 1}
        if x.dtype in (bool, jnp.int4, jnp.float8_e4m3fn) or not np.ndim(x):
            dim, into = {}, {}
        ways = ways_of(x, giver, dim, taker, into)
        way = ways.ways[0]
        if ways.carrier == "here":
            continue
        assert ways.carrier == "put"
        left = None
        if way.given.devices and ME in way.given.processes:
            left = ways.leave([entered(ways, x)])
            for peer in sorted(set(way.taken.processes) - {ME}):
                box.send(ways, left, peer)
        if ME in way.taken.processes:
            others = sorted(set(way.given.processes) - {ME})
            parts = dict(box.get() for _ in others)
            parts = {p: (f.about, f.buffers) for p, f in parts.items()}
            if left is not None:
                parts[ME] = ways.pack(ME, left)
            (got,) = ways.arrive(ways.unpack(parts))
            check(way.taken, got, x, (giver, dim, taker, into, name))
        assert ways.sent == ways.planned
        counts = [int(n) for n in RUN.gather("bytes", str(ways.sent))]
        assert sum(counts) == way.plan.border_bytes, (counts, way.plan.border_bytes)
        sent += sum(counts)
    assert sent


def check(place, got, x, what):
    """Compare the pieces of a physical array here, which is not partial, with those of the value."""
    wanted = np.zeros(place.physical_shape, x.dtype)
    if not place.at.partial_axes:
        whole = place.is_plain
        for shard in got.addressable_shards:
            piece = np.asarray(shard.data)
            if whole:
                np.testing.assert_array_equal(piece, np.asarray(x)[shard.index], str(what))
        assert got.dtype == x.dtype
    assert got.shape == wanted.shape


@case
def opposite_orders():
    """Two threads of each process send equal shapes at the same time; each process has another order."""
    box, rounds, threads = Inbox(), 25, 2
    to = LAST if ME == 0 else 0
    if ME in (0, LAST):
        names = ("first", "last") if ME == 0 else ("last", "first")
        ways = ways_of(LARGE, names[0], {"x": S(0)}, names[1], {"x": S(0)})
        order = list(range(threads * rounds))[:: 1 if ME == 0 else -1]
        left = {i: ways.leave([entered(ways, LARGE + 1000 * ME + i)]) for i in order}

        def send(thread):
            for i in order[thread::threads]:
                box.send(ways, left[i], to, i)

        started = [threading.Thread(target=send, args=(t,)) for t in range(threads)]
        for t in started:
            t.start()
        for t in started:
            t.join()
        back = ways_of(LARGE, names[1], {"x": S(0)}, names[0], {"x": S(0)})
        for _ in order:
            peer, f = box.get()
            (got,) = back.arrive(back.unpack({peer: (f.about, f.buffers)}))
            check(back.ways[0].taken, got, LARGE + 1000 * to + f.key, f.key)


@case
def a_hundred_in_flight():
    box, ways = Inbox(), ways_of(LARGE, taken={})
    if ME == 0:
        left = [ways.leave([entered(ways, LARGE + i)]) for i in range(100)]
        for i, values in enumerate(left):
            box.send(ways, values, LAST, i)
    RUN.gather("all are sent", "")
    if ME == LAST:
        for i in range(100):
            peer, f = box.get()
            assert f.key == i
            (got,) = ways.arrive(ways.unpack({peer: (f.about, f.buffers)}))
            check(ways.ways[0].taken, got, LARGE + i, i)


@case
def launched_before_computed_and_donated_after():
    box, ways = Inbox(), ways_of(LARGE, copied=True)
    if ME == 0:
        sharding = NamedSharding(MESHES["first"], PartitionSpec("x"))

        @partial(jax.jit, out_shardings=sharding)
        def slow(x):
            return jax.lax.fori_loop(0, 60, lambda _, m: m @ m / 500, jnp.full((500, 500), 1.0)).sum() * 0 + x

        jax.block_until_ready(ways.leave([slow(entered(ways, LARGE))]))
        x = slow(entered(ways, LARGE))
        begin = time.perf_counter()
        left = ways.leave([x])
        launched = time.perf_counter() - begin
        other = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        box.send(ways, left, LAST)
        assert launched < (time.perf_counter() - begin) / 2
        del left, x, other
    if ME == LAST:
        peer, f = box.get()
        (got,) = ways.arrive(ways.unpack({peer: (f.about, f.buffers)}))
        check(ways.ways[0].taken, got, LARGE, "slow")


@case
def a_value_that_cannot_be_had_is_not_sent():
    box, ways = Inbox(), ways_of(LARGE)
    if ME == 0:
        left = ways.leave([entered(ways, LARGE)])
        left[1].delete()
        with pytest.raises(RuntimeError, match="deleted"):
            box.send(ways, left, LAST)
        box.send(ways, ways.leave([entered(ways, LARGE)]), LAST)
    if ME == LAST:
        peer, f = box.get()
        (got,) = ways.arrive(ways.unpack({peer: (f.about, f.buffers)}))
        check(ways.ways[0].taken, got, LARGE, "after a failure")


@case
def a_pipeline():
    mesh = shardc.make_mesh(pipe=RUN.processes, data=4)
    rng = np.random.default_rng(0)
    params = {f"w{i}": (rng.normal(size=(20, 20)) / 4).astype(np.float32) for i in range(RUN.processes)}
    batch = {k: rng.normal(size=(32, 20)).astype(np.float32) for k in "xy"}

    def loss(params, batch):
        x = batch["x"]
        for i in range(RUN.processes):
            x = jnp.tanh((shardc.stage_boundary(x) if i else x) @ params[f"w{i}"])
        return ((x - batch["y"]) ** 2).mean()

    def step(params, batch):
        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    train = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline())
    found, wanted = params, params
    made = open_puts(RUN).made
    for _ in range(3):
        found, value = train(found, batch)
        wanted, other = jax.jit(step)(wanted, batch)
        np.testing.assert_allclose(float(value), float(other), rtol=1e-5)
    assert open_puts(RUN).made > made
    plan = train.plan(params, batch)
    assert {t.carrier for t in plan.transfers} == {"put"}
    assert "put" in plan.explain()
    audit = train.compile(params, batch).audit()
    assert audit.ok and not audit.links


def main(names):
    for name in names or CASES:
        CASES[name]()
        RUN.gather("done", name)
        print("ok", name, flush=True) if ME == 0 else None


if __name__ == "__main__":
    main(sys.argv[1:])
