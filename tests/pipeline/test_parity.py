"""One device is the truth for pipelines too: every schedule, model, depth, inner mesh and number of microbatches.

The stages of a program are cut, placed and compiled once; all schedules that run the same tasks replay them. In the
sample that `make test` runs each schedule stands together with each number of ranks and each inner mesh, and each model
and number of microbatches stands in some case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from examples import gpt2, llama, mlp, moe, t5
from examples.zoo import MODELS
from shardc.pipeline.schedule.methods import METHODS, make_schedule
from tests.turns import cover

TASKS = {
    ("loop", 1, False): "one task",
    ("loop", 1, True): "two tasks",
    ("loop", 2, False): "loop",
    ("v", 2, True): "v",
}
"""Names of groups of schedules, by the placement of stages, stages of each rank, whether backward is two tasks."""


def groups() -> dict[str, list[str]]:
    """All schedules by how tasks are cut and where they run; in each group only the order differs."""
    found: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        key = method.placement, method.chunks, make_schedule(name, 2, 4).splits_backward
        found.setdefault(TASKS.get(key, str(key)), []).append(name)
    return found


SCHEDULES = groups()
"""Steps of the group "one task" take their gradients at an older version of the parameters, without which there is no
pipedream-2bw."""
RANKS = (2, 3, 4)
INNER = {"": {}, "data": {"data": 2}, "model": {"model": 2}}
MICROBATCHES = {"1": lambda p: 1, "p-1": lambda p: p - 1, "p": lambda p: p, "2p+1": lambda p: 2 * p + 1}
ROWS = 2
"""Of a microbatch."""
SMALL = {"d_model": 8, "heads": 2}
CONFIGS = {
    "mlp": lambda stages: mlp.Config(blocks=stages, hidden=6),
    "gpt2": lambda stages: gpt2.Config(**SMALL, layers=stages, seq=4),
    "llama": lambda stages: llama.Config(**SMALL, layers=stages, kv_heads=2, hidden=6, seq=4),
    "t5": lambda stages: t5.Config(
        **SMALL, layers=(stages + 1) // 2, d_head=4, hidden=6, seq=12, spans=2, span=2, buckets=4, farthest=8
    ),
    "moe": lambda stages: moe.Config(**SMALL, layers=stages, experts=2, hidden=6, seq=4),
}
HERE = ("mlp", "gpt2", "llama", "t5")
"""The models of this module's tests."""


class Case(NamedTuple):
    """What is compiled once."""

    tasks: str
    model: str
    ranks: int
    inner: str
    microbatches: str

    @property
    def m(self) -> int:
        return MICROBATCHES[self.microbatches](self.ranks)

    @property
    def stages(self) -> int:
        return self.ranks * METHODS[SCHEDULES[self.tasks][0]].chunks

    @property
    def schedules(self) -> list[str]:
        """Those of the group that can have so many ranks and microbatches."""
        chunks = self.stages // self.ranks
        return [s for s in SCHEDULES[self.tasks] if METHODS[s].refuse(self.ranks, self.m, chunks) is None]

    @property
    def cost(self) -> float:
        """Roughly how much there is to compile."""
        tasks = self.stages * (5 if self.tasks in ("two tasks", "v") else 4)
        return (20 + tasks * {"mlp": 1, "t5": 4}.get(self.model, 3)) ** 0.7

    def pairs(self) -> set[tuple[object, object]]:
        """What stands together in this case, and the model."""
        return {*product(self.schedules, [("ranks", self.ranks), self.inner]), self.microbatches, self.model}


def cases(models: Sequence[str], ranks: Sequence[int]) -> Iterator[Case]:
    for case in map(Case._make, product(SCHEDULES, models, ranks, INNER, MICROBATCHES)):
        if not (case.microbatches == "p-1" and case.m == 1):  # which is "1"
            yield case


EVERY = list(cases(HERE, RANKS))
OVER_PROCESSES = cover(list(cases(("mlp", "gpt2", "t5", "moe"), (2, 3))), Case.pairs, lambda c: c.cost)
"""Those that `tests.processes` runs, each rank in a process of its own."""


def loss_of(case: Case, cut=lambda x: x):
    """`loss(params, batch)` of a model with a block or more for each stage."""
    cfg = CONFIGS[case.model](case.stages)
    blocks = 2 * cfg.layers if case.model == "t5" else case.stages
    last = {round((s + 1) * blocks / case.stages) - 1 for s in range(case.stages - 1)}
    between = lambda i, x: cut(x) if i in last else x  # noqa: E731
    if case.model == "mlp":
        return partial(mlp.loss, between=between)
    return partial({"gpt2": gpt2, "llama": llama, "t5": t5, "moe": moe}[case.model].loss, cfg=cfg, between=between)


def update(params, momentum, grads, xp=jnp):
    """Stochastic gradient descent with momentum, the gradient clipped by its norm over all parameters."""
    norm = xp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
    momentum = jax.tree.map(lambda v, g: 0.9 * v + g * (0.1 / xp.maximum(norm, 0.1)), momentum, grads)
    return jax.tree.map(lambda p, v: p - 0.5 * v, params, momentum), momentum


def step_of(case: Case):
    """`step(params, momentum, batch)`: both anew, the loss, the gradients; a delayed one has `older` params besides."""
    loss = shardc.accumulate(jax.value_and_grad(loss_of(case, shardc.stage_boundary)), microbatches=case.m)

    def step(params, momentum, batch):
        value, grads = loss(params, batch)
        return *update(params, momentum, grads), value, grads

    def delayed(params, older, momentum, batch):
        value, grads = loss(older, batch)
        new, momentum = update(params, momentum, grads)
        return new, params, momentum, value, grads

    return delayed if case.tasks == "one task" else step


@cache
def start_of(model: str, stages: int):
    """Parameters and momentum that nothing is symmetric in."""
    init_fn, _ = MODELS[model].make_step(CONFIGS[model](stages))
    shapes, _ = jax.eval_shape(init_fn, jax.random.key(0))
    rng = np.random.default_rng(0)
    return tuple(jax.tree.map(lambda s: 0.3 * rng.normal(size=s.shape), shapes) for _ in range(2))


def batch_of(case: Case):
    return next(MODELS[case.model].batches(CONFIGS[case.model](case.stages), ROWS * case.m, 0))


@cache
def gradient_of(model: str, stages: int):
    return jax.jit(jax.value_and_grad(loss_of(Case("one task", model, stages, "", "1"))))


def one_device(case: Case, params):
    """Loss and gradient as the means over strided microbatches."""
    batch, grad = batch_of(case), gradient_of(case.model, case.stages)
    found = [grad(params, {k: x[j :: case.m] for k, x in batch.items()}) for j in range(case.m)]
    return jax.tree.map(lambda *xs: np.mean(np.stack(xs), 0), *found)


@pytest.fixture(autouse=True)
def in_double_and_compiled_fast(compiled_fast):
    with jax.enable_x64(True):
        yield


def placements(case: Case):
    if case.inner == "model":
        weights = MODELS[case.model].plans["tensor"]()["in_placements"]["params"]
        names = ("params", "momentum", "older") if case.tasks == "one task" else ("params", "momentum")
        return dict.fromkeys(names, weights)
    return {"batch": {"data": shardc.S(0)}} if case.inner else {}


def test_the_cases_are_all_there():
    assert len(SCHEDULES) >= len(TASKS)
    assert len(EVERY) == len(SCHEDULES) * len(HERE) * len(INNER) * (3 + 4 + 4)


@pytest.mark.sampled(by=lambda case: case.pairs() - {"t5", "llama", "gpt2"}, cost=lambda case: case.cost)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_schedule_gives_what_one_device_gives(case):
    params, momentum = start_of(case.model, case.stages)
    older = jax.tree.map(lambda p: 0.9 * p, params)
    batch = batch_of(case)
    delayed = case.tasks == "one task"
    value, grads = one_device(case, older if delayed else params)
    new, moved = update(params, momentum, grads, np)
    state = (params, older, momentum) if delayed else (params, momentum)
    want = (new, params, moved, value, grads) if delayed else (new, moved, value, grads)
    pipeline = shardc.Pipeline(schedule=case.schedules[0])
    step = shardc.function(
        step_of(case), mesh=shardc.make_mesh(pipe=case.ranks, **INNER[case.inner]), pipeline=pipeline,
        in_placements=placements(case), donate_argnums=range(len(state)),
    )  # fmt: skip
    compiled = step.compile(*state, batch)
    audit = compiled.audit()
    assert audit.ok, str(audit)
    for schedule in case.schedules:
        replay = compiled.with_schedule(schedule)
        assert replay.plan.schedule.name == schedule
        assert_close(replay(*state, batch), want, schedule)


def assert_close(got, want, where):
    """To 1e-10 of a leaf's largest value, or where that is next to nothing to 1e-13 of all leaves'."""
    top = max(np.abs(w).max() for w in jax.tree.leaves(want))
    got = jax.tree_util.tree_leaves_with_path(got, is_leaf=lambda x: isinstance(x, shardc.PlacedArray))
    for (keys, g), w in zip(got, jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        path = f"{where}: {jax.tree_util.keystr(keys, simple=True, separator='/')}"
        np.testing.assert_allclose(
            np.asarray(g), w, rtol=0, atol=1e-10 * max(np.abs(w).max(), 1e-3 * top), err_msg=path
        )
