"""PPO (Schulman et al. 2017, "Proximal Policy Optimization Algorithms") on CartPole, in plain JAX.

A step of training plays: N carts, each with a pole to balance, move T times as the policy says, and what they lived
through changes the policy. The cart is that of Barto, Sutton and Anderson 1983, as gymnasium's CartPole-v1 has it; its
physics is below. Sizes: N carts, T times, O = 4 numbers that are observed (place, speed, angle, turning), A = 2 moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    carts: int = 64
    times: int = 64  # moves of each cart in a step
    hidden: int = 64
    epochs: int = 4  # how often a step learns from what was lived through
    minibatches: int = 4  # each has the whole lives of some carts
    discount: float = 0.99
    trace: float = 0.95  # lambda of generalized advantages (Schulman et al. 2015)
    clip: float = 0.2
    entropy: float = 0.01
    limit: int = 500  # moves, after which a cart starts anew
    learning_rate: float = 3e-3


CONFIGS = {"tiny": Config(), "test": Config(carts=16, times=16, hidden=16, epochs=2, minibatches=2)}

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FAR, TILTED = 2.4, 0.2095  # where it ends: metres, radians


def move(cart_NO, right_N, xp=jnp):
    """The carts (N, O) after 0.02 s of a push to the right where `right_N` is 1, to the left where it is 0.

    `xp` is NumPy where the carts are its arrays.
    """
    place, speed, angle, turning = cart_NO.T
    force = xp.where(right_N == 1, FORCE, -FORCE)
    sine, cosine, mass = xp.sin(angle), xp.cos(angle), CART + POLE
    push = (force + POLE * HALF_LENGTH * turning**2 * sine) / mass
    turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
    gain = push - POLE * HALF_LENGTH * turn * cosine / mass
    after = (place + SECONDS * speed, speed + SECONDS * gain, angle + SECONDS * turning, turning + SECONDS * turn)
    return xp.stack(after, axis=1)


def init(key, cfg: Config):
    """{"policy": [...], "value": [...]}; a layer is a kernel and a bias."""

    def layers(key, out, scale):
        sizes = ((4, cfg.hidden, 2**0.5), (cfg.hidden, cfg.hidden, 2**0.5), (cfg.hidden, out, scale))
        return [
            {"kernel": jax.nn.initializers.orthogonal(gain)(k, (a, b), float), "bias": jnp.zeros(b)}
            for k, (a, b, gain) in zip(jax.random.split(key, 3), sizes, strict=True)
        ]

    policy, value = jax.random.split(key)
    return {"policy": layers(policy, 2, 0.01), "value": layers(value, 1, 1.0)}


def mlp(layers, x, xp=jnp):
    for layer in layers[:-1]:
        x = xp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


def play(params, carts, batch, cfg: Config):
    """The carts after T moves, and what they lived through, (N, T, ...) each.

    Args:
      carts: {"at" (N, O), "moves" (N,)}: where they are, and how many moves ago they started.
      batch: {"chance" (N, T), "start" (N, T, O)}, all in [0, 1): what decides each move, and where a cart starts anew.
    """

    def one(carts, dice):
        chance_N, start_NO = dice
        at_NO = carts["at"]
        logits_NA, value_N = mlp(params["policy"], at_NO), mlp(params["value"], at_NO)[:, 0]
        chances_NA = jax.nn.log_softmax(logits_NA)
        action_N = (chance_N < jnp.exp(chances_NA[:, 1])).astype(jnp.int32)
        next_NO, moves_N = move(at_NO, action_N), carts["moves"] + 1
        fell_N = (jnp.abs(next_NO[:, 0]) > FAR) | (jnp.abs(next_NO[:, 2]) > TILTED)
        over_N = fell_N | (moves_N >= cfg.limit)
        # a cart that is stopped, and has not fallen, would have gone on: what it was worth is its last reward
        reward_N = 1.0 + jnp.where(over_N & ~fell_N, cfg.discount * mlp(params["value"], next_NO)[:, 0], 0.0)
        lived = {
            "at": at_NO, "action": action_N, "chance": pick(chances_NA, action_N), "value": value_N,
            "reward": reward_N, "over": over_N, "fell": fell_N,
        }  # fmt: skip
        start_NO = 0.1 * start_NO.astype(float) - 0.05
        carts = {"at": jnp.where(over_N[:, None], start_NO, next_NO), "moves": jnp.where(over_N, 0, moves_N)}
        return carts, lived

    dice = (batch["chance"].swapaxes(0, 1), batch["start"].swapaxes(0, 1))
    carts, lived = jax.lax.scan(one, carts, dice)
    return carts, jax.tree.map(lambda x: x.swapaxes(0, 1), lived)


def pick(x_NA, action_N):
    """The number that belongs to each action."""
    return jnp.where(action_N == 1, x_NA[..., 1], x_NA[..., 0])


def advantages(lived, last_N, cfg: Config):
    """How much better moves were than foretold (N, T), summed backwards; `last_N` is what the end is worth."""

    def back(carry, now):
        advantage_N, next_N = carry
        goes_on_N = jnp.where(now["over"], 0.0, 1.0)
        error_N = now["reward"] + cfg.discount * goes_on_N * next_N - now["value"]
        advantage_N = error_N + cfg.discount * cfg.trace * goes_on_N * advantage_N
        return (advantage_N, now["value"]), advantage_N

    by_time = {name: lived[name].swapaxes(0, 1) for name in ("over", "reward", "value")}
    return jax.lax.scan(back, (jnp.zeros_like(last_N), last_N), by_time, reverse=True)[1].swapaxes(0, 1)


def loss(params, lived, cfg: Config):
    """The clipped surrogate, the squared error of the value and the entropy (equation 9), as means over all moves."""
    chances_NTA = jax.nn.log_softmax(mlp(params["policy"], lived["at"]))
    ratio_NT = jnp.exp(pick(chances_NTA, lived["action"]) - lived["chance"])
    clipped_NT = ratio_NT.clip(1 - cfg.clip, 1 + cfg.clip)
    gain = jnp.minimum(ratio_NT * lived["advantage"], clipped_NT * lived["advantage"]).mean()
    error = ((mlp(params["value"], lived["at"])[..., 0] - lived["goal"]) ** 2).mean()
    entropy = -(jnp.exp(chances_NTA) * chances_NTA).sum(-1).mean()
    return 0.5 * error - gain - cfg.entropy * entropy


def make_step(cfg: Config, accumulate: Callable = lambda fn: fn):
    """`init_fn(key)` and `step_fn(params, opt_state, carts, batch)`, which returns all three anew and a number.

    The loss of PPO does not say how well it plays. What is returned in its place is how many of a hundred moves end
    with a fall. `accumulate` may replace `fn(params, lived)` by its mean over parts of the carts.
    """
    start_fn, learn_fn = make_learner(cfg, accumulate)

    def init_fn(key):
        carts = {"at": jnp.zeros((cfg.carts, 4)), "moves": jnp.zeros(cfg.carts, jnp.int32)}
        return *start_fn(key), carts

    def step_fn(params, opt_state, carts, batch):
        carts, lived = play(params, carts, batch, cfg)
        params, opt_state, falls = learn_fn(params, opt_state, lived, carts["at"])
        return params, opt_state, carts, falls

    return init_fn, step_fn


def make_learner(cfg: Config, accumulate: Callable = lambda fn: fn):
    """The part of a step that learns: `start_fn(key)`, and `learn_fn(params, opt_state, lived, end_NO)` of what carts
    lived through until they were at `end_NO`. Both give parameters and optimizer state, the second one a number too."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(cfg.learning_rate, eps=1e-5))

    def start_fn(key):
        params = init(key, cfg)
        return params, optimizer.init(params)

    def learn_fn(params, opt_state, lived, end_NO):
        advantage_NT = advantages(lived, mlp(params["value"], end_NO)[:, 0], cfg)
        normed_NT = (advantage_NT - advantage_NT.mean()) / (advantage_NT.std() + 1e-8)
        lived = {**lived, "goal": advantage_NT + lived["value"], "advantage": normed_NT}
        # cart i goes to minibatch i mod M: the carts of each lie wherever carts lie
        parts = jax.tree.map(lambda x: x.reshape(-1, cfg.minibatches, *x.shape[1:]).swapaxes(0, 1), lived)

        def learn(state, part):
            params, opt_state = state
            _, grads = accumulate(jax.value_and_grad(partial(loss, cfg=cfg)))(params, part)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        def epoch(state, _):
            return jax.lax.scan(learn, state, parts)[0], None

        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), length=cfg.epochs)
        return params, opt_state, 100 * lived["fell"].astype(float).mean()

    return start_fn, learn_fn


def lifetimes(params, cfg: Config, carts: int = 100, seed: int = 0):
    """After how many moves each of so many carts falls (carts,), at most `cfg.limit`; the likelier move is made."""

    def one(state, _):
        at_NO, lives_N, up_N = state
        at_NO = move(at_NO, mlp(params["policy"], at_NO).argmax(-1))
        up_N &= (jnp.abs(at_NO[:, 0]) <= FAR) & (jnp.abs(at_NO[:, 2]) <= TILTED)
        return (at_NO, lives_N + up_N, up_N), None

    at_NO = jax.random.uniform(jax.random.key(seed), (carts, 4), minval=-0.05, maxval=0.05)
    start = (at_NO, jnp.ones(carts, int), jnp.ones(carts, bool))
    return jax.lax.scan(one, start, length=cfg.limit - 1)[0][1]
