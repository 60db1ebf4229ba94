"""RLHF in small: a policy writes, a judge rewards, a learner learns, each on a mesh of its own, in one process or many.

    python -m examples.rlhf                                                     # 8 fake devices, one process
    python -m shardc run --processes 4 --islands 2 --devices 2 -m examples.rlhf # the same over four, learner in two
    python -m shardc run --processes 4 --islands 2 --devices 2 --restarts 3 -m examples.rlhf --checkpoints folder

The policy is a small transformer that writes token by token with a cache of keys and values. The judge likes rows in
which each token is the one before it plus 1. The learner holds parameters and optimizer state split over its devices
(FSDP), and improves the policy by group-relative advantages (GRPO, Shao et al. 2024). While it makes version v of the
parameters, the policy writes with version v - 1: `shardc.late(state["policy"], 1)`. A version travels as one message,
and its number with it, so that every row says which version has written it.

Sizes: N rows, G rows for each prompt, T tokens, V kinds of tokens, L layers, D numbers a token, H heads of K.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import shardc
from examples.train import fake_cpu_devices, positive


@dataclass(frozen=True)
class Config:
    rows: int = 64
    group: int = 8
    length: int = 16
    kinds: int = 16
    layers: int = 2
    width: int = 32
    heads: int = 4
    clip: float = 0.2
    learning_rate: float = 3e-3


CONFIGS = {"tiny": Config(), "test": Config(rows=16, group=4, length=8, width=16)}


# --- the policy -------------------------------------------------------------------------------------------------------


def init(key, cfg: Config):
    """{"embed", "place", "layers"}; each leaf of "layers" has the weights of all layers."""
    L, D = cfg.layers, cfg.width
    shapes = dict.fromkeys(("query", "key", "value", "out"), (L, D, D)) | {
        "up": (L, D, 4 * D),
        "down": (L, 4 * D, D),
    }
    shapes |= {"embed": (cfg.kinds, D), "place": (cfg.length, D)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    made = {name: jax.random.normal(keys[name], shape) * shape[-2] ** -0.5 for name, shape in shapes.items()}
    return {"embed": made.pop("embed"), "place": made.pop("place"), "layers": made}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(w, x_NTD, heads: int, attend: Callable):
    """One layer. `attend(keys, values)` gives all keys and values that the rows look at, and which they may."""
    split = (*x_NTD.shape[:2], heads, -1)
    q, k, v = ((norm(x_NTD) @ w[n]).reshape(split) for n in ("query", "key", "value"))
    k_NSHK, v_NSHK, may_TS, kept = attend(k, v)
    scores = jnp.einsum("nthk,nshk->nhts", q, k_NSHK) * q.shape[-1] ** -0.5
    mixed = jnp.einsum("nhts,nshk->nthk", jax.nn.softmax(jnp.where(may_TS, scores, -1e30)), v_NSHK)
    x_NTD = x_NTD + mixed.reshape(x_NTD.shape) @ w["out"]
    return x_NTD + jax.nn.gelu(norm(x_NTD) @ w["up"]) @ w["down"], kept


def log_chances(params, tokens_NT, cfg: Config):
    """Of each token but the first, given those before it: (N, T - 1)."""
    T = cfg.length - 1
    x_NTD = params["embed"][tokens_NT[:, :-1]] + params["place"][:T]
    past = jnp.tril(jnp.ones((T, T), bool))
    x_NTD, _ = jax.lax.scan(
        lambda x, w: block(w, x, cfg.heads, lambda k, v: (k, v, past, None)), x_NTD, params["layers"]
    )
    all_NTV = jax.nn.log_softmax(norm(x_NTD) @ params["embed"].T)
    return jnp.take_along_axis(all_NTV, tokens_NT[:, 1:, None], -1)[..., 0]


def make_writer(cfg: Config) -> Callable:
    def write(policy, prompt_N, key):
        """Rows that begin with their prompt, the log chance of each token, and the version of the policy."""
        params, rows = policy["params"], len(prompt_N)
        empty = jnp.zeros((cfg.layers, rows, cfg.length, cfg.heads, cfg.width // cfg.heads))

        def one_token(carried, at):
            cache, token_N = carried
            may = jnp.arange(cfg.length)[None] <= at

            def layer(x, both):
                w, (keys, values) = both

                def attend(k, v):
                    cached = [jax.lax.dynamic_update_slice_in_dim(c, n, at, 1) for c, n in ((keys, k), (values, v))]
                    return *cached, may, tuple(cached)

                return block(w, x, cfg.heads, attend)

            x_N1D = (params["embed"][token_N] + params["place"][at])[:, None]
            x_N1D, cache = jax.lax.scan(layer, x_N1D, (params["layers"], cache))
            chances_NV = jax.nn.log_softmax(norm(x_N1D[:, 0]) @ params["embed"].T)
            new_N = jax.random.categorical(jax.random.fold_in(key, at), chances_NV)
            return (cache, new_N), (new_N, jnp.take_along_axis(chances_NV, new_N[:, None], 1)[:, 0])

        _, (new_TN, chance_TN) = jax.lax.scan(one_token, ((empty, empty), prompt_N), jnp.arange(cfg.length - 1))
        return {"tokens": jnp.concatenate([prompt_N[None], new_TN]).T, "chance": chance_TN.T, "by": policy["version"]}

    return write


# --- the judge and the learner ----------------------------------------------------------------------------------------


def judge(liked_VV, tokens_NT):
    """The share of pairs that the table likes, of each row."""
    return jnp.mean(liked_VV[tokens_NT[:, :-1], tokens_NT[:, 1:]], axis=1)


def make_learner(cfg: Config) -> tuple[Callable, Callable]:
    optimizer = optax.adam(cfg.learning_rate)

    def start(key):
        params = init(key, cfg)
        return {"policy": {"params": params, "version": jnp.zeros((), jnp.int32)}, "opt_state": optimizer.init(params)}

    def learn(state, written, reward_N):
        policy = state["policy"]
        groups = reward_N.reshape(-1, cfg.group)
        better = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-3)

        def loss(params):
            ratio = jnp.exp(log_chances(params, written["tokens"], cfg) - written["chance"])
            gain = better.reshape(-1, 1)
            return -jnp.mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - cfg.clip, 1 + cfg.clip) * gain))

        grads = jax.grad(loss)(policy["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        policy = {"params": optax.apply_updates(policy["params"], updates), "version": policy["version"] + 1}
        return {"policy": policy, "opt_state": opt_state}, {"reward": reward_N.mean(), "by": written["by"]}

    return start, learn


# --- the flow ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meshes:
    """The devices of each: policy and judge take turns in the first half, so that they are in the same processes; the
    learner has the second half."""

    policy: Mesh
    judge: Mesh
    learner: Mesh

    @classmethod
    def of(cls, devices: Sequence[Any]) -> Meshes:
        some, half = np.array(devices), len(devices) // 2
        return cls(*(Mesh(part, ("data",)) for part in (some[:half:2], some[1:half:2], some[half:])))


def make_flow(cfg: Config, meshes: Meshes) -> tuple[Any, Callable[[], Any]]:
    """The flow, and the function that makes the state that it begins with."""
    start, learn = make_learner(cfg)
    split = {"data": shardc.S(0)}
    rows = {"prompt_N": split, "policy": {}}
    write = shardc.function(make_writer(cfg), mesh=meshes.policy, in_placements=rows)
    reward = shardc.function(judge, mesh=meshes.judge, in_placements={"tokens_NT": split})
    learner = shardc.function(
        learn, mesh=meshes.learner, donate_argnames="state",
        in_placements={
            "state": shardc.fsdp("data", min_size=2**8),
            "written": {"tokens": split, "chance": split, "by": {}},
            "reward_N": split,
        },
    )  # fmt: skip
    kinds = np.arange(cfg.kinds)
    liked_VV = (kinds[None] == (kinds[:, None] + 1) % cfg.kinds).astype(np.float32)

    @shardc.flow(credits=2)
    def train(state, item):
        prompt_N, key = item
        written = write(shardc.late(state["policy"], 1), prompt_N, key)
        return learner(state, written, reward(liked_VV, written["tokens"]))

    return train, lambda: jax.jit(start)(jax.random.key(0))


def prompts(cfg: Config, rounds: range) -> list[Any]:
    """The items of rounds: a first token for each group of rows, and a key."""
    keys = [jax.random.key_data(jax.random.key(r)) for r in rounds]
    firsts = [np.random.default_rng([7, r]).integers(cfg.kinds, size=cfg.rows // cfg.group) for r in rounds]
    return [(np.repeat(f, cfg.group).astype(np.int32), np.asarray(k)) for f, k in zip(firsts, keys, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=positive, default=150)
    add("--every", type=positive, default=25, help="rounds between two lines, and between two checkpoints")
    add("--config", choices=CONFIGS, default="tiny")
    add("--checkpoints", metavar="FOLDER", help="go on from the last one")
    options = parser.parse_args(argv)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # the launcher has said it
        fake_cpu_devices(8)
    cfg = CONFIGS[options.config]
    train, start = make_flow(cfg, Meshes.of(shardc.devices()))
    plan = train.plan(jax.eval_shape(start), prompts(cfg, range(1))[0])
    print(plan.explain())
    with shardc.checkpoints(options.checkpoints, every=1) if options.checkpoints else nullcontext() as saved:
        (state, pending), begun = (start(), None), 0
        if saved is not None:
            (state, pending), begun = saved.last(or_else=lambda: (start(), plan.pending))
        for i in range(begun, -(-options.rounds // options.every)):
            rounds = range(i * options.every, min((i + 1) * options.every, options.rounds))
            state, given = train.run(state, prompts(cfg, rounds), pending=pending)
            pending = given.pending
            last = shardc.fetch(given[-1])
            print(
                f"round {rounds.stop:4}: reward {float(last['reward']):.3f}, by version {int(last['by'])}", flush=True
            )
            if saved is not None:
                saved.step(i, (state, pending))
    train.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
