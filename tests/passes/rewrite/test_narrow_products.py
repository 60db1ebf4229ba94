"""Products of float32 on machines that multiply in bfloat16: what they read is converted, and sent and kept so."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

import shardc
from shardc import S, compat
from shardc.ir.loop import Loop
from shardc.ir.nested import bodies_of
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import view
from shardc.passes.estimate.backend import CPU, GPU, TPU
from shardc.passes.estimate.live_ranges import live_ranges
from shardc.passes.estimate.traffic import in_products
from shardc.passes.rewrite.narrow_products import narrowed
from shardc.passes.trace.canonicalize import canonicalize

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=s).astype(np.float32) for s in ((6, 32), (32, 32)))


def multiplied(x, w):
    """The product, as the machine computes it."""
    return lax.dot_general(x.astype(BF16), w.astype(BF16), (((1,), (0,)), ((), ())), preferred_element_type=F32)


def convolved(x, w):
    return lax.conv_general_dilated(x[None], w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def convolved_narrow(x, w):
    return lax.conv_general_dilated(
        x[None].astype(BF16), w[None].astype(BF16), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
        preferred_element_type=F32,
    )  # fmt: skip


def stacked(product):
    def run(x, w):
        def layer(x, w):
            return jnp.tanh(product(x, w)), x.sum()

        x, sums = lax.scan(layer, x, jnp.stack([w, 2 * w]))
        return lax.cond(sums[0] > 0, lambda: product(x, w), lambda: product(2 * x, w))

    return run


def gradient(product):
    """By hand, as each product of the gradient is one of its own."""

    def run(x, w):
        y = product(x, w)
        g = jnp.ones_like(y)
        return product(g, w.T), product(x.T, g)

    return run


CASES = {
    "product": (jnp.matmul, multiplied),
    "convolution": (convolved, convolved_narrow),
    "bodies": (stacked(jnp.matmul), stacked(multiplied)),
    "gradient": (jax.grad(lambda x, w: (x @ w).sum(), (0, 1)), gradient(multiplied)),
}


def narrow(fn, *args):
    return narrowed(canonicalize(jax.make_jaxpr(fn)(*args))[0], BF16)


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_the_machine(name):
    fn, by_hand = CASES[name]
    got = jex.jaxpr_as_fun(compat.close(narrow(fn, X, W)))(X, W)
    for g, want, before in zip(got, jax.tree.leaves(by_hand(X, W)), jax.tree.leaves(fn(X, W)), strict=True):
        assert (g.shape, g.dtype) == (before.shape, before.dtype)
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-5)
        if name != "gradient":
            assert np.abs(g - before).max() > 1e-4  # float32 would be closer


@pytest.mark.parametrize("precision", ["highest", "float32", "high", lax.DotAlgorithmPreset.F32_F32_F32])
def test_products_that_ask_for_more_stay(precision):
    with jax.default_matmul_precision(precision if isinstance(precision, str) else "default"):
        f = lambda x, w: jnp.matmul(x, w, precision=None if isinstance(precision, str) else precision)  # noqa: E731
        before = canonicalize(jax.make_jaxpr(f)(X, W))[0]
    assert narrowed(before, BF16) is before


def test_a_value_is_converted_once_and_what_was_narrow_is_read():
    def fn(x, w, h):
        wide = h.astype(F32)
        return x @ w + x @ (w + 1) + wide @ w, wide.sum()

    eqns = all_eqns(narrow(fn, X, W, X.astype(BF16)))
    conversions = [e for e in eqns if e.primitive.name == "convert_element_type"]
    assert Counter(e.params["new_dtype"] for e in conversions) == {BF16: 3, F32: 1}
    assert {a.aval.dtype for e in eqns if e.primitive.name == "dot_general" for a in e.invars} == {BF16}


def test_other_types_stay():
    for dtype in (np.float64, np.int32, jnp.bfloat16, np.float16):
        with jax.enable_x64(True):
            before = canonicalize(jax.make_jaxpr(jnp.matmul)(X.astype(dtype), W.astype(dtype)))[0]
        assert narrowed(before, BF16) is before


def loss(w, x):
    for k in w:
        x = jnp.tanh(x @ k)
    return (x**2).mean()


@jax.custom_vjp
def on_the_machine(x, w):
    return multiplied(x, w)


on_the_machine.defvjp(
    lambda x, w: (multiplied(x, w), (x, w)), lambda kept, g: (multiplied(g, kept[1].T), multiplied(kept[0].T, g))
)


def layers(product, remat=False):
    """Layers in a loop: the last operand of each product, squared, is read by products alone, `x` by others too."""

    def layer(x, w):
        return x + product(jnp.sin(product(x, w)) ** 2, w), None

    def fn(x, ws, v):
        layer_ = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        y, _ = lax.scan(layer_, x, ws)
        _, rows = lax.scan(lambda c, row: (c + 1, product(jnp.cos(row)[None], v)), 0.0, y)
        return (rows**2).mean()

    return jax.grad(fn, (0, 1, 2))


@pytest.mark.parametrize("remat", [False, True])
def test_loops_stack_and_read_what_is_multiplied(remat):
    args = X, np.stack([W, W.T]) / 6, W / 6
    jaxpr = narrow(layers(jnp.matmul, remat), *args)
    got = jex.jaxpr_as_fun(compat.close(jaxpr))(*args)
    for g, want in zip(got, layers(on_the_machine, remat)(*args), strict=True):
        np.testing.assert_allclose(g, want, rtol=2e-5, atol=2e-6)
    loops = [Loop.of(e) for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert any(a.aval.dtype == BF16 for loop in loops for a in loop.consts.values())  # v is converted before its loop
    if not remat:
        stacks = [s for loop in loops for s in loop.stacks if s.aval.ndim == 3]
        assert Counter(s.aval.dtype for s in stacks)[BF16] >= 1
        read = {a for loop in loops for a in loop.rows.values() if a in stacks}
        assert {a.aval.dtype for a in read} == {BF16, F32}


def test_what_a_result_or_something_else_reads_stays_wide():
    """A stack that is a result; one whose rows are added; a constant that one branch adds."""

    def fn(x, ws):
        _, stack = lax.scan(lambda c, w: (c @ w, c @ w), x, ws)
        _, other = lax.scan(lambda c, w: (c @ w, c @ (2 * w)), x, ws)
        both = lax.map(lambda pair: pair[0] @ ws[0] + pair[1] @ ws[1] + pair[1], (stack, other))
        return stack, lax.cond(x[0, 0] > 0, lambda: x @ ws[0], lambda: x), both

    jaxpr = narrow(fn, X, np.stack([W, W]))
    scans = [Loop.of(e) for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert {a.aval.dtype for loop in scans for a in loop.stacks} == {F32}
    (branch,) = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert any(a.aval.dtype == F32 and a.aval.shape == X.shape for a in branch.invars)


def planned(topology, precision="default"):
    mesh = shardc.make_mesh(topology=topology, data=8)
    f = shardc.function(
        lambda w, x: jax.grad(loss)(w, x), mesh=mesh, in_placements=({"data": S(0)}, {"data": S(0)}),
        out_placements={"data": S(0)},
    )  # fmt: skip
    with jax.default_matmul_precision(precision):
        return f.plan([jax.ShapeDtypeStruct((1024, 1024), F32)] * 2, jax.ShapeDtypeStruct((65536, 1024), F32))


def test_weights_are_gathered_as_they_are_multiplied():
    """On GPUs, and where more precision is asked for, products read float32; half of the bytes are sent on a TPU."""
    gathered = {
        key: {c.value.partition("[")[0]: c for c in planned(*key).collectives if c.kind == "all_gather"}
        for key in [("v5p:2x2x2",), ("v5p:2x2x2", "highest"), ("h100:8",)]
    }
    narrow, highest, gpu = gathered.values()
    assert narrow.keys() == {"bf16"} and highest.keys() == {"f32"} and gpu.keys() <= {"f32"}
    assert 2 * narrow["bf16"].bytes // narrow["bf16"].count == highest["f32"].bytes // highest["f32"].count


def test_values_that_only_products_read_are_kept_narrow():
    """Where products read float32 that is kept anyway, its narrow copy takes no memory; else it takes half."""
    both = [planned("v5p:2x2x2", p).memory.peak for p in ("default", "highest")]
    assert both[0] < 0.9 * both[1]


@pytest.mark.parametrize(("made", "run"), [("v5p:2x2x2", None), (None, "v5p:2x2x2")])
def test_a_saved_plan_is_replayed_as_it_was_made(tmp_path, made, run):
    """A plan for a TPU that runs on CPU devices multiplies what the TPU would."""
    w, x = (RNG.normal(size=(64, 64)).astype(np.float32) for _ in range(2))

    def function(topology, plan=None):
        mesh = shardc.make_mesh(topology=topology, data=8)
        pins = {"in_placements": ({"data": S(0)}, {"data": S(0)}), "out_placements": {"data": S(0)}}
        return shardc.function(lambda w, x: x @ w, mesh=mesh, plan=plan, **pins)

    first = function(made).plan(w, x)
    first.save(tmp_path / "plan.json")
    again = function(run, shardc.load_plan(tmp_path / "plan.json"))
    sent = [(c.kind, c.value, c.bytes) for c in first.collectives]
    assert [(c.kind, c.value, c.bytes) for c in again.plan(w, x).collectives] == sent
    assert all(value.startswith("bf16" if made else "f32") for _, value, _ in sent)
    if run is None:
        np.testing.assert_allclose(again(w, x), multiplied(x, w), rtol=1e-5, atol=1e-5)
        assert np.abs(again(w, x) - x @ w).max() > 1e-3


def test_products_convert_what_is_in_memory_as_they_read_it():
    """An argument that a product alone reads is neither copied nor kept twice; what an operation makes is written
    narrow."""
    large = jax.ShapeDtypeStruct((65536, 4096), F32)
    weights = jax.ShapeDtypeStruct((4096, 4096), F32)

    def plan(fn):
        return shardc.function(fn, mesh=shardc.make_mesh(topology="v5p:1", data=1)).plan(large, weights)

    read, made = plan(lambda x, w: x @ w), plan(lambda x, w: jnp.tanh(x) @ w)
    assert read.time.memory == 0
    traffic = (4 + 2) * large.size / view(shardc.make_mesh(topology="v5p:1", data=1)).topology.memory_rate
    assert made.time.memory == pytest.approx(traffic, rel=0.01)
    size = 4 * large.size
    assert read.memory.temporaries == pytest.approx(1.08 * size, rel=0.01)  # the result
    assert made.memory.temporaries == pytest.approx(1.08 * 1.5 * size, rel=0.01)


def test_a_wider_conversion_is_no_narrow_one():
    """A machine that multiplies what is given has no narrow type, and NumPy holds None for float64."""
    with jax.enable_x64(True):
        jaxpr = canonicalize(jax.make_jaxpr(lambda x, w: x.astype(np.float64) @ w)(X, W.astype(np.float64)))[0]
    (wide,) = (e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "convert_element_type")
    for backend in (CPU, GPU, TPU):
        assert in_products(jaxpr, backend.multiplies_in) == set()
        assert wide in live_ranges(jaxpr, backend=backend).values


def test_a_literal_that_a_branch_converts_stays():
    def scaled(x, s):
        return lax.dot_general(x, s, (((), ()), ((), ())))

    def fn(x):
        return lax.cond(x[0, 0] > 0, scaled, lambda x, s: 2 * scaled(x, s), x, np.float32(0.3))

    jaxpr = narrow(fn, X)
    (branch,) = (e for e in jaxpr.eqns if e.primitive.name == "cond")
    assert any(compat.is_literal(a) for a in branch.invars)
    for body in bodies_of(branch):
        given = [a.aval.dtype for a in branch.invars[1:]]
        assert [v.aval.dtype for v in body.invars] == given
    (got,) = jex.jaxpr_as_fun(compat.close(jaxpr))(X)
    np.testing.assert_allclose(got, fn(X), rtol=1e-2, atol=1e-2)
