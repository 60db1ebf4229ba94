"""One rank of torch.distributed.pipelining, a script for a Python that has torch (and need not have JAX).

Started four times by torch_peer.py with a folder that holds `problem.npz`: parameters by `name/of/leaf`, x and y. Reads
lines from stdin: `check` does a step and writes the new parameters and the loss to `new<rank>.npz`, `run 5` does five;
each is answered with the seconds it took, between two barriers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STAGES, MICROBATCHES, RATE = 4, 8, 0.1


class Stage(nn.Module):
    """The parameters of a stage, by their names in the problem."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.names = list(arrays)
        self.p = nn.ParameterDict({n.replace("/", "__"): nn.Parameter(torch.tensor(arrays[n])) for n in self.names})

    def get(self, name: str) -> torch.Tensor:
        return self.p[name.replace("/", "__")]


class Tanh(Stage):
    def forward(self, x):
        for name in self.names:
            x = torch.tanh(x @ self.get(name))
        return x


class GPT2(Stage):
    """What examples/gpt2.py computes between two cuts."""

    def forward(self, x):
        if "wpe/embedding" in self.names:
            x = self.get("wte/embedding")[x] + self.get("wpe/embedding")[: x.shape[1]]
        for block in sorted({n.split("/")[0] for n in self.names if n.startswith("blocks")}):
            x = x + self.attention(f"{block}/attn", self.norm(f"{block}/ln_1", x))
            h = F.gelu(self.dense(f"{block}/mlp/up", self.norm(f"{block}/ln_2", x)), approximate="tanh")
            x = x + self.dense(f"{block}/mlp/down", h)
        if "ln_f/scale" in self.names:
            x = self.norm("ln_f", x) @ self.get("wte/embedding").T
        return x

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.get(f"{name}/scale"), self.get(f"{name}/bias"), 1e-5)

    def dense(self, name, x):
        return x @ self.get(f"{name}/kernel") + self.get(f"{name}/bias")

    def attention(self, name, x):
        B, T, D = x.shape
        q, k, v = (self.dense(f"{name}/{n}", x).view(B, T, 8, D // 8).transpose(1, 2) for n in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(f"{name}/out", out.transpose(1, 2).reshape(B, T, D))


def squared(out, y):
    return F.mse_loss(out, y)


def cross_entropy(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten().long())


MODELS = {"mlp": (Tanh, squared), "gpt2": (GPT2, cross_entropy)}


class Rank:
    def __init__(self, rank: int, model: str, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        problem = dict(np.load(folder / "problem.npz"))
        self.x, self.y = (torch.tensor(problem.pop(k)) for k in "xy")
        stage, loss = MODELS[model]
        keys = str(problem.pop("keys")).split(";")[rank].split(",")
        self.module = stage({n: a for n, a in problem.items() if n.split("/")[0] in keys})
        self.stage = PipelineStage(self.module, rank, STAGES, torch.device("cpu"))
        self.schedule = Schedule1F1B(self.stage, n_microbatches=MICROBATCHES, loss_fn=loss)
        self.ends = dist.new_group([0, STAGES - 1])
        self.tied = "wte/embedding" in self.module.names
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        self.losses = []
        args = (self.x,) if self.rank == 0 else ()
        if self.rank == STAGES - 1:
            self.schedule.step(*args, target=self.y, losses=self.losses, return_outputs=False)
        else:
            self.schedule.step(*args)
        params = list(self.module.parameters())
        if self.tied:
            dist.all_reduce(self.module.get("wte/embedding").grad, group=self.ends)
        with torch.no_grad():
            torch._foreach_add_(params, [p.grad for p in params], alpha=-RATE)
        for p in params:
            p.grad = None

    def timed(self, steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        dist.barrier()
        return time.perf_counter() - start

    def count(self) -> int:
        """Microbatches whose activations live at once, counted in one step."""
        peak, forward = 0, self.stage.forward_one_chunk

        def counted(*args, **kwargs):
            nonlocal peak
            out = forward(*args, **kwargs)
            peak = max(peak, len(self.stage.fwd_cache))
            return out

        self.stage.forward_one_chunk = counted
        self.step()
        del self.stage.forward_one_chunk
        return peak

    def check(self) -> float:
        took = self.timed(1)
        arrays = {n: self.module.get(n).detach().numpy() for n in self.module.names}
        loss = torch.stack(self.losses).mean().detach().numpy() if self.losses else np.nan
        np.savez(self.folder / f"new{self.rank}.npz", __loss__=loss, **arrays)
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{options.folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=options.rank, world_size=STAGES)
    rank = Rank(options.rank, options.model, options.folder)
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        print({"check": rank.check, "count": rank.count, "run": rank.timed}[word](*map(int, rest)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
