"""The free plan beside restrictions of it, by `plan.seconds`. benchmarks/clock_search.md has the results.

    python -m benchmarks.clock_search [gpt3/h100:8x2 mixtral ...] [--json FILE]

Large models at their published sizes, rows over the first axis pinned and all else AUTO; and the same with more pinned,
or with permutes forbidden. Nothing runs; memory is without a limit. No restriction should be faster than the free plan
by more than a thousandth. A process of its own for each case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import shardc
from benchmarks.large_models import BOTH, EXPERTS_HAND, KERNELS, LARGE, MEGATRON, WORDS
from benchmarks.large_step import processor_seconds
from benchmarks.measure import fake_cpu, report
from benchmarks.tables import Rows, new_table, start
from shardc import AUTO, S

ROWS_EACH = {"gpt3": 2, "llama405b": 1, "mixtral": 2, "vit22b": 64, "t5_11b": 8}
"""Rows of a batch for each device."""
MESHES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "gpt3": {
        "v5e:4x2": {"fsdp": 4, "model": 2}, "v5e:8x8": {"fsdp": 8, "model": 8}, "v5p:4x4x4": {"fsdp": 8, "model": 8},
        "v5p:8x8x8": {"fsdp": 64, "model": 8}, "h100:8": {"fsdp": 2, "model": 4}, "h100:8x2": {"fsdp": 2, "model": 8},
        "h100:8x8": {"fsdp": 8, "model": 8}, "h100:8x64": {"fsdp": 64, "model": 8},
        "gb200:64": {"fsdp": 8, "model": 8}, "gb200:64x4": {"fsdp": 16, "model": 16},
    },
    "llama405b": {
        "v5e:16x16": {"fsdp": 16, "model": 16}, "v5p:2x2x2": {"fsdp": 4, "model": 2},
        "v5p:4x4x4": {"fsdp": 4, "model": 16}, "v5p:8x8x8": {"fsdp": 64, "model": 8},
        "h100:8x8": {"fsdp": 8, "model": 8}, "h100:8x32": {"fsdp": 32, "model": 8},
        "gb200:8": {"fsdp": 4, "model": 2}, "gb200:64": {"fsdp": 8, "model": 8},
    },
    "mixtral": {
        "v5e:8x8": {"fsdp": 8, "expert": 8}, "v5p:4x4x4": {"fsdp": 8, "expert": 8},
        "v5p:4x8x8": {"fsdp": 32, "expert": 8}, "h100:8": {"fsdp": 2, "expert": 4},
        "h100:8x8": {"fsdp": 8, "expert": 8}, "h100:8x16": {"fsdp": 16, "expert": 8},
        "gb200:64": {"fsdp": 8, "expert": 8},
    },
    "vit22b": {
        "v5e:4x4": {"fsdp": 4, "model": 4}, "v5e:8x8": {"fsdp": 16, "model": 4}, "v5p:4x4x4": {"fsdp": 16, "model": 4},
        "h100:8x4": {"fsdp": 4, "model": 8}, "h100:8x8": {"fsdp": 16, "model": 4}, "gb200:8": {"fsdp": 2, "model": 4},
        "gb200:64": {"fsdp": 16, "model": 4},
    },
    "t5_11b": {
        "v5e:4x2": {"fsdp": 4, "model": 2}, "v5e:8x8": {"fsdp": 16, "model": 4}, "v5p:4x4x4": {"fsdp": 16, "model": 4},
        "v5p:4x8x8": {"fsdp": 32, "model": 8}, "h100:8": {"fsdp": 4, "model": 2}, "h100:8x8": {"fsdp": 16, "model": 4},
        "gb200:64": {"fsdp": 16, "model": 4}, "gb200:8": {"fsdp": 2, "model": 4},
    },
}  # fmt: skip
CASES = [f"{model}/{topology}" for model, meshes in MESHES.items() for topology in meshes]
FREE = "free"


def restrictions(model: str, axes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keyword arguments of `shardc.function` for each plan."""
    first, second = axes
    rows, both = {first: S(0), ...: AUTO}, {first: S(0), second: S(0)}

    def said(batch: Any, patterns: Mapping[str, Any]) -> dict[str, Any]:
        weights = dict.fromkeys(BOTH, shardc.rules(patterns))
        return {"in_placements": {**weights, "batch": batch}, "donate_argnames": BOTH}

    free = {"in_placements": {"batch": rows}, "donate_argnames": BOTH}
    words = {} if model == "vit22b" else WORDS
    found = {
        FREE: free,
        "no permutes": free | {"forbid": dict.fromkeys(axes, "permute")},
        "data": said(both, {"*": {}}),
        "fsdp": said(rows, {**KERNELS, **words, "*": {...: AUTO}}),
    }
    if model == "mixtral":
        hand = {k: {a: s for a, s in p.items() if a in axes} for k, p in EXPERTS_HAND.items()}
        experts = {"*experts/router/*": {}, "*experts/*": {second: S(-3), ...: AUTO}, "*": {...: AUTO}}
        return found | {"hand": said(both, {**hand, "*": {}}), "experts": said(rows, experts)}
    tensor = {k: {"model": p["model"], ...: AUTO} for k, p in MEGATRON.items()}
    megatron = {**MEGATRON, **dict.fromkeys(words, MEGATRON["*/out/kernel"]), "*": {}}
    return found | {
        "hand": said({first: S(0), ...: AUTO}, megatron),
        "tensor": said(rows, {**tensor, "*": {...: AUTO}}),
    }


def measure(case: str, plans: Sequence[str]) -> None:
    name, topology = case.split("/")
    axes = MESHES[name][topology]
    devices = 1
    for n in axes.values():
        devices *= n
    large = replace(LARGE[name], rows=ROWS_EACH[name] * devices)
    mesh, args = shardc.make_mesh(topology=topology, hbm=10**15, **axes), large.arguments()
    found: dict[str, Any] = {"case": case, "mesh": ",".join(f"{a}={n}" for a, n in axes.items())}
    for plan, options in restrictions(name, tuple(axes)).items():
        if plans and plan not in plans:
            continue
        ours = shardc.function(mesh=mesh, **options)(large.step)
        ours.look(*args)
        took, made = processor_seconds(lambda: ours.plan(*args))  # noqa: B023  called at once
        found[plan] = {"seconds": made.seconds, "gap": made.gap, "planning": took, "time": vars(made.time)}
    report(**found)


def show(rows: Rows, console: Console) -> None:
    names = list(dict.fromkeys(k for r in rows for k, v in r.items() if isinstance(v, dict) and k != FREE))
    table = new_table("Planned seconds", "what", "mesh", "free s", "gap", "plan s", *names, "missed by")
    for r in rows:
        free = r[FREE]["seconds"]
        others = {k: r[k]["seconds"] / free - 1 for k in names if k in r}
        gap = r[FREE]["gap"]
        table.add_row(
            r["case"], r["mesh"], f"{free:.4g}", "-" if gap is None else f"{gap:.1%}", f"{r[FREE]['planning']:.1f}",
            *(f"{others[k]:+.2%}" if k in others else "" for k in names),
            f"{max(0.0, *(-x for x in others.values())):.2%}",
        )  # fmt: skip
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clock_search", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("cases", nargs="*", help="a model, or a model and a machine; all if none is named")
    parser.add_argument("--plans", nargs="*", default=[], help="the restrictions to plan; all if none is named")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        measure(options.measure, options.plans)
        return 0
    rows: Rows = []
    plans = ["--plans", *options.plans] if options.plans else []
    for case in CASES:
        if not options.cases or any(f"{case}/".startswith(f"{c}/") for c in options.cases):
            rows += start("benchmarks.clock_search", "--measure", case, *plans, env=fake_cpu(1))
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    show(rows, Console(width=200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
