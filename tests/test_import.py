"""What is loaded, and when: counted in modules, as seconds differ from machine to machine."""

import json
import subprocess
import sys
from pathlib import Path

import shardc

STEP = """
import json, sys
import jax.numpy as jnp
import shardc
loaded = lambda: sorted(m for m in sys.modules if m.startswith("shardc"))
first = loaded()
f = shardc.function(lambda w, x: w - x.sum(), mesh=shardc.make_mesh(data=1), in_placements={"x": {"data": shardc.S(0)}})
f(jnp.ones(4), jnp.ones(8))
print(json.dumps([first, loaded(), "click" in sys.modules]))
"""
OTHERS = (
    "checkpoint",
    "flax",
    "equinox",
    "launch",
    "pipelines",
    "report.explain",
    "tune",
    "pipeline.make",
    "pipeline.plan",
)


def test_a_step_on_one_mesh_loads_no_pipelines_reports_or_checkpoints():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=120, check=True)
    at_import, at_call, has_click = json.loads(done.stdout)
    assert at_import == ["shardc", "shardc.versions"]
    assert [m for m in at_call if m.removeprefix("shardc.").startswith(OTHERS)] == []
    assert len(at_call) < 230
    assert not has_click


def test_every_name_is_there():
    assert set(shardc.__all__) <= set(dir(shardc))
    assert all(getattr(shardc, name) is not None for name in shardc.__all__)


def test_no_name_is_that_of_a_module():
    """Importing `shardc.x.y` sets `shardc.x`: a name that is loaded at first use must be no module."""
    modules = {path.stem for path in Path(shardc.__file__).parent.iterdir()}
    assert not modules & set(shardc.__all__)
