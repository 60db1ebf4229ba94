"""The model zoo without shardc: every model under plain jit, on one device."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from itertools import islice
from operator import itemgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import data, gpt2, mlp, resnet

EXAMPLES = Path(gpt2.__file__).parent
TINY_TEXT = gpt2.CONFIGS["test"]
LOSS_AND_GRADS = jax.jit(jax.value_and_grad(gpt2.loss), static_argnums=2)


@cache
def start_and_step(module):
    """The test config's first state and its step, compiled once for all tests."""
    init_fn, step_fn = module.make_step(module.CONFIGS["test"])
    return jax.jit(init_fn)(jax.random.key(0)), jax.jit(step_fn)


def batches(module, rows=16):
    if module is gpt2:
        return data.text_batches(data.text_bytes(50_000), rows, TINY_TEXT.seq)
    return data.digit_batches(data.digits()[0], rows)


def in_halves(fn):
    """What `accumulate` is on one device: the mean of `fn` over the even and the odd rows."""

    def mean(params, batch):
        even, odd = (jax.tree.map(itemgetter(slice(start, None, 2)), batch) for start in (0, 1))
        return jax.tree.map(lambda a, b: (a + b) / 2, fn(params, even), fn(params, odd))

    return mean


def assert_close(got, want, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=atol), got, want)


@pytest.mark.parametrize("module", [mlp, resnet, gpt2])
def test_loss_falls(module):
    (state, step), losses = start_and_step(module), []
    for batch in islice(batches(module), 100):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


@pytest.mark.parametrize("module", [mlp, gpt2])
def test_accumulate_over_parts_is_the_same_step(module):
    (state, whole), batch = start_and_step(module), next(batches(module))
    _, in_parts = module.make_step(module.CONFIGS["test"], in_halves)
    _, moments, loss = whole(*state, batch)
    _, moments_of_parts, loss_of_parts = jax.jit(in_parts)(*state, batch)
    assert_close(loss_of_parts, loss)
    assert_close(moments_of_parts, moments)


def test_resnet_step_moves_every_batch_statistic():
    state, step = start_and_step(resnet)
    _, after, _, _ = step(*state, next(batches(resnet)))
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), state[1], after)
    assert jax.tree.structure(state[1]) == jax.tree.structure(after)
    assert not any(jax.tree.leaves(same)), same


@pytest.mark.parametrize(
    "changes", [{"scan_layers": True}, {"remat": True}, {"scan_layers": True, "remat": True}], ids=str
)
def test_gpt2_scanned_and_rematerialized_layers_are_the_same_model(changes):
    cfg = replace(TINY_TEXT, **changes)
    (params, _), batch = start_and_step(gpt2)[0], next(batches(gpt2))
    want_loss, want = LOSS_AND_GRADS(params, batch, TINY_TEXT)
    if cfg.scan_layers:
        params, want = gpt2.stack_blocks(params, cfg), gpt2.stack_blocks(want, cfg)
    shapes = jax.eval_shape(gpt2.make_step(cfg)[0], jax.random.key(0))[0]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    got_loss, got = LOSS_AND_GRADS(params, batch, cfg)
    assert_close(got_loss, want_loss)
    assert_close(got, want)


def test_gpt2_looks_only_back():
    params, _ = start_and_step(gpt2)[0]
    tokens = jnp.arange(TINY_TEXT.seq)[None]
    logits_of = jax.jit(gpt2.GPT2(TINY_TEXT).apply)
    logits, changed = (logits_of({"params": params}, text) for text in (tokens, tokens.at[0, 9].set(200)))
    np.testing.assert_array_equal(logits[0, :9], changed[0, :9])
    assert not np.allclose(logits[0, 9:], changed[0, 9:])


def test_gpt2_generates_past_its_window():
    params, _ = start_and_step(gpt2)[0]
    text = gpt2.generate(params, TINY_TEXT, b"import ", length=TINY_TEXT.seq)
    assert len(text) == TINY_TEXT.seq
    assert text == gpt2.generate(params, TINY_TEXT, b"import ", length=TINY_TEXT.seq)


def test_gpt2_in_bfloat16_keeps_float32_weights_and_loss():
    init_fn, step_fn = gpt2.make_step(replace(TINY_TEXT, dtype=jnp.bfloat16))
    state = jax.eval_shape(init_fn, jax.random.key(0))
    params, _, loss = jax.eval_shape(step_fn, *state, next(batches(gpt2)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} | {loss.dtype} == {jnp.dtype("float32")}


@pytest.mark.parametrize("module", [mlp, resnet, gpt2])
def test_everything_is_float64_under_x64(module):
    with jax.enable_x64(True):
        init_fn, step_fn = module.make_step(module.CONFIGS["test"])
        state = jax.eval_shape(init_fn, jax.random.key(0))
        result = jax.eval_shape(step_fn, *state, next(batches(module)))
        jaxpr = str(jax.make_jaxpr(step_fn)(*state, next(batches(module))))
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state, result))} == {"float64", "int32"}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result[:-1]) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert "convert_element_type[new_dtype=float32" not in jaxpr


@pytest.mark.parametrize(
    ("module", "config", "millions"), [(gpt2, "small124m", 124.439808), (resnet, "resnet50", 25.557032)]
)
def test_large_configs_have_the_published_number_of_parameters(module, config, millions):
    params = jax.eval_shape(module.make_step(module.CONFIGS[config])[0], jax.random.key(0))[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == round(millions * 1e6)


@pytest.mark.parametrize("name", ["data", "mlp", "resnet", "gpt2"])
def test_models_know_nothing_of_shardc_or_meshes(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {m for n in nodes for m in ([n.module] if isinstance(n, ast.ImportFrom) else [a.name for a in n.names])}
    assert not {m for m in modules if m.split(".")[0] in ("shardc", "examples") or m.startswith("jax.sharding")}
