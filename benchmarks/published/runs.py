"""The rows of runs.csv: training runs whose configuration and speed are public, each with its source.

A row that leaves out what a plan needs has a reason in `missing`. What is assumed where a source is silent stands in
benchmarks/published.md.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

FILE = Path(__file__).with_name("runs.csv")
TOO_LARGE = 3e10
"""Parameters that no device holds whole beside their gradients: such a run is fully sharded, whatever its row says."""
RECALLED = "recalled, not read from its source"


@dataclass(frozen=True)
class Run:
    """A published run. Sizes of the mesh are devices along an axis; `seconds` and `gib` are as published.

    Attributes:
      narrow: the type of the operands of a layer's products, if they are not bfloat16.
      chunks: stages of each rank of a pipeline.
    """

    name: str
    source: str
    hardware: str
    devices: int
    model: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool
    batch: int
    microbatches: int
    data: int
    fsdp: int
    tensor: int
    pipe: int
    chunks: int
    narrow: str
    recompute: str
    sequence_parallel: bool
    flash: bool
    seconds: float
    gib: float | None

    @property
    def megatron(self) -> bool:
        """Whether weights and gradients are 16-bit and lie whole on each data-parallel rank."""
        return self.name.startswith(("vtrain", "korthikanti"))

    @property
    def configuration(self) -> Run:
        """What a plan follows from: the run without what was measured, and without the release that ran it."""
        return replace(self, name=self.name.split("-")[0], source="", seconds=0.0, gib=None)

    @property
    def mesh(self) -> dict[str, int]:
        """The axes that have more than one device, outermost first."""
        sizes = {"pipe": self.pipe, "data": self.data, "fsdp": self.fsdp, "model": self.tensor}
        return {axis: n for axis, n in sizes.items() if n > 1} or {"data": 1}

    @property
    def stages(self) -> list[int]:
        """Layers of each stage; of unequal ones the first and the last have fewer, for the embedding and the head."""
        count = self.pipe * self.chunks
        least, more = divmod(self.layers, count)
        front = (count - more) // 2
        return [least + (front <= i < front + more) for i in range(count)]

    @property
    def parameters(self) -> float:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + (2 + self.gated) * self.hidden * self.ffn
        return self.layers * layer + (1 + self.gated) * self.vocab * self.hidden

    @property
    def attention_flops(self) -> float:
        """Operations of attention with all keys in one step, forward and backward."""
        return 12.0 * self.batch * self.layers * self.heads * self.head_dim * self.seq**2

    @property
    def kernel_flops(self) -> float:
        """Operations of its flash kernels in one step: half of the pairs; the backward pass is 2.5 times the forward
        pass, which most recompute policies run twice."""
        forward = self.attention_flops / 6 if self.flash else 0.0
        return forward * (3.5 + (self.recompute not in ("", "none", "minimal_flash", "selective")))

    @property
    def model_flops(self) -> float:
        """Operations of one step that the model asks for (Narayanan et al. 2021; PaLM, appendix B): six for each
        parameter of a product and token, and attention with all keys. What is computed anew is not counted."""
        used = self.parameters - self.gated * self.vocab * self.hidden
        return 6.0 * used * self.batch * self.seq + self.attention_flops


TYPES: Mapping[str, str] = {
    "fp16": "", "bf16": "", "FP8": "float8_e4m3fn", "FP8-CS": "float8_e4m3fn", "MXFP8": "float8_e4m3fn",
    "fp8 linear": "float8_e4m3fn", "fp8_full": "float8_e4m3fn", "NVFP4": "float4_e2m1fn",
}  # fmt: skip


def missing(row: Mapping[str, str]) -> str:
    """The reason why a row of the CSV is not planned; empty if it is."""
    reasons = {
        "experts (MoE)": bool(row["experts"]) or not row["layers"],
        RECALLED: row["source_kind"] == "recalled",
        "context parallel": row["cp"] not in ("", "1"),
        "batch not published": not row["batch_sequences"],
        "microbatch not published": not row["microbatches"] and row["pp"] not in ("", "1"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def read(file: Path = FILE) -> list[Run]:
    with file.open(encoding="utf-8", newline="") as lines:
        return [run_of(row) for row in csv.DictReader(lines) if not missing(row)]


def run_of(row: Mapping[str, str]) -> Run:
    """A row of the CSV with what its source leaves out filled in."""

    def count(column: str, default: int = 1) -> int:
        return int(row[column] or 0) or default

    devices, tensor, pipe = count("devices"), count("tp"), count("pp")
    data, fsdp, batch = count("dp"), count("fsdp"), count("batch_sequences")
    if data == fsdp and data * fsdp * tensor * pipe > devices:  # fully sharded over the data-parallel ranks
        data = 1
    if row["source"].endswith("ironwood/README.md"):
        fsdp = devices
    microbatches = count("microbatches")
    run = Run(
        row["id"], row["source"], row["hardware"], devices, row["model"], count("layers"), count("hidden"),
        count("ffn"), count("heads"), count("kv_heads"), count("head_dim", count("hidden") // count("heads")),
        count("vocab"), count("seq"), row["gated"] == "1" or "llama" in row["model"], batch, microbatches,
        data, fsdp, tensor, pipe, count("vp"), TYPES[row["precision"]],
        row["recompute"] or ("full" if "tpu-recipes" in row["source"] else ""),
        row["sequence_parallel"] == "True" or (row["id"].startswith(("nemo", "maxtext", "torchtitan")) and tensor > 1),
        row["attention"] != "unfused", 0.0, float(row["memory_gib"]) if row["memory_gib"] else None,
    )  # fmt: skip
    if fsdp == 1 and run.parameters / (tensor * pipe) > TOO_LARGE:
        run = replace(run, data=1, fsdp=data * fsdp)
    seconds = float(row["step_seconds"] or 0)
    if not seconds:
        seconds = run.model_flops / (devices * float(row["tflops_per_device"]) * 1e12)
    return replace(run, seconds=seconds)
