"""The figures of a step."""

from types import SimpleNamespace

import jax
import numpy as np

import shardc
from shardc.live import figures
from shardc.live.figures import memory_in_use, step_figures


def on(topology, axes):
    f = shardc.function(lambda x: x @ x, mesh=shardc.make_mesh(topology=topology, **axes))
    return f.plan(jax.ShapeDtypeStruct((4096, 4096), "bfloat16"))


def test_mfu_is_a_part_of_what_all_devices_can_do():
    plan = on("v5p:2x2x1", {"data": 4})
    found = step_figures(SimpleNamespace(latest=SimpleNamespace(plan=plan)), 0.01)
    assert found["tflops"] == 2 * 4096**3 / 0.01 / 1e12
    assert np.isclose(found["mfu"], 2 * 4096**3 / (4 * plan.mesh.topology.flops) / 0.01)
    cpu = on("cpu", {"data": 8})
    assert "mfu" not in step_figures(SimpleNamespace(latest=SimpleNamespace(plan=cpu)), 0.01)


def test_memory_is_what_the_backend_counts(monkeypatch):
    assert memory_in_use() is None  # CPU
    devices = [SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (5, 7)]
    monkeypatch.setattr(figures, "jax", SimpleNamespace(local_devices=lambda: devices))
    assert step_figures(None, None) == {"memory_bytes": 7}
