"""Values that go from a function on one mesh to one on another: they stay what they are, and nothing waits for them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import B, P, S
from shardc.arrays.place import Place
from shardc.dataflow.moves import EnteredValues, copied, entered, giving, on_host, taking, ways_of
from shardc.execute.ways import Way, Ways
from shardc.machine.mesh import border
from shardc.sbp.placement import Placement

LINE = ({}, {"data": S(0)}, {"data": S(1)}, {"data": P})
SQUARE = ({}, {"a": S(0), "b": S(1)}, {"b": S(0)}, {"a": P, "b": S(0)})
KINDS = ("int4", "bool", "key", "bfloat16")
SHAPES = ((8, 4), (7, 5), (1, 3), (0, 4), ())


def mesh(first, count, shape=None, names=("data",)):
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(shape or (count,)), names)


MESHES = {
    "4 to 4": (mesh(0, 4), LINE, mesh(4, 4)),
    "4 to 2": (mesh(0, 4), LINE, mesh(4, 2)),
    "2 to 4": (mesh(0, 2), LINE, mesh(4, 4)),
    "2x2 to 4": (mesh(0, 4, (2, 2), ("a", "b")), SQUARE, mesh(4, 4)),
    "overlapping": (mesh(0, 4), LINE, mesh(2, 4)),
    "the same devices in another order": (mesh(0, 4), LINE, Mesh(np.array(jax.devices()[3::-1]), ("data",))),
    "the same mesh": (mesh(0, 4), LINE, mesh(0, 4)),
}


def value(shape, kind):
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7
    match kind:
        case "key":
            return jax.random.split(jax.random.key(3), shape)
        case _:
            return jnp.asarray(x.astype(kind if kind == "bool" else np.float32)).astype(kind)


def numbers(x):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x).astype(np.float64)


def can_be(shape, placement, kind):
    """Whether a value can be at a placement: its dimensions are there, and devices can add its pieces."""
    dims = [p.dim for p in placement.values() if p not in (B, P)]
    return all(d < len(shape) for d in dims) and (P not in placement.values() or kind not in ("bool", "key"))


def cases(given, taken, sampled):
    """Values with where they are given and taken: one for each pair, and each kind and shape in one of them."""
    pairs = list(itertools.product(given, taken))
    every = [("float32", SHAPES[(k + sampled) % 2], pair) for k, pair in enumerate(pairs)]
    others = list(itertools.product(KINDS, SHAPES))
    some = [(*other, pairs[(k * 5 + sampled) % len(pairs)]) for k, other in enumerate(others)]
    for kind, shape, (at, to) in every + some:
        if can_be(shape, at, kind) and can_be(shape, to, kind):
            yield value(shape, kind), at, to


def carried(here, there, found):
    """What a function on one mesh gets of values that one on another mesh gives."""
    values, at, to = map(list, zip(*found, strict=True))
    give = shardc.function(lambda xs: xs, mesh=here, out_placements=at)
    take = shardc.function(lambda xs: xs, mesh=there, in_placements={"xs": to}, out_placements=to)

    @shardc.flow
    def flow(state, xs):
        return state, take(give(xs))

    _, given = flow.run(jnp.zeros(()), [values])
    flow.close()
    return given[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("meshes", MESHES)
def test_from_any_placement_to_any_other(meshes):
    here, given, there = MESHES[meshes]
    found = list(cases(given, LINE, len(meshes)))
    made = carried(here, there, found)
    for (x, at, to), y in zip(found, made, strict=True):
        assert (y.shape, y.dtype, y.devices()) == (x.shape, x.dtype, set(there.devices.flat)), (x.aval, at, to)
        np.testing.assert_array_equal(numbers(y), numbers(x), err_msg=f"{x.aval} from {at} to {to}")


def test_a_weakly_typed_value_stays_one():
    """As on one device, where it takes the type of what it is added to."""
    here, there = mesh(0, 2), mesh(2, 4)
    give = shardc.function(lambda x: (2.5, x), mesh=here)
    take = shardc.function(lambda a, b: a * b, mesh=there)

    @shardc.flow
    def flow(state, x):
        return state, take(*give(x))

    x = np.arange(4, dtype=jnp.bfloat16)
    assert flow.plan(0.0, x).nodes[2].work.results[0].dtype == jnp.bfloat16
    _, given = flow.run(jnp.zeros(()), [x])
    flow.close()
    assert given[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(given[0], 2.5 * x)


def test_late_values_are_boxed_behind_the_border_when_they_are_taken():
    """Those of the first rounds lie where they are taken; what a run leaves is given to the next one."""
    here, there = mesh(0, 4), mesh(4, 4)
    give = shardc.function(lambda s, x: (s + x, s * x), mesh=here, out_placements=({"data": S(0)}, {"data": P}))
    take = shardc.function(lambda a, b: (a + 2 * b).sum(), mesh=there, in_placements={"a": {}, "b": {"data": P}})

    @shardc.flow
    def flow(state, x):
        made = give(state, x)
        first = np.full((8, 6), 3, np.float32)
        return made[0], take(*(shardc.late(v, 2, first=first) for v in made))

    start, items = np.ones((8, 6), np.float32), [np.float32(k) for k in (1, 2, 3, 4, 5)]
    edge = next(e for e in flow.plan(start, items[0]).edges if e.delay == 2)
    assert ways_of(edge, None, None, False).finishes
    state, some = flow.run(start, items[:3])
    last, rest = flow.run(state, items[3:], pending=some.pending)
    flow.close()
    s, made, want = start, [(np.full_like(start, 3),) * 2] * 2, []
    for x in items:
        made.append((s + x, s * x))
        s = s + x
    want = [float((a + 2 * b).sum()) for a, b in made[:5]]
    np.testing.assert_allclose([float(x) for x in (*some, *rest)], want)
    np.testing.assert_array_equal(last, s)


def planned(given, taken, shape=(64, 64)):
    """A flow's edge between two places, and its ways."""
    (here, at), (there, to) = given, taken
    give = shardc.function(lambda x: x, mesh=here, out_placements=at)
    take = shardc.function(lambda x: x.sum(), mesh=there, in_placements={"x": to})

    @shardc.flow
    def flow(state, x):
        return state, take(give(x))

    edges = flow.plan((), jax.ShapeDtypeStruct(shape, np.float32)).edges
    edge = next(e for e in edges if e.giver.work.meshes and e.taker.work.meshes)
    return edge, ways_of(edge, None, None, False)


@jax.jit
def slow(x):
    return x + 0 * jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), jnp.ones((400, 400))).sum()


@pytest.mark.parametrize("at", [{"data": S(0)}, {"data": P}], ids=["S(0)", "P"])
def test_a_move_gathers_nothing_and_does_not_wait(at):
    edge, ways = planned((mesh(0, 4), at), (mesh(4, 4), {"data": S(1)}))
    place = edge.places(edge.moves[0])[0]
    x = place.enter(np.ones((64, 64), np.float32))
    move, take = giving(ways, True), taking(edge, ways, ways.arrive)
    jax.block_until_ready(take(move([place.leave(slow(x))])))
    late = slow(x)
    moved = take(move([place.leave(late)]))
    assert not late.is_ready()
    np.testing.assert_array_equal(moved[0], np.ones((64, 64)))
    (plan,) = edge.plans
    assert not plan.after.steps
    assert [step.kind for step in plan.before.steps] == ["reduce_scatter"] * (P in at.values())


def test_bytes_are_those_that_cross_the_border():
    """Each element once for each device that needs it; what is spread behind the border is counted apart."""
    whole = 64 * 64 * 4
    four, other = mesh(0, 4), mesh(4, 4)
    for at, to, least in (({"data": S(0)}, {"data": S(1)}, 1), ({"data": P}, {"data": S(0)}, 1), ({}, {}, 4)):
        edge, ways = planned((four, at), (other, to))
        assert edge.bytes == least * whole
        assert edge.most_bytes == edge.bytes // 4
        assert [w.plan for w in ways.ways] == edge.plans
    aval = jax.ShapeDtypeStruct((64, 64), np.float32)
    split = [Place(aval, four, Placement({"data": S(d)})) for d in (0, 1)]
    plan = Way(*split, border(four, four)).plan
    assert (plan.border_bytes, plan.parcels, plan.border_seconds) == (0, (), 0.0)
    assert plan.boxing_bytes == 3 * whole // 16


def test_values_on_the_host_are_in_the_processes_of_their_nodes():
    show = shardc.host(lambda x: None, gives=None)

    @shardc.flow
    def flow(state, x):
        return state, show(shardc.function(jnp.sin, mesh=mesh(0, 4))(x))

    into, out = (e for e in flow.plan((), 1.0).edges if e.moves)
    assert [(w.given.process, w.taken.process) for w in ways_of(into, 3, 5, True).ways] == [(3, None)]
    assert [(w.given.process, w.taken.process) for w in ways_of(out, 3, 5, True).ways] == [(None, 5)]


def test_a_users_arrays_are_neither_overwritten_nor_read_later():
    two = mesh(0, 2)
    add = shardc.function(lambda w, x: w + x, mesh=two, in_placements={"w": {}, "x": {}}, donate_argnames=("w", "x"))

    @shardc.flow
    def flow(w, x):
        return add(w, x), None

    here = shardc.put(jnp.ones(8), two, {})
    items = [here, here, np.ones(8, np.float32)]
    last, _ = flow.run(jnp.zeros(8), items)
    items[2][:] = 9
    flow.close()
    np.testing.assert_array_equal(last, np.full(8, 3))
    np.testing.assert_array_equal(here, np.ones(8))


def test_entered_values_are_taken_as_they_are():
    edge, ways = planned((mesh(0, 4), {"data": S(0)}), (mesh(4, 4), {"data": P}))
    place = edge.places(edge.moves[0])[1]
    x = entered(place, np.ones((64, 64), np.float32))
    values = EnteredValues([x])
    assert taking(edge, ways, ways.arrive)(values) is values
    assert x.placement == Placement({"data": P})
    assert entered(Place(x.aval), x) is x


def test_copies_are_not_the_array():
    x, n = jnp.arange(3.0), np.arange(3.0)
    one, two = copied(x), copied(n)
    x.delete()
    n[:] = 9
    assert one.tolist() == two.tolist() == [0, 1, 2]
    assert copied(5) == 5


def test_leaves_on_the_host_are_numpy_arrays_but_for_random_keys():
    key = jax.random.key(1)
    uneven = shardc.put(jnp.arange(7), mesh(0, 4), {"data": S(0)})
    a, b, c = on_host([uneven, key, 3])
    assert isinstance(a, np.ndarray)
    np.testing.assert_array_equal(a, np.arange(7))
    assert (b is key, c) == (True, 3)


def test_a_value_whose_place_no_plan_knows_is_not_waited_for():
    aval = jax.ShapeDtypeStruct((8, 4), np.float32)
    there = Place(aval, mesh(4, 4), Placement({"data": S(1)}))
    ways = Ways([Way(Place(aval, mesh(0, 4)), there, border(mesh(0, 4), there.mesh))], False)
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    x = shardc.put(value, mesh(0, 4), {"data": S(0)})
    jax.block_until_ready(ways.move([slow(x)]))
    late = slow(x)
    (moved,) = ways.arrive(ways.move([late]))
    assert not late.is_ready()
    assert moved.sharding == there.sharding
    np.testing.assert_array_equal(moved, value)
    uneven = shardc.put(value, mesh(0, 3), {"data": S(0)})
    np.testing.assert_array_equal(ways.arrive(ways.move([uneven]))[0], value)
