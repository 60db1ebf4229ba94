"""Values carried from place to place, within a process and as the bytes that a link sends."""

from __future__ import annotations

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from shardc import P, S
from shardc.arrays import place as places
from shardc.arrays.place import Place, put_leaf
from shardc.arrays.placed import is_placed
from shardc.errors import ClusterError
from shardc.execute import ways as carriers
from shardc.execute.ways import Way, Ways, WaysCodec, moved
from shardc.machine.topology import DeviceLink
from shardc.sbp.placement import Placement

FAST, SLOW = DeviceLink(1e12, 1e-7), DeviceLink(1e6, 1e-4)
AXES = {"x": S(0)}, {"x": S(1)}, {"x": P()}, {}
SQUARE = *AXES, {"x": S(0), "y": S(1)}, {"y": S(0), "x": S(0)}, {"x": P(), "y": S(0)}


def mesh(name):
    d = np.array(jax.devices())
    return {
        "four": lambda: Mesh(d[:4], ("x",)),
        "other order": lambda: Mesh(d[[3, 1, 2, 0]], ("x",)),
        "others": lambda: Mesh(d[4:], ("x",)),
        "two": lambda: Mesh(d[4:6], ("x",)),
        "three": lambda: Mesh(d[5:], ("x",)),
        "square": lambda: Mesh(d[4:].reshape(2, 2), ("x", "y")),
    }[name]()


MESHES = "four", "other order", "others", "two", "three", "square"
VALUES = {
    "f32": np.arange(56, dtype=np.float32).reshape(8, 7),
    "uneven": np.arange(35, dtype=np.int32).reshape(7, 5),
    "one row": np.arange(4, dtype=np.float32).reshape(1, 4),
    "no row": np.zeros((0, 4), np.float32),
    "bf16": np.arange(32).reshape(4, 8).astype(jnp.bfloat16),
    "int4": (np.arange(32).reshape(8, 4) % 7 - 3).astype(jnp.int4),
    "bool": np.arange(32).reshape(8, 4) % 3 == 0,
    "f64": np.arange(32, dtype=np.float64).reshape(8, 4),
}


def pairs():
    """All meshes with each placement, one value each: the values go round."""
    names, found = itertools.cycle(VALUES), []
    for a, b in itertools.product(MESHES, MESHES):
        for p in SQUARE if a == "square" else AXES:
            for q in SQUARE if b == "square" else AXES:
                found.append((a, p, b, q, next(names)))
    return found


def ends(giver, given, taker, taken, x):
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return Place(aval, mesh(giver), Placement(given)), Place(aval, mesh(taker), Placement(taken))


@pytest.mark.parametrize(("giver", "given", "taker", "taken", "name"), pairs())
@pytest.mark.sampled(24)
def test_a_value_arrives(giver, given, taker, taken, name):
    with jax.enable_x64(name == "f64"):
        x = VALUES[name]
        if x.dtype in (bool, jnp.int4):
            given, taken = ({a: s for a, s in p.items() if s != P()} for p in (given, taken))
        here, there = ends(giver, given, taker, taken, x)
        for link in (FAST, SLOW):
            got = moved(put_leaf(x, here.mesh, here.at), here, there, link)
            np.testing.assert_array_equal(np.asarray(got), x)
            assert got.dtype == x.dtype
            physical = got.physical if is_placed(got) else got
            assert not x.size or physical.sharding.is_equivalent_to(there.sharding, physical.ndim)


def test_keys_and_weak_types_arrive():
    keys = jax.random.split(jax.random.key(3), 8)
    here, there = ends("four", {"x": S(0)}, "two", {}, keys)
    got = moved(jax.device_put(keys, here.sharding), here, there, SLOW)
    assert got.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))
    one = jnp.asarray(2.0)
    weak = jax.typeof(one * 1)
    here, there = Place(weak, mesh("four"), Placement()), Place(weak, mesh("two"), Placement())
    assert moved(here.enter(2.0), here, there, FAST).weak_type


def test_a_way_to_the_host_and_back():
    x = VALUES["uneven"]
    here = Place(jax.ShapeDtypeStruct(x.shape, x.dtype), mesh("three"), Placement({"x": S(0)}))
    host = Place(here.aval)
    down = moved(put_leaf(x, here.mesh, here.at), here, host, FAST)
    np.testing.assert_array_equal(np.asarray(down), x)
    mine = x.copy()
    up = moved(mine, host, here, FAST)
    mine[:] = 0  # the user may write to it
    np.testing.assert_array_equal(np.asarray(up), x)


def test_values_of_one_message_go_together():
    x, y, z = VALUES["f32"], VALUES["uneven"], VALUES["f32"][:, :4]
    ways = Ways([Way(*ends("four", {"x": S(0)}, "two", {"x": S(1)}, z), SLOW),
                 Way(*ends("four", {"x": S(0)}, "two", {"x": S(1)}, z), SLOW),
                 Way(*ends("four", {"x": S(0)}, "two", {"x": S(0)}, x), SLOW),
                 Way(*ends("four", {"x": P()}, "two", {}, y), SLOW)], wide=False)  # fmt: skip
    given = [w.given.enter(v) for w, v in zip(ways.ways, (z, z + 1, x, y), strict=True)]
    for _ in range(2):
        got = ways.arrive(ways.move(given))
        for w, v, want in zip(ways.ways, got, (z, z + 1, x, y), strict=True):
            np.testing.assert_array_equal(w.taken.value(v), want)
    assert ways.sent == ways.planned == 2 * sum(w.plan.border_bytes for w in ways.ways)


def test_what_stays_is_not_copied_unless_it_may_be_overwritten():
    x = VALUES["f32"]
    here, _ = ends("four", {"x": S(0)}, "two", {}, x)
    given = here.enter(x)
    assert Ways([Way(here, here, FAST)], False).move([given])[0] is given
    (copy,) = Ways([Way(here, here, FAST, copied=True)], False).move([given])
    given.delete()
    np.testing.assert_array_equal(np.asarray(copy), x)


def test_a_move_does_not_wait_for_its_value():
    here, there = ends("four", {"x": S(0)}, "two", {"x": S(1)}, VALUES["f32"])
    ways = Ways([Way(here, there, SLOW)], wide=False)
    ways.move([here.enter(VALUES["f32"])])  # compiled

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 40, lambda _, m: m @ m / 500, jnp.full((500, 500), 1.0)).sum() * 0 + x

    x = here.enter(VALUES["f32"])
    jax.block_until_ready(slow(x))
    given = slow(x)
    begin = time.perf_counter()
    moved_ = ways.move([given])
    launched = time.perf_counter() - begin
    jax.block_until_ready(moved_)
    assert launched < (time.perf_counter() - begin) / 2


# --- over links -------------------------------------------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch):
    """Fake processes: devices 0, 1 are in process 0, devices 2, 3 in process 1, the others in process 2."""
    now = [0]
    monkeypatch.setattr(places, "process_of", lambda d: min(d.id // 2, 2))
    for module in (places, carriers):
        monkeypatch.setattr(module, "me", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("given", "taker", "taken", "name"), list(itertools.product(AXES, ("others", "two", "square"), AXES, VALUES))
)
@pytest.mark.parametrize("carrier", ["links", "put"])
@pytest.mark.sampled(24)
def test_the_parts_of_two_processes_make_the_value_in_a_third(process, monkeypatch, given, taker, taken, name, carrier):
    monkeypatch.setattr(places, "carrier_between", lambda devices: carrier)
    with jax.enable_x64(name == "f64"):
        x = VALUES[name]
        if x.dtype in (bool, jnp.int4):
            given, taken = ({a: s for a, s in p.items() if s != P()} for p in (given, taken))
        here, there = ends("four", given, taker, taken, x)
        plan, of = here.way_to(there, SLOW), [Ways([Way(here, there, SLOW)], name == "f64") for _ in range(3)]
        parts = {}
        for process[0] in (0, 1):
            ways = of[process[0]]
            parts[process[0]] = WaysCodec([ways]).pack(0, 2, ways.leave([here.enter(x)]))
            assert ways.carrier == carrier or not x.size
            assert ways.sent == ways.planned == sum(b.nbytes for b in parts[process[0]][1])
        assert sum(ways.sent for ways in of) == plan.border_bytes == x.nbytes  # once, for all devices of the taker
        if carrier == "put":
            parts = {p: (about, [jax.device_put(o.array, o.device) for o in out]) for p, (about, out) in parts.items()}
        process[0] = 2
        (got,) = of[2].arrive(WaysCodec([of[2]]).unpack(0, parts))
        np.testing.assert_array_equal(there.value(got), x)


def test_another_plan_is_noticed(process):
    x = VALUES["f32"]
    one = Ways([Way(*ends("four", {"x": S(0)}, "two", {"x": S(0)}, x), SLOW)], False)
    other = Ways([Way(*ends("four", {"x": S(0)}, "two", {"x": S(1)}, x), SLOW)], False)
    packed = one.pack(2, one.leave([one.ways[0].given.enter(x)]))
    process[0] = 2
    with pytest.raises(ClusterError, match="another way"):
        other.unpack({0: packed})
