"""The notebook, whose cells are run as one program: Jupyter is not needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOR_DEVICES = ("XLA_FLAGS", "NPROC", "PJRT_NPROC")
"""Variables that the first cell has to set by itself."""


@pytest.mark.sampled(0)
def test_the_cells_run_one_after_the_other():
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)  # differences of commits stay readable

    program = "\n\n".join("".join(cell["source"]) for cell in code)
    env = {name: value for name, value in os.environ.items() if name not in FOR_DEVICES} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "audit: planned = found" in done.stdout
