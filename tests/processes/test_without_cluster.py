"""Processes that the user has joined by `jax.distributed.initialize`: there are no links."""

from __future__ import annotations

from tests.processes.run import run_script

SCRIPT = """
import json, os, sys
import jax, numpy as np

said = json.loads(os.environ["SEAT"])
jax.distributed.initialize(
    said["jax"], said["processes"], said["me"], coordinator_bind_address=said["jax"],
    cluster_detection_method="deactivate",
)
import shardc
from shardc import S
from shardc.runtime import cluster

ME = jax.process_index()
MESH = shardc.make_mesh(data=8)
assert cluster.current() is None
x = np.arange(13.0, dtype=np.float32)
placed = shardc.put(x[shardc.rows_here(x.shape, MESH, {"data": S(0)})], MESH, {"data": S(0)}, here=True)
np.testing.assert_array_equal(shardc.fetch(placed), x)
f = shardc.function(lambda x: x * 2, mesh=MESH, in_placements=({"data": S(0)},))
np.testing.assert_array_equal(shardc.fetch(f(placed)), 2 * x)
f(x)
g = shardc.function(lambda x: x * (2 + ME), mesh=MESH)
for made in (lambda: g(x), lambda: f(np.ones(8 + 8 * ME)), lambda: f(np.full(3, 1.0 * ME))):
    try:
        made()
    except shardc.DisagreementError as error:
        print(str(error).splitlines()[1], flush=True)
    else:
        raise SystemExit("no error")
sys.stdout.flush()
os._exit(0)
"""


def test_first_calls_are_compared_and_rows_put(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for code, text in run_script(tmp_path / "script.py"):
        assert code == 0, text
        assert "the plan: process 0: digest" in text
        assert "argument x: process 0: float32[8], given whole; process 1: float32[16], given whole" in text
        assert "the value of x: process 0: " in text
