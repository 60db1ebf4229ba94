"""A parameter server for handwritten digits (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter
Server"): workers push gradients when they have them, and pull what the server has then.

    python -m examples.ps --model mlp --mode ssp --stale 2 --slow-worker 0.05

Modes are bounds on staleness. bsp: all workers see the changes of all others of a round (bulk synchronous). ssp: nobody
is more than --stale rounds ahead of the slowest (Ho et al. 2013, stale synchronous). asp: nobody waits for anybody.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardc
from examples import mlp
from examples.data import digit_batches, digits
from examples.train import fake_cpu_devices, positive
from shardc import S

DEVICES = 2  # of each worker, and of the server


def logistic(params, batch):
    """Mean cross entropy of a linear classifier."""
    logits_NC = batch["image"].reshape(len(batch["image"]), -1) @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits_NC, batch["label"]).mean()


def model(name: str) -> tuple[Callable[..., Any], Any]:
    """The loss of (params, batch), and the parameters to begin with."""
    if name == "logistic":
        return logistic, {"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
    return mlp.loss, mlp.init(jax.random.key(0), mlp.CONFIGS["tiny"])


def make(name: str, workers: int, stale: int | None, rows: int = 64, slow: float = 0.0):
    """The server's state, the flow, and the state to begin with. Worker 0 takes `slow` seconds more to read a batch."""
    devices = np.array(jax.devices()[: DEVICES * (workers + 1)]).reshape(workers + 1, DEVICES)
    *meshes, server = (jax.sharding.Mesh(d, ("data",)) for d in devices)
    loss, params = model(name)
    optimizer = optax.adam({"logistic": 5e-3, "mlp": 1e-3}[name])
    held = shardc.shared({"params": params, "opt": optimizer.init(params)}, on=server)

    def grad(params, batch):
        return jax.value_and_grad(loss)(params, batch)

    def update(state, grads):
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    train, _ = digits()
    batches = [digit_batches(train, rows, seed=i) for i in range(workers)]

    def next_batch(worker, round):
        time.sleep(0 if worker else slow)
        return next(batches[int(worker)])

    shapes = {n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in train.items()}
    read = shardc.host(next_batch, gives=shapes)
    grads = [shardc.function(grad, mesh=m, in_placements={"batch": {"data": S(0)}}) for m in meshes]

    @shardc.flow
    def rounds(seen, k):
        losses, new = [], []
        for i, (grad, params) in enumerate(zip(grads, seen, strict=True)):
            found, g = grad(params, read(i, k))
            losses.append(found)
            new.append(held.change(update, g, stale=stale)["params"])
        return new, {"loss": losses}

    return held, rounds, [params] * workers


def seconds_of(spans: Sequence[Any], name: str, workers: int) -> list[float]:
    """The seconds of a round of each worker: from its first change to its last."""
    names = [name, *(f"{name}[{i}]" for i in range(1, workers))]
    ends = {n: sorted(s.end for s in spans if str(s.label) == n) for n in names}
    return [(e[-1] - e[0]) / max(1, len(e) - 1) for e in ends.values()]


def accuracy(name: str, params) -> float:
    """The part of the test digits that are told right."""
    _, test = digits()
    if name == "mlp":
        logits_NC = mlp.forward(params, test["image"])
    else:
        logits_NC = test["image"].reshape(len(test["image"]), -1) @ params["kernel"] + params["bias"]
    return float((np.asarray(logits_NC).argmax(1) == test["label"]).mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="logistic", choices=("logistic", "mlp"))
    parser.add_argument("--mode", default="bsp", choices=("bsp", "ssp", "asp"))
    parser.add_argument("--stale", type=positive, default=2, help="--mode ssp: rounds")
    parser.add_argument("--workers", type=positive, default=3, help=f"each on {DEVICES} devices, as is the server")
    parser.add_argument("--rounds", type=positive, default=60)
    parser.add_argument("--slow-worker", type=float, default=0.0, help="seconds by which worker 0 is slower")
    options = parser.parse_args(argv)
    if jax.config.jax_platforms in (None, "", "cpu"):
        fake_cpu_devices(DEVICES * (options.workers + 1))
    stale = {"bsp": 0, "ssp": options.stale, "asp": None}[options.mode]
    held, train, seen = make(options.model, options.workers, stale, slow=options.slow_worker)
    print(train.plan(seen, 0).explain())
    seen, _ = train.run(seen, range(1))  # compiles
    _, given = train.run(seen, range(options.rounds), record=True)
    train.close()
    for k in range(0, options.rounds, max(1, options.rounds // 6)):
        print(f"round {k + 1:4}  losses {'  '.join(f'{float(x):.4f}' for x in given[k]['loss'])}")
    each = seconds_of(given.spans, "update", options.workers)
    print(f"{held.changes} changes; seconds of a round of each worker: {'  '.join(f'{s:.4f}' for s in each)}")
    print(f"{accuracy(options.model, held.value['params']):.1%} of the test digits are told right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
