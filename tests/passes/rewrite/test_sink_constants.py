"""Constants that sink into the loops that read them: the same numbers, and fewer bytes given to the loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun

import shardc.sbp.rules  # registers them
from examples import gpt2
from shardc import S, compat
from shardc.ir.nested import bodies_of, nested_bodies
from shardc.ir.walk import all_eqns, bytes_of
from shardc.passes.rewrite.sink_constants import sink_constants
from shardc.passes.trace.canonicalize import canonicalize
from tests.passes.programs import before_after
from tests.pipeline.pipelines import on_host

STEPS, ROWS = 3, 16
X = np.linspace(-1.0, 1.0, ROWS * ROWS).reshape(ROWS, ROWS)
LITTLE = np.linspace(-2.0, 2.0, ROWS)


def canonical(fn, *args):
    return canonicalize(jax.make_jaxpr(fn)(*args), marks=True)[0]


def causal(rows=ROWS):
    return jnp.tril(jnp.ones((rows, rows), bool))


def masked(h, mask):
    return jnp.where(mask, h, 0.5)


def in_steps(step, c, x):
    """`step(h, c)` in a loop."""
    return lax.scan(lambda h, _: (step(h, c), None), x, None, length=STEPS)[0]


def constants(loop):
    """The number of operands of a loop that are the same in every step."""
    return sum(body.fixed for body in nested_bodies(loop))


def given(jaxpr, name="scan"):
    """The operands of each loop of a program that are the same in every step, the outermost loop first."""
    loops = [e for e in all_eqns(jaxpr) if e.primitive.name == name]
    first = [e.invars[: constants(e)] for e in loops]
    return [[v for v in vs if not compat.is_literal(v)] for vs in first]


def names(jaxpr):
    return [e.primitive.name for e in jaxpr.eqns]


def scan_body(jaxpr):
    return next(bodies_of(e)[0] for e in jaxpr.eqns if e.primitive.name == "scan")


def sunk(fn, *args):
    """The program with its constants sunk; asserts that it is one, with the same numbers."""
    jaxpr = canonical(fn, *args)
    found = sink_constants(jaxpr)
    check_jaxpr(found)
    made = [*found.invars, *(v for e in all_eqns(found) for v in e.outvars)]
    made += [v for e in all_eqns(found) for body in bodies_of(e) for v in body.invars]
    assert len(made) == len(set(made)), "every variable is made once"
    assert [v.aval for v in found.invars] == [v.aval for v in jaxpr.invars]
    flat = jax.tree.leaves(args)
    for a, b in zip(*(jaxpr_as_fun(compat.close(j))(*flat) for j in (jaxpr, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert sink_constants(found) is found, "nothing is left to sink"
    return found


def test_the_text(golden):
    def fn(x, little):
        wide = lax.broadcast_in_dim(little, (3, 4), (1,))
        return lax.scan(lambda c, row: (lax.add(c, lax.mul(wide, row)), None), x[0], x)[0]

    before = canonical(fn, jax.ShapeDtypeStruct((2, 3, 4), np.float32), jax.ShapeDtypeStruct((4,), np.float32))
    golden("sink_constants", before_after(before, sink_constants(before)))


def test_a_mask_is_computed_in_every_step():
    jaxpr = sunk(lambda x: in_steps(masked, causal(), x), X)
    assert given(jaxpr) == [[]]
    assert names(jaxpr) == ["scan"]
    assert "iota" in names(scan_body(jaxpr))


def test_what_jax_takes_out_of_a_loop_goes_back():
    """A mask and a zero of its shape, of the forward pass and of the backward pass."""

    def loss(x):
        return in_steps(lambda h, _: jnp.sin(masked(h @ h, causal())), None, x).sum()

    step = jax.value_and_grad(loss)
    assert [v.aval.shape for vs in given(canonical(step, X)) for v in vs] == [X.shape] * 3
    assert given(sunk(step, X)) == [[], []]


def test_a_few_known_numbers_sink_whoever_reads_them():
    """The position of a window, which the scatter of a step and the gather of its gradient read."""
    step = jax.grad(lambda x: (in_steps(lambda h, _: h.at[1:-1, 2:].add(h[2:, :-2]), None, x) ** 2).sum())
    assert [[v.aval.shape for v in vs] for vs in given(canonical(step, X))] == [[(2,)], [(2,)]]
    assert given(sunk(step, X)) == [[], []]


def test_a_loop_is_given_what_a_value_follows_from():
    """And no more than that: of what is costly the result."""

    def fn(x, little):
        bias = jnp.exp(little)[:, None] + jnp.float32(little)[None]
        return in_steps(jnp.add, bias, x)

    (kept,) = given(sunk(fn, X, LITTLE))
    assert [v.aval.size for v in kept] == [ROWS, ROWS]


def test_what_others_read_stays_for_them():
    def fn(x, little):
        bias = jnp.broadcast_to(little, x.shape)
        return in_steps(jnp.add, bias, x), bias, bias @ x

    jaxpr = sunk(fn, X, LITTLE)
    assert names(jaxpr).count("broadcast_in_dim") == 1
    assert "broadcast_in_dim" in names(scan_body(jaxpr))


def spread(little):
    return jnp.broadcast_to(little, (ROWS, ROWS))


STAY = {
    "a product reads it": lambda x, little: in_steps(jnp.matmul, spread(little), x),
    "a product reads a view of it": lambda x, little: in_steps(
        lambda h, c: h @ c.reshape(ROWS // 2, 2, ROWS).reshape(ROWS, ROWS), spread(little), x
    ),
    "a step reads a part of it": lambda x, little: in_steps(lambda h, c: h + c[:1], spread(little), x),
    "a step gives it back": lambda x, little: lax.scan(lambda h, c: (h + c, c), x, spread(little)[None])[1],
    "it is carried": lambda x, little: in_steps(lambda h, c: h * 2, None, spread(little)) + x,
    "it is as much": lambda x, little: in_steps(jnp.add, x.T + 1, x),
    "it is less": lambda x, little: in_steps(masked, x > little[0], x),
    "it is costly": lambda x, little: in_steps(jnp.add, jnp.exp(x[0] * x[:, :1]), x),
    "it is pinned": lambda x, little: in_steps(jnp.add, shardc.constrain(spread(little), {}), x),
    "it is pinned in each step": lambda x, little: in_steps(
        lambda h, c: h + shardc.constrain(c, {}), spread(little), x
    ),
    "a stage ends in it": lambda x, little: in_steps(jnp.add, shardc.stage_boundary(spread(little)), x),
    "a loop in a loop carries it": lambda x, little: in_steps(
        lambda h, c: h + in_steps(lambda d, _: d * 2, None, c), spread(little), x
    ),
    "there is no loop": lambda x, little: x + spread(little),
}  # fmt: skip


@pytest.mark.parametrize("why", STAY)
def test_what_stays(why):
    jaxpr = canonical(STAY[why], X, LITTLE)
    assert sink_constants(jaxpr) is jaxpr


def test_loops_in_loops():
    """It sinks into the innermost loop that reads it, and into each that does."""

    def fn(x, little):
        bias = spread(little)
        return in_steps(lambda h, c: in_steps(jnp.add, c, h) * c, bias, x)

    jaxpr = sunk(fn, X, LITTLE)
    assert [[v.aval.shape for v in vs] for vs in given(jaxpr)] == [[(ROWS,)], [(ROWS,)]]
    assert names(jaxpr) == ["scan"]
    outer = scan_body(jaxpr)
    assert names(outer).count("broadcast_in_dim") == names(scan_body(outer)).count("broadcast_in_dim") == 1


def test_while():
    """The condition as well as the body."""

    def fn(x, little):
        bias = spread(little)
        going = lambda c: (c[0] < 4) & ((c[1] * bias).sum() < 1e9)  # noqa: E731
        return lax.while_loop(going, lambda c: (c[0] + 1, c[1] + bias), (0, x))

    jaxpr = sunk(fn, X, LITTLE)
    assert [[v.aval.shape for v in vs] for vs in given(jaxpr, "while")] == [[(ROWS,), (ROWS,)]]
    assert names(jaxpr) == ["while"]


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_through_what_is_rematerialised(prevent_cse):
    """A mask from outside of the rematerialised steps of a loop; and a loop inside of what is rematerialised."""

    def fn(x, little):
        again = partial(jax.checkpoint, prevent_cse=prevent_cse)
        inside = again(lambda x, little: in_steps(jnp.add, spread(little), x))
        return in_steps(again(lambda h, c: jnp.sin(h * c)), spread(little), inside(x, little)).sum()

    for step in (fn, jax.grad(fn)):
        assert X.shape in [v.aval.shape for vs in given(canonical(step, X, LITTLE)) for v in vs]
        assert X.shape not in [v.aval.shape for vs in given(sunk(step, X, LITTLE)) for v in vs]


def test_a_loop_inside_a_branch():
    def fn(x, little):
        return lax.cond(x.sum() > 0, lambda: in_steps(jnp.add, spread(little), x), lambda: x)

    (branch,) = (b for e in sunk(fn, X, LITTLE).eqns if e.primitive.name == "cond" for b in bodies_of(e) if b.eqns)
    assert [v.aval.shape for vs in given(branch) for v in vs] == [(ROWS,)]


def test_lines_are_kept():
    """`explain` names the line that made a mask, wherever it is computed."""
    jaxpr = canonical(lambda x: in_steps(masked, causal(), x), X)
    lines = {compat.source_line(e) for e in jaxpr.eqns if e.primitive.name == "iota"}
    assert {compat.source_line(e) for e in scan_body(sink_constants(jaxpr)).eqns if e.primitive.name == "iota"} == lines


# --- at random -------------------------------------------------------------------------------------------------------


def programs(rng):
    """A function of X and LITTLE: light operations, products and loops in loops, that read what was made before."""

    def values(made, depth):
        """Adds to what was `made` what follows from it."""
        for _ in range(rng.integers(2, 6)):
            a, b = (made[rng.integers(len(made))] for _ in range(2))
            made.append(_OPERATIONS[rng.integers(len(_OPERATIONS))](a, b))
        for _ in range(rng.integers(1, 3) if depth else 0):
            made.append(loop(list(made), depth - 1))
        return made

    def loop(made, depth):
        kind = rng.integers(4)
        seed = rng.integers(2**32)

        def step(h):
            nonlocal rng
            before, rng = rng, np.random.default_rng(seed)  # JAX may trace a step twice
            found = values([*made, h], depth)[-1]
            rng = before
            return jnp.tanh(h + found)

        if kind == 0:
            return jax.checkpoint(step)(made[0])
        if kind == 1:
            return lax.while_loop(lambda c: (c[0] < 2) & (made[-1].sum() < 1e9), lambda c: (c[0] + 1, step(c[1])),
                                  (0, made[0]))[1]  # fmt: skip
        return lax.scan(lambda h, _: (step(h), None), made[0], None, length=2)[0]

    def fn(x, little):
        made = values([spread(little), jnp.sin(x), jnp.where(causal(), 1.0, little)], 2)
        return made[-1], sum(m.mean() for m in made)

    return fn


_OPERATIONS = (
    lambda a, b: a + b,
    lambda a, b: jnp.where(a > b, a, 1.0),
    lambda a, b: spread(a[0]) * b,
    lambda a, b: spread(jnp.float32(a[:, 1])),
    lambda a, b: a.T,
    lambda a, b: jnp.tanh(a) @ jnp.tanh(b),
    lambda a, b: jnp.exp(-abs(a)),
    lambda a, b: a - b.sum(0),
    lambda a, b: a.reshape(2, ROWS // 2, ROWS).reshape(ROWS, ROWS),
    lambda a, b: spread(jnp.arange(ROWS) + a[0, 0]),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed):
    """The same numbers, and no loop is given more bytes."""
    with jax.enable_x64(True):
        fn = programs(np.random.default_rng(seed))
        jaxpr = canonical(fn, X, LITTLE)
        fn = programs(np.random.default_rng(seed))
        found = sunk(fn, X, LITTLE)
        for name in ("scan", "while"):
            for before, now in zip(given(jaxpr, name), given(found, name), strict=True):
                assert sum(map(bytes_of, now)) <= sum(map(bytes_of, before))


# --- plans -----------------------------------------------------------------------------------------------------------


def attention(mask_of, x, w):
    """Layers that read a mask; they are scanned."""

    def layer(h, w):
        scores = jnp.where(mask_of(), h @ h.swapaxes(-1, -2), -1e9)
        return h + jnp.tanh(jax.nn.softmax(scores) @ h @ w), None

    return lax.scan(layer, x, w)[0]


def test_a_plan_is_as_fast_as_if_the_mask_were_made_inside():
    args = jnp.ones((64, 128, 128)), jnp.ones((4, 128, 128))

    @shardc.function(mesh=shardc.make_mesh(topology="v5p", data=8), in_placements={"x": {"data": S(0)}})
    def outside(x, w):
        mask = jnp.broadcast_to(causal(128), x.shape)
        return attention(lambda: mask, x, w)

    @shardc.function(mesh=shardc.make_mesh(topology="v5p", data=8), in_placements={"x": {"data": S(0)}})
    def inside(x, w):
        return attention(lambda: jnp.broadcast_to(causal(128), x.shape), x, w)

    one, other = outside.plan(*args), inside.plan(*args)
    assert (one.seconds, one.memory.peak) == (other.seconds, other.memory.peak)


def step_of(rows, vary):
    def loss(w, x):
        return (attention(lambda: jnp.broadcast_to(causal(rows), (*x.shape[:-2], rows, rows)), x, w) ** 2).mean()

    def step(w, x):
        value, grads = vary(jax.value_and_grad(loss))(w, x)
        return w - 0.1 * grads, value

    return step


IN_TWO = partial(shardc.accumulate, microbatches=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("split", "vary"),
    [({"data": S(0)}, IN_TWO), ({"data": S(0), "model": S(1)}, IN_TWO), ({"model": S(2), "data": S(1)}, lambda fn: fn)],
)
def test_the_numbers_of_one_device(split, vary):
    """At any placement, of dimensions that do not divide too, with the collectives that the plan says."""
    rows = 7
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(STEPS, rows, rows)), rng.normal(size=(8, rows, rows))
    with jax.enable_x64(True):
        step = step_of(rows, vary)
        want = jax.jit(step)(w, x)
        f = shardc.function(
            step, mesh=shardc.make_mesh(data=4, model=2), in_placements={"x": split}, donate_argnames=("w",)
        )
        compiled = f.compile(w, x)
        assert not any(v.aval.dtype == bool for vs in given(compiled.plan.program.jaxpr) for v in vs)
        assert compiled.audit().ok
        for a, b in zip(jax.tree.leaves(f(jnp.array(w), x)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10, atol=1e-12)


def test_a_pipeline():
    """A mask from outside of the microbatches, and scanned layers in each stage."""
    rows = 8
    rng = np.random.default_rng(0)
    params, x = rng.normal(size=(2, STEPS, rows, rows)) / 3, rng.normal(size=(8, rows, rows))

    def step(params, x):
        mask = jnp.broadcast_to(causal(rows), (2, rows, rows))

        def loss(params, x):
            h = shardc.stage_boundary(attention(lambda: mask, x, params[0]))
            return (attention(lambda: mask, h, params[1]) ** 2).mean()

        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4)(params, x)
        return params - 0.1 * grads, value

    with jax.enable_x64(True):
        f = shardc.function(
            step, mesh=shardc.make_mesh(pipe=2, data=2), pipeline=shardc.Pipeline(schedule="zb-h1"),
            in_placements={"x": {"data": S(0)}},
        )  # fmt: skip
        assert f.compile(params, x).audit().ok
        for a, b in zip(on_host(f(params, x)), jax.jit(step)(params, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(0)
def test_a_saved_plan(tmp_path):
    """Operations are numbered with what sank; a mask is no value that the loops of a training step are given."""
    cfg = gpt2.Config(layers=3, d_model=64, heads=4, seq=32, scan_layers=True)
    init, step = gpt2.make_step(cfg, partial(shardc.accumulate, microbatches=2))
    state = jax.eval_shape(init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((32, 32), np.int32) for k in ("inputs", "targets")}
    mesh = shardc.make_mesh(topology="v5p", data=4, model=2)
    plan = shardc.function(step, mesh=mesh, in_placements={"batch": {"data": S(0)}}).plan(*state, batch)
    _, forward, backward = given(plan.program.jaxpr)
    assert (forward, backward) == ([], [])
    plan.save(tmp_path / "plan.json")
    saved = shardc.function(step, mesh=mesh, plan=tmp_path / "plan.json").plan(*state, batch)
    assert (saved.seconds, saved.memory, saved.collectives) == (plan.seconds, plan.memory, plan.collectives)
