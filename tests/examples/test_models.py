"""The model zoo without shardc: every model under plain jit, on one device."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from operator import itemgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import bert, dlrm, gpt2, llama, mixer, mlp, moe, ppo, resnet, t5, unet, vit
from examples.generate import PIECES, continuations, generate, pieces_of
from examples.zoo import MODELS

pytestmark = pytest.mark.usefixtures("compiled_fast")

EXAMPLES = Path(gpt2.__file__).parent
TINY_TEXT = gpt2.CONFIGS["test"]
DECODERS = {gpt2: gpt2.GPT2, llama: llama.Llama, moe: moe.MoE}
ZOO = [mlp, resnet, vit, mixer, gpt2, llama, moe, bert, t5, unet, dlrm, ppo]
SLOW = [unet, t5]
SCANNED = [gpt2, llama, moe, vit, t5]
DATA_PARALLEL = [mlp, vit, mixer, gpt2, llama, moe, bert, t5, unet, dlrm]


def name_of(module):
    return module.__name__.split(".")[-1]


def some_slow(modules):
    return [pytest.param(m, marks=[pytest.mark.sampled(0)] if m in SLOW else []) for m in modules]


@cache
def start_and_step(module):
    """The test config's first state and its step, compiled once for all tests."""
    init_fn, step_fn = module.make_step(module.CONFIGS["test"])
    return jax.jit(init_fn)(jax.random.key(0)), jax.jit(step_fn)


def batches(module, rows=16):
    return MODELS[name_of(module)].batches(module.CONFIGS["test"], rows, 0)


def loss_of(module, cfg):
    """`fn(params, batch, between)`; the MLP's loss has no config."""
    return module.loss if module is mlp else partial(module.loss, cfg=cfg)


def in_halves(fn):
    """What `accumulate` is on one device: the mean of `fn` over the even and the odd rows."""

    def mean(params, batch):
        even, odd = (jax.tree.map(itemgetter(slice(start, None, 2)), batch) for start in (0, 1))
        return jax.tree.map(lambda a, b: (a + b) / 2, fn(params, even), fn(params, odd))

    return mean


def assert_close(got, want, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=atol), got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("module", some_slow(ZOO), ids=name_of)
def test_loss_falls(module):
    (state, step), losses = start_and_step(module), []
    for batch in islice(batches(module), 100):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("module", some_slow(DATA_PARALLEL), ids=name_of)
def test_accumulate_over_parts_is_the_same_step(module):
    (state, whole), batch = start_and_step(module), next(batches(module))
    _, in_parts = module.make_step(module.CONFIGS["test"], in_halves)
    _, moments, loss = whole(*state, batch)
    _, moments_of_parts, loss_of_parts = jax.jit(in_parts)(*state, batch)
    assert_close(loss_of_parts, loss)
    assert_close(moments_of_parts, moments)


@pytest.mark.sampled(0)
def test_resnet_step_moves_every_batch_statistic():
    state, step = start_and_step(resnet)
    _, after, _, _ = step(*state, next(batches(resnet)))
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), state[1], after)
    assert jax.tree.structure(state[1]) == jax.tree.structure(after)
    assert not any(jax.tree.leaves(same)), same


@pytest.mark.sampled(1)
@pytest.mark.parametrize("module", some_slow(SCANNED), ids=name_of)
@pytest.mark.parametrize(
    "changes", [{"scan_layers": True}, {"remat": True}, {"scan_layers": True, "remat": True}], ids=str
)
def test_scanned_and_rematerialized_layers_are_the_same_model(module, changes):
    params, _ = start_and_step(module)[0]
    assert_same_when_changed(module, module.CONFIGS["test"], changes, params)


def assert_same_when_changed(module, plain, changes, params):
    cfg, batch = replace(plain, **changes), next(batches(module))
    want_loss, want = loss_and_grads(module, plain)(params, batch)
    if cfg.scan_layers:
        params, want = module.stack_blocks(params, cfg), module.stack_blocks(want, cfg)
    shapes = jax.eval_shape(module.make_step(cfg)[0], jax.random.key(0))[0]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    got_loss, got = loss_and_grads(module, cfg)(params, batch)
    assert_close(got_loss, want_loss)
    assert_close(got, want)


@cache
def loss_and_grads(module, cfg):
    return jax.jit(jax.value_and_grad(loss_of(module, cfg)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("module", "blocks"), [(mlp, 2), (vit, 2), (mixer, 2), (gpt2, 2), (llama, 2), (moe, 2), (t5, 4), (unet, 5)]
)
def test_between_changes_what_the_next_block_reads(module, blocks):
    (params, *_), batch, seen = start_and_step(module)[0], next(batches(module)), []
    loss = loss_of(module, module.CONFIGS["test"])

    @jax.jit
    def changed_at(cut):
        def between(i, x):
            seen.append(i)
            return jnp.where(i == cut, 2 * x, x)

        return loss(params, batch, between=between)

    unchanged, *changed = (float(changed_at(cut)) for cut in range(-1, blocks - 1))
    assert seen == list(range(blocks - 1))
    assert unchanged == pytest.approx(float(jax.jit(loss)(params, batch)))
    assert len({unchanged, *changed}) == blocks


@pytest.mark.parametrize("module", SCANNED, ids=name_of)
def test_scanned_layers_cannot_be_cut(module):
    cfg, batch = replace(module.CONFIGS["test"], scan_layers=True), next(batches(module))
    params = jax.eval_shape(module.make_step(cfg)[0], jax.random.key(0))[0]
    with pytest.raises(ValueError, match="between changes what follows block 0, and scan_layers=True leaves no place"):
        jax.eval_shape(partial(loss_of(module, cfg), between=lambda i, x: x + 1), params, batch)


@pytest.mark.parametrize("module", DECODERS, ids=name_of)
def test_decoders_look_only_back(module):
    cfg, (params, _) = module.CONFIGS["test"], start_and_step(module)[0]
    tokens = jnp.arange(cfg.seq)[None]
    logits_of = jax.jit(lambda tokens: jax.tree.leaves(DECODERS[module](cfg).apply({"params": params}, tokens))[0])
    logits, changed = (logits_of(text) for text in (tokens, tokens.at[0, 9].set(200)))
    np.testing.assert_array_equal(logits[0, :9], changed[0, :9])
    assert not np.allclose(logits[0, 9:], changed[0, 9:])


def test_text_is_generated_past_the_window():
    params, _ = start_and_step(gpt2)[0]
    write = partial(generate, lambda p, tokens: gpt2.GPT2(TINY_TEXT).apply({"params": p}, tokens), params)
    text = write(TINY_TEXT.seq, b"import ", length=TINY_TEXT.seq)
    assert len(text) == TINY_TEXT.seq
    assert text == write(TINY_TEXT.seq, b"import ", length=TINY_TEXT.seq)


def test_text_is_made_of_pieces_that_are_known():
    known = pieces_of(b"for for_each in  (a, b)  in", times=1)
    texts = b"fo", b"for", b"x for", b" "
    after = {text: bytes(np.flatnonzero(continuations(text, known)).tolist()) for text in texts}
    assert after[b"fo"] == b"r"  # and nothing that would leave half a word
    assert after[b"for"] == after[b"x for"] == b" (),_"
    assert set(after[b" "]) == set(b" (),_abefi")
    assert continuations(b"q", known).all()  # a prompt that is unknown itself

    params, _ = start_and_step(gpt2)[0]
    logits_of = lambda p, tokens: gpt2.GPT2(TINY_TEXT).apply({"params": p}, tokens)  # noqa: E731
    text = b"for" + generate(logits_of, params, TINY_TEXT.seq, b"for", 40, known)
    assert all(piece in known for piece in PIECES.findall(text))


def test_llama_turns_pairs_by_their_distance():
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (1, 1, 1, 8)), (1, 12, 1, 8))
    turned = llama.rotate(x, base=100.0)[0, :, 0]
    np.testing.assert_array_equal(turned[0], x[0, 0, 0])
    products = turned @ turned.T
    for distance in range(12):
        np.testing.assert_allclose(jnp.diagonal(products, distance), products[0, distance], rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", ["test_mixtral", "test_deepseek"])
def test_mixtures_of_llamas_learn_and_look_only_back(name):
    cfg = moe.CONFIGS[name]
    init_fn, step_fn = moe.make_step(cfg)
    state, step, losses = jax.jit(init_fn)(jax.random.key(0)), jax.jit(step_fn), []
    params = state[0]
    for batch in islice(batches(moe), 60):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert_same_when_changed(moe, cfg, {"scan_layers": True, "remat": True}, params)

    tokens = jnp.arange(cfg.seq)[None]
    logits_of = jax.jit(lambda tokens: moe.MoE(cfg).apply({"params": params}, tokens)[0])
    logits, changed = logits_of(tokens), logits_of(tokens.at[0, 9].set(200))
    np.testing.assert_allclose(logits[0, :9], changed[0, :9], rtol=1e-5, atol=1e-6)
    assert not np.allclose(logits[0, 9:], changed[0, 9:])


def test_experts_of_a_token_are_as_many_as_are_chosen():
    scores_BTE = jax.random.normal(jax.random.key(0), (2, 6, 8))
    dispatch_BTEC, combine_BTEC, _ = moe.route(scores_BTE, places=6, chosen=3)
    np.testing.assert_array_equal(dispatch_BTEC.sum((2, 3)), 3)
    np.testing.assert_allclose(combine_BTEC.sum((2, 3)), 1, rtol=1e-6)
    best_BT3E = jnp.argsort(scores_BTE)[..., -3:]
    np.testing.assert_array_equal(jnp.take_along_axis(dispatch_BTEC.sum(3), best_BT3E, -1), 1)


@pytest.mark.sampled(0)
def test_queries_of_a_vit_with_parallel_layers_have_one_size():
    cfg = replace(vit.CONFIGS["test"], parallel=True)
    params, _ = vit.make_step(cfg)[0](jax.random.key(0))
    assert "ln_2" not in params["blocks"][0]
    batch = next(MODELS["vit"].batches(cfg, 16, 0))
    larger = jax.tree_util.tree_map_with_path(
        lambda path, x: 100 * x if jax.tree_util.keystr(path, simple=True, separator="/").endswith("q/kernel") else x,
        params,
    )
    forward = jax.jit(partial(vit.forward, cfg=cfg))
    logits, scaled = (forward(p, batch["image"]) for p in (params, larger))
    np.testing.assert_allclose(logits, scaled, rtol=1e-3, atol=1e-4)
    loss, grads = jax.jit(jax.value_and_grad(partial(vit.loss, cfg=cfg)))(params, batch)
    assert_same_when_changed(vit, cfg, {"scan_layers": True, "remat": True}, params)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves((loss, grads)))


def test_t5_distances_are_those_of_the_paper():
    cfg = t5.CONFIGS["small60m"]
    both, back = (np.asarray(t5.distances(cfg, 200, both_ways)) for both_ways in (True, False))
    # keys before the query: 0 to 7 one by one, then by the logarithm, 127 and beyond in the last of 16
    assert [both[199, 199 - d] for d in (0, 1, 7, 8, 11, 12, 16, 127, 199)] == [0, 1, 7, 8, 8, 9, 10, 15, 15]
    assert [both[0, d] for d in (1, 7, 8, 199)] == [17, 23, 24, 31]
    assert [back[199, 199 - d] for d in (0, 15, 16, 18, 19, 199)] == [0, 15, 16, 16, 17, 31]
    assert not back[np.triu_indices(200)].any()


@pytest.mark.sampled(0)
def test_t5_looks_back_in_what_it_says_and_everywhere_in_what_it_reads():
    cfg, (params, _) = t5.CONFIGS["test"], start_and_step(t5)[0]
    logits_of = jax.jit(partial(t5.T5(cfg).apply, {"params": params}))
    text, said = jnp.arange(20)[None], jnp.arange(8)[None]
    logits = logits_of(text, said)
    changed = logits_of(text, said.at[0, 5].set(99))
    np.testing.assert_array_equal(logits[0, :5], changed[0, :5])
    assert not np.allclose(logits[0, 5:], changed[0, 5:])
    assert not np.allclose(logits[0, 0], logits_of(text.at[0, 19].set(99), said)[0, 0])


def test_experts_take_as_many_tokens_as_they_have_places():
    scores = np.random.default_rng(0).normal(size=(3, 10, 4)) + np.array([2, 0, 0, 0])
    dispatch, combine, _ = map(np.asarray, moe.route(scores, places=4))
    assert dispatch.sum((1, 3)).max() == 4  # the first is liked by more than 4 of 10
    assert dispatch.sum(1).max() == 1  # each place is taken once
    kept = dispatch.sum((2, 3)) == 2
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(combine.sum((2, 3))[kept], 1, rtol=1e-6)
    best_two = np.sort(np.argsort(scores, axis=-1)[..., 2:], axis=-1)
    for b, t in np.argwhere(kept):
        np.testing.assert_array_equal(np.flatnonzero(dispatch[b, t].sum(-1)), best_two[b, t])


def test_experts_liked_equally_are_balanced():
    T, E = 8, 4
    equally = jnp.eye(E)[jnp.arange(T) % E][None] * 1e-3
    one = jnp.broadcast_to(jnp.array([20.0, 0, 0, 0]), (1, T, E))
    assert moe.route(equally, places=T)[2] == pytest.approx(1, rel=1e-3)
    assert moe.route(one, places=T)[2] == pytest.approx(E, rel=1e-3)


@pytest.mark.sampled(0)
def test_unet_noise_belongs_to_a_row_and_its_key():
    cfg, (params, _) = unet.CONFIGS["test"], start_and_step(unet)[0]
    batch, loss = next(batches(unet)), jax.jit(partial(unet.loss, cfg=cfg))
    want, rolled = loss(params, batch), {name: np.roll(x, 1, axis=0) for name, x in batch.items()}
    np.testing.assert_allclose(loss(params, rolled), want, rtol=1e-5)
    assert abs(loss(params, {**batch, "key": rolled["key"]}) / want - 1) > 1e-3


def test_gpt2_in_bfloat16_keeps_float32_weights_and_loss():
    init_fn, step_fn = gpt2.make_step(replace(TINY_TEXT, dtype=jnp.bfloat16))
    state = jax.eval_shape(init_fn, jax.random.key(0))
    params, _, loss = jax.eval_shape(step_fn, *state, next(batches(gpt2)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} | {loss.dtype} == {jnp.dtype("float32")}


@pytest.mark.parametrize("module", ZOO, ids=name_of)
def test_everything_is_float64_under_x64(module):
    with jax.enable_x64(True):
        init_fn, step_fn = module.make_step(module.CONFIGS["test"])
        state = jax.eval_shape(init_fn, jax.random.key(0))
        jaxpr, result = jax.make_jaxpr(step_fn, return_shape=True)(*state, next(batches(module)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state, result))} == {"float64", "int32"}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result[:-1]) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert "convert_element_type[new_dtype=float32" not in str(jaxpr)


@pytest.mark.parametrize(
    ("module", "config", "millions"),
    [
        (gpt2, "small124m", 124.439808),
        (resnet, "resnet50", 25.557032),
        (vit, "base16", 86.567656),
        (bert, "base110m", 109.514298 - 2 * 768e-6),  # without the table of sentences
        (llama, "llama3_8b", 8030.261248),
        (t5, "small60m", 60.506624),
    ],
)
def test_large_configs_have_the_published_number_of_parameters(module, config, millions):
    params = jax.eval_shape(module.make_step(module.CONFIGS[config])[0], jax.random.key(0))[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == round(millions * 1e6)


def test_bert_reads_in_both_directions_and_only_what_is_shown():
    cfg, (params, _) = bert.CONFIGS["test"], start_and_step(bert)[0]
    logits_of = jax.jit(partial(bert.BERT(cfg).apply, {"params": params}))
    text, positions = jnp.arange(20)[None], jnp.array([[9]])
    logits = logits_of(text, positions)
    for place in (0, 19):
        assert not np.allclose(logits, logits_of(text.at[0, place].set(99), positions))


@pytest.mark.sampled(0)
def test_dlrm_reads_the_rows_that_its_categories_name():
    (params, _), batch = start_and_step(dlrm)[0], next(batches(dlrm, 64))
    grads = jax.grad(dlrm.loss)(params, batch)
    for j, table in enumerate(grads["tables"]):
        rows = np.flatnonzero(np.abs(table).sum(1))
        assert set(rows) == set(batch["categories"][:, j])


def test_a_pole_falls_to_the_side_it_leans_to_and_pushes_turn_it_back():
    upright, leaning = np.zeros((1, 4)), np.array([[0.0, 0, 0.1, 0]])
    right, left = (np.asarray(ppo.move(upright, np.array([a])))[0] for a in (1, 0))
    np.testing.assert_allclose(right, -left, atol=1e-12)
    np.testing.assert_allclose(right, [0, 0.19512195, 0, -0.29268293], rtol=1e-6)  # as gymnasium 1.0 has it
    assert np.asarray(ppo.move(leaning, np.array([1])))[0, 3] < np.asarray(ppo.move(leaning, np.array([0])))[0, 3]


def test_advantages_are_discounted_sums_of_errors_up_to_the_end_of_a_life():
    cfg = replace(ppo.CONFIGS["test"], discount=0.5, trace=0.5)
    reward, value = np.array([[1.0, 2, 3, 4]]), np.array([[0.5, 1, 1.5, 2]])
    lived = {"reward": reward, "value": value, "over": np.arange(4)[None] == 1}
    errors = np.array([1 + 0.5 * 1 - 0.5, 2 - 1, 3 + 0.5 * 2 - 1.5, 4 + 0.5 * 8 - 2])
    want = [errors[0] + 0.25 * errors[1], errors[1], errors[2] + 0.25 * errors[3], errors[3]]
    np.testing.assert_allclose(ppo.advantages(lived, np.array([8.0]), cfg)[0], want, rtol=1e-6)


def test_carts_that_fall_start_anew():
    cfg, (params, _, carts) = ppo.CONFIGS["test"], start_and_step(ppo)[0]
    far = {"at": carts["at"].at[:, 0].set(3.0), "moves": carts["moves"] + 7}
    batch = next(batches(ppo))
    after, lived = ppo.play(params, far, batch, cfg)
    assert np.asarray(lived["fell"])[:, 0].all()
    np.testing.assert_allclose(lived["at"][:, 1], 0.1 * batch["start"][:, 0] - 0.05, rtol=1e-5, atol=1e-7)
    assert (np.asarray(after["moves"]) < cfg.times).all()


@pytest.mark.parametrize("name", ["data", "generate", *MODELS])
def test_models_know_nothing_of_shardc_or_meshes(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    nodes = list(ast.walk(ast.parse(source)))
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    modules |= {f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    modules -= {f"examples.{m}" for m in MODELS}  # of which each is looked at here
    assert not {m for m in modules if m.split(".")[0] in ("shardc", "examples") or m.startswith("jax.sharding")}
