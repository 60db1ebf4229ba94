"""Where a training step is cut: what crosses stages, where arguments live, what is computed where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardc
from shardc.ir.nested import bodies_of
from shardc.passes.trace.trace import Arguments, trace
from shardc.pipeline.cut.cut_stages import cut_stages


def cut(step, *args, stages, **options):
    arguments = Arguments(step, ())
    program = trace(arguments, arguments.bind(args, {}), marks=True)
    return program, cut_stages(program, stages, "step", **options)


def make_step(loss, optimizer, microbatches=4):
    def step(params, opt_state, x):
        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=microbatches)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def chain(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w)
        x = shardc.stage_boundary(x) if i < len(params) - 1 else x
    return jnp.mean(x**2)


def ends(crossings):
    return sorted((c.sent.stage, c.received.stage, c.aval.str_short()) for c in crossings)


WEIGHTS = [np.ones((4, 4), np.float32)] * 3
ROWS = np.ones((8, 4), np.float32)


def test_a_chain_sends_activations_on_and_gradients_back():
    sgd = optax.sgd(0.1)
    program, found = cut(make_step(chain, sgd), WEIGHTS, sgd.init(WEIGHTS), ROWS, stages=3)
    assert ends(found.crossings) == [(s, t, "float32[2,4]") for s, t in ((0, 1), (1, 0), (1, 2), (2, 1))]
    homes = dict(zip(program.in_paths, found.homes, strict=True))
    assert homes == {"params/0": 0, "params/1": 1, "params/2": 2, "x": 0}
    assert [program.out_paths[i] for s in found.stages for i in s.results] == ["0/0", "0/1", "0/2", "2"]


def test_a_global_norm_is_one_number_from_each_stage():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    _, found = cut(make_step(chain, clipped), WEIGHTS, clipped.init(WEIGHTS), ROWS, stages=3)
    after = [c for c in found.crossings if not c.sent.in_loop]
    assert ends(c for c in after if c.received.stage == 0) == [(1, 0, "float32[]"), (2, 0, "float32[]")]
    assert {c.aval.shape for c in after} == {()}, "only scalars cross after the loop"


def test_a_shared_weight_is_summed_on_each_stage_and_once_between_them():
    def tied(params, x):
        h = shardc.stage_boundary(jnp.tanh(x @ params["table"]))
        h = shardc.stage_boundary(jnp.tanh(h @ params["w"]))
        return jnp.mean((h @ params["table"].T) ** 2)

    params = {"table": WEIGHTS[0], "w": WEIGHTS[0]}
    sgd = optax.sgd(0.1)
    program, found = cut(make_step(tied, sgd), params, sgd.init(params), ROWS, stages=3)
    after = [c for c in found.crossings if not c.sent.in_loop]
    assert ends(after) == [(2, 0, "float32[4,4]")], "the partial sum of the last stage"
    assert found.homes[program.in_paths.index("params/table")] == 0
    table = program.in_paths.index("params/table")
    assert [s.stage for s in found.stages if table in s.arguments] == [0, 2]


def test_a_skip_goes_straight_to_its_stage_and_a_mask_is_made_there():
    def skips(params, x):
        mask = jnp.tril(jnp.ones((2, 2), bool))
        first = jnp.tanh(x @ params[0])
        h = shardc.stage_boundary(jnp.where(mask, 1.0, 0.5) @ first)
        h = shardc.stage_boundary(jnp.tanh(h @ params[1]))
        return jnp.mean((jnp.where(mask, 1.0, 0.5) @ h @ params[2] + first) ** 2)

    sgd = optax.sgd(0.1)
    _, found = cut(make_step(skips, sgd), WEIGHTS, sgd.init(WEIGHTS), ROWS, stages=3)
    assert (0, 2) in {(c.sent.stage, c.received.stage) for c in found.crossings}
    assert (2, 0) in {(c.sent.stage, c.received.stage) for c in found.crossings}, "and its gradient straight back"
    assert {c.aval.shape for c in found.crossings} == {(2, 4)}, "no mask crosses"


def test_a_stage_that_recomputes_keeps_its_input_only():
    sgd = optax.sgd(0.1)
    args = WEIGHTS, sgd.init(WEIGHTS), ROWS
    for recompute, heavy in (((), 2), ((1,), 3)):
        _, found = cut(make_step(chain, sgd), *args, stages=3, recompute=recompute)
        (scan,) = [e for e in found.stages[1].program.jaxpr.eqns if e.primitive.name == "scan"]
        names = [e.primitive.name for e in bodies_of(scan)[0].eqns]
        assert names.count("dot_general") == heavy + 1
