"""A planned program inside jax.jit, and written by jax.export: a process without shardc runs it, with equal values."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import shardc
from examples import gpt2, mixer, mlp
from examples.zoo import MODELS
from shardc import P, S

X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def test_a_compiled_function_inside_jit(mesh):
    w = np.ones(8, np.float32)
    f = shardc.function(lambda x, y: (x @ y + w, y), mesh=mesh, in_placements={"x": {"data": S(0)}})
    compiled = f.compile(X, X)
    whole = jax.jit(lambda x: compiled(2 * x, y=x)[0] + 1)
    np.testing.assert_allclose(whole(X), 2 * X @ X + w + 1, rtol=1e-6)
    lowered = jax.jit(compiled).lower(X, X).as_text()
    assert [c.kind for c in compiled.plan.collectives] == ["all_gather"] * lowered.count("stablehlo.all_gather")
    np.testing.assert_allclose(jax.vmap(lambda x: compiled(x, X)[0])(np.stack([X, -X])), [X @ X + w, w - X @ X], 1e-6)
    for grad in (jax.grad(lambda x: compiled(x, X)[0].sum()), jax.grad(jax.jit(lambda x: compiled(x, X)[0].sum()))):
        with pytest.raises(shardc.ArgumentError, match="a compiled program has no gradient"):
            grad(X)
    with pytest.raises(shardc.ArgumentError, match="x: planned for float32"):
        jax.jit(compiled)(X[:4], X)


def test_what_jit_cannot_place(mesh):
    fn = jnp.matmul
    places = {"in_placements": ({"data": S(0)}, {}), "out_placements": {"data": S(0)}}
    uneven = shardc.function(fn, mesh=mesh, **places).compile(X[:7], X)
    with pytest.raises(shardc.ArgumentError, match=r"(x|x1|a): {data: S\(0\)} splits \(7, 8\) unevenly"):
        jax.jit(uneven)(X[:7], X)
    terms = {"in_placements": ({"data": S(1)}, {"data": S(0)}), "out_placements": {"data": P}}
    with pytest.raises(shardc.ArgumentError, match="has terms of a sum on each device"):
        jax.jit(shardc.function(fn, mesh=mesh, **terms).compile(X, X))(X, X)


def test_a_compiled_pipeline_inside_jit():
    @shardc.function(mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline())
    def step(w, x):
        def loss(w, x):
            return (shardc.stage_boundary(x @ w) @ w).sum()

        return shardc.accumulate(jax.grad(loss), microbatches=2)(w, x)

    compiled = step.compile(X, X)
    with pytest.raises(shardc.ArgumentError, match="a compiled pipeline is several programs"):
        jax.jit(compiled)(X, X)


LOSS = {"mlp": lambda params, batch, cfg: mlp.loss(params, batch), "gpt2": gpt2.loss, "mixer": mixer.loss}
ELSEWHERE = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
for path in sys.argv[1:]:
    exported = jax.export.deserialize(open(path, "rb").read())
    values = np.load(path + ".npz")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    at = exported.in_shardings_jax(mesh)
    given = [jax.device_put(values[f"given {i}"], at[i]) for i in range(len(exported.in_avals))]
    for i, x in enumerate(jax.jit(exported.call)(*given)):
        np.testing.assert_array_equal(x, values[f"made {i}"])
assert not any(name.partition(".")[0] == "shardc" for name in sys.modules)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp", "gpt2", "mixer"])
def test_a_process_without_shardc(mesh, tmp_path, name):
    """The step of a model, and its part without gradients."""
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    model = MODELS[name]
    cfg = model.configs["test"]
    init, step = model.make_step(cfg, lambda fn: fn)
    state, batch = jax.jit(init)(jax.random.key(0)), next(model.batches(cfg, 16, 0))
    calls = {"step": (step, (*state, batch)), "loss": (partial(LOSS[name], cfg=cfg), (state[0], batch))}
    for what, (fn, args) in calls.items():
        compiled = shardc.function(fn, mesh=mesh, in_placements={"batch": {"data": S(0)}}).compile(*args)
        leaves, tree = jax.tree.flatten(args)
        flat = jax.jit(lambda *xs, c=compiled, t=tree: jax.tree.leaves(c(*jax.tree.unflatten(t, xs))))
        at = jax.tree.leaves(compiled.plan.in_placements)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.to_sharding(mesh))
            for x, p in zip(leaves, at, strict=True)
        ]
        (tmp_path / what).write_bytes(export.export(flat)(*shapes).serialize())
        made = {f"made {i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(compiled(*args)))}
        np.savez(tmp_path / f"{what}.npz", **{f"given {i}": np.asarray(x) for i, x in enumerate(leaves)}, **made)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", ELSEWHERE, *calls], env=environment, check=True, cwd=tmp_path)
