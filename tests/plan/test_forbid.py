"""`forbid=`: what may not move over an axis does not, or an error says what asks for it."""

from __future__ import annotations

from dataclasses import replace

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import shardc
from shardc import ArgumentError, ForbiddenMoveError, PlacementError, S
from shardc.passes.audit.hlo_groups import crossed_axes
from shardc.plan.forbid import forbid_text, is_forbidden, read_forbid
from shardc.report.refused.forbidden_moves import refuse_compiled
from shardc.sbp.cost import COLLECTIVES

MESH = shardc.make_mesh(data=4, model=2)
RNG = np.random.default_rng(0)
PARAMS = {"up": RNG.normal(size=(64, 256)).astype("float32"), "down": RNG.normal(size=(256, 64)).astype("float32")}
X = RNG.normal(size=(32, 64)).astype("float32")
MEGATRON = {"params": {"up": {"model": S(1)}, "down": {"model": S(0)}}, "x": {"data": S(0)}}


def forward(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def step(params, x):
    grads = jax.grad(lambda p: (forward(p, x) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def moves(plan):
    return {(c.kind, axis) for c in plan.collectives for axis in c.axes}


@pytest.mark.parametrize(
    ("forbid", "gone"),
    [
        ({"model": "all_gather"}, {("all_gather", "model")}),
        ({"model": ("all_reduce", "permute")}, {("all_reduce", "model"), ("permute", "model")}),
        ({"data": ["all_gather", "reduce_scatter"]}, {("all_gather", "data"), ("reduce_scatter", "data")}),
    ],
)
def test_what_is_forbidden_goes_another_way(forbid, gone):
    f = shardc.function(step, mesh=MESH, in_placements=MEGATRON, donate_argnames="params", forbid=forbid)
    copies = lambda: jax.tree.map(np.copy, PARAMS)  # noqa: E731
    exe = f.compile(copies(), X)
    assert gone.isdisjoint(moves(exe.plan))
    assert exe.audit().ok and gone.isdisjoint((c.kind, a) for c in exe.audit().found for a in c.crosses)
    for got, want in zip(jax.tree.leaves(f(copies(), X)), jax.tree.leaves(jax.jit(step)(PARAMS, X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


def test_nothing_moves_over_an_axis_where_it_can_be():
    f = shardc.function(step, mesh=MESH, in_placements={"x": {"data": S(0)}}, forbid="model")
    assert {axis for _, axis in moves(f.plan(PARAMS, X))} == {"data"}


@pytest.mark.parametrize(
    ("pins", "forbid", "text"),
    [
        (
            {"x": {"data": S(0)}}, {"data"},
            'mesh data=4, model=2 on cpu: forbid={"data"} cannot be kept: the nearest plan that was found moves\n'
            "  all_gather over data, model of f32[32,64], {data: S(0), model: S(0)} -> B, 7.0 KiB, at "
            "test_forbid.py:30 (forward)\n"
            "It can be kept if one of these pins is left open (AUTO):\n"
            "  in_placements: x at {data: S(0)}\n"
            "  out_placements at B",
        ),
        (MEGATRON, {"model"}, "The pins together ask for it, no single one does: leave several open (AUTO)"),
    ],
)  # fmt: skip
def test_an_error_says_what_moves_and_which_pins_ask_for_it(pins, forbid, text):
    f = shardc.function(forward, mesh=MESH, in_placements=pins, out_placements={}, forbid=forbid)
    with pytest.raises(ForbiddenMoveError) as error:
        f.plan(PARAMS, X)
    assert str(error.value).startswith("forward (test_forbid.py:") and text in str(error.value)


@pytest.mark.sampled
@pytest.mark.parametrize("donate", [(), ("params",)])
@pytest.mark.parametrize("pins", [{"x": {"data": S(0)}}, {}])
@pytest.mark.parametrize(
    "forbid", ["model", {"model": "all_gather"}, {"model": ("all_gather", "all_reduce")}, {"data": "all_gather"}]
)
def test_a_loop_keeps_it_in_every_call(forbid, pins, donate):
    f = shardc.function(step, mesh=MESH, in_placements=pins, donate_argnames=donate, forbid=forbid)
    got, want = jax.tree.map(jnp.array, PARAMS), PARAMS
    for _ in range(3):
        got, want = f(got, X), jax.jit(step)(want, X)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=1e-6 * float(jnp.abs(w).max()))
    plan = f.plan(got, X)
    assert plan.out_placements == plan.in_placements.params
    assert not any(is_forbidden(read_forbid(forbid, plan.mesh, "f"), c.kind, c.axes) for c in plan.collectives)


def test_a_result_that_looks_like_an_argument_is_not_forced_to_its_place():
    pins = {"x": {"data": S(0)}, "w": {"model": S(1)}}
    f = shardc.function(lambda x, w: x @ w, mesh=MESH, in_placements=pins, forbid="model")
    assert f.plan(X, np.ones((64, 64), "f")).out_placements["model"] == S(1)


def test_an_error_names_arguments_that_were_passed_split():
    params = shardc.put(PARAMS, MESH, {"up": {"model": S(1)}, "down": {"model": S(1)}})
    f = shardc.function(forward, mesh=MESH, in_placements={"x": {"data": S(0)}}, out_placements={}, forbid="model")
    with pytest.raises(ForbiddenMoveError) as error:
        f.plan(params, X)
    assert "It can be kept if one of these pins" not in str(error.value)
    assert "placements in which arguments were passed ask for it together" in str(error.value)
    with pytest.raises(ForbiddenMoveError, match=r"one of these arguments is passed in another .*\n  params/up at .*S"):
        f.plan(params | {"down": PARAMS["down"]}, X)


def test_a_shard_map_of_the_user_that_has_to_move():
    def total(x):
        return jax.shard_map(
            lambda r: jax.lax.psum(r, "data"), mesh=MESH, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
        )(x)

    with pytest.raises(ForbiddenMoveError, match=r"all_reduce over data of .*\n.*It is not for the pins"):
        shardc.function(total, mesh=MESH, forbid="data").plan(X)
    assert shardc.function(total, mesh=MESH, forbid="model").plan(X).collectives


def test_no_ring_goes_around_and_no_halo_is_exchanged():
    mesh = shardc.make_mesh(topology="v5p:8", model=8)
    wide = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)

    def product(x, w):
        return x @ w

    pins = {"x": {"model": S(0)}, "w": {"model": S(1)}}
    of = lambda **forbid: shardc.function(product, mesh=mesh, in_placements=pins, out_placements=pins["w"], **forbid)  # noqa: E731
    assert ("permute", "model") in moves(of().plan(wide, wide))
    assert moves(of(forbid={"model": "permute"}).plan(wide, wide)) == {("all_gather", "model")}

    def smooth(x):
        return x[:-2] + x[1:-1] + x[2:]

    long = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    pins = {"x": {"model": S(0)}}
    halo = lambda **forbid: shardc.function(smooth, mesh=mesh, in_placements=pins, out_placements=pins["x"], **forbid)  # noqa: E731
    assert moves(halo().plan(long)) == {("permute", "model")}
    assert ("permute", "model") not in moves(halo(forbid={"model": "permute"}).plan(long))
    with pytest.raises(ForbiddenMoveError, match="over model"):
        halo(forbid="model").plan(long)


def test_names_that_do_not_fit_are_told_at_once():
    with pytest.raises(ArgumentError) as error:
        shardc.function(step, mesh=MESH, forbid={"modle": "gather", "data": "all_reduce"})
    assert str(error.value).splitlines()[1:] == [
        "  the mesh has no axis 'modle', only data, model. Did you mean \"model\"?",
        "  'gather' is no kind of collective; write one of all_reduce, all_gather, reduce_scatter, all_to_all, permute."
        ' Did you mean "all_gather"?',
    ]


@pytest.mark.parametrize("forbid", [3, True, {"model": None}, {"model": True}, {"model": []}])
def test_what_names_nothing_is_refused(forbid):
    with pytest.raises(ArgumentError, match=r"forbid=.*\n?.*write axes, \{\"dcn\"\}, or the kinds for each axis"):
        shardc.function(step, mesh=MESH, forbid=forbid)
    assert shardc.function(step, mesh=MESH, forbid=None)


def test_a_pipeline_keeps_it_in_its_stages():
    def loss(params, batch):
        x = shardc.stage_boundary(jnp.tanh(batch @ params["up"] @ params["down"]))
        return (jnp.tanh(x @ params["up2"] @ params["down2"]) ** 2).mean()

    def train(params, batch):
        return shardc.accumulate(jax.grad(loss), microbatches=4)(params, batch)

    mesh = shardc.make_mesh(pipe=2, data=2, model=2)
    params = PARAMS | {"up2": PARAMS["up"], "down2": PARAMS["down"]}
    pins = {"params": shardc.rules({"up*": {"model": S(1)}, "down*": {"model": S(0)}}), "batch": {"data": S(0)}}

    def made(forbid):
        return shardc.function(train, mesh=mesh, in_placements=pins, pipeline=shardc.Pipeline(), forbid=forbid)

    gone = {("all_reduce", "model"), ("all_gather", "data")}
    exe = made({"model": "all_reduce", "data": "all_gather"}).compile(params, X)
    assert gone.isdisjoint(moves(exe.plan)) and ("all_reduce", "model") in moves(made(()).plan(params, X))
    for got, want in zip(jax.tree.leaves(exe(params, X)), jax.tree.leaves(jax.jit(train)(params, X)), strict=True):
        np.testing.assert_allclose(shardc.fetch(got), want, rtol=2e-4, atol=1e-5)
    with pytest.raises(ForbiddenMoveError, match="cannot be kept"):
        made({"model"}).plan(params, X)
    with pytest.raises(ArgumentError, match="pipe is the axis of the pipeline: what stages hand on"):
        made({"pipe"})


def test_modules_and_strict_data_parallel_take_it_too():
    class Linear(equinox.Module):
        weight: jax.Array

    strict = shardc.data_parallel("data", batch="x")
    f = shardc.function(step, mesh=MESH, in_placements=strict, forbid={"data": "all_reduce"})
    with pytest.raises(PlacementError, match="this step sends besides"):
        f.plan(PARAMS, X)
    wide = {"x": {"data": S(0)}}

    def apply(model, x):
        return x @ model.weight

    f = shardc.equinox.function(apply, mesh=MESH, in_placements=wide, out_placements={}, forbid="data")
    with pytest.raises(ForbiddenMoveError):
        f.plan(Linear(jnp.ones((64, 8))), X)

    def call(module, x):
        return module(x)

    g = shardc.flax.function(call, mesh=MESH, in_placements=wide, out_placements={}, forbid="data")
    with pytest.raises(ForbiddenMoveError):
        g.plan(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), X)


def test_a_saved_plan_that_moves_it_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    made = shardc.function(forward, mesh=MESH, in_placements=MEGATRON, out_placements={"data": S(0)})
    made.plan(PARAMS, X).save(path)
    with pytest.raises(ForbiddenMoveError, match="over model"):
        shardc.function(forward, mesh=MESH, plan=path, forbid="model").plan(PARAMS, X)


def test_inside_of_jit_nothing_is_promised():
    f = shardc.function(forward, mesh=MESH, forbid="model")
    with pytest.raises(ForbiddenMoveError, match=r"XLA decides what moves, so forbid=\{\"model\"\} cannot be promised"):
        jax.jit(f)(PARAMS, X)


def test_tune_says_which_meshes_cannot_keep_it():
    found = shardc.tune(
        forward, PARAMS, X, topology="v5p", devices=8, axes=("data", "model"), in_placements=MEGATRON,
        out_placements={"data": S(0)}, forbid="model",
    )  # fmt: skip
    kept = [c for c in found.candidates if c.plan is not None]
    assert kept and all(c.axes["model"] == 1 for c in kept)
    assert any('forbid={"model"} cannot be kept' in (c.problem or "") for c in found.candidates)


def test_a_compiled_program_that_moves_it_is_refused():
    exe = shardc.function(forward, mesh=MESH, in_placements=MEGATRON, out_placements={"data": S(0)}).compile(PARAMS, X)
    found = exe.audit()
    refuse_compiled(found, frozenset({("all_gather", "model")}), "f")
    with pytest.raises(ForbiddenMoveError, match=r"f: the plan keeps .*\n  all_reduce over model of f32\[8,64\]"):
        refuse_compiled(found, frozenset({("all_reduce", "model")}), "f")
    unknown = replace(found, found=(replace(found.found[0], kind="ragged-all-to-all"),))
    with pytest.raises(ForbiddenMoveError, match="ragged-all-to-all"):
        refuse_compiled(unknown, frozenset({("permute", "model")}), "f")


def test_axes_that_groups_cross():
    axes = {"data": 4, "model": 2}
    assert crossed_axes(((0, 1), (2, 3)), axes) == ("model",)
    assert crossed_axes(((0, 3),), axes) == ("data", "model")
    assert crossed_axes(((0, 2), (2, 4)), axes) == ("data",)
    assert crossed_axes(((0, 0),), axes) == ()


def test_texts_read_back():
    view = shardc.function(forward, mesh=MESH)._view
    for forbid in (
        "data",
        {"data", "model"},
        {"data": "permute"},
        {"data": ("all_gather", "permute"), "model": "permute"},
    ):
        said = read_forbid(forbid, view, "f")
        assert read_forbid(eval(forbid_text(said)), view, "f") == said
    assert is_forbidden(frozenset({("permute", "data")}), "permute", ("model", "data"))
    assert not is_forbidden(frozenset({("permute", "data")}), "all_gather", COLLECTIVES)
