"""One device is the truth: what a flow gives is what its function gives in plain Python, round after round."""

from __future__ import annotations

import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import B, P, RoundFailedError, S
from tests.dataflow.interpreter import assert_equal, assert_same, plain
from tests.pipeline import pipelines
from tests.runtime.watchdog import actor_threads, within

ROWS = 8
SHAPE = jax.ShapeDtypeStruct((ROWS, 4), float)
SCALAR = jax.ShapeDtypeStruct((), float)


@pytest.fixture(autouse=True)
def wide(compiled_fast):
    with jax.enable_x64(True):
        yield


def timed(fn, *args):
    """A call under a watchdog, with the settings of this thread."""

    def call():
        with jax.enable_x64(True):
            return fn(*args)

    return within(30, call)


def mesh(first, count, axis="data"):
    return Mesh(np.array(jax.devices()[first : first + count]), (axis,))


def loss(params, x):
    return jnp.mean((x @ params["w"] - jnp.sin(x.sum(1, keepdims=True))) ** 2)


def grad_of(params, x):
    return jax.value_and_grad(loss)(params, x)


def apply(state, found):
    grad = jax.tree.map(lambda *g: sum(g) / len(g), *[g for _, g in found])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grad)
    return {"params": params, "n": state["n"] + 1}, sum(value for value, _ in found) / len(found)


def next_batch(key, i=0):
    return np.random.default_rng([int(key), int(i)]).normal(size=(ROWS, 4))


def size_of(params):
    return np.abs(params["w"]).sum()


READ = shardc.host(next_batch, gives=SHAPE, seconds=1e-3)
EVALUATE = shardc.host(size_of, gives=SCALAR)
SPLIT = {"x": {"data": S(0)}}


def start():
    return {"params": {"w": jnp.ones((4, 3))}, "n": jnp.zeros((), int)}


def parameter_server(delay=0, rate=3, workers=3, donate="state", credits=2):
    grads = [shardc.function(grad_of, mesh=mesh(2 * i, 2), in_placements=SPLIT) for i in range(workers)]
    update = shardc.function(apply, mesh=mesh(6, 2), donate_argnames=donate)

    @shardc.flow(credits=credits)
    def train(state, key):
        params = shardc.late(state["params"], delay)
        found = [g(params, READ(key, i)) for i, g in enumerate(grads)]
        state, value = update(state, found)
        return state, {"loss": value, "n": state["n"], "size": shardc.every(rate, EVALUATE)(state["params"])}

    return train


# ---- parameter servers


@pytest.mark.sampled
@pytest.mark.parametrize("donate", ["state", ()])
@pytest.mark.parametrize("credits", [1, 2, 3])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_a_parameter_server(delay, credits, donate):
    assert_same(parameter_server(delay, donate=donate, credits=credits), start(), range(10))


def test_a_synchronous_parameter_server_is_data_parallel():
    state, given = parameter_server().run(start(), range(10))

    def step(state, x):
        value, grad = grad_of(state["params"], x)
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grad), "n": state["n"] + 1}, value

    together, wanted = shardc.function(step, mesh=shardc.make_mesh(data=8), in_placements=SPLIT), start()
    for key in range(10):
        wanted, value = together(wanted, np.concatenate([next_batch(key, i) for i in range(3)]))
        assert_equal(given[key]["loss"], value)
    assert_equal(state, wanted)


# ---- delays and rates


def test_values_of_earlier_rounds_are_returned_and_kept():
    step = shardc.function(lambda w, x: (w * 0.9 + x, w.sum()), mesh=mesh(0, 2), donate_argnames="w")

    @shardc.flow
    def train(state, x):
        w, total = step(state["w"], x)
        old = shardc.late(state["w"], 2)
        before = shardc.late(total, 1, first=jnp.float64(-1))
        again = shardc.late(before, 2, first=np.float64(-2))
        kept = {"w": w, "swap": state["w"], "third": state["swap"], "fixed": state["fixed"]}
        return kept, {"old": old, "before": before, "again": again, "fixed": state["fixed"], "now": state["w"], "x": x}

    state = {"w": jnp.ones(4), "swap": 2 * jnp.ones(4), "third": 3 * jnp.ones(4), "fixed": jnp.arange(3.0)}
    assert_same(train, state, np.arange(20.0).reshape(5, 4))


def test_late_values_of_a_node_are_read_by_nodes():
    act = shardc.function(lambda w, x: jnp.tanh(x * w), mesh=mesh(0, 2), in_placements=SPLIT)
    learn = shardc.function(lambda w, seen, last: w - 0.01 * (seen.mean() + last.mean()), mesh=mesh(2, 4))

    @shardc.flow
    def train(w, x):
        seen = act(shardc.late(w, 1), x)
        last = shardc.late(seen, 3, first=jnp.zeros((ROWS, 4)))
        return learn(w, shardc.late(seen, 1, first=jnp.ones((ROWS, 4))), last), {"w": w, "last": last}

    assert_same(train, jnp.ones(()), map(next_batch, range(9)))


@pytest.mark.parametrize("rounds", [11, 12, 13])
def test_rates_of_2_3_and_6_together(rounds):
    one, two, three = mesh(0, 2), mesh(2, 2), mesh(4, 4)
    step = shardc.function(lambda w, x: w * 0.9 + x, mesh=one, donate_argnames="w")
    second = shardc.function(lambda w: (w**2).sum(), mesh=two)
    third = shardc.function(lambda w: w[:2] * 3, mesh=three)
    both = shardc.function(lambda a, b, c: a + b.sum() - c, mesh=two)

    @shardc.flow
    def train(w, x):
        w = step(w, x)
        a, b = shardc.every(2, second)(w), shardc.every(3, third)(w)
        c = shardc.every(6, both)(a, b, shardc.late(a, 4, first=jnp.zeros(())))
        host = shardc.every(3, EVALUATE)({"w": shardc.late(w, 2, first=jnp.zeros(4))})
        return w, [a, b, c, host, w]

    assert_same(train, jnp.ones(4), itertools.repeat(0.5 * jnp.ones(4), rounds))


# ---- meshes


def test_several_functions_on_one_mesh_and_on_overlapping_ones():
    left, right, middle, all_of_them = mesh(0, 4), mesh(4, 4), mesh(2, 4), mesh(0, 8)
    f = shardc.function(lambda x, w: x * w, mesh=left, in_placements=SPLIT)
    g = shardc.function(lambda x: jnp.sin(x), mesh=right, in_placements=SPLIT)
    h = shardc.function(lambda x, y: x + y[::-1], mesh=middle, in_placements={"x": {"data": S(1)}})
    end = shardc.function(lambda w, z: (w + z.mean(), z.sum(0)), mesh=all_of_them, donate_argnames="w")

    @shardc.flow
    def train(w, x):
        z = h(f(x, w), g(f(x, shardc.late(w, 1))))
        return end(w, g(z))

    assert len(train.plan(jnp.ones(()), SHAPE).built.rows) == 2
    assert_same(train, jnp.ones(()), map(next_batch, range(6)))


def test_uneven_splits_and_pinned_partial_sums():
    one, two, three = mesh(0, 4), mesh(4, 3), mesh(2, 5)
    f = shardc.function(lambda x: (x * 2, x.sum(0)), mesh=one, in_placements=SPLIT,
                        out_placements=({"data": S(0)}, {"data": P}))  # fmt: skip
    g = shardc.function(lambda x, total: (x - total, x.max()), mesh=two, in_placements=SPLIT,
                        out_placements=({"data": S(0)}, {"data": B}))  # fmt: skip
    h = shardc.function(lambda w, x, y: w + (x * y).sum(), mesh=three, in_placements={**SPLIT, "y": {"data": S(1)}})
    look = shardc.host(lambda x, total: x.sum() - total.sum(), gives=SCALAR)

    @shardc.flow
    def train(w, x):
        x, total = f(x)
        y, most = g(x, total)
        old = shardc.late(x, 1, first=jnp.zeros((7, 5)))
        return h(w, old, y), {"x": x, "total": total, "y": y, "most": most, "look": look(x, total)}

    _, given = assert_same(train, jnp.ones(()), (np.random.default_rng(i).normal(size=(7, 5)) for i in range(5)))
    assert isinstance(given[0]["x"], shardc.PlacedArray)
    assert isinstance(given[0]["total"], shardc.PlacedArray)


def test_a_state_that_jax_cannot_place():
    f = shardc.function(lambda w, x: w + x, mesh=mesh(0, 4), in_placements={"w": {"data": S(0)}},
                        out_placements={"data": S(0)}, donate_argnames="w")  # fmt: skip

    @shardc.flow
    def train(w, x):
        return f(w, x), {"w": w, "old": shardc.late(w, 2)}

    state, _ = assert_same(train, jnp.arange(7.0), range(6))
    assert isinstance(state, shardc.PlacedArray)
    assert_same(train, jnp.arange(7.0), range(6), pause=2)


def test_random_keys_integers_and_bools():
    draw = shardc.function(
        lambda key, n, flag: (
            jax.random.split(key)[0], n * 3 % 1000, ~flag, jax.random.normal(key, (ROWS, 4)) * jnp.where(flag, 1, n),
        ),
        mesh=mesh(0, 4), out_placements=(None, None, None, {"data": S(0)}),
    )  # fmt: skip
    use = shardc.function(lambda x, key: x + jax.random.uniform(key, x.shape), mesh=mesh(4, 4), in_placements=SPLIT)
    look = shardc.host(lambda n, flag: (n > 500) | flag, gives=jax.ShapeDtypeStruct((), bool))

    @shardc.flow
    def train(state, key):
        new, n, flag, x = draw(state["key"], state["n"], state["flag"])
        y = use(x, key)
        return {"key": new, "n": n, "flag": flag}, {"y": y, "look": look(n, flag), "late": shardc.late(state["key"], 1)}

    state = {"key": jax.random.key(3), "n": jnp.int32(7), "flag": jnp.array(True)}
    assert_same(train, state, jax.random.split(jax.random.key(0), 6))
    raw = {**state, "key": jax.random.PRNGKey(3)}
    assert_same(train, raw, jax.random.split(jax.random.PRNGKey(0), 6))


@pytest.mark.parametrize("delay", [0, 1])
def test_a_pipeline_is_a_node(delay):
    def learn(params, batch):
        return pipelines.training(lambda p, b: pipelines.loss(p, b, (0,)), 2)(params, batch)

    learner = shardc.function(
        learn, mesh=shardc.make_mesh(pipe=2, data=2), in_placements={"batch": {"data": S(0)}},
        pipeline=shardc.Pipeline(axis="pipe"), donate_argnames="params",
    )  # fmt: skip
    act = shardc.function(lambda params, x: pipelines.chain(params, x, ()), mesh=mesh(4, 4), in_placements=SPLIT)

    @shardc.flow
    def train(params, key):
        x = READ(key, 1)
        y = act(shardc.late(params, delay), x)
        params, grads, value = learner(params, {"x": x, "y": y})
        return params, {"loss": value, "grads": grads, "size": shardc.every(2, EVALUATE)(params[0])}

    assert_same(train, jax.tree.map(jnp.asarray, pipelines.layers(2)), range(5))
    assert_same(train, jax.tree.map(jnp.asarray, pipelines.layers(2)), range(5), pause=2)


# ---- ends


def counted(last):
    """A loader of `last` batches."""
    count = itertools.count()

    def load():
        i = next(count)
        if i >= last:
            raise StopIteration
        return next_batch(i)

    return shardc.host(load, gives=SHAPE, credits=4)


@pytest.mark.parametrize("last", [0, 1, 5])
def test_a_loader_ends_the_run(last):
    def flow_of(load):
        f = shardc.function(lambda w, x: w + x.sum(), mesh=mesh(0, 2), donate_argnames="w")
        g = shardc.function(lambda w: w * 2, mesh=mesh(2, 2))

        @shardc.flow
        def train(w):
            new = f(w, load())
            return new, {"w": new, "twice": g(shardc.late(w, 2)), "thrice": shardc.every(3, g)(new)}

        return train

    wanted = plain(flow_of(counted(last)).__wrapped__, jnp.ones(()))
    state, given = timed(flow_of(counted(last)).run, jnp.ones(()))
    assert_equal((state, list(given)), wanted)
    assert len(given) == last


@pytest.mark.parametrize("rounds", [0, 2, 7])
def test_rounds_and_inputs_end_a_run(rounds):
    flow = parameter_server(1)
    assert_same(flow, start(), range(20), rounds=rounds)
    assert_same(flow, start(), range(rounds))
    assert_same(flow, start(), range(rounds), rounds=20)


# ---- host functions


def simulate(number, w, key):
    return {"x": w.sum() * number + key * np.ones(3), "n": np.int32(number)}


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_fleet(where):
    fleet = shardc.host(
        simulate, gives={"n": jax.ShapeDtypeStruct((), jnp.int32), "x": jax.ShapeDtypeStruct((3,), float)}, copies=3,
        where=where,
    )  # fmt: skip
    learn = shardc.function(
        lambda w, seen: w + seen["x"].mean() + seen["n"].sum(), mesh=mesh(0, 2), donate_argnames="w"
    )

    @shardc.flow
    def train(w, key):
        seen = fleet(shardc.late(w, 1), key)
        return learn(w, seen), seen

    assert_same(train, jnp.ones(2), range(6))
    train.close()


# ---- bounds


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("credits", [1, 3])
def test_nobody_is_ahead_by_more_than_the_registers(delay, credits):
    """A register is taken when the giver begins, and free when the taker has ended."""
    flow, rounds = parameter_server(delay, rate=1, credits=credits), 24
    _, given = flow.run(start(), range(rounds), record=True)
    spans = {(str(s.label), s.round): s for s in given.spans}
    edges = flow.plan(start(), 0).edges
    assert len(spans) == rounds * len(flow.plan(start(), 0).nodes)
    for e, r in itertools.product(edges, range(rounds)):
        read, freed = r + e.delay, r + e.delay - e.registers  # the rounds in which the taker reads it, and gave way
        begin = spans[e.giver.name, r].start
        assert read >= rounds or spans[e.taker.name, read].start >= begin
        assert freed < 0 or spans[e.taker.name, freed].end <= begin or e.giver is e.taker
    assert set(given.seconds) == {n.name for n in flow.plan(start(), 0).nodes}


# ---- donation


@pytest.mark.parametrize("readers", ["host", "late", "logged", "mesh", "late host", "other mesh"])
def test_what_is_donated_is_copied_for_its_other_readers(readers):
    step = shardc.function(lambda w, x: (w * 0.5 + x, w.sum()), mesh=mesh(0, 2), donate_argnames="w")
    look = shardc.function(lambda w: w.sum() * 2, mesh=mesh(0, 2))
    far = shardc.function(lambda w: w.sum() * 3, mesh=mesh(2, 2), donate_argnames="w")
    host = shardc.host(lambda w: w.sum(), gives=SCALAR)

    @shardc.flow
    def train(w, x):
        made, total = step(w, x)
        seen = {
            "host": lambda: host(made),
            "late": lambda: look(shardc.late(w, 2)),
            "logged": lambda: (made, w, shardc.late(w, 1)),
            "mesh": lambda: look(made),
            "late host": lambda: host(shardc.late(w, 2)),
            "other mesh": lambda: far(made),
        }[readers]()
        return made, (total, seen)

    assert_same(train, jnp.ones(64), np.random.default_rng(0).normal(size=(12, 64)))
    if readers in ("host", "late", "late host"):
        assert any(m.copied for e in train.plan(jnp.ones(64), jnp.ones(64)).edges for m in e.moves)


def test_a_result_that_two_functions_donate():
    make = shardc.function(lambda w, x: (w + x, w * x), mesh=mesh(0, 2), donate_argnames="w")
    take = shardc.function(lambda z: z * 2, mesh=mesh(0, 2), donate_argnames="z")

    @shardc.flow
    def train(w, x):
        w, z = make(w, x)
        return w, (take(z), take(z), take(shardc.late(z, 1, first=jnp.zeros(64))))

    assert_same(train, jnp.ones(64), np.random.default_rng(0).normal(size=(8, 64)))


def test_what_does_not_change_is_not_donated_away():
    """Leaves of the state that stay, arrays of the function's surroundings, `first=` and items are used again."""
    one = mesh(0, 1)
    whole = jax.sharding.NamedSharding(one, jax.sharding.PartitionSpec())
    fixed, first, item = (jax.device_put(jnp.arange(64.0) * i, whole) for i in range(3))
    add = shardc.function(lambda x, y: x + y, mesh=one, donate_argnames="x")

    @shardc.flow
    def train(state, x):
        new = add(state["stays"], add(fixed, add(state["w"], x)))
        late = add(shardc.late(new, 3, first=first), x)
        return {"w": new, "stays": state["stays"]}, (late, add(x, new), x)

    for _ in range(2):
        assert_same(train, {"w": jnp.ones(64), "stays": jnp.ones(64)}, [item] * 5)


def test_one_array_twice_in_a_state():
    """As the weights of a target network are in the beginning."""
    step = shardc.function(
        lambda s: {"now": s["now"] + s["target"], "target": s["now"]}, mesh=mesh(0, 2), donate_argnames="s"
    )

    @shardc.flow
    def train(state):
        return step(state), state["target"]

    wanted = plain(train.__wrapped__, {"now": jnp.ones(64), "target": jnp.ones(64)}, rounds=4)
    x = jnp.ones(64)
    state, given = train.run({"now": x, "target": x}, rounds=4)
    assert_equal((state, list(given)), wanted)


def test_one_value_given_and_donated_in_one_call():
    mix = shardc.function(lambda w, v: (w + v.sum(), v * 2), mesh=mesh(0, 2), donate_argnames=("w", "v"))
    add = shardc.function(lambda x: x + 1, mesh=mesh(0, 2), donate_argnames="x")

    @shardc.flow
    def train(w):
        a = add(w)
        new, other = mix(a, a)
        return add(new), (other, mix(w, w))

    assert_same(train, jnp.ones(64), rounds=4)


# ---- runs that go on


@pytest.mark.parametrize("pause", [None, 1, 2, 4])
def test_late_parts_of_the_state_are_kept_while_others_are_donated(pause):
    step = shardc.function(lambda a, b: a + 0.5 * b, mesh=mesh(0, 2), donate_argnames="a")
    total = shardc.function(lambda b: b.sum(), mesh=mesh(0, 2), donate_argnames="b")

    @shardc.flow
    def train(state):
        new = step(state["a"], state["b"])
        late = shardc.late(state["a"], 2)
        return {"a": new, "b": state["a"], "c": late}, (total(state["b"]), state["b"], state["a"], late, state["c"])

    state = {"a": jnp.ones(64), "b": 2 * jnp.ones(64), "c": 3 * jnp.ones(64)}
    assert_same(train, state, rounds=6, pause=pause)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pause", [1, 4, 7])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_run_goes_on_from_its_state_and_what_was_pending(delay, pause):
    assert_same(parameter_server(delay, rate=1), start(), range(10), pause=pause)


def test_a_run_goes_on_at_a_multiple_of_its_period():
    assert_same(parameter_server(2, rate=3), start(), range(12), pause=6)


def test_the_same_flow_runs_again():
    flow = parameter_server(1)
    for _ in range(2):
        assert_same(flow, start(), range(4))
    flow.close()
    assert_same(flow, start(), range(4))


# ---- errors


class Mistake(Exception):
    pass


@pytest.mark.parametrize("donate", ["state", ()])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_after_an_error_the_state_of_the_last_complete_round_goes_on(at, donate):
    broken = [True]

    def read(key):
        if key == at and broken[0]:
            raise Mistake("no file")
        return next_batch(key)

    load = shardc.host(read, gives=SHAPE)
    grad = shardc.function(grad_of, mesh=mesh(0, 2), in_placements=SPLIT)
    update = shardc.function(apply, mesh=mesh(6, 2), donate_argnames=donate)

    @shardc.flow
    def train(state, key):
        state, value = update(state, [grad(state["params"], load(key))])
        return state, value

    broken[0] = False
    wanted = plain(train.__wrapped__, start(), range(8))
    broken[0] = True
    with pytest.raises(RoundFailedError) as caught:
        timed(train.run, start(), range(8))
    error = caught.value
    assert (error.node, error.round) == ("read", at)
    assert max(0, at - 4) <= error.rounds <= at  # what was complete when the actors stopped
    assert isinstance(error.__cause__, Mistake)
    broken[0] = False
    assert error.state is not None
    state, given = train.run(error.state, range(error.rounds, 8))
    assert_equal((state, [*error.given, *given]), wanted)


def test_memory_is_as_it_was():
    flow = parameter_server(2)
    flow.run(start(), range(4))
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        flow.run(start(), range(6))
    with pytest.raises(RoundFailedError):
        flow.run(start(), [0, 1, 2, 10**30])
    gc.collect()
    assert len(jax.live_arrays()) <= before


@pytest.mark.parametrize("drop", [False, True])
def test_threads_end_with_the_flow(drop):
    flow, others = parameter_server(1), actor_threads()  # of tests before
    flow.run(start(), range(3))
    mine = [t for t in actor_threads() if t not in others]
    assert len(mine) >= 9
    if drop:
        del flow
        gc.collect()
    else:
        flow.close()
    for thread in mine:
        thread.join(5)
    assert not any(t.is_alive() for t in mine)


def test_actors_run_under_the_settings_of_the_thread_that_runs_the_flow():
    f = shardc.function(jnp.dot, mesh=mesh(0, 2))

    @shardc.flow
    def train(w, x):
        return f(w, x), None

    with jax.default_matmul_precision("highest"):
        train.run(jnp.eye(4), [jnp.eye(4)] * 3)
    assert len(f._plans) == 1
