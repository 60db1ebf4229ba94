"""What processes have to agree on: run by `test_agreements.py`, in each of them."""

from __future__ import annotations

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.execute.process_group import group_of_mesh
from shardc.runtime import cluster
from shardc.tuning.calibrate import calibrate
from tests.runtime.peers import others, together

ME, ALL = jax.process_index(), jax.process_count()
MESH = shardc.make_mesh(data=ALL * jax.local_device_count())


def double(**options):
    return shardc.function(lambda x: x * 2, mesh=MESH, in_placements=({"data": S(0)},), **options)


def test_a_program_that_differs():
    f = shardc.function(lambda x: x * (2 + ME) if ME else x + 1, mesh=MESH, in_placements=({"data": S(0)},))
    with pytest.raises(shardc.DisagreementError, match=r"<lambda>, first call: .*differ in\n  the plan: process 0: d"):
        f(np.arange(8.0))


def test_constants_that_differ():
    factor, table = 2.0 + ME, np.full(8, ME)
    f = shardc.function(lambda x: x * factor, mesh=MESH, in_placements=({"data": S(0)},))
    with pytest.raises(shardc.DisagreementError, match="differ in\n  the plan: "):
        f(np.arange(8.0))
    g = shardc.function(lambda x: x * table, mesh=MESH, in_placements=({"data": S(0)},))
    with pytest.raises(shardc.DisagreementError, match="differ in\n  the value of captured array 0: process 0"):
        g(np.arange(8.0))


def test_shapes_that_differ_are_named_first():
    with pytest.raises(shardc.DisagreementError) as error:
        double()(np.ones((8 + 8 * ME, 16), np.float32))
    lines = str(error.value).splitlines()
    assert lines[0] == "<lambda>, first call: the processes of this run differ in"
    assert lines[1] == "  argument x: process 0: float32[8,16], given whole; process 1: float32[16,16], given whole"
    assert lines[2].startswith("  the value of x: process 0: ")
    assert lines[-1].startswith("  the plan: process 0: digest")


def test_values_that_differ_in_the_first_call():
    with pytest.raises(shardc.DisagreementError, match=r"\n  the value of x: process 0: \w{8}; process 1: \w{8}"):
        double()(np.full(8, ME))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda x: x.astype("bfloat16"), lambda x: x[::2][:8]])
def test_values_that_differ_later_are_an_error_of_the_next_call(kind):
    f = double()
    given = [np.arange(16.0)] * 3 + [np.arange(16.0) + 0.25 * ME] + [np.arange(16.0)] * 3
    given = [kind(x) for x in given]
    for x in given[:4]:
        f(x)
    with pytest.raises(shardc.DisagreementError, match=r"<lambda>, call 4: .*\n  the value of x: process 0: "):
        f(given[4])
    for x in given[4:]:
        f(x)
    shardc.fetch(())


def test_the_last_call_is_looked_at_by_fetch():
    f = double()
    f(np.ones(8))
    y = f(np.full(8, 1.0 * ME))
    with pytest.raises(shardc.DisagreementError, match="<lambda>, call 2"):
        shardc.fetch(y)


def test_keys_and_numbers():
    f = shardc.function(lambda k, s: jax.random.normal(k, (8,)) * s, mesh=MESH)
    f(jax.random.key(0), 2.0)
    f(jax.random.key(ME), 2.0)
    with pytest.raises(shardc.DisagreementError, match="the value of k: process 0"):
        f(jax.random.key(1), 2.0)
    f(jax.random.key(1), 2.0 + ME)
    with pytest.raises(shardc.DisagreementError, match=r"the value of s: process 0: 2\.0; process 1: 3\.0"):
        shardc.fetch(())


def test_settings_that_differ():
    with (
        jax.default_matmul_precision("float32" if ME else "bfloat16"),
        pytest.raises(shardc.DisagreementError, match="JAX's settings"),
    ):
        double()(np.ones(8))


def test_an_argument_that_one_process_has_placed():
    x = shardc.put(np.ones(8, np.float32), MESH, {"data": S(0)})
    with pytest.raises(
        shardc.DisagreementError, match=r"argument x: process 0: .*, given whole; process 1: .*, placed"
    ):
        double()(np.ones(8, np.float32) if ME == 0 else x)


def test_other_calls_at_the_same_time():
    f, g = double(), shardc.function(lambda y: y + 1, mesh=MESH)
    f(np.ones(8))
    g(np.ones(8))
    with pytest.raises(shardc.DisagreementError, match=r"the call: process 0: <lambda>, call 2; process 1: shardc.put"):
        f(np.ones(8)) if ME == 0 else shardc.put(np.ones(8), MESH, {})
        shardc.fetch(())


def test_repeated_calls_of_placed_arguments_need_no_messages():
    f = double(donate_argnames=("x",))
    x = shardc.put(np.ones(8, np.float32), MESH, {"data": S(0)})
    x = f(f(x))
    links = [cluster.current().link(p) for p in others(cluster.current())]
    before = [link.control for link in links]
    start = time.monotonic()
    for _ in range(20):
        x = f(x)
    if time.monotonic() - start < 0.8:  # else signs of life went over the links
        assert sum(link.control for link in links) - sum(before) < 200
    assert shardc.fetch(x)[0] == 2.0**22


def test_callbacks_that_raise_raise_in_all_processes():
    def fails(x):
        raise ValueError(f"no data in process {ME}")

    @shardc.function(mesh=MESH, in_placements=({"data": S(0)},))
    def f(x):
        return jax.pure_callback(fails, jax.ShapeDtypeStruct((), np.float32), x.sum()) + x

    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no data in process 0"):
            f(np.ones(8, np.float32))
    g = shardc.function(lambda x: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), np.float32), x) + x, mesh=MESH)
    np.testing.assert_array_equal(shardc.fetch(g(np.ones(8, np.float32))), np.full(8, 9))


@pytest.mark.parametrize("at", [0, 7])
def test_nan_checks(at):
    f = shardc.function(lambda x: jnp.log(x) * 2, mesh=MESH, in_placements=({"data": S(0)},))
    x = np.ones(8, np.float32)
    x[at] = -1
    with jax.debug_nans(True):
        for given in (x, shardc.put(x, MESH, {"data": S(0)})):
            with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in log at agreements"):
                f(given)
        np.testing.assert_array_equal(shardc.fetch(f(np.ones(8, np.float32))), np.zeros(8))
    uneven = shardc.function(lambda x: jnp.log(x) * 2, mesh=MESH, in_placements=({"data": S(0)},))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        uneven(np.asarray([1, 1, 1, 1, 1, 1, 1, 1, -1], np.float32))


def test_arrays_below_a_byte():
    f = shardc.function(lambda x: x + x, mesh=MESH, in_placements=({"data": S(0)},))
    np.testing.assert_array_equal(
        shardc.fetch(f(jnp.arange(8, dtype="int4")).astype("int8")),
        shardc.fetch(jnp.arange(8, dtype="int4") * 2).astype("int8"),
    )


def test_a_plan_from_a_file(tmp_path):
    f = double()
    x = np.arange(8.0)
    f.plan(x).save(tmp_path / "plan.json")
    again = double(plan=tmp_path / "plan.json")
    np.testing.assert_array_equal(shardc.fetch(again(x)), 2 * x)
    texts = group_of_mesh(MESH).gather(
        "test", {"plan": (tmp_path / "plan.json").read_text(), "text": f.plan(x).explain()}
    )
    assert texts[0] == texts[-1]


def test_reports_are_equal_everywhere():
    f = shardc.function(lambda x, w: jnp.tanh(x @ w).sum(), mesh=MESH, in_placements={"x": {"data": S(0)}})
    x, w = np.ones((8, 4), np.float32), np.ones((4, 16), np.float32)
    exe = f.compile(x, w)
    assert exe.audit().ok
    stats = exe.memory_stats()
    facts = {"digest": exe.plan.digest, "explain": exe.plan.explain(), "bytes": str(stats.argument_size_in_bytes)}
    group_of_mesh(MESH).agree("reports", {**facts, "hlo": str(len(exe.hlo()))})
    np.testing.assert_allclose(float(exe(x, w)), np.tanh(x @ w).sum(), rtol=1e-5)


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_what_dies_in_a_collective_is_not_another_call(kind):
    f = double(donate_argnames=("x",))
    x = shardc.put(np.ones(8, np.float32), MESH, {"data": S(0)})
    x = f(x)
    (executable,) = f._executables.values()
    launched = []

    def dies(*args):
        launched.append(args)
        if kind is not ValueError:
            args[0].delete()
        raise kind("Gloo all-reduce failed: connection closed by peer")

    executable.compiled = dies
    with pytest.raises(
        shardc.StepFailedError, match="failed while it ran.*\n.*" + ("its arg" if kind is ValueError else "x")
    ):
        f(x)
    assert len(launched) == 1


def test_clients_of_a_gang_take_turns_in_one_order():
    """Two on devices of all processes, whose threads come in another order in each, and one of this process alone."""
    gang, wait = shardc.Gang(), random.Random(ME)
    here = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    back = jax.sharding.Mesh(MESH.devices[::-1], ("data",))
    x, found = np.arange(64, dtype=np.float32), {}

    def loop(name, mesh, weight):
        step = shardc.function(lambda x: x / 2 + jnp.sum(x) / (2 * x.size), mesh=mesh, in_placements=({"data": S(0)},))
        shared, y = gang.share(step, weight, name=name), x
        for _ in range(100):
            y = shared(y)
            time.sleep(wait.random() * 1e-3)
        found[name] = np.asarray(y.addressable_shards[0].data)

    loops = [("one", MESH, 1), ("other", back, 3), ("here", here, 1)]
    together(*(lambda each=each: loop(*each) for each in loops), seconds=120)
    order = [name for name in gang.log if name != "here"]
    assert len(order) == 200 and len(gang.log) == 300
    group_of_mesh(MESH).agree("the gang", {"its log": " ".join(order)})
    for y in found.values():
        np.testing.assert_allclose(y, x.mean(), rtol=1e-5)


def test_a_calibration_is_equal_everywhere():
    found = calibrate(shardc.make_mesh(data=ALL, model=2), sizes=(2**10, 2**12), turns=1, width=8)
    group_of_mesh(MESH).agree("calibration", {"the file": found.topology.to_json()})


def test_tune_gives_the_same_answer():
    def step(x, w):
        return jnp.tanh(x @ w).sum()

    args = np.ones((64, 32), np.float32), np.ones((32, 32), np.float32)
    made = shardc.tune(step, *args, pipe=())
    group_of_mesh(MESH).agree("tune", {"the ranking": made.explain() if hasattr(made, "explain") else str(made)})
    f = made.best.function
    np.testing.assert_allclose(float(f(*args)), step(*args), rtol=1e-5)
