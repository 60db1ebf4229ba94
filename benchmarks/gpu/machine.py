"""The machine: its device and versions, how fast it multiplies and reads, and one step under shardc.

The speeds are written to calibration.json, which the section seconds plans with. `shardc.calibrate` needs two devices
or more, because it also measures collectives. The step fills numba's cache: on a new machine the first plan compiles
what every plan needs.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import jax

import shardc
from benchmarks.gpu import programs
from benchmarks.measure import report, seconds
from shardc.machine.mesh import view
from shardc.machine.topology import Topology
from shardc.tuning.calibrate import DTYPES, Watch, measure_flops, measure_memory

FILE = "calibration.json"


def calibrated(mesh: Any, width: int, held: int, turns: int) -> Topology:
    """What is known of the device, with its measured speeds.

    Args:
      width: of the matrices that are multiplied.
      held: bytes that are read and written.
    """
    watch = Watch(mesh, turns)
    rates = {dtype: measure_flops(mesh, dtype, width, watch) for dtype in DTYPES}
    known = view(mesh).topology
    return replace(
        known, kind=f"{known.kind}-measured", flops=rates["bfloat16"], rates=tuple(rates.items()),
        memory_bandwidth=measure_memory(mesh, held, watch), layout=(), shape=(),
    )  # fmt: skip


def driver() -> str | None:
    """The version of NVIDIA's driver, if nvidia-smi is there."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def measure(job: str, options: argparse.Namespace) -> None:
    device = jax.devices()[0]
    mesh = shardc.make_mesh(data=1)
    report(
        card=device.device_kind, platform=device.platform, driver=driver(), jax=jax.__version__,
        python=platform.python_version(), runtime=getattr(device.client, "platform_version", ""), cores=os.cpu_count(),
        memory=(device.memory_stats() or {}).get("bytes_limit"), topology=view(mesh).topology.kind,
        shardc=shardc.__file__,
    )  # fmt: skip
    large = device.platform != "cpu" and not options.tiny
    machine = calibrated(mesh, 8192 if large else 512, 2**30 if large else 2**20, turns=5)
    (options.out / FILE).write_text(machine.to_json())
    report(flops=dict(machine.rates), memory_bandwidth=machine.memory_bandwidth)
    program = programs.make("mlp", tiny=True)
    function = shardc.function(mesh=mesh, **program.options)(program.fn)
    spent, _ = seconds(lambda: jax.block_until_ready(function(*program.args)))
    report(first_step=spent)
