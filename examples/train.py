"""Train a model of the zoo under a plan.

    python -m examples.train --model gpt2 --mesh data=4,model=2 --plan data_tensor --devices 8
    python -m shardc run --processes 2 --devices 4 -m examples.train --mesh data=4,model=2 --plan data_tensor

The losses are those of one device, whatever the mesh, the plan and the number of processes: try --devices 1, or
--check-against-one-device.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

MODELS = ("mlp", "resnet", "vit", "mixer", "gpt2", "llama", "moe", "bert", "t5", "unet", "dlrm", "ppo")
FLAT = ("resnet", "dlrm", "ppo")
"""Models that are no stack of blocks."""
DECODERS = ("gpt2", "llama", "moe")
"""Models that read one byte of text after the other; their configs have `vocab`, `scan_layers` and `remat`."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="gpt2", choices=MODELS)
    add("--config", default="tiny", help="a named config of the model's file")
    add("--plan", default="data", help="a plan of examples/plans/")
    mesh = "axes and sizes, as in data=4,model=2, or auto, which plans on all and takes the best; default: data=<all>"
    add("--mesh", type=axes, help=mesh)
    add("--schedule", help="--plan pipeline: 1f1b, zb-h1, ... (python -m shardc schedule --help), or a file with one")
    add("--stages", choices=("marked", "auto"), help="--plan pipeline: cut after every so many blocks, or by cost")
    add("--chunks", type=positive, help="--plan pipeline: stages on each rank; default: what the schedule has")
    fake = "fake so many CPU devices; 1: every axis of --mesh has size 1; shardc run has its own --devices"
    add("--devices", type=positive, help=fake)
    add("--steps", type=positive, default=60)
    add("--batch", type=positive, help="rows in a batch")
    parts = "parts into which each batch is cut; default: 1, for --plan pipeline 4 for each rank if the batch allows"
    add("--microbatches", type=positive, help=parts)
    add("--seed", type=int, default=0)
    add("--layers", type=positive, help="blocks of the model (unet: at each level), instead of the config's")
    add("--vocab", type=positive, help=f"{', '.join(DECODERS)}: rows of the embedding, 256 or more")
    add("--scan", action="store_true", help=f"{', '.join(DECODERS)}: scan over stacked layers")
    add("--remat", action="store_true", help=f"{', '.join(DECODERS)}: recompute each block in the backward pass")
    add("--loss-log", metavar="FILE", help="write one JSON line per step to this file; - is standard output")
    add("--csv", metavar="FILE", help="write the figures of every tenth step to this file: loss, rate, time, memory")
    add("--checkpoints", metavar="DIR", help="write the state to this directory or URL, and go on from there")
    add("--every", type=positive, help="--checkpoints: steps from one to the next; default: 10")
    add("--check-against-one-device", action="store_true", help="train once more without shardc, compare the losses")
    options = parser.parse_args(argv)
    if options.model not in DECODERS and (options.vocab or options.scan or options.remat):
        parser.error(f"--vocab, --scan and --remat are for {', '.join(DECODERS)}")
    if options.model in FLAT and options.layers:
        parser.error(f"--layers is not for {options.model}")
    if options.every and not options.checkpoints:
        parser.error("--every is for --checkpoints")
    if options.vocab is not None and options.vocab < 256:
        parser.error(f"--vocab {options.vocab}: the text is made of bytes, which want at least 256")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def axes(text: str) -> dict[str, int] | str:
    if text == "auto":
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and size.isdecimal() and int(size) for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write data=4,model=2")
    sizes = {name.strip(): int(size) for name, _, size in pairs}
    if len(sizes) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    return sizes


def fake_cpu_devices(devices: int) -> None:
    """Tell JAX, before it starts, to cut this machine's CPU in `devices`."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    # Collectives block threads of XLA's pool: with fewer than two per device they can wait for each other for ever.
    os.environ["NPROC"] = str(max(2 * devices, int(os.environ.get("NPROC", "0"))))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    started_by_shardc = "jax" in sys.modules  # its launcher has told JAX how many devices there are
    if options.devices and not started_by_shardc and os.environ.get("JAX_PLATFORMS", "cpu") in ("", "cpu"):
        fake_cpu_devices(options.devices)
    from examples.loop import train  # noqa: PLC0415 JAX reads the environment when it starts

    return train(options)


if __name__ == "__main__":
    sys.exit(main())
