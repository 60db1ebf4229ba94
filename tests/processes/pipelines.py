"""Pipelines whose stages run in several processes, each with a JAX runtime of its own, against one device.

    python -m shardc run --processes 2 --islands 2 --devices 2 -m tests.processes.pipelines NAME ...

runs cases by name; without a name all that are for so many processes. Process 0 prints `ok NAME` for each.
"""

import os
import re
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import shardc
from shardc import S
from shardc.arrays.remote_array import RemoteArray, is_remote
from shardc.execute.process_group import group_of_run
from shardc.machine.devices import process_of
from shardc.runtime.cluster import current

jax.devices()  # starts the backend, before the tests' own module of settings asks for eight devices

from tests.pipeline import test_parity as parity  # noqa: E402
from tests.runtime.peers import together  # noqa: E402

CASES = {}
STOPS = 12
"""Calls of a pipeline that are stopped at random times."""


def case(*, processes=2, islands=None):
    """Register a case for so many processes and JAX runtimes."""

    def register(fn):
        CASES[fn.__name__] = (processes, islands or processes, fn)
        return fn

    return register


def weights(rng, *shapes):
    return {f"w{i}": (rng.normal(size=s) / 8).astype(np.float32) for i, s in enumerate(shapes)}


def model(params, x):
    """A layer to each stage."""
    for i in range(len(params)):
        x = jnp.tanh(x @ params[f"w{i}"])
        x = shardc.stage_boundary(x) if i + 1 < len(params) else x
    return x


def loss_of(params, batch):
    return ((model(params, batch["x"]) - batch["y"]) ** 2).mean()


def batch_of(rng, rows=24, width=20):
    return {k: rng.normal(size=(rows, width)).astype(np.float32) for k in "xy"}


def trained(step, state, batches):
    """The losses of some steps, and the state after them."""
    losses = []
    for batch in batches:
        *state, loss = step(*state, batch)
        losses.append(loss)
    return [float(x) for x in losses], state


def with_adam(params, opt, batch, tx):
    """Clipping and Adam: a norm over all stages, a step count that all stages read."""
    loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss


def check_training(pipeline, mesh, stages, **options):
    """Train on one device and as a pipeline: equal losses, equal states."""
    rng = np.random.default_rng(0)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    params, batches = weights(rng, *[(20, 20)] * stages), [batch_of(rng) for _ in range(3)]
    fn = partial(with_adam, tx=tx)
    step = shardc.function(fn, mesh=mesh, pipeline=pipeline, donate_argnames=("params", "opt"), **options)
    got, state = trained(step, (params, tx.init(params)), batches)
    want, right = trained(jax.jit(fn), (params, tx.init(params)), batches)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), shardc.fetch(tuple(state)), tuple(right))
    return step, state


def executable_of(step):
    (found,) = step._executables.values()
    return found


@case()
def two_pipelines_take_turns():
    """Each from a thread of its own; their threads come in another order in each process."""
    rng, gang, done = np.random.default_rng(0), shardc.Gang(), {}
    mesh, batches = shardc.make_mesh(pipe=2, data=2), [batch_of(rng) for _ in range(10)]
    params = weights(rng, (20, 20), (20, 20))

    def sgd(params, batch):
        loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def score(params, batch):
        return (shardc.accumulate(loss_of, microbatches=4)(params, batch),)

    def loop(shared, state):
        for batch in batches:
            *state, loss = shared(*state, batch) if shared.client.name == "sgd" else shared(params, batch)
            done.setdefault(shared.client.name, []).append(loss)

    pipelines = [shardc.function(fn, mesh=mesh, pipeline=shardc.Pipeline()) for fn in (sgd, score)]
    shared = [gang.share(fn) for fn in (pipelines if current().me else pipelines[::-1])]
    together(*(partial(loop, each, (params,)) for each in shared), seconds=120)
    assert sorted(gang.log) == ["score"] * 10 + ["sgd"] * 10
    group_of_run().agree("the gang", {"its log": " ".join(gang.log)})
    want = {"sgd": trained(jax.jit(sgd), (params,), batches)[0], "score": [score(params, b)[0] for b in batches]}
    for name, losses in want.items():
        np.testing.assert_allclose([float(x) for x in done[name]], losses, rtol=1e-5)


@case()
def an_argument_of_two_stages_and_results_elsewhere():
    mesh = shardc.make_mesh(pipe=2, data=2)
    step, (params, _) = check_training(shardc.Pipeline(), mesh, 2, in_placements={"batch": {"data": S(0)}})
    far, near = ("w1", "w0") if current().me == 0 else ("w0", "w1")
    assert is_remote(params[far]) and not is_remote(params[near]) and isinstance(params[far], RemoteArray)
    with pytest.raises(shardc.ClusterError, match=r"lives in process \d and cannot be read here; shardc.fetch"):
        np.asarray(params[far])
    made = executable_of(step)
    tasks = [id for id, task in made.plan.built.tasks.items() if task.plan is not None]
    assert sorted(made._executables) == sorted(id for id in tasks if id.stage == current().me)
    audit = made.audit()
    assert audit.ok and [*audit.links] == [1 - current().me] and "the link to process" in str(audit)


@case()
def every_process_has_its_share_of_chunks():
    mesh = shardc.make_mesh(pipe=2, data=2)
    check_training(shardc.Pipeline(schedule="interleaved", chunks=2), mesh, 4)


@case()
def pieces_with_padding():
    mesh = shardc.make_mesh(pipe=2, data=2)
    pinned = {"params": {"data": S(1)}, "batch": {"data": S(0)}}
    rng = np.random.default_rng(1)
    params, batches = weights(rng, (20, 19), (19, 20)), [batch_of(rng, 20) for _ in range(2)]

    def step(params, batch):
        loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    made = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline(schedule="zb-h1"), in_placements=pinned)
    got, state = trained(made, (params,), batches)
    want, right = trained(jax.jit(step), (params,), batches)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), shardc.fetch(tuple(state)), tuple(right))


@case()
def random_keys_cross_and_come_back():
    mesh = shardc.make_mesh(pipe=2, data=1)
    rng = np.random.default_rng(2)
    params, batch = weights(rng, (20, 20), (20, 20)), batch_of(rng)

    def noisy(params, key, batch):
        first, second = jax.random.split(key)
        x = jnp.tanh(batch["x"] @ params["w0"]) + jax.random.normal(first, (20,))
        x = shardc.stage_boundary(x) @ params["w1"] + jax.random.normal(second, (20,))
        return ((x - batch["y"]) ** 2).mean()

    def step(params, key, batch):
        key, now = jax.random.split(key)
        run = shardc.accumulate(jax.value_and_grad(noisy), microbatches=4, in_axes=(None, None, 0))
        loss, grads = run(params, now, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key, loss

    made = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline())
    got, state = trained(made, (params, jax.random.key(3)), [batch] * 3)
    want, right = trained(jax.jit(step), (params, jax.random.key(3)), [batch] * 3)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert jnp.array_equal(jax.random.key_data(shardc.fetch(state[1])), jax.random.key_data(right[1]))


@case()
def layers_of_a_scan_lie_on_their_stages():
    mesh = shardc.make_mesh(pipe=2, data=2)
    rng = np.random.default_rng(4)
    params, batch = {"w": (rng.normal(size=(4, 20, 20)) / 8).astype(np.float32)}, batch_of(rng)

    def loss_of(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
        return ((x - batch["y"]) ** 2).mean()

    def step(params, batch):
        loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    made = shardc.function(
        step, mesh=mesh, pipeline=shardc.Pipeline(stages="auto"), in_placements={"batch": {"data": S(0)}},
        donate_argnames="params",
    )  # fmt: skip
    got, (state,) = trained(made, (params,), [batch] * 3)
    want, (right,) = trained(jax.jit(step), (params,), [batch] * 3)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(shardc.fetch(state["w"]), right["w"], rtol=0, atol=1e-5)


@case()
def a_call_is_shown_with_the_times_of_all_processes():
    mesh = shardc.make_mesh(pipe=2, data=2)
    rng = np.random.default_rng(5)
    params, batch = weights(rng, (20, 20), (20, 20)), batch_of(rng)

    def step(params, batch):
        return shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)

    made = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline()).compile(params, batch)
    made(params, batch)
    text = made.timeline()
    assert re.search(r"rank 0, process 0 planned.*\n +measured.*[LFBU]", text)
    assert re.search(r"rank 1, process 1 planned.*\n +measured.*[LFBU]", text)
    assert "Rank 0 runs in process 0; rank 1 runs in process 1." in made.plan.explain()
    folder = Path(tempfile.mkdtemp())
    made.trace(folder / "trace.json")
    assert (folder / "trace.json").exists() == (current().me == 0)


@case()
def other_data_in_one_process_is_an_error_in_both():
    mesh = shardc.make_mesh(pipe=2, data=2)
    rng = np.random.default_rng(6)
    params, me = weights(rng, (20, 20), (20, 20)), current().me

    def step(params, batch):
        return shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)

    made = shardc.function(step, mesh=mesh, pipeline=shardc.Pipeline())
    with pytest.raises(
        shardc.DisagreementError, match=r"argument batch/x: process 0: float32\[24,20\]; process 1: .*8"
    ):
        made(params, batch_of(rng, 24 if me == 0 else 8))
    batch = batch_of(np.random.default_rng(me))
    with pytest.raises(shardc.DisagreementError, match="the value of batch/x"):
        made(params, batch)


@case()
def one_program_wants_one_runtime():
    mesh = shardc.make_mesh(data=4)
    with pytest.raises(shardc.MeshError, match=r"devices of processes 0, 1, whose JAX runtimes know nothing of each"):
        shardc.function(lambda x: x + 1, mesh=mesh)(np.ones(8, np.float32))
    with pytest.raises(shardc.MeshError, match=r"the mesh of rank 0 has devices of processes 0, 1"):
        step = shardc.function(loss_and_grad, mesh=shardc.make_mesh(data=2, pipe=2), pipeline=shardc.Pipeline())
        step(weights(np.random.default_rng(0), (20, 20), (20, 20)), batch_of(np.random.default_rng(0)))


def loss_and_grad(params, batch):
    return shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)


@case(processes=3)
def a_rank_moves_to_a_process_of_its_own():
    at = [Mesh(np.array([d for d in shardc.devices() if process_of(d) == p]), ("data",)) for p in range(3)]
    rng = np.random.default_rng(7)
    params, batch, tx = weights(rng, (20, 20), (20, 20)), batch_of(rng), optax.adam(1e-2)
    fn = partial(with_adam, tx=tx)
    step = shardc.function(fn, pipeline=shardc.Pipeline(meshes=at[:2]), donate_argnames=("params", "opt"))
    got, state = trained(step, (params, tx.init(params)), [batch] * 2)
    before = dict(executable_of(step)._executables)
    move = step.remap(1, at[2])
    with pytest.raises(shardc.ArgumentError, match="where a rank was before it was mapped onto other devices"):
        step(*state, batch)
    state = move(tuple(state))
    more, state = trained(step, state, [batch] * 2)
    want, right = trained(jax.jit(fn), (params, tx.init(params)), [batch] * 4)
    np.testing.assert_allclose(got + more, want, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), shardc.fetch(tuple(state)), tuple(right))
    after = executable_of(step)._executables
    kept = [e for e in after.values() if any(e is other for other in before.values())]
    assert (len(kept), len(after) - len(kept) > 0) == [(len(before), False), (0, False), (0, True)][current().me]


@case(processes=3)
def a_rank_moves_within_its_process_and_then_to_another():
    """The values of the second move are told apart from those of the first by all processes alike."""
    at = [Mesh(np.array([d for d in shardc.devices() if process_of(d) == p]), ("data",)) for p in range(3)]
    one = [Mesh(m.devices[:1], ("data",)) for m in at]
    rng = np.random.default_rng(8)
    params, batch = weights(rng, (20, 20), (20, 20)), batch_of(rng)

    def step(params, batch):
        loss, grads = loss_and_grad(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    made = shardc.function(step, pipeline=shardc.Pipeline(meshes=one[:2]))
    got, state = trained(made, (params,), [batch] * 2)
    for to in (Mesh(at[1].devices[1:], ("data",)), one[2]):
        state = made.remap(1, to)(tuple(state))
        more, state = trained(made, state, [batch])
        got += more
    want, right = trained(jax.jit(step), (params,), [batch] * 4)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), shardc.fetch(tuple(state)), tuple(right))


@case()
def a_rank_cannot_move_to_where_all_others_are():
    at = [Mesh(np.array([d]), ("data",)) for d in shardc.devices()]
    made = shardc.function(loss_and_grad, pipeline=shardc.Pipeline(meshes=[at[0], at[2]]))
    with pytest.raises(shardc.MeshError, match="all ranks would run in process 0, and the other processes would have"):
        made.remap(1, at[1])


@case()
def results_at_other_placements_than_they_were_given_at():
    """The second call is another program; both processes see that."""
    rng = np.random.default_rng(9)
    params, batch = {"w": (rng.normal(size=(5, 6, 6)) / 3).astype(np.float32)}, np.ones((8, 6), np.float32)

    def loss_of(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return (x**2).mean()

    def step(params, x):
        loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=2)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    made = shardc.function(step, mesh=shardc.make_mesh(pipe=2, data=2), pipeline=shardc.Pipeline(stages="auto"))
    got, _ = trained(made, (params,), [batch] * 3)
    want, _ = trained(jax.jit(step), (params,), [batch] * 3)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@case(processes=4, islands=2)
def a_stage_of_two_hosts_is_an_island():
    mesh = shardc.make_mesh(pipe=2, data=4)
    check_training(shardc.Pipeline(), mesh, 2, in_placements={"batch": {"data": S(0)}})


@case(processes=4, islands=2)
def small_results_in_pieces_are_made_whole_by_all_that_hold_them():
    rng = np.random.default_rng(10)
    params, batch = weights(rng, (8, 8), (8, 8)), batch_of(rng, 8, 8)

    def step(params, batch):
        loss, grads = loss_and_grad(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    mesh = shardc.make_mesh(pipe=2, data=4)
    pinned = {"params": {"data": S(0)}, "batch": {"data": S(0)}}
    made = shardc.function(
        step, mesh=mesh, pipeline=shardc.Pipeline(), in_placements=pinned, out_placements=[{"data": S(0)}, {}]
    )
    got, state = trained(made, (params,), [batch] * 3)
    want, right = trained(jax.jit(step), (params,), [batch] * 3)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), shardc.fetch(tuple(state)), tuple(right))


class Stopped(Exception):
    """A script's own error, wherever it is."""


def stop(*_):
    raise Stopped


@case(processes=4, islands=2)
def a_stop_leaves_no_process_of_a_stage_waiting():
    """One process is stopped at a random time of a call; the next calls are right in all of them."""
    rng, me = np.random.default_rng(13), current().me
    mesh = shardc.make_mesh(pipe=2, data=4)
    params, batch = weights(rng, (256, 256), (256, 256)), batch_of(rng, 64, 256)
    fn = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=16)
    made = shardc.function(fn, mesh=mesh, pipeline=shardc.Pipeline(), in_placements={"batch": {"data": S(0)}})
    want = float(jax.jit(fn)(params, batch)[0])
    signal.signal(signal.SIGUSR2, stop)
    begin = time.monotonic()
    assert abs(float(made(params, batch)[0]) - want) < 1e-5
    begin = time.monotonic()
    made(params, batch)[0].block_until_ready()
    usual, stopped = time.monotonic() - begin, 0
    for trial in range(STOPS):
        chosen, after = int(rng.integers(4)), float(rng.random() * usual)
        current().gather("trial", str(trial))
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGUSR2))
        try:
            if me == chosen:
                timer.start()
            float(made(params, batch)[0])
            if me == chosen:
                timer.join()
        except (Stopped, shardc.PipelineError) as error:
            stopped += 1
            del error
        assert abs(float(made(params, batch)[0]) - want) < 1e-5
        if me == 0:
            print(f"trial {trial}: process {chosen} after {after:.3f} of {usual:.3f} s", flush=True)
    assert stopped


@case(processes=2, islands=1)
def stages_of_one_runtime_in_two_processes():
    mesh = shardc.make_mesh(pipe=2, data=2)
    check_training(shardc.Pipeline(), mesh, 2, in_placements={"batch": {"data": S(0)}})


@case(processes=2, islands=1)
def stages_of_the_same_processes_have_other_placements():
    """Two devices of each process for either stage, on meshes of other shapes: pieces go from process to process."""
    rng, devices = np.random.default_rng(14), np.array(jax.devices()).reshape(2, 2, -1)
    shapes = ((2, 2), (4, 1))
    meshes = [Mesh(devices[:, i].reshape(shape), ("p", "d")) for i, shape in enumerate(shapes)]
    params, batches = weights(rng, (24, 24), (24, 24)), [batch_of(rng, 24, 24) for _ in range(3)]

    def loss_of(params, batch):
        x = shardc.constrain(jnp.tanh(batch["x"] @ params["w0"]), {"p": S(1), "d": S(0)})
        x = shardc.constrain(shardc.stage_boundary(x), {"p": S(0)})
        return ((jnp.tanh(x @ params["w1"]) - batch["y"]) ** 2).mean()

    def step(params, batch):
        loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def one_step(params, batch):
        loss, grads = loss_and_grad(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    made = shardc.function(step, pipeline=shardc.Pipeline(meshes=meshes), donate_argnames="params")
    got, state = trained(made, (params,), batches)
    want, right = trained(jax.jit(one_step), (params,), batches)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), shardc.fetch(tuple(state)), tuple(right))
    assert executable_of(made)._crossing


@case(processes=2, islands=1)
def rows_of_each_process_go_to_the_stages_without_a_copy():
    mesh, rng = shardc.make_mesh(pipe=2, data=2), np.random.default_rng(11)
    params, batch = weights(rng, (20, 20), (20, 20)), batch_of(rng)
    rows = {"data": S(0)}
    mine = {k: x[shardc.rows_here(x.shape, mesh, rows)] for k, x in batch.items()}
    made = shardc.function(loss_and_grad, mesh=mesh, pipeline=shardc.Pipeline())
    loss, _ = made(params, shardc.put(mine, mesh, rows, here=True))
    np.testing.assert_allclose(float(loss), float(jax.jit(loss_of)(params, batch)), rtol=1e-6)


@case(processes=2, islands=1)
def stages_of_one_runtime_write_what_they_have():
    rng = np.random.default_rng(12)
    made = shardc.function(loss_and_grad, mesh=shardc.make_mesh(pipe=2, data=2), pipeline=shardc.Pipeline())
    _, grads = made(weights(rng, (20, 20), (20, 20)), batch_of(rng))
    state = {"grads": grads, "here": np.arange(3.0), "n": 3}
    folder = current().gather("folder", tempfile.mkdtemp() if current().me == 0 else "")[0]
    with shardc.checkpoints(folder) as saved:
        for i in range(3):
            saved.step(i, state)
    with shardc.checkpoints(folder) as saved:
        again, start = saved.last(or_else=state)
    assert start == 3
    jax.tree.map(np.testing.assert_array_equal, shardc.fetch(again["grads"]), shardc.fetch(grads))


def run_parity(chosen):
    """A case of the parity of pipelines with one device; results that live elsewhere are fetched."""
    known = parity.assert_close

    def close(got, want, where):
        known(shardc.fetch(got), want, where)

    parity.assert_close = close
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        parity.test_every_schedule_gives_what_one_device_gives(chosen)
    jax.config.update("jax_disable_most_optimizations", False)
    parity.assert_close = known


for number, chosen in enumerate(parity.OVER_PROCESSES):
    CASES[f"parity-{number}"] = (chosen.ranks, chosen.ranks, partial(run_parity, chosen))


def main(names):
    here = (current().processes, current().config.islands)
    names = names or [n for n, (p, i, _) in CASES.items() if (p, i) == here]
    for name in names:
        CASES[name][2]()
        current().gather("done", name)
        print("ok", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
