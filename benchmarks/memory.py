"""Memory as planned beside what XLA allots: `python -m benchmarks.memory [--on cpu v5p] [--case gpt2/fsdp]`.

Compiles each step for 8 CPU devices, or ahead of time for 8 chips that are not there, and compares `plan.memory.peak`
with what `memory_analysis()` says: of XLA:CPU arguments + results + temporaries - donated, of XLA:TPU what lives at the
peak. Nothing runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from benchmarks.cases import SIZES, Case
from benchmarks.measure import MIB, fake_cpu, report
from benchmarks.run import tpu_env
from benchmarks.tables import Rows, new_table, start

CHIPS = {"v5p": "v5:2x2x2", "v5e": "v5e:2x4"}
"""Topologies of 8 chips, as libtpu calls them."""

PLANS = (
    "mlp/data/data=8", "mlp/fsdp/data=8", "mlp/data_tensor/data=4,model=2", "resnet/data/data=8", "resnet/fsdp/data=8",
    "vit/data/data=8", "gpt2/data/data=8", "gpt2/tensor/model=8", "gpt2/fsdp/data=8", "gpt2/data_tensor/data=4,model=2",
    "llama/data/data=8", "llama/fsdp/data=8", "moe/data/data=8", "t5/data/data=8", "bert/data/data=8",
    "dlrm/data/data=8", "ppo/data/data=8", "unet/data/data=8",
)  # fmt: skip

SCANNED = {"scan_layers": True}
LARGE: dict[str, tuple[str, dict[str, Any], int]] = {
    "124m-scan": ("small124m", SCANNED, 64),
    "124m-scan-remat": ("small124m", SCANNED | {"remat": True}, 64),
}
"""GPT-2 of 124 million parameters on TPU: the config, what is changed in it, and rows of 1024 tokens."""


@dataclass(frozen=True)
class Row:
    """One row of the table; prints and parses as `gpt2/fsdp/data=8/tiny`."""

    case: Case
    size: str

    def __str__(self) -> str:
        return f"{self.case}/{self.size}"

    @classmethod
    def parse(cls, text: str) -> Row:
        case, _, size = text.rpartition("/")
        return cls(Case.parse(case), size)

    @property
    def config(self) -> tuple[Any, int]:
        """The model's config, and rows in a batch."""
        zoo = self.case.zoo
        if self.size in LARGE:
            name, changes, rows = LARGE[self.size]
            return replace(zoo.configs[name], **changes), rows
        return (self.case.config, self.case.rows) if self.size == "larger" else (zoo.configs["tiny"], zoo.rows)


def all_rows(device: str) -> Iterator[Row]:
    for text in PLANS:
        case = Case.parse(text)
        yield Row(case, "tiny")
        if case.model in SIZES:
            yield Row(case, "larger")
    if device != "cpu":
        yield from (Row(Case.parse("gpt2/fsdp/data=8"), size) for size in LARGE)


def measure(row: Row, device: str) -> None:
    import jax  # noqa: PLC0415  the environment is set before JAX is imported
    import jax.numpy as jnp  # noqa: PLC0415

    import shardc  # noqa: PLC0415

    cfg, rows = row.config
    init_fn, step_fn = row.case.zoo.make_step(cfg)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    batch = next(row.case.zoo.batches(cfg, rows, 0))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)), (*state, batch))
    step = shardc.function(mesh=mesh_of(row.case, device), **row.case.options)(step_fn)
    planned, xla = step.plan(*args).memory, step.compile(*args).memory_stats()
    held = xla.argument_size_in_bytes + xla.output_size_in_bytes - xla.alias_size_in_bytes
    needs = held + xla.temp_size_in_bytes if device == "cpu" else xla.peak_memory_in_bytes
    report(planned=planned.peak, arguments=planned.arguments, xla=needs)


def mesh_of(case: Case, device: str) -> Any:
    import numpy as np  # noqa: PLC0415
    from jax.experimental import topologies  # noqa: PLC0415
    from jax.sharding import AxisType, Mesh  # noqa: PLC0415

    import shardc  # noqa: PLC0415

    if device == "cpu":
        return shardc.make_mesh(**dict(case.mesh))
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[device]).devices
    axes = dict(case.mesh)
    return Mesh(np.asarray(chips).reshape(*axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def table(device: str, options: argparse.Namespace) -> Rows:
    found: Rows = []
    printed = new_table(f"Memory, 8 devices: {device}", "example", "plan", "mesh", "size", "planned MiB", "XLA MiB",
                        "ratio")  # fmt: skip
    env = fake_cpu(8) if device == "cpu" else tpu_env()
    python = sys.executable if device == "cpu" else options.tpu_python or sys.executable
    for row in all_rows(device):
        if not str(row).startswith(options.case):
            continue
        for done in start("benchmarks.memory", "--row", str(row), "--on", device, env=env, python=python):
            found.append({"row": str(row), "on": device, **done})
            ratio = done["planned"] / done["xla"]
            printed.add_row(
                row.case.model, row.case.plan, row.case.mesh_text, row.size, f"{done['planned'] / MIB:.2f}",
                f"{done['xla'] / MIB:.2f}", f"{ratio:.3f}{' !' if not 1 <= ratio <= 1.1 else '  '}",
            )  # fmt: skip
    options.console.print(printed)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--on", nargs="+", choices=("cpu", *CHIPS), default=["cpu"], help="devices to compile for")
    parser.add_argument("--case", default="", help="only rows that start so, as in gpt2/fsdp")
    parser.add_argument("--tpu-python", help="a Python with jax[tpu] and the examples' packages, if this one has none")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.row:
        measure(Row.parse(options.row), options.on[0])
        return 0
    options.console = Console() if os.isatty(1) else Console(width=140)
    for device in options.on:
        table(device, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
