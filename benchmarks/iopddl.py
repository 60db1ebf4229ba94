"""The solver on problems of the ASPLOS 2025 contest on intra-operator parallelism (github.com/google/iopddl):

    python -m benchmarks.iopddl asplos-2025-iopddl-*.json.gz [--work N] [--milp] [--json]

Nodes choose a strategy each; nodes and edges cost; what nodes have in use at any time stays within a limit. The files
are not part of the project. `--milp` solves each problem with HiGHS too, in as many seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from benchmarks.memory_limited import MemoryLimit, Times, solve_limited
from benchmarks.tables import new_table
from shardc.solver import FORBIDDEN, Memo, relative_gap

Array = NDArray[np.float64]
WORK = 6e10
"""Table entries that the solver may touch for one file."""


@dataclass(frozen=True)
class Instance:
    name: str
    unary: list[Array]
    pairwise: dict[tuple[int, int], Array]
    memory: MemoryLimit


def read(path: Path) -> Instance:
    """Reads a problem in the contest's format, packed by gzip or not."""
    raw = path.read_bytes()
    data: Mapping[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    data = data.get("problem", data)
    nodes, edges, memo = data["nodes"], data["edges"], Memo()
    unary = [memo.one(np.asarray(costs, np.float64)) for costs in nodes["costs"]]
    pairwise: dict[tuple[int, int], Array] = {}
    for (i, j), costs in zip(edges["nodes"], edges["costs"], strict=True):
        table = np.asarray(costs, np.float64).reshape(unary[i].size, unary[j].size)
        if i == j:
            unary[i] = unary[i] + np.diagonal(table)
            continue
        pair, table = ((i, j), table) if i < j else ((j, i), np.ascontiguousarray(table.T))
        pairwise[pair] = memo.one(pairwise[pair] + table if pair in pairwise else table)
    uses = [
        (v, *span, np.asarray(amounts, np.float64))
        for v, (span, amounts) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True))
        if span and amounts
    ]
    return Instance(data["name"], unary, pairwise, MemoryLimit(uses, float(data.get("usage_limit", np.inf))))


def measure(instance: Instance, work: float) -> dict[str, Any]:
    begin = time.perf_counter()
    found = solve_limited(instance.unary, instance.pairwise, instance.memory, work)
    return {
        "name": instance.name,
        "cost": found.cost,
        "cost_unlimited": found.cost_unlimited,
        "bound": found.bound,
        "gap": found.gap,
        "feasible": found.feasible,
        "seconds": time.perf_counter() - begin,
        "bound_unlimited": found.bound_unlimited,
        "peak": found.peak,
        "limit": instance.memory.limit,
        "work": found.work,
    }


def measure_milp(instance: Instance, seconds: float) -> dict[str, Any]:
    """The same problem as an integer program with a variable for each value and each pair of values, by HiGHS."""
    sizes = [u.size for u in instance.unary]
    tables = list(instance.pairwise.values())
    first = np.concatenate(([0], np.cumsum(sizes + [t.size for t in tables])))
    costs = np.concatenate([*instance.unary, *(t.ravel() for t in tables)])
    rows: list[NDArray[np.intp]] = []
    columns: list[NDArray[np.intp]] = []
    signs: list[Array] = []
    count = len(sizes)
    for v, n in enumerate(sizes):  # one value each
        rows.append(np.full(n, v))
        columns.append(first[v] + np.arange(n))
        signs.append(np.ones(n))
    equal = count
    for e, (i, j) in enumerate(instance.pairwise):  # the pairs with a value are one if it is taken, none if not
        place = first[len(sizes) + e] + np.arange(tables[e].size).reshape(tables[e].shape)
        for v, index in ((i, place), (j, place.T)):
            n, m = index.shape
            rows += [np.repeat(equal + np.arange(n), m), equal + np.arange(n)]
            columns += [index.ravel(), first[v] + np.arange(n)]
            signs += [np.ones(n * m), -np.ones(n)]
            equal += n
    times = Times(instance.memory.of(count), instance.memory.limit)
    for k, v in enumerate(times.owner):
        points = np.arange(times.low[k], times.high[k])
        rows.append(np.repeat(equal + points, sizes[v]))
        columns.append(np.tile(first[v] + np.arange(sizes[v]), points.size))
        signs.append(np.tile(times.amounts[k], points.size))
    low = np.concatenate((np.ones(count), np.zeros(equal - count), np.full(times.room.size, -np.inf)))
    high = np.concatenate((np.ones(count), np.zeros(equal - count), times.room))
    entries = (np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns)))
    matrix = csr_array(entries, (low.size, costs.size))
    allowed = costs < FORBIDDEN
    begin = time.perf_counter()
    found = milp(
        np.where(allowed, costs, 0.0),
        integrality=np.arange(costs.size) < first[count],
        bounds=Bounds(0, allowed.astype(float)),
        constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": seconds},
    )
    cost = float(found.fun) if found.x is not None else np.inf
    bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
    return {
        "name": f"{instance.name} (HiGHS)",
        "cost": cost,
        "bound": bound,
        "gap": relative_gap(cost, bound),
        "feasible": bool(np.isfinite(cost)),
        "seconds": time.perf_counter() - begin,
    }


def main(paths: list[Path], work: float, with_milp: bool, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    columns = ("model", "cost", "cost unlimited", "bound", "gap", "feasible", "s", "peak : limit")
    table = new_table("Contest problems", *columns)
    for path in paths:
        instance = read(path)
        rows.append(measure(instance, work))
        if with_milp:
            rows.append(measure_milp(instance, rows[-1]["seconds"]))
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['cost']:.0f}",
            f"{row['cost_unlimited']:.0f}" if "cost_unlimited" in row else "",
            f"{row['bound']:.0f}",
            f"{100 * row['gap']:.3f}%",
            "yes" if row["feasible"] else "no",
            f"{row['seconds']:.1f}",
            f"{row['peak'] / row['limit']:.3f}" if "peak" in row else "",
        )
    Console(width=150).print(table)
    if as_json:
        print(json.dumps(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--work", type=float, default=WORK, help="table entries that may be touched for one file")
    parser.add_argument("--milp", action="store_true", help="also by HiGHS, in the same seconds")
    parser.add_argument("--json", action="store_true", help="one list on the last line")
    options = parser.parse_args()
    main(options.files, options.work, options.milp, options.json)
