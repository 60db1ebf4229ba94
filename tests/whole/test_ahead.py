"""Functions compiled for machines that are not there: by the compilers of the plugins that are installed, and, without
one, by XLA:CPU for devices that are taken for compile-only ones.

`make ahead` installs the plugins (5 GB) and runs this file.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import MeshError, S, compat
from shardc.machine import ahead

BF16 = jnp.bfloat16
TABLE = jnp.ones((64, 64), BF16)
SHAPES = jax.ShapeDtypeStruct((512, 64), BF16), jax.ShapeDtypeStruct((1024, 512), BF16)
STAGES = [(jax.ShapeDtypeStruct((64, 256), BF16), jax.ShapeDtypeStruct((256, 64), BF16))] * 2, SHAPES[0]
NOT_HERE = "is compiled for {}, and has no devices to run on: audit(), hlo() and memory_stats() are those of that"


def step(w: Any, x: Any) -> Any:
    grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w @ TABLE).astype(jnp.float32) ** 2))(w)
    return w - grad


def loss_of(params: Any, batch: Any) -> Any:
    (up, down), (up2, down2) = params
    x = shardc.stage_boundary(batch + jax.nn.relu(batch @ up) @ down)
    return jnp.mean((x + jax.nn.relu(x @ up2) @ down2).astype(jnp.float32) ** 2)


def train(params: Any, batch: Any) -> Any:
    loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=4)(params, batch)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


def function_on(topology: str, **axes: int) -> Any:
    mesh = shardc.make_mesh(topology=topology, **axes)
    return shardc.function(step, mesh=mesh, in_placements=({"data": S(0)}, {"data": S(0)}), donate_argnames="w")


def pipeline_on(topology: str) -> Any:
    mesh = shardc.make_mesh(topology=topology, pipe=2, data=4)
    pipeline = shardc.Pipeline(axis="pipe", schedule="1f1b")
    return shardc.function(
        train, mesh=mesh, in_placements=({}, {"data": S(0)}), pipeline=pipeline, donate_argnames="params"
    )


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


@pytest.fixture
def cpus_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_plugin", lambda platform: True)
    monkeypatch.setattr(compat, "compile_only_devices", lambda *asked, **options: jax.devices())
    monkeypatch.setattr(compat, "is_compile_only", lambda device: True)
    ahead._compile_only.cache_clear()


@pytest.mark.usefixtures("cpus_as_gpus")
def test_a_function_is_compiled_and_cannot_be_called() -> None:
    function = function_on("h100:8", data=8)
    compiled = function.compile(*SHAPES)
    assert compiled.plan.mesh.topology.kind == "h100" and compiled.audit().planned == compiled.plan.collectives
    assert compiled.memory_stats().peak_memory_in_bytes > 0 and "ENTRY" in compiled.hlo()
    assert function.compile(*SHAPES).executable is compiled.executable
    with pytest.raises(MeshError, match=re.escape(NOT_HERE.format("data=8 on h100"))):
        compiled(*zeros(SHAPES))
    with pytest.raises(MeshError, match="a mesh without devices; make the mesh without `topology=` to run it"):
        function(*zeros(SHAPES))


@pytest.mark.usefixtures("cpus_as_gpus")
def test_a_pipeline_is_compiled_and_starts_no_actors() -> None:
    compiled = pipeline_on("h100:8").compile(*STAGES)
    assert compiled.audit().ok and compiled.executable.memory.peak > 0
    assert compiled.executable._executor is None and not any(s.index for s in compiled.executable._states)
    for call in (compiled, compiled.measure):
        with pytest.raises(MeshError, match=re.escape(NOT_HERE.format("pipe=2, data=4 on h100"))):
            call(*zeros(STAGES))


def test_nothing_is_planned_before_the_plugin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_plugin", lambda platform: False)
    ahead._compile_only.cache_clear()
    function = function_on("h100:8", data=8)
    with pytest.raises(MeshError, match=re.escape("pip install 'shardc[cuda]'")):
        function.compile(*SHAPES)
    assert not function._plans


MACHINES = [
    ("cuda", "a100:8", {"data": 8}),
    ("cuda", "h100:8x2", {"data": 16}),
    ("cuda", "h100:8x4", {"data": 8}),  # a part of the machine
    ("cuda", "h200:8", {"data": 4, "model": 2}),
    ("cuda", "b200:8", {"data": 8}),
    ("cuda", "gb200:16", {"data": 16}),
    ("tpu", "v4:2x2x2", {"data": 8}),
    ("tpu", "v5e:4x2", {"data": 8}),
    ("tpu", "v5p:2x2x2", {"data": 8}),
    ("tpu", "v6e:4x4", {"data": 16}),
    ("tpu", "tpu7x:2x2x2", {"data": 8}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("plugin", "topology", "axes"), MACHINES, ids=[name for _, name, _ in MACHINES])
def test_the_compiler_of_a_machine_sends_what_is_planned(plugin: str, topology: str, axes: Any) -> None:
    if not compat.has_plugin(plugin):
        pytest.skip(f"JAX's plugin for {plugin} is not installed: make ahead")
    compiled = function_on(topology, **axes).compile(*SHAPES)
    assert compiled.audit().ok, compiled.audit()
    assert compiled.memory_stats().peak_memory_in_bytes > 0
    assert compiled.executable.schedule()
    with pytest.raises(MeshError, match="has no devices to run on"):
        compiled(*zeros(SHAPES))


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("plugin", "topology"), [("cuda", "h100:4x2"), ("tpu", "v5e:4x2")])
def test_the_stages_of_a_pipeline_are_compiled_for_a_machine(plugin: str, topology: str) -> None:
    if not compat.has_plugin(plugin):
        pytest.skip(f"JAX's plugin for {plugin} is not installed: make ahead")
    compiled = pipeline_on(topology).compile(*STAGES)
    assert compiled.audit().ok, compiled.audit()
    assert {name.split(".")[1] for name in compiled.memory_stats()} == {"stage0", "stage1"}
