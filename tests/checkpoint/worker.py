"""Processes that the tests of checkpoints start, and kill: `python -m tests.checkpoint.worker MODE ARGUMENTS`."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

DEADLINE = 120.0
ROOT = Path(__file__).parents[2]


class Worker:
    """A process that is started now, and killed when the `with` ends, or after the deadline."""

    def __init__(self, mode, *args, devices=4):
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = {**os.environ, "XLA_FLAGS": flags, "NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.checkpoint.worker", mode, *map(str, args)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.watchdog = threading.Timer(DEADLINE, self.process.kill)
        self.watchdog.daemon = True
        self.watchdog.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stdout.close()
        self.process.stderr.close()

    def kill(self):
        self.watchdog.cancel()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def line(self):
        """The next line that it prints."""
        text = self.process.stdout.readline()
        assert text, f"it ended: {self.process.wait()}\n{self.process.stderr.read()}"
        return text.strip()

    def end(self):
        """Its last lines, when it has ended well."""
        out, err = self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0, f"exit code {self.process.returncode}\n{out}\n{err}"
        return out.strip()


def value_at(step, rows=512):
    """The state after a step: known without the steps before."""
    import numpy as np

    k = np.random.default_rng(step + 1)
    return {"w": k.normal(size=(rows, 256)).astype(np.float32), "b": k.normal(size=7), "n": step}


def alone(directory, steps, every):
    """Write states, say so, and check what is there at the start."""
    import numpy as np

    import shardc

    with shardc.checkpoints(directory, every=int(every), keep=2) as saved:
        state, start = saved.last(or_else=value_at(-1))
        for name, x in value_at(start - 1).items():
            np.testing.assert_array_equal(state[name], x)
        print(start, flush=True)
        for i in range(start, int(steps)):
            saved.step(i, value_at(i))


def spmd(directory, coordinator, me):
    """Two processes of one JAX runtime: save, poison what was saved, restore onto another mesh."""
    import jax
    import numpy as np

    jax.distributed.initialize(coordinator, 2, int(me), initialization_timeout=60)
    import shardc
    from shardc import PlacedArray, Placement, S
    from shardc.arrays.place import put_leaf

    w = np.arange(13 * 8, dtype=np.float32).reshape(13, 8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    double = jax.jit(lambda x: 2 * x)

    def state(rows, columns):
        return {
            "uneven": put_leaf(w, mesh, Placement({rows: S(0)})),
            "even": double(put_leaf(w, mesh, Placement({columns: S(1)}))),
            "host": w[:3].copy(),
            "local": jax.numpy.arange(3),
            "key": jax.random.key(5),
            "n": 3,
        }

    poison = jax.jit(lambda x: x * jax.numpy.nan, donate_argnums=0)
    first = state("a", "b")
    with shardc.checkpoints(directory, every=1) as saved:
        saved.step(0, first)
        first["even"] = poison(first["even"])
        first["host"][:] = np.nan
        got, start = saved.last(or_else=state("b", "a"))
        saved.step(1, got)
    assert start == 1 and isinstance(got["uneven"], PlacedArray) and got["uneven"].placement == Placement({"b": S(0)})
    for wanted, x in ((w, got["uneven"].read()), (2 * w, got["even"])):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])
    np.testing.assert_array_equal(got["host"], w[:3])
    np.testing.assert_array_equal(got["local"], np.arange(3))
    assert (jax.random.key_data(got["key"]) == jax.random.key_data(jax.random.key(5))).all() and got["n"] == 3
    largest = max(Path(directory, "1").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = largest.read_bytes()
    if me == "0":
        largest.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with shardc.checkpoints(directory) as saved:
        assert saved.last(or_else=got)[1] == 1 and f"{largest.name} is not as it was written" in saved.note
    if me == "0":
        largest.write_bytes(data)
    try:
        with shardc.checkpoints(directory) as saved:
            saved.last(or_else={**got, "more": 1} if me == "1" else got)
    except shardc.CheckpointError as error:
        print(str(error).splitlines()[-1], flush=True)


def island(directory, store, secret, me, epoch, steps):
    """One of two processes with JAX runtimes of their own: its stage, and a scalar that both have."""
    import jax
    import numpy as np

    import shardc
    from shardc import PlacedArray, Placement
    from shardc.runtime import cluster
    from tests.checkpoint.test_leaves import elsewhere, far

    me = int(me)
    config = cluster.RunConfig(me, 2, 2, store, bytes.fromhex(secret), "127.0.0.1:0", int(epoch), deadline=60.0)
    run = cluster.join(config, bytearray)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("a",))

    def state_of(w, n):
        here = PlacedArray(jax.device_put(w, jax.NamedSharding(mesh, jax.P("a"))), w.shape, Placement({}), mesh)
        return {"stages": [here if s == me else far((512, 256), elsewhere(s)) for s in (0, 1)], "n": n}

    def one_step(i, state):
        run.gather("a step of a pipeline", "")  # nobody is ahead
        if me == 0:
            print(i, flush=True)
        return state_of(np.asarray(state["stages"][me]) * 0.5 + value_at(2 * i + me)["w"], state["n"] + i)

    with shardc.checkpoints(directory, every=2, keep=2) as saved:
        init = state_of(np.zeros((512, 256), np.float32), 0)
        state = saved.run(one_step, init, steps=int(steps))
    print("end", state["n"], float(np.asarray(state["stages"][me]).sum(dtype=np.float64)), flush=True)
    cluster.leave()


if __name__ == "__main__":
    {"alone": alone, "spmd": spmd, "island": island}[sys.argv[1]](*sys.argv[2:])
