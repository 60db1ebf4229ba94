"""LoRA of a Llama: the numbers of one device, optimizer state of the adapters alone, weights that are merged."""

from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import shardc
from examples import data, llama, lora, weights

CFG = replace(llama.CONFIGS["test"], layers=1)


@pytest.mark.sampled(0)
def test_steps_and_merged_weights_are_those_of_one_device(compiled_fast):
    mesh, like = shardc.make_mesh(data=4, model=2), weights.shapes(llama, CFG)
    base = jax.tree.map(np.asarray, jax.jit(llama.make_step(CFG)[0])(jax.random.key(1))[0])
    params = shardc.put(base, mesh, lora.BASE)
    init, step, merge = lora.make(CFG, mesh, rank=3)
    adapters, state = init(jax.random.key(0))
    plain = lora.init_adapters(jax.random.key(0), like, 3)
    optimizer = optax.adam(CFG.learning_rate)
    plain_state = optimizer.init(plain)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, plain_state)
    assert {path.rpartition("/attn/")[2] for path in plain} == {"q/kernel", "v/kernel"}

    @jax.jit
    def plain_step(adapters, state, batch):
        loss, grads = jax.value_and_grad(lambda a: llama.loss(lora.merged(base, a), batch, CFG))(adapters)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, loss

    for batch in islice(data.text_batches(data.text_bytes(100_000), 8, CFG.seq), 3):
        adapters, state, loss = step(adapters, state, params, batch)
        plain, plain_state, expected = plain_step(plain, plain_state, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    whole, expected = shardc.fetch(merge(params, adapters)), lora.merged(base, plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), whole, expected)


@pytest.mark.sampled(0)  # 10 s
def test_main(compiled_fast, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(lora, "fake_cpu_devices", lambda _: None)
    (tmp_path / "base").mkdir()
    like = weights.shapes(llama, llama.CONFIGS["test"])
    weights.write(tmp_path / "base", weights.random(like), weights.LLAMA)
    assert lora.main(["--from", str(tmp_path / "base"), "--to", str(tmp_path / "merged"), "--steps", "12"]) == 0
    out = capsys.readouterr().out
    assert "896 of 35,872 parameters train" in out
    before, after = (load_file(tmp_path / d / "model-00001-of-00001.safetensors") for d in ("base", "merged"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qv"}
