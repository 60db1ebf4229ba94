"""torch.distributed.pipelining as a peer: four processes of a Python that has torch, driven line by line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pipeline.models import STAGES, Workload

SCRIPT = Path(__file__).with_name("torch_rank.py")


def torch_of(python: str) -> str | None:
    """The version of torch that a Python has; None if it has none with pipelining."""
    probe = "import torch, torch.distributed.pipelining; print(torch.__version__)"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else None


class TorchPeer:
    """1F1B over gloo, each rank a process with one thread. It sleeps until it is told to run."""

    def __init__(self, python: str, model: str, work: Workload, folder: Path) -> None:
        self.folder = folder
        keys = ";".join(",".join(names) for names in work.keys)
        np.savez(folder / "problem.npz", keys=keys, **work.batch, **flat(work.params))
        self.ranks = [
            subprocess.Popen(
                [python, str(SCRIPT), str(rank), model, str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for rank in range(STAGES)
        ]  # fmt: skip
        for rank in self.ranks:
            assert rank.stdout is not None
            if not rank.stdout.readline().startswith("ready"):
                self.close()
                raise RuntimeError("torch did not start; what it said stands above")

    def ask(self, line: str) -> list[float]:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(line + "\n")
        answers = [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]
        return [float(a) for a in answers]

    def first(self) -> tuple[float, dict[str, np.ndarray], float]:
        """Seconds of the first step, the new parameters and the loss."""
        took = max(self.ask("check"))
        parts = [dict(np.load(self.folder / f"new{rank}.npz")) for rank in range(STAGES)]
        losses = [float(p.pop("__loss__")) for p in parts]
        return took, {n: a for part in parts for n, a in part.items()}, losses[-1]

    def run(self, steps: int) -> float:
        """Seconds of a step."""
        return max(self.ask(f"run {steps}")) / steps

    def peak(self) -> list[int]:
        return [int(n) for n in self.ask("count")]

    def close(self) -> None:
        for rank in self.ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()


def flat(tree: Any, path: str = "") -> dict[str, np.ndarray]:
    """A tree of dicts --> its leaves by `name/of/leaf`."""
    if not isinstance(tree, dict):
        return {path: np.asarray(tree)}
    return {n: a for k, v in tree.items() for n, a in flat(v, f"{path}/{k}" if path else k).items()}
