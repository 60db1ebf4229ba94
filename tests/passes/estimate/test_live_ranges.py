"""Live ranges of small programs, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardc import compat
from shardc.ir.nested import bodies_of, with_bodies
from shardc.ir.walk import bytes_of
from shardc.passes.estimate.backend import CPU, GPU, TPU
from shardc.passes.estimate.live_ranges import live_ranges
from shardc.passes.trace.canonicalize import canonicalize

ROWS, COLS = 4, 8
X = jax.ShapeDtypeStruct((ROWS, COLS), jnp.float32)
W = jax.ShapeDtypeStruct((COLS, COLS), jnp.float32)


def traced(f, *args):
    return canonicalize(jax.make_jaxpr(f)(*args))[0]


def spans(f, *args, backend=CPU, ties=None):
    """(primitive that makes it, begin, end) of all values that are not arguments."""
    jaxpr = traced(f, *args)
    found = live_ranges(jaxpr, ties or {}, backend)
    makers = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    rows = list(zip(found.values, found.begin.tolist(), found.end.tolist(), strict=True))
    assert all((b, e) == (0, found.points) for _, b, e in rows[: found.arguments])
    return [(makers.get(v, "body"), b, e) for v, b, e in rows[found.arguments :]]


def test_a_chain_is_one_loop():
    assert spans(lambda x: jnp.exp(jnp.tanh(x * 2.0) + 1.0), X) == [("exp", 0, 5)]


def test_a_chain_begins_in_memory_and_ends_there():
    def f(x, w):  # points 0: product, 1: tanh, 2: product, 3: add
        return (jnp.tanh(x @ w) @ w) + 1.0

    assert sorted(spans(f, X, W)) == [("add", 0, 5), ("dot_general", 0, 1), ("dot_general", 2, 3), ("tanh", 1, 3)]


def test_what_is_costly_is_computed_once_for_several_loops():
    def f(x, w):  # 0: product, 1: exp or neg, 2, 3: two products with loops before them
        y = x @ w
        z = fn(y)
        return (z + 1.0) @ w, (z * 2.0) @ w

    fn = jnp.exp
    assert [r[0] for r in spans(f, X, W)].count("exp") == 1
    fn = jnp.negative
    assert "neg" not in [r[0] for r in spans(f, X, W)]


def test_a_residual_of_two_values_is_computed_where_it_is_read():
    def f(x, w):  # the square of tanh is read at the end, so tanh is there until then
        y = jnp.tanh(x @ w)
        residual = 1.0 - y * y
        return (y @ w @ w) * residual

    by_name = {name: (b, e) for name, b, e in spans(f, X, W) if name != "dot_general"}
    assert set(by_name) == {"tanh", "mul"}
    points = len(traced(f, X, W).eqns)
    assert by_name["tanh"][1] >= points - 1


def test_a_result_takes_the_place_of_a_donated_argument_that_is_read_no_more():
    def last(w, g):
        return w - 0.1 * g

    def early(w, g):
        y = w - 0.1 * g
        return y, jnp.sum(w @ w)

    assert spans(last, W, W, ties={0: 0}) == []
    assert spans(last, W, W) == [("sub", 0, 3)]
    assert "sub" in [r[0] for r in spans(early, W, W, ties={0: 0})]


def test_a_result_that_takes_an_arguments_place_in_the_end_is_not_there_before_it_is_made():
    def f(w, g):  # w is read once more behind what takes its place
        y = jnp.tanh(g @ g) - w
        return y, (y @ g) @ w

    def begin(ties):
        return {name: b for name, b, _ in spans(f, W, W, backend=TPU, ties=ties)}["sub"]

    assert begin(None) == 0 < begin({0: 0})


def test_a_result_that_is_computed_late_takes_the_place_of_an_argument():
    def step(p, m, x):  # p is read by a product, long before what takes its place is computed
        m = 0.9 * m + 0.1 * (x.T @ jnp.tanh(x @ p))
        return p - m, m

    assert {"sub", "add"}.isdisjoint(r[0] for r in spans(step, W, W, X, backend=TPU, ties={0: 0, 1: 1}))
    assert {"sub", "add"} < {r[0] for r in spans(step, W, W, X, backend=TPU)}


def test_a_loop_does_not_write_over_an_update():
    def f(x, row, w):
        return jnp.tanh(jax.lax.dynamic_update_slice(x @ w, row, (0, 0))) @ w

    row = jax.ShapeDtypeStruct((1, COLS), X.dtype)

    def ends(backend):  # of the update, and when the loop behind it begins
        found = {name: (b, e) for name, b, e in spans(f, X, row, W, backend=backend)}
        return found["dynamic_update_slice"][1], found["tanh"][0]

    end, begin = ends(GPU)
    assert end == begin
    end, begin = ends(TPU)
    assert end == begin + 1


def test_a_quotient_by_a_number_is_computed_in_each_loop():
    def f(x, w, m, n):
        scaled = (x @ w) / n
        return (scaled + m) @ w, (scaled * m) @ w

    of = jax.ShapeDtypeStruct((), X.dtype)
    assert "div" not in [r[0] for r in spans(f, X, W, X, of, backend=TPU)]
    assert "div" in [r[0] for r in spans(f, X, W, X, of, backend=GPU)]
    assert "div" in [r[0] for r in spans(f, X, W, X, X, backend=TPU)]


def test_loops_have_their_carries_and_stacks_from_the_beginning():
    def f(x, ws):
        def body(x, w):
            y = jnp.tanh(x @ w)
            return y, y

        return jax.lax.scan(body, x, ws)

    jaxpr = traced(f, X, jax.ShapeDtypeStruct((3, COLS, COLS), jnp.float32))
    found = live_ranges(jaxpr, {}, CPU)
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    span = {v: (b, e) for v, b, e in zip(found.values, found.begin, found.end, strict=True)}
    assert all(span[v] == (0, found.points) for v in scan.outvars)
    row = bodies_of(scan)[0].invars[1]
    assert span[row][1] - span[row][0] == 1


def test_a_carry_that_is_still_read_has_two_buffers():
    def buffers(step):
        start = (X, jax.ShapeDtypeStruct((), jnp.float32))
        jaxpr = traced(lambda x, s, w: jax.lax.scan(lambda c, _: (step(*c, w), None), (x, s), length=3)[0], *start, W)
        (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
        return live_ranges(jaxpr, {}, CPU).values.count(bodies_of(scan)[0].outvars[0])

    def late(x, s, w):
        y = x @ w
        return y, s + jnp.sum(jnp.cos(x))

    def early(x, s, w):
        s = s + jnp.sum(jnp.cos(x))
        return x @ w, s

    assert (buffers(early), buffers(late)) == (1, 2)


def test_branches_come_one_after_the_other():
    def f(i, x, w):
        return jax.lax.cond(i, lambda x: jnp.tanh(x @ w) @ w, lambda x: jnp.tanh(x @ w) @ w @ w @ w, x)

    one = traced(lambda x, w: jnp.tanh(x @ w) @ w @ w @ w, X, W)
    both = live_ranges(traced(f, jax.ShapeDtypeStruct((), bool), X, W), {}, CPU)
    alone = live_ranges(one, {}, CPU)
    assert both.live(bytes_of).max() <= alone.live(bytes_of).max() + 4 * ROWS * COLS + 8


def test_what_is_recomputed_is_not_kept():
    def peak(wrap):
        def loss(x, w):
            for _ in range(6):
                x = wrap(lambda x, w: jnp.sin(jnp.sin(jnp.sin(x @ w) @ w) @ w))(x, w)
            return jnp.sum(x)

        return live_ranges(traced(jax.grad(loss), X, W), {}, TPU).live(bytes_of).max()

    assert peak(jax.checkpoint) < 0.8 * peak(lambda f: f)


def test_what_follows_from_what_a_step_begins_with_begins_with_it():
    """On eager devices a recomputed residual does not wait for the rest of the step."""

    def f(w, xs):
        def step(c, x):  # exp is read by two loops, behind three products
            y = jnp.exp(x)
            c = c @ w @ w @ w
            return (c * y) @ w + (c - y) @ w, None

        return jax.lax.scan(step, jnp.zeros((ROWS, COLS)), xs)[0]

    jaxpr = traced(f, W, jax.ShapeDtypeStruct((3, ROWS, COLS), jnp.float32))
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    body = bodies_of(scan)[0]
    first, *rest = body.eqns
    assert first.primitive.name == "exp" and [e.primitive.name for e in rest[:3]] == ["dot_general"] * 3
    late = compat.new_jaxpr(body.invars, body.outvars, [*rest[:3], first, *rest[3:]], body)
    moved = scan.replace(params=with_bodies(scan, [late]))
    jaxpr = compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, [moved if e is scan else e for e in jaxpr.eqns], jaxpr)

    def begin(backend):
        found = live_ranges(jaxpr, {}, backend)
        return int(found.begin[found.values.index(first.outvars[0])])

    assert begin(CPU) == begin(TPU) - 3
