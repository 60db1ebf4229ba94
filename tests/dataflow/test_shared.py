"""States that are changed as changes come: bounds on staleness, quorums, each change exactly once."""

import threading
import time
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import shardc
from shardc import S
from shardc.errors import ArgumentError, FlowError, RoundFailedError
from tests.runtime.watchdog import within

N = 3
FLOAT = jax.ShapeDtypeStruct((), jnp.float32)
FLOAT_2 = jax.ShapeDtypeStruct((2,), jnp.float32)


def meshes():
    devices = jax.devices()
    workers = [Mesh(np.array(devices[2 * i : 2 * i + 2]), ("data",)) for i in range(N)]
    return workers, Mesh(np.array(devices[6:8]), ("data",))


def run(flow, *args, **options):
    wide = jax.config.jax_enable_x64  # of this thread

    def go():
        with jax.enable_x64(wide):
            return flow.run(*args, **options)

    try:
        return within(60, go)
    finally:
        flow.close()


# -- clocks: the state knows who has changed it how often


def clocks(workers=N):
    return {"count": jnp.zeros(workers, jnp.int32), "ahead": jnp.zeros((), jnp.int32), "w": jnp.zeros(8)}


def tick(state, one, _=None):
    """Count a change; `ahead`: the rounds by which somebody who changes was ahead of the slowest."""
    n = state["count"]
    ahead = jnp.max(jnp.where(one > 0, n - n.min(), 0))
    new = n + (one > 0).astype(n.dtype)
    return {"count": new, "ahead": jnp.maximum(state["ahead"], ahead), "w": state["w"] + one.sum()}


def ticking(seconds, seen_first=True, **options):
    """A shared state, and a flow whose workers sleep `seconds(worker, round)` and change it."""
    workers, server = meshes()
    held = shardc.shared(clocks(), on=server)
    sleep = shardc.host(lambda i, k: time.sleep(seconds(int(i), int(k))) or np.float32(i), gives=FLOAT)
    works = [shardc.function(lambda n, i: jnp.arange(N, dtype=jnp.float32) * 0 + (jnp.arange(N) == i), mesh=m)
             for m in workers]  # fmt: skip

    @shardc.flow
    def flow(seen, k):
        found = []
        for i, work in enumerate(works):
            found.append(held.change(tick, work(seen[i], sleep(i, k)), **options)["count"])
        return (found if seen_first else seen), {"seen": found}

    return held, flow, [jnp.zeros(N, jnp.int32)] * N


def uneven(i, k):
    return float(np.random.default_rng([i, k]).choice([0, 0.0005, 0.004]))


@pytest.mark.parametrize("stale", [0, 1, 3])
def test_clocks_are_never_further_apart_than_stale(stale):
    held, flow, seen = ticking(lambda i, k: uneven(i, k) + 0.004 * (i == 1), stale=stale)
    _, given = run(flow, seen, range(30), record=True)
    assert held.changes == 90
    assert held.value["count"].tolist() == [30] * N
    assert int(held.value["ahead"]) <= stale
    for r, round in enumerate(given):
        for i, counts in enumerate(round["seen"]):
            assert counts[i] >= r + 1
            assert counts.min() >= r + 1 - stale
    assert apart(given.spans, "tick") <= stale


def apart(spans, name):
    """The largest number of rounds by which a node that began was ahead of others, by the spans of a run."""
    ends = {}
    for span in spans:
        label = str(span.label)
        if label.partition("[")[0] == name and "seen" not in label:
            ends.setdefault(label, []).append((span.start, span.end))
    assert len(ends) == N
    begun = [(start, r) for each in ends.values() for r, (start, _) in enumerate(sorted(each))]
    return max(r - min(sum(end <= start for _, end in each) for each in ends.values()) for start, r in begun)


@pytest.mark.parametrize("seen_first", [True, False], ids=["sees", "does not look"])
@pytest.mark.parametrize("stale", [0, 1, 4])
def test_fast_workers_are_as_far_ahead_as_they_may(stale, seen_first):
    held, flow, seen = ticking(lambda i, k: 1.0 * (i == 1 and k == 2), seen_first=seen_first, stale=stale)
    _, given = run(flow, seen, range(10))
    assert int(held.value["ahead"]) == stale
    if stale == 0:
        assert [n.tolist() for round in given for n in round["seen"]] == [
            [r + 1] * N for r in range(10) for _ in range(N)
        ]


def count_of(state):
    return state["count"] + 0


def counts(held, computed, stale):
    """What reads of a round have: the state, or what a function makes of it."""
    return held.read(count_of, stale=stale) if computed else held.read(stale=stale)["count"]


@pytest.mark.parametrize("computed", [False, True])
def test_bulk_synchronous_reads_have_the_changes_of_their_round_and_no_others(computed):
    workers, server = meshes()
    held = shardc.shared(clocks(), on=server)
    sleep = shardc.host(lambda i, k: time.sleep(uneven(int(i), int(k))) or np.float32(i), gives=FLOAT)
    works = [shardc.function(lambda n, i: (jnp.arange(N) == i) * 1.0, mesh=m) for m in workers]

    @shardc.flow
    def flow(state, k):
        before = [counts(held, computed, 0) for _ in works]
        changes = [
            held.change(tick, work(n, sleep(i, k))) for i, (work, n) in enumerate(zip(works, before, strict=True))
        ]
        return state, {"before": before, "after": [c["count"] for c in changes]}

    _, given = run(flow, (), range(40))
    for r, round in enumerate(given):
        assert [n.tolist() for n in round["before"]] == [[r] * N] * N
        assert [n.tolist() for n in round["after"]] == [[r + 1] * N] * N


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("stale", [1, 2, None])
def test_reads_as_a_round_begins(stale, computed):
    workers, server = meshes()
    held = shardc.shared(clocks(), on=server)
    sleep = shardc.host(lambda i, k: time.sleep(uneven(int(i), int(k))) or np.float32(i), gives=FLOAT)
    works = [shardc.function(lambda n, i: (jnp.arange(N) == i) * 1.0, mesh=m) for m in workers]

    @shardc.flow
    def flow(state, k):
        before = [counts(held, computed, stale) for _ in works]
        for i, (work, n) in enumerate(zip(works, before, strict=True)):
            held.change(tick, work(n, sleep(i, k)), stale=stale)
        return state, {"before": before}

    _, given = run(flow, (), range(30))
    assert held.value["count"].tolist() == [30] * N
    if stale is not None:
        assert all(n.min() >= r - stale for r, round in enumerate(given) for n in round["before"])


# -- numbers


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w) - 1) ** 2)


def batch(k, i):
    time.sleep(uneven(int(i), int(k)))
    return np.random.default_rng([int(k), int(i)]).normal(size=(8, 4))


def descend(state, g):
    return {"w": state["w"] - 0.1 * g / N, "n": state["n"] + 1}


@pytest.mark.parametrize("first", [False, True], ids=["change", "read"])
def test_bulk_synchronous_is_data_parallel(first):
    with jax.enable_x64(True):
        workers, server = meshes()
        begin = {"w": jnp.ones((4, 3)), "n": jnp.zeros((), int)}
        held = shardc.shared(begin, on=server)
        grads = [shardc.function(jax.value_and_grad(loss), mesh=m, in_placements={"x": {"data": S(0)}})
                 for m in workers]  # fmt: skip
        read = shardc.host(batch, gives=jax.ShapeDtypeStruct((8, 4), float))

        @shardc.flow
        def train(seen, k):
            losses, now = [], []
            for i, grad in enumerate(grads):
                found, g = grad(held.read(stale=0)["w"] if first else seen[i], read(k, i))
                losses.append(found)
                now.append(held.change(descend, g)["w"])
            return (seen if first else now), {"loss": losses}

        _, given = run(train, [begin["w"]] * N, range(25))
        w, losses = begin["w"], []
        for k in range(25):
            found = [jax.value_and_grad(loss)(w, batch(k, i)) for i in range(N)]
            losses.append([float(x) for x, _ in found])
            w = w - 0.1 * sum(g for _, g in found) / N
        np.testing.assert_allclose([[float(x) for x in g["loss"]] for g in given], losses, rtol=1e-12)
        np.testing.assert_allclose(held.value["w"], w, rtol=1e-12)
        assert held.changes == int(held.value["n"]) == 25 * N


def test_a_slow_worker_of_an_asynchronous_flow_delays_nobody():
    held, flow, seen = ticking(lambda i, k: 0.002 if i else 1.0 * (k == 10), stale=None)
    _, given = run(flow, seen, range(20), record=True)
    ends = {}
    for span in given.spans:
        ends.setdefault(str(span.label), []).append(span.end)
    slow, *fast = (sorted(ends[name]) for name in ("tick", "tick[1]", "tick[2]"))
    assert all(each[-1] < slow[-1] for each in fast)
    assert int(held.value["ahead"]) > 1
    assert held.value["count"].tolist() == [20] * N


def test_a_slow_device_delays_nobody():
    workers, server = meshes()
    held = shardc.shared(clocks(), on=server)

    def work(n, i):
        return (jnp.arange(N) == i) * 1.0 + 0 * n.sum()

    def slow(n, i):
        x = jax.lax.fori_loop(0, 60, lambda _, x: jnp.tanh(x @ x), jnp.ones((400, 400)))
        return work(n, i) + 0 * x.sum()

    works = [shardc.function(fn, mesh=m) for fn, m in zip((slow, work, work), workers, strict=True)]

    @shardc.flow
    def flow(seen, k):
        return [
            held.change(tick, g(n, i), stale=None)["count"] for i, (g, n) in enumerate(zip(works, seen, strict=True))
        ], ()

    run(flow, [jnp.zeros(N, jnp.int32)] * N, range(2))
    run(flow, [jnp.zeros(N, jnp.int32)] * N, range(12))
    assert held.value["count"].tolist() == [14] * N
    assert int(held.value["ahead"]) > 1


def test_a_slow_worker_does_not_make_the_results_of_others_pile_up():
    alive = []

    def seconds(i, k):
        if i == 0:
            alive.append(sum(x.shape == (7, 11) for x in jax.live_arrays()))
        return 0.005 * (i == 0)

    workers, server = meshes()
    held = shardc.shared(jnp.zeros((7, 11)), on=server)
    sleep = shardc.host(lambda i, k: time.sleep(seconds(int(i), int(k))) or np.float32(i), gives=FLOAT)
    works = [shardc.function(lambda w, i: i + w.sum(), mesh=m) for m in workers]

    @shardc.flow
    def flow(seen, k):
        return [held.change(lambda w, x: w + x * 0, g(w, sleep(i, k)), stale=None) for i, (g, w) in
                enumerate(zip(works, seen, strict=True))], ()  # fmt: skip

    run(flow, [jnp.zeros((7, 11))] * N, range(60))
    assert max(alive) < 60  # 2 fast workers would leave 100 and more


# -- quorums


def test_late_changes_of_a_quorum_come_with_the_next():
    held, flow, seen = ticking(lambda i, k: 0.004 if i else 0.03, quorum=(2, 3), grace=0.002)
    run(flow, seen, range(20))
    assert held.value["count"].tolist() == [20] * N  # each in one change, and in no other
    assert held.changes < 40
    assert int(held.value["ahead"]) > 2


@pytest.mark.parametrize("quorum", [(1, 1), (1, 3), (2, 2), (3, 3)])
def test_each_change_of_a_quorum_is_applied_once(quorum):
    held, flow, seen = ticking(uneven, quorum=quorum, grace=0.001)
    run(flow, seen, range(25))
    assert held.value["count"].tolist() == [25] * N
    assert 25 * N / quorum[1] <= held.changes <= 25 * N / quorum[0] + 25


def test_a_grace_that_is_long_enough_waits_for_all():
    held, flow, seen = ticking(lambda i, k: 0.002 if i else 0.02, quorum=(2, 3), grace=60.0)
    begin = time.monotonic()
    run(flow, seen, range(10))
    assert (held.changes, int(held.value["ahead"])) == (10, 0)
    assert time.monotonic() - begin < 60


def test_a_quorum_applies_the_mean():
    workers, server = meshes()
    held = shardc.shared(jnp.zeros(()), on=server)
    give = shardc.host(lambda k, i: np.float32(int(k) * 10**i), gives=FLOAT)
    works = [shardc.function(lambda x: x + 0, mesh=m) for m in workers]

    @shardc.flow
    def flow(state, k):
        changes = [held.change(lambda w, x, by: w + by * x, work(give(k, i)), 3.0, quorum=(N, N)) for i, work in
                   enumerate(works)]  # fmt: skip
        return state, changes

    run(flow, (), range(5))
    assert float(held.value) == 111 * 10
    assert held.changes == 5


def test_who_comes_late_counts_as_much():
    workers, server = meshes()
    held = shardc.shared(jnp.zeros(2), on=server)
    give = shardc.host(lambda k, i: time.sleep(0.02 * (i == 0)) or np.float32([i == 0, 1]), gives=FLOAT_2)
    works = [shardc.function(lambda x: x + 0, mesh=m) for m in workers]

    @shardc.flow
    def flow(state, k):
        return state, [held.change(lambda w, x: w + x, work(give(k, i)), quorum=(2, 3)) for i, work in enumerate(works)]

    run(flow, (), range(12))
    np.testing.assert_allclose(held.value, [12 / N, 12], rtol=1e-5)
    assert held.changes > 12


def test_inputs_that_end_leave_nobody_waiting():
    held, flow, seen = ticking(lambda i, k: 0.001 * i, quorum=(N, N), grace=60.0)
    _, given = run(flow, seen, iter(range(7)))
    assert (len(given), held.changes) == (7, 7)


def test_a_loader_that_ends_leaves_nobody_waiting():
    def seconds(i, k):
        if (i, k) == (1, 5):
            raise StopIteration
        return 0.0

    held, flow, seen = ticking(seconds, quorum=(2, N), grace=60.0)
    run(flow, seen, range(100))
    assert held.value["count"][1] == 5
    assert held.value["count"].min() == 5


def test_a_failure_leaves_nobody_waiting():
    def seconds(i, k):
        if (i, k) == (1, 5):
            raise ValueError("no more disk")
        return 0.0

    held, flow, seen = ticking(seconds, quorum=(N, N), grace=60.0)
    with pytest.raises(RoundFailedError, match=r"failed in round 5.*no more disk"):
        run(flow, seen, range(100))
    assert held.changes <= 5
    assert held.value["count"].tolist() == [held.changes] * N


def test_the_flow_runs_again_after_a_failure():
    fails = [True]

    def seconds(i, k):
        if fails and (i, k) == (1, 5):
            fails.clear()
            raise ValueError("no more disk")
        return 0.0

    held, flow, seen = ticking(seconds, quorum=(N, N))
    with pytest.raises(RoundFailedError):
        within(60, lambda: flow.run(seen, range(10)))
    before = held.changes
    run(flow, seen, range(10))
    assert held.changes == before + 10


def test_changes_of_a_quorum_that_wait_for_each_other_are_an_error():
    workers, server = meshes()
    held = shardc.shared(jnp.zeros(()), on=server)
    add = shardc.function(lambda w: w + 1, mesh=workers[0])

    def change(w, x):
        return w + x

    @shardc.flow
    def flow(state, x):
        seen = held.change(change, x, quorum=(2, 2))
        held.change(change, add(seen), quorum=(2, 2))
        return state, ()

    with pytest.raises(RoundFailedError, match="1 changes wait for a quorum of 2, and all others wait for them"):
        run(flow, (), [1.0] * 3)


# -- other programs on the same devices


def test_functions_and_other_states_on_the_same_mesh():
    workers, server = meshes()
    one = shardc.shared({"w": jnp.zeros((8, 8))}, on=server)
    two = shardc.shared({"w": jnp.zeros((8, 8))}, on=server)

    def mixed(state, x):  # sums over devices
        return {"w": state["w"] + x.sum() + 0 * (state["w"] @ state["w"].T)}

    put = {"state": {"w": {"data": S(0)}}, "x": {"data": S(0)}}
    mix = shardc.function(mixed, mesh=server, in_placements=put, out_placements={"w": {"data": S(0)}})
    total = shardc.function(lambda x: x.sum(), mesh=server, in_placements={"x": {"data": S(0)}})
    give = [shardc.function(lambda w, k: jnp.ones((8, 8)) * (w[0, 0] * 0 + 1), mesh=m) for m in workers]

    @shardc.flow
    def flow(seen, k):
        sums, now = [], []
        for g, w in zip(give, seen, strict=True):
            x = g(w, k)
            sums.append(total(x))
            two.change(mix, x, stale=None)
            now.append(one.change(mix, x, stale=None)["w"])
        return now, sums

    _, given = run(flow, [jnp.zeros((8, 8))] * N, range(50))
    assert all(float(x) == 64 for sums in given for x in sums)
    for held in (one, two):
        assert float(held.value["w"][3, 3]) == 64 * 50 * N
        assert held.changes == 50 * N


@pytest.mark.parametrize("stale", [0, 1])
def test_a_worker_on_the_same_mesh_that_overwrites_what_it_sees(stale):
    workers, server = meshes()
    begin = {"w": jnp.ones((4, 4)), "n": jnp.zeros(())}
    held = shardc.shared(begin, on=server)

    def work(w, x):
        return w * 0 + x, w.sum()

    here = shardc.function(work, mesh=server, donate_argnames="w")
    there = shardc.function(work, mesh=workers[0], donate_argnames="w")

    def add(state, g):
        return {"w": state["w"] + g, "n": state["n"] + 1}

    @shardc.flow
    def flow(seen, x):
        new, sums = [], []
        for work, w in zip((here, there), seen, strict=True):
            g, total = work(w, x)
            sums.append(total)
            new.append(held.change(add, g, stale=stale)["w"])
        return new, sums

    _, given = run(flow, [jnp.ones((4, 4)), jnp.ones((4, 4))], [1.0] * 20)
    assert held.value["w"].tolist() == [[41.0] * 4] * 4
    if stale == 0:
        assert [[float(x) for x in g] for g in given] == [[16.0 * (1 + 2 * r)] * 2 for r in range(20)]


def counter(seconds=0.0):
    _, server = meshes()
    held = shardc.shared({"n": jnp.zeros(4)}, on=server)
    read = shardc.host(lambda k: time.sleep(seconds) or k, gives=FLOAT)

    def add(state, x):
        return {"n": state["n"] + x}

    def flow_of():
        @shardc.flow
        def flow(state, k):
            return state, held.change(add, read(k))["n"]

        return flow

    return held, flow_of


def test_two_flows_at_once_are_an_error():
    held, flow_of = counter(0.02)
    one, two = flow_of(), flow_of()
    ended = []
    thread = threading.Thread(target=lambda: ended.append(one.run((), map(float, range(20)))))
    thread.start()
    while not held.changes:
        time.sleep(0.001)
    with pytest.raises(FlowError, match="another flow that is running changes its shared state"):
        two.run((), [1.0])
    thread.join(60)
    assert ended
    run(two, (), [1.0])
    assert held.changes == 21
    one.close()


def test_the_value_is_a_copy_and_what_was_given_is_kept():
    _, server = meshes()
    given = {"n": jax.device_put(jnp.zeros(4), jax.NamedSharding(server, jax.P()))}
    held = shardc.shared(given, on=server)

    @shardc.flow
    def flow(state, k):
        return state, held.change(lambda s, x: {"n": s["n"] + x}, k)["n"]

    before = held.value
    _, seen = run(flow, (), [1.0, 2.0, 3.0])
    assert held.value["n"].tolist() == [6.0] * 4
    assert before["n"].tolist() == given["n"].tolist() == [0.0] * 4
    assert [x.tolist()[0] for x in seen] == [1.0, 3.0, 6.0]


def test_the_value_is_read_while_a_flow_runs():
    _, server = meshes()
    held = shardc.shared({"a": jnp.zeros(4), "b": jnp.zeros(4)}, on=server)

    @shardc.flow
    def flow(state, k):
        return state, held.change(lambda s, x: jax.tree.map(lambda a: a + x, s), k)["a"]

    ended = threading.Event()
    thread = threading.Thread(target=lambda: (run(flow, (), [1.0] * 200), ended.set()))
    thread.start()
    values = []
    while not ended.is_set():
        values.append(held.value)
    thread.join(60)
    firsts = [float(v["a"][0]) for v in values]
    assert all((v["a"] == v["b"]).all() for v in values)
    assert firsts == sorted(firsts)
    assert held.changes == 200


def test_a_host_function_changes_what_another_one_reads():
    """Evaluation reads while training goes on."""
    held, _ = counter()
    note = []
    look = shardc.host(lambda n: note.append(float(n[0])))
    numbers = count()
    give = shardc.host(lambda: next(numbers) * 0 + 1.0, gives=FLOAT)

    @shardc.flow
    def flow(state):
        held.change(lambda s, x: {"n": s["n"] + x}, give())
        shardc.every(5, look)(held.read(stale=0)["n"])
        return state, ()

    run(flow, (), rounds=20)
    assert note == [4.0, 9.0, 14.0, 19.0]


# -- plans


def test_a_plan_needs_no_devices():
    worker, server = AbstractMesh((2,), ("data",)), AbstractMesh((4,), ("model",))
    state = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
    held = shardc.shared(state, on=server)
    grad = shardc.function(lambda w, x: w * x, mesh=worker)

    @shardc.flow
    def flow(w, x):
        new = held.change(lambda s, g: {"w": s["w"] - g, "n": s["n"] + 1}, grad(w, x), stale=1)
        return new["w"], ()

    plan = flow.plan(state["w"], jax.ShapeDtypeStruct((), jnp.float32))
    moved = {(e.giver.name, e.taker.name): e.bytes for e in plan.edges if e.bytes}
    assert moved["<lambda> seen", "<lambda>"] == 64 * 32 * 4  # the counter, which nobody reads, is not sent
    assert "<lambda> seen" in plan.explain()


def test_changes_wait_for_reads_of_the_round_before():
    _, flow, seen = ticking(uneven, stale=0)
    waits = {(e.giver.name, e.taker.name, e.delay) for e in flow.plan(seen, 0).edges if not e.moves}
    names = ["tick", "tick[1]", "tick[2]"]
    assert {(name, "tick seen", 0) for name in names} | {("tick seen", name, 1) for name in names} <= waits


@pytest.mark.parametrize("state", [{"n": 0, "x": 0.0}, {"n": np.int64(0), "x": np.zeros(())}])
def test_states_of_numbers_and_numpy(state):
    _, server = meshes()
    held = shardc.shared(state, on=server)

    @shardc.flow
    def flow(now, k):
        before = held.read()
        held.change(lambda s, k: {"n": s["n"] + 1, "x": s["x"] + k}, k)
        return now, before

    _, given = run(flow, (), [1.0, 2.0])
    assert {n: (float(x), x.dtype.name) for n, x in held.value.items()} == {"n": (2, "int32"), "x": (3, "float32")}
    assert [(int(g["n"]), float(g["x"]), g["x"].dtype.name) for g in given] == [(0, 0, "float32"), (1, 1, "float32")]


def test_a_state_of_shapes_is_for_plans():
    _, server = meshes()
    held = shardc.shared(jax.ShapeDtypeStruct((), jnp.float32), on=server)

    @shardc.flow
    def flow(now, k):
        return now, held.change(lambda w, k: w + k, k)

    flow.plan((), 1.0)
    with pytest.raises(FlowError, match="has shapes alone, which is enough for plans"):
        run(flow, (), [1.0])


def test_bulk_synchronous_workers_share_one_read():
    _, flow, seen = ticking(uneven, stale=0)
    names = [n.name for n in flow.plan(seen, 0).nodes]
    assert [n for n in names if "seen" in n] == ["tick seen"]
    _, flow, seen = ticking(uneven, stale=1)
    names = [n.name for n in flow.plan(seen, 0).nodes]
    assert len([n for n in names if "seen" in n]) == N


# -- errors


def test_what_is_wrong_outside_a_round():
    _, server = meshes()
    held = shardc.shared(jnp.zeros(()), on=server)
    with pytest.raises(ArgumentError, match="change is for a flow's round"):
        held.change(lambda w: w)
    with pytest.raises(ArgumentError, match=r"read is for a flow's round; outside of one, read `.value`"):
        held.read()
    with pytest.raises(ArgumentError, match="is no mesh"):
        shardc.shared(jnp.zeros(()), on="server")
    with pytest.raises(ArgumentError, match="no arrays"):
        shardc.shared({}, on=server)


def grow(w, x):
    return {"w": w, "x": x}


def widen(w, x):
    return w + jnp.zeros(3)


@pytest.mark.parametrize(
    ("fn", "options", "error", "text"),
    [
        (jnp.add, {"stale": -1}, ArgumentError, "stale=-1; it takes a whole number of rounds of 0 or more, or None"),
        (jnp.add, {"stale": 1.5}, ArgumentError, "stale=1.5"),
        (jnp.add, {"quorum": 3}, ArgumentError, r"quorum=3; it takes \(fewest, most\)"),
        (jnp.add, {"quorum": (3, 2)}, ArgumentError, r"quorum=\(3, 2\)"),
        (jnp.add, {"quorum": (1, 2)}, FlowError, r"quorum=\(1, 2\), but the round has 1 change"),
        (jnp.add, {"quorum": (1, 1), "grace": -1.0}, ArgumentError, "grace=-1.0"),
        (grow, {}, FlowError, "grow does not return a state like the one that it changes"),
        (widen, {}, FlowError, r"takes   float32\[\]\n  returns float32\[3\]"),
        (3, {}, ArgumentError, "a change, or a read, wants a function, got 3"),
    ],
)
def test_wrong_changes(fn, options, error, text):
    _, server = meshes()
    held = shardc.shared(jnp.zeros(()), on=server)
    if fn is jnp.add:
        fn = lambda w, x: w + x  # noqa: E731

    @shardc.flow
    def flow(state, x):
        return state, held.change(fn, x, **options)

    with pytest.raises(error, match=text):
        flow.plan((), 1.0)


def test_several_quorums_and_means_of_whole_numbers():
    _, server = meshes()
    held = shardc.shared(jnp.zeros(()), on=server)

    @shardc.flow
    def several(state, x):
        held.change(lambda w, x: w + x, x, quorum=(1, 2))
        held.change(lambda w, x: w + x, x)
        return state, ()

    @shardc.flow
    def whole(state, x):
        return state, held.change(lambda w, x: w + x, x, quorum=(1, 1))

    with pytest.raises(FlowError, match="have several quorums"):
        several.plan((), 1.0)
    with pytest.raises(FlowError, match="with quorum= it gets means"):
        whole.plan((), 1)


def test_a_function_on_another_mesh():
    workers, server = meshes()
    held = shardc.shared(jnp.zeros(()), on=server)
    there = shardc.function(lambda w, x: w + x, mesh=workers[0])

    @shardc.flow
    def flow(state, x):
        return state, held.change(there, x)

    @shardc.flow
    def reads(state, x):
        return state, held.read(there, x)

    for wrong in (flow, reads):
        with pytest.raises(ArgumentError, match="is on another mesh than the shared state that it takes"):
            wrong.plan((), 1.0)


def test_a_worker_that_needs_the_others_of_its_round_before_it_changes_is_a_deadlock():
    workers, server = meshes()
    held = shardc.shared(jnp.zeros(()), on=server)
    add = shardc.function(lambda w: w + 1, mesh=workers[0])

    @shardc.flow
    def flow(state, x):
        seen = held.change(lambda w, x: w + x, x)
        held.change(lambda w, x: w + x, add(seen))
        return state, ()

    with pytest.raises(FlowError, match="wait"):
        flow.plan((), 1.0)


@pytest.mark.parametrize("stale", [0, 2, None])
def test_simulated_rounds_are_as_far_apart(stale):
    workers, server = meshes()
    held = shardc.shared(clocks(), on=server)
    works = [shardc.function(lambda n: n * 1.0, mesh=m) for m in workers]
    waits = [shardc.host(lambda k: k, gives=FLOAT, seconds=(s, 0.0)) for s in (0.004, 0.04, 0.004)]

    @shardc.flow
    def flow(seen, k):
        return [held.change(tick, work(n), wait(k), stale=stale)["count"] for work, n, wait in
                zip(works, seen, waits, strict=True)], ()  # fmt: skip

    plan = flow.plan([jnp.zeros(N, jnp.int32)] * N, 0)
    done = [span for spans in plan.simulate(20).spans for span in spans]
    gap = apart(done, "tick")
    assert gap == stale if stale is not None else gap > 15
    assert plan.seconds_of(20) == pytest.approx(0.8, rel=0.02)
