"""Plans of the zoo's tiny models on one release of JAX beside those on another.

    python -m benchmarks.releases --save jax-0.10.2.json       # on one release
    python -m benchmarks.releases --save jax-0.12.0.1.json     # on another
    python -m benchmarks.releases jax-0.10.2.json jax-0.12.0.1.json

Prints bytes and collectives of each plan, and which arguments have another placement. No device is needed. The plans
are for 4 x 2 devices. jax 0.10.2 on Python 3.11 and jax 0.12.0.1 on Python 3.12 and 3.13 give the same bytes in all 54
plans and the same placement of every argument; no operation is replicated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import shardc
from examples.zoo import MODELS
from shardc.ir.walk import all_eqns

MESH = {"data": 4, "model": 2}


def plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each plan of each model, but pipelines: its name, and what stands in the table."""
    for name, model in MODELS.items():
        cfg = model.configs["tiny"]
        init_fn, step_fn = model.make_step(cfg)
        batch = next(iter(model.batches(cfg, model.rows, 0)))
        state = jax.eval_shape(init_fn, jax.random.key(0))
        for plan_name, make in model.plans.items():
            if plan_name == "pipeline":
                continue
            mesh = shardc.make_mesh(topology="cpu", **MESH)
            plan = shardc.function(mesh=mesh, **make())(step_fn).plan(*state, batch)
            primitives: dict[str, int] = {}
            for eqn in all_eqns(plan.program.jaxpr):
                primitives[eqn.primitive.name] = primitives.get(eqn.primitive.name, 0) + 1
            yield (
                f"{name}/{plan_name}",
                {
                    "bytes": plan.bytes_per_device,
                    "collectives": len(plan.collectives),
                    "gathered": [g.primitive for g in plan.gathered],
                    "found": [f.primitive for f in plan.found],
                    "arguments": dict(zip(plan.program.in_paths, map(str, plan.inputs), strict=True)),
                    "primitives": primitives,
                },
            )


def compare(one: dict[str, Any], two: dict[str, Any]) -> str:
    """A table of the plans of two releases."""
    a, b = one["plans"], two["plans"]
    head = f"| plan | bytes, jax {one['jax']} | jax {two['jax']} | ratio | arguments elsewhere | traced differently |"
    rows = [head, "|---|---:|---:|---:|---|---|"]
    same = 0
    for name in a:
        x, y = a[name], b[name]
        moved = [p for p, at in x["arguments"].items() if y["arguments"].get(p) != at]
        if x["bytes"] == y["bytes"] and not moved:
            same += 1
            continue
        names = sorted(x["primitives"].keys() | y["primitives"].keys())
        changed = [
            f"{p} {m} -> {n}" for p in names if (m := x["primitives"].get(p, 0)) != (n := y["primitives"].get(p, 0))
        ]
        ratio = y["bytes"] / x["bytes"] if x["bytes"] else float("nan")
        rows.append(
            f"| {name} | {x['bytes']:,} | {y['bytes']:,} | {ratio:.4f} | {len(moved)}: {', '.join(moved[:3])} | "
            f"{', '.join(changed)} |"
        )
    whole = sorted({p for side in (a, b) for row in side.values() for p in row["gathered"]})
    said = f"{same} of {len(a)} plans have the same bytes and arguments."
    rows += ["", f"{said} Replicated: {', '.join(whole) or 'nothing'}."]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("files", type=Path, nargs="*")
    options = parser.parse_args()
    if options.save:
        found = {"jax": jax.__version__, "plans": dict(plans())}
        options.save.write_text(json.dumps(found, indent=1))
    if options.files:
        print(compare(*(json.loads(f.read_text()) for f in options.files)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
