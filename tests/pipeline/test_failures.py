"""A task that fails stops the pipeline, says where, leaves the arguments as they were, and the next call works."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S, accumulate, make_mesh, stage_boundary
from shardc.errors import PipelineTaskError, StepFailedError
from tests.pipeline.pipelines import assert_same, batch, dense, error, layers, on_host
from tests.runtime.watchdog import actor_threads, within

single = partial(jax.tree.map, np.float32)


class Trap:
    """A function on the host that fails at one microbatch, once it is set."""

    def __init__(self):
        self.at = None
        self.raises = RuntimeError("kaputt")

    def __call__(self, value, number):
        if self.at is not None and (np.asarray(number) == self.at).any():
            raise self.raises
        return np.asarray(value)


def call(trap, x, number):
    return jax.pure_callback(trap, jax.ShapeDtypeStruct(x.shape, x.dtype), x, number, vmap_method="sequential")


def passing(trap, backward):
    """The identity, which calls the trap with the values or with their gradients."""

    @jax.custom_vjp
    def f(x, number):
        return x if backward else call(trap, x, number)

    f.defvjp(
        lambda x, number: (f(x, number), number),
        lambda number, ct: (call(trap, ct, number) if backward else ct, None),
    )
    return f


def step_of(trap, stage, backward):
    f = passing(trap, backward)

    def loss(params, batch):
        x = batch["x"]
        for i, layer in enumerate(params):
            x = dense(layer, x)
            x = f(x, batch["number"]) if i == stage else x  # the trap
            x = stage_boundary(x) if i < len(params) - 1 else x
        return error(x, batch)

    def step(params, batch):
        value, grads = accumulate(jax.value_and_grad(loss), microbatches=4)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def pipelined(trap, stage=2, backward=False, schedule="1f1b", axes=None, donated=("params",)):
    places = {"in_placements": {"batch": {"data": S(0)}}} if axes else {}
    return shardc.function(
        step_of(trap, stage, backward), mesh=make_mesh(pipe=4, **axes or {}), donate_argnames=donated,
        pipeline=shardc.Pipeline(schedule=schedule), **places,
    )  # fmt: skip


DATA = single(batch(8, number=np.arange(8) % 4))
CASES = {
    "forward": ({}, "2F3", 2),
    "backward": ({"backward": True}, "2B3", 2),
    "input gradient": ({"backward": True, "schedule": "zb-h1"}, "2I3", 2),
    "first stage": ({"stage": 0, "schedule": "gpipe"}, "0F3", 0),
    "last stage": ({"stage": 3, "backward": True, "schedule": "gpipe"}, "3B3", 3),
    "forward, split": ({"axes": {"data": 2}}, "2F3", 2),
    "backward, split": ({"axes": {"data": 2}, "backward": True}, "2B3", 2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_failing_task_is_named_and_undone(case):
    options, label, actor = CASES[case]
    trap = Trap()
    step = pipelined(trap, **options)
    params, _ = within(60, step, jax.tree.map(jnp.asarray, single(layers(4))), DATA)
    before = on_host(params)
    trap.at = 3.0
    for _ in range(2):
        with pytest.raises(PipelineTaskError) as caught:
            within(60, step, params, DATA)
        failure = caught.value
        assert (failure.actor, str(failure.label)) == (actor, label)
        assert failure.source.count("test_failures.py:") or "pipelines.py" in failure.source
        assert str(failure).startswith(f"actor {actor} failed in {label} ({failure.source}): ")
        assert "kaputt" in str(failure) and "it can be run again" in str(failure)
        assert_same(params, before, 0)
    trap.at = None
    again, value = within(60, step, params, DATA)
    want, want_value = jax.jit(step_of(trap, options.get("stage", 2), options.get("backward", False)))(before, DATA)
    assert_same((again, value), (want, want_value), 1e-5)


def test_a_failing_update_says_what_is_gone():
    trap = Trap()

    def step(params, batch):
        value, grads = accumulate(jax.value_and_grad(plain), microbatches=4)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        late = call(trap, params[1]["b"] * value, batch["number"].sum())
        return params, late

    def plain(params, batch):
        return error(dense(params[1], stage_boundary(dense(params[0], batch["x"]))), batch)

    function = shardc.function(step, mesh=make_mesh(pipe=2), pipeline=shardc.Pipeline(), donate_argnames="params")
    params, _ = jax.block_until_ready(function(jax.tree.map(jnp.asarray, single(layers(2))), DATA))
    trap.at = DATA["number"].sum()
    with pytest.raises((StepFailedError, jax.errors.JaxRuntimeError)):
        jax.block_until_ready(within(60, function, params, DATA))


def test_no_thread_is_left():
    trap, others = Trap(), actor_threads()  # of tests before
    step = pipelined(trap)
    params, _ = step(jax.tree.map(jnp.asarray, single(layers(4))), DATA)
    mine = [t for t in actor_threads() if t not in others]
    assert len(mine) >= 1
    trap.at = 3.0
    with pytest.raises(PipelineTaskError):
        step(params, DATA)
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None
    assert not [t for t in actor_threads() if t in mine]


def test_a_closed_pipeline_starts_again():
    trap, others = Trap(), set(actor_threads())  # of tests before
    compiled = pipelined(trap, donated=()).compile(single(layers(4)), DATA)
    want = on_host(compiled(single(layers(4)), DATA))
    mine = set(actor_threads()) - others
    compiled.executable.close()
    assert mine and not mine & set(threading.enumerate())
    assert_same(compiled(single(layers(4)), DATA), want, 0)


def test_an_interrupt_stops_all_and_the_next_call_works():
    trap = Trap()
    step = pipelined(trap)
    params, _ = step(jax.tree.map(jnp.asarray, single(layers(4))), DATA)
    before = on_host(params)
    main = threading.main_thread().ident
    original = Trap.__call__

    class Slow(Trap):
        def __call__(self, value, number):
            if self.at is not None and (np.asarray(number) == self.at).any():
                signal.pthread_kill(main, signal.SIGINT)
            return original(self, value, -1.0 * np.asarray(number) - 1)

    trap.__class__ = Slow
    trap.at = 3.0
    with pytest.raises(KeyboardInterrupt):
        jax.block_until_ready(step(params, DATA))
        for _ in range(100):  # the signal may come a moment later
            threading.Event().wait(0.05)
    trap.at = None
    if any(x.is_deleted() for x in jax.tree.leaves(params)):
        pytest.skip("the signal came when the step was through")
    assert_same(params, before, 0)
    within(60, step, params, DATA)
