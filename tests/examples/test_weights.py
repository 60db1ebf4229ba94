"""Weights in files of safetensors: onto a mesh and back, in the layouts of Hugging Face."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import shardc
from examples import gpt2, llama, weights
from shardc import S

MODELS = weights.models()


def numbers(like):
    """Parameters of which no two elements are equal by chance."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), like)


def tensors(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def by_dimension(x):
    return {"data": S(0), "model": S(x.ndim - 1)} if x.ndim > 1 else {"data": S(0)}


@pytest.mark.parametrize("name", list(MODELS))
def test_there_and_back(name, tmp_path):
    table, like = MODELS[name]
    params, mesh = numbers(like), shardc.make_mesh(data=4, model=2)
    weights.write(tmp_path, params, table, prefix="model.", limit=50_000)
    placed = shardc.put(
        like, mesh, jax.tree.map(by_dimension, like), read=weights.reader(tmp_path, table, like, "model.")
    )
    jax.tree.map(np.testing.assert_array_equal, shardc.fetch(placed), params)
    (tmp_path / "back").mkdir()
    weights.write(tmp_path / "back", placed, table, prefix="model.")
    found, again = tensors(tmp_path), tensors(tmp_path / "back")
    assert found.keys() == again.keys()
    for tensor, x in found.items():
        np.testing.assert_array_equal(again[tensor], x)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == found.keys() and set(index.values()) == {f.name for f in tmp_path.glob("*.safetensors")}


def test_tensors_have_the_shapes_of_hugging_face(tmp_path):
    for name in ("llama, scanned", "gpt2", "gemma"):
        table, like = MODELS[name]
        weights.write(tmp_path, numbers(like), table, prefix=f"{name}/", limit=1 << 30)
        (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / f"{name}.safetensors")
    found = tensors(tmp_path)
    assert found["llama, scanned/model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert found["llama, scanned/model.layers.0.mlp.down_proj.weight"].shape == (32, 64)
    assert found["gpt2/h.1.attn.c_attn.weight"].shape == (32, 96)
    assert found["gpt2/h.1.attn.c_attn.bias"].shape == (96,)
    assert found["gemma/model.layers.1.self_attn.q_proj.weight"].shape == (64, 32)
    assert found["gemma/model.layers.1.self_attn.o_proj.weight"].shape == (32, 64)
    assert found["gemma/model.layers.1.self_attn.v_proj.weight"].shape == (16, 32)
    layer = numbers(MODELS["gpt2"][1])["blocks_1"]["attn"]["k"]["kernel"]
    np.testing.assert_array_equal(found["gpt2/h.1.attn.c_attn.weight"][:, 32:64], layer)
    kv = numbers(MODELS["gemma"][1])["layer_1"]["attn"]["kv_einsum"]["w"]
    np.testing.assert_array_equal(found["gemma/model.layers.1.self_attn.v_proj.weight"], kv[1, 0].T)


def test_a_leaf_that_no_row_names():
    with pytest.raises(KeyError, match="no row of the table is for the leaf blocks_0/bias"):
        list(weights.parts(weights.LLAMA, "blocks_0/bias", (4,)))


def test_main(capfd, monkeypatch):
    monkeypatch.setattr(weights, "fake_cpu_devices", lambda _: None)
    assert weights.main([]) == 0
    out = capfd.readouterr().out
    assert out.count("back equal") == 4 and "NOT" not in out


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_are_those_of_transformers(name, tmp_path):
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 256, size=(2, 16)).astype(np.int32)
    more = {"initializer_range": 0.3, "vocab_size": 256}
    if name == "llama":
        cfg, module, kind, table, prefix = llama.CONFIGS["test"], llama, llama.Llama, weights.LLAMA, ""
        theirs = hf.LlamaForCausalLM(hf.LlamaConfig(
            hidden_size=cfg.d_model, intermediate_size=cfg.hidden, num_hidden_layers=cfg.layers, rms_norm_eps=1e-5,
            num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads, rope_theta=cfg.rope_base, **more,
        ))  # fmt: skip
    else:
        cfg, module, kind, table, prefix = gpt2.CONFIGS["test"], gpt2, gpt2.GPT2, weights.GPT2, "transformer."
        theirs = hf.GPT2LMHeadModel(hf.GPT2Config(
            n_positions=cfg.seq, n_embd=cfg.d_model, n_layer=cfg.layers, n_head=cfg.heads, **more
        ))  # fmt: skip
    theirs.eval().save_pretrained(tmp_path)
    like, mesh = weights.shapes(module, cfg), shardc.make_mesh(data=4, model=2)
    params = shardc.put(
        like, mesh, jax.tree.map(by_dimension, like), read=weights.reader(tmp_path, table, like, prefix)
    )
    ours = shardc.function(lambda params, tokens: kind(cfg).apply({"params": params}, tokens), mesh=mesh)(
        params, tokens
    )
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor(tokens).long()).logits.numpy(), atol=1e-4)
