"""Nodes that share devices, links, an interpreter or cores: what a round takes, by arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import shardc
from shardc import S
from shardc.dataflow.timing import resources
from shardc.machine.mesh import view

FLOAT = jax.ShapeDtypeStruct((), jnp.float32)
LARGE = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)


def one(number, count=1):
    return Mesh(np.array(jax.devices()[number : number + count]), ("data",))


def on(mesh, fn=lambda x: x * 2, **options):
    return shardc.function(fn, mesh=mesh, **options)


def a_round(plan, **seconds):
    rounds = 400 * plan.network.period
    return plan.seconds_of(rounds, seconds=seconds) / rounds


def busiest(plan, **seconds):
    line = plan.timeline(rounds=40, seconds=seconds).splitlines()[1]
    return line.partition(" rounds; ")[2].partition(" is busiest")[0]


# ---- devices


def server(n, stale=1, quorum=None):
    held = shardc.shared(jnp.zeros(4), on=one(7))

    def change(w, g):
        return w + g

    work = [on(one(k), lambda w, x: w * x) for k in range(n)]

    @shardc.flow
    def train(s, x):
        for f in work:
            held.change(change, f(held.read(stale=stale), x), stale=stale, quorum=quorum)
        return s, None

    return train.plan((), 1.0)


@pytest.mark.parametrize("stale", [1, None])
def test_n_workers_take_n_changes_of_a_server_on_one_device(stale):
    for n in (1, 2, 6):
        plan = server(n, stale)
        assert a_round(plan, change=0.069) == pytest.approx(n * 0.069, rel=5e-3)
    assert busiest(plan, change=0.069) == "device 7"
    assert "device 7" in plan.explain().partition("Used in turns")[2]


def test_workers_that_are_slower_than_their_server_are_not_held_up():
    plan = server(3)
    assert a_round(plan, change=0.01, **{"<lambda>": 0.1}) == pytest.approx(0.11, rel=0.1)
    assert busiest(plan, change=0.01, **{"<lambda>": 0.1}).startswith("<lambda>")


def test_changes_of_a_quorum_are_applied_together():
    """The plan's seconds of a change are those of one program; four calls share it."""
    alone, together = server(4), server(4, quorum=(3, 4))
    seconds = [next(n.work.seconds for n in p.nodes if n.name == "change") for p in (alone, together)]
    assert seconds[0] == pytest.approx(4 * seconds[1])


def test_a_function_on_the_devices_of_a_shared_state_takes_turns_with_its_changes():
    held = shardc.shared(jnp.zeros(4), on=one(0, 2))
    both = on(one(1, 2), lambda x: x + 1)

    def change(w, g):
        return w + g

    @shardc.flow
    def train(s, x):
        held.change(change, x, stale=None)
        return both(s), None

    plan = train.plan(jnp.zeros(4), jax.ShapeDtypeStruct((4,), jnp.float32))
    assert a_round(plan, change=0.03, **{"<lambda>": 0.05}) == pytest.approx(0.08, rel=5e-3)
    users = {t.name: t.users for t in plan.turns if t.name.startswith("device")}
    assert "<lambda>" in users["device 1"] and "<lambda>" not in users.get("device 0", ())


def test_functions_on_meshes_apart_do_not():
    a, b = on(one(0)), on(one(1))

    @shardc.flow
    def train(s, x):
        return s, (a(x), b(x))

    assert a_round(train.plan((), 1.0), **{"<lambda>": 0.05}) == pytest.approx(0.05, rel=5e-3)


def test_meshes_without_devices():
    """Two shared states on one mesh that is only planned."""
    mesh = shardc.make_mesh(data=2, topology="v5p:2x2x1")
    assert isinstance(mesh, AbstractMesh)
    helds = [shardc.shared(FLOAT, on=mesh) for _ in range(2)]

    def change(w, g):
        return w + g

    @shardc.flow
    def train(s, x):
        for held in helds:
            held.change(change, x, stale=None)
        return s, None

    plan = train.plan((), 1.0)
    assert a_round(plan, change=0.01) == pytest.approx(0.02, rel=5e-3)
    assert busiest(plan, change=0.01) == "data=2"


# ---- links


def fan_in(n, most=1):
    """n meshes that each send 4 MiB to the last device."""
    make = [on(one(k), lambda s: jnp.zeros(LARGE.shape) + s) for k in range(n)]
    take = on(one(7), lambda *xs: sum(x.sum() for x in xs))

    @shardc.flow
    def train(s, x):
        return s, take(*(f(x) for f in make))

    return train.plan((), 1.0)


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_n_senders_share_the_link_into_a_device(n):
    plan = fan_in(n)
    link = view(one(7)).link
    sent = (4 << 20) / link.bandwidth
    quick = {"<lambda>": 0.0, "<lambda>#2": 0.0}
    assert a_round(plan, **quick) == pytest.approx(n * sent, rel=0.02)
    assert busiest(plan, **quick).startswith("link")


def test_a_device_that_sends_to_many_shares_the_link_out_of_it():
    """One device sends to three others and to a mesh of two, which each take it whole: five times over its link."""
    give = on(one(0), lambda x: jnp.zeros(LARGE.shape) + x)
    take = [on(m, lambda x: x.sum()) for m in (one(1), one(2), one(3), one(4, 2))]

    @shardc.flow
    def train(s, x):
        made = give(x)
        return s, [f(made) for f in take]

    plan = train.plan((), 1.0)
    sent = {(e.giver.name, e.taker.work.meshes[0].size): e.most_bytes for e in plan.edges if e.most_bytes > 4}
    assert sorted(sent.values()) == [4 << 20, 8 << 20] or sorted(sent.values()) == [4 << 20, 4 << 20]
    out = max(plan.turns, key=lambda t: (t.name == "link out of device 0", t.seconds))
    assert out.name == "link out of device 0"
    whole = sum(e.most_bytes for e in plan.edges if e.giver.name == give.__name__)
    assert out.seconds == pytest.approx(whole / view(one(0)).link.bandwidth)


def test_a_sharded_value_leaves_each_device_in_part():
    give = on(one(0, 4), lambda x: x * 2, in_placements={"x": {"data": S(0)}}, out_placements={"data": S(0)})
    take = on(one(4, 1), lambda x: x.sum())

    @shardc.flow
    def train(s, x):
        return s, take(give(x))

    plan = train.plan((), LARGE)
    edge = next(e for e in plan.edges if e.giver.name != "inputs")
    assert edge.most_bytes == edge.bytes == 4 << 20  # into the one; a quarter of it leaves each of the four
    assert [len(end) for end in edge.ends] == [4, 1]


# ---- host functions


def fleet(n, **options):
    play = shardc.host(lambda c, i: np.float32(c), gives=FLOAT, copies=n, **options)

    @shardc.flow
    def train(s, i):
        return s, play(i)

    return train.plan((), 0)


@pytest.mark.parametrize("n", [1, 4, 8])
def test_threads_share_the_interpreter(n, monkeypatch):
    monkeypatch.setattr(resources, "has_lock", lambda: True)
    assert a_round(fleet(n, seconds=0.03)) == pytest.approx(n * 0.03)
    assert a_round(fleet(n, seconds=(0.03, 0.0))) == pytest.approx(0.03)
    assert a_round(fleet(n, seconds=(0.03, 0.01))) == pytest.approx(max(0.03, n * 0.01), rel=0.02)
    text = fleet(n, seconds=0.03).explain()
    assert ("a round takes 30.0 ms: seconds=(of a call, in Python)" in text) == (n > 1)
    assert "count as pure Python" not in fleet(n, seconds=(0.03, 0.01)).explain()
    if n > 1:
        assert busiest(fleet(n, seconds=0.03)) == "Python's interpreter"


def test_processes_share_the_cores_of_this_machine(monkeypatch):
    monkeypatch.setattr(resources, "cores", lambda: 3)
    for n, turns in ((1, 1), (3, 1), (4, 4 / 3), (6, 2)):
        assert a_round(fleet(n, seconds=0.03, where="process")) == pytest.approx(turns * 0.03, rel=0.02)
        assert a_round(fleet(n, seconds=(0.03, 0.0), where="process")) == pytest.approx(0.03)
        assert a_round(fleet(n, seconds=0.03, where="ray")) == pytest.approx(0.03)  # its cluster finds the places
    assert busiest(fleet(6, seconds=0.03, where="process")) == "3 cores of this machine"


def test_an_interpreter_without_a_lock_runs_threads_on_all_cores(monkeypatch):
    monkeypatch.setattr(resources, "has_lock", lambda: False)
    monkeypatch.setattr(resources, "cores", lambda: 2)
    assert a_round(fleet(4, seconds=0.03)) == pytest.approx(0.06, rel=0.02)


def test_cores_of_this_machine_do_not_count_for_a_plan_of_another_one(monkeypatch):
    monkeypatch.setattr(resources, "cores", lambda: 2)
    mesh = shardc.make_mesh(data=2, topology="v5p:2x2x1")
    play = shardc.host(lambda c, i: np.float32(c), gives=FLOAT, copies=8, seconds=0.03, where="process")
    learn = on(mesh, lambda x: x.sum())

    @shardc.flow
    def train(s, i):
        return s, learn(play(i))

    assert a_round(train.plan((), 0)) == pytest.approx(0.03, rel=0.02)
