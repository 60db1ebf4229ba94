"""Functions, pipelines and other callables share eight devices."""

import doctest
import re
import threading
from collections import Counter, defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import shardc
from shardc import S, gangs
from shardc.runtime import gang as gang_module
from shardc.runtime.gang import Turn
from tests.runtime.peers import until
from tests.runtime.watchdog import within

DEVICES = jax.devices()
MESH = shardc.make_mesh(data=8)
MESHES = [Mesh(np.array(d), ("data",)) for d in (DEVICES, DEVICES[:4], DEVICES[2:6], DEVICES[::-1])]
X = np.arange(64.0, dtype=np.float32)


def step(x):
    return x * 0.5 + jnp.sum(x) / (2 * x.size)


def function(fn=step, mesh=MESH, **options):
    return shardc.function(fn, mesh=mesh, in_placements=({"data": S(0)},), **options)


def at_once(*clients):
    """Calls each function in a thread of its own; an error of one of them is raised."""
    errors = []

    def run(client):
        try:
            client()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(c,), daemon=True) for c in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A loaded machine keeps threads away from their next call for longer than a millisecond."""
    monkeypatch.setattr(gang_module, "_PATIENCE", (0.1, 0.1))


# --- shares and order


@pytest.mark.parametrize("weights", [(1, 2, 4, 8), (1, 1, 1, 1)])
@pytest.mark.sampled(0)
def test_a_thousand_programs_of_each_client(weights):
    """On overlapping meshes, each with a collective."""
    gang, programs = shardc.Gang(), 1000
    fns = [function(mesh=m) for m in MESHES]
    last = {}

    def loop(i, step):
        x = shardc.put(X, MESHES[i], {"data": S(0)})
        for _ in range(programs):
            x = step(x)
        last[i] = np.asarray(x)

    for i, fn in enumerate(fns):  # compiled before the clients start together
        fn(shardc.put(X, MESHES[i], {"data": S(0)}))
    steps = [gang.share(fn, w, name=f"client {i}") for i, (fn, w) in enumerate(zip(fns, weights, strict=True))]
    with gang.turn(gang.client("starts them")):
        loops = threading.Thread(target=at_once, args=[partial(loop, i, s) for i, s in enumerate(steps)], daemon=True)
        loops.start()
        until(lambda: len(gang._waiting) == 4)
    loops.join(120)
    assert gang.log.popleft() == "starts them" and gang.clients.pop("starts them")
    assert Counter(gang.log) == {f"client {i}": programs for i in range(4)}
    for x in last.values():
        np.testing.assert_allclose(x, np.full(64, X.mean()), rtol=1e-5)
    had = dict.fromkeys(gang.clients, 0.0)
    for name in gang.log:  # until the first one is done
        had[name] += gang.clients[name].seconds / programs
        if had[name] >= 0.99 * gang.clients[name].seconds:
            break
    wanted = {name: c.weight / sum(weights) for name, c in gang.clients.items()}
    assert {name: s / sum(had.values()) for name, s in had.items()} == pytest.approx(wanted, rel=0.1)


def test_each_device_runs_the_programs_in_the_order_of_the_log():
    gang = shardc.Gang(in_flight=3)
    seen = defaultdict(list)

    def program(name, mesh, at):
        def local(x):
            total = jax.lax.psum(x, "data")
            jax.debug.callback(lambda i, _: seen[at[int(i)]].append(name), jax.lax.axis_index("data"), total)
            return total / mesh.size

        spec = PartitionSpec("data")
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def loop(fn, x):
        for _ in range(20):
            x = fn(x)
        x.block_until_ready()

    loops = []
    for i, mesh in enumerate(MESHES):
        fn, x = program(f"client {i}", mesh, [d.id for d in mesh.devices]), shardc.put(X, mesh, {"data": S(0)})
        fn(x).block_until_ready()
        loops.append(partial(loop, gang.share(fn, name=f"client {i}", seconds=1.0), x))
    jax.effects_barrier()
    seen.clear()
    within(60, at_once, *loops)
    jax.effects_barrier()
    on = {f"client {i}": {d.id for d in mesh.devices} for i, mesh in enumerate(MESHES)}
    assert len(gang.log) == 80
    for device in DEVICES:
        assert seen[device.id] == [name for name in gang.log if device.id in on[name]]


# --- prices


def test_the_price_is_that_of_the_plan_of_the_call(monkeypatch):
    gang, fn = shardc.Gang(), function()
    shared, prices, end = gang.share(fn), [], gang.end

    def ended(turn, failed):
        if not failed:  # as the cache's first guess, when shapes change
            prices.append(turn.seconds)
        end(turn, failed)

    monkeypatch.setattr(gang, "end", ended)
    small, large = X, np.ones((8, 64, 64, 64), np.float32)
    for x in (small, large, small, large, small):
        shared(x)
    seconds = [fn.plan(x).seconds for x in (small, large)]
    assert seconds[0] < seconds[1]
    assert prices == [seconds[0], seconds[1], seconds[0], seconds[1], seconds[0]]
    assert shared.client.programs == 5 and list(gang.log) == ["step"] * 5
    assert shared.plan(small).seconds == seconds[0]


def test_a_price_that_is_given_or_measured():
    gang = shardc.Gang(in_flight=1)
    given, jitted = gang.share(function(), seconds=2.0), gang.share(jax.jit(step), name="jitted")
    for _ in range(3):
        given(X)
        jitted(X)
    until(lambda: not gang._unfinished)
    assert given.client.seconds == 6.0
    assert jitted.client.programs == 3 and 0 < jitted.client.seconds == jitted.client.ran
    assert not hasattr(gang.share(step, name="plain"), "plan")


# --- kinds of callables


def test_whatever_runs_a_plan():
    gang = shardc.Gang()

    class Model:
        scale = 2.0

        @shardc.function(mesh=MESH, in_placements={"x": {"data": S(0)}}, static_argnames="self")
        def apply(self, x):
            return x * self.scale

    compiled = gang.share(function().compile(X))
    np.testing.assert_array_equal(compiled(X), step(X))
    np.testing.assert_array_equal(gang.share(Model().apply)(X), X * 2)
    assert list(gang.log) == ["step", "apply"]
    assert compiled.plan.seconds > 0


def test_a_pipeline():
    def loss(w, x):
        for i in range(2):
            x = jnp.tanh(x @ w[i])
            x = shardc.stage_boundary(x) if i == 0 else x
        return jnp.mean(x**2)

    def train(w, x):
        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4, in_axes=(None, 0))(w, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    mesh = shardc.make_mesh(pipe=2, data=4)
    pipeline = shardc.function(train, mesh=mesh, pipeline=shardc.Pipeline(axis="pipe"))
    gang = shardc.Gang()
    shared, other = gang.share(pipeline), gang.share(function(), name="other")
    w, x = [np.eye(16, dtype=np.float32) for _ in range(2)], np.ones((32, 16), np.float32)
    found = []

    def steps():
        state = w
        for _ in range(5):
            state, value = shared(state, x)
            found.append(value)

    def others():
        y = X
        for _ in range(20):
            y = other(y)

    within(120, at_once, steps, others)
    state = w
    for value in found:
        state, wanted = jax.jit(train)(state, x)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert Counter(gang.log) == {"train": 5, "other": 20}
    assert shared.client.seconds == pytest.approx(5 * pipeline.plan(w, x).seconds, rel=0.5)


def test_inside_other_transformations_there_is_no_turn():
    gang = shardc.Gang()
    shared = gang.share(function())
    jax.jit(shared)(X)
    with jax.disable_jit():
        shared(X)
    assert not gang.log
    outer = gang.share(lambda x: shared(shared(x)), name="outer")
    within(60, outer, X)
    assert list(gang.log) == ["outer"]  # its programs are part of its turn


def test_state_that_every_step_donates():
    """The results of a program are gone when the next one is launched, and yet places are counted."""
    gang = shardc.Gang(in_flight=2)

    def heavy(x):
        for _ in range(20):
            x = x @ x / jnp.sum(x)
        return x

    shared = gang.share(function(heavy, donate_argnums=0))
    x = shared(np.ones((128, 128), np.float32))
    for _ in range(30):
        x = shared(x)
        assert len(gang._unfinished) <= 2
    x.block_until_ready()
    until(lambda: not gang._unfinished)
    assert shared.client.programs == 31


def test_nobody_waits_while_a_function_is_traced_planned_and_compiled(monkeypatch):
    gang = shardc.Gang(in_flight=1)
    tracing, go_on = threading.Event(), threading.Event()

    def slow(x):
        tracing.set()
        assert go_on.wait(20)
        return x + 1

    shared, other = gang.share(function(slow)), gang.share(function(), name="other")
    thread = threading.Thread(target=shared, args=(X,), daemon=True)
    thread.start()
    assert tracing.wait(20)
    for _ in range(3):
        within(20, other, X)
    go_on.set()
    thread.join(20)
    assert list(gang.log) == ["other"] * 3 + ["slow"]

    compiled, begin = [], Turn.__enter__
    third = gang.share(fn := function(lambda x: x - 3), name="third")
    plan = fn.plan(X)

    def enter(turn):
        compiled.append("compiled" in fn._executable(plan).__dict__)
        return begin(turn)

    monkeypatch.setattr(Turn, "__enter__", enter)
    third(X)
    assert compiled == [True]


# --- errors


def test_errors_reach_the_caller_and_give_the_place_back():
    gang = shardc.Gang(in_flight=1)

    def checked(x):
        def refuse(value):
            if value > 1e6:
                raise ValueError("too large")
            return value

        return x + jax.pure_callback(refuse, jax.ShapeDtypeStruct((), x.dtype), jnp.sum(x))

    shared = gang.share(function(checked))
    shared(X)
    for _ in range(3):
        with pytest.raises(Exception, match="too large"):
            shared(X + 1e6)
        with pytest.raises(TypeError):
            shared()
    within(20, shared, X)
    within(20, gang.share(function()), X)
    assert list(gang.log) == ["checked"] * 2 + ["step"]


@pytest.mark.parametrize("fn", [3, None, "step", MESH], ids=["3", "None", "step", "mesh"])
def test_what_cannot_be_called_cannot_be_shared(fn):
    with pytest.raises(
        shardc.ArgumentError, match=re.escape(f"Gang.share wants a callable, as a shardc.function; got {fn!r}")
    ):
        shardc.Gang().share(fn)


def test_bad_shares():
    gang = shardc.Gang()
    shared = gang.share(function())
    with pytest.raises(shardc.ArgumentError, match=r"Gang: there is a client 'step' already; .* as name='step_2'\."):
        gang.share(function())
    with pytest.raises(shardc.ArgumentError, match=r"Gang\.share: step is a client of this gang already\."):
        gang.share(shared, name="again")
    with pytest.raises(shardc.ArgumentError, match=r"Gang: other: weight=0; write a positive number\."):
        gang.share(function(), 0, name="other")
    with pytest.raises(shardc.ArgumentError, match=r"Gang: in_flight=0; write a number of programs, 1 or more"):
        shardc.Gang(in_flight=0)
    assert list(gang.clients) == ["step"]


# --- what is shown


def test_explain():
    gang = shardc.Gang(in_flight=1)
    train, score = gang.share(step, 3, name="train", seconds=2e-3), gang.share(step, name="score", seconds=1e-3)
    assert gang.explain().splitlines()[-1].split() == ["score", "1", "0", "0", "s", "0", "s", "25%", "-"]
    train(X)
    score(X)
    until(lambda: not gang._unfinished)
    lines = gang.explain().splitlines()
    assert lines[0] == "Gang: 2 clients, at most 1 program in flight"
    assert lines[1].split() == ["client", "weight", "programs", "priced", "measured", "share", "wanted", "had"]
    rows = [line.split() for line in lines[-2:]]
    assert rows[0][:5] == ["train", "3", "1", "2.00", "ms"] and rows[0][-2:] == ["75%", "67%"]
    assert rows[1][:5] == ["score", "1", "1", "1.00", "ms"] and rows[1][-2:] == ["25%", "33%"]
    assert repr(train) == "SharedCallable(train, weight=3)"


def test_the_example_of_the_docstring():
    found = doctest.testmod(gangs)
    assert found.attempted and not found.failed
