"""Tables of planned runs beside the published ones, and of the fit."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console

from benchmarks.published.fit import FORMS, MOST, fit, grid, judge, key, order, seconds, summary
from benchmarks.tables import Rows, new_table
from shardc.sbp.cost import COLLECTIVES

GIB = 2**30
FAILED = "the planner failed"
EIGHT = "torchtitan-a100", "torchtitan-L8-8-8192-413", "torchtitan-L8-128-8192-416"
"""The runs of torchtitan by which Phantora (github.com/QDelta/Phantora) judges itself."""


def by_family(rows: Rows) -> dict[str, Rows]:
    return {name: [row for row in rows if row["family"] == name] for name in dict.fromkeys(r["family"] for r in rows)}


def show_runs(rows: Rows, console: Console) -> None:
    """Each run; what a part takes at data sheet figures is given relative to the published time."""
    table = new_table(
        "Planned as published", "row", "mesh", "published s", "planned s", "ratio", "with shares", "MFU", "planned",
        "compute", "memory", "moved", "wait", "GiB", "planned", "CPU s",
    )  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["family"], row["run"])):
        took, parts = row["published"], row["parts"]
        moved = sum(parts[kind] for kind in COLLECTIVES) - parts["overlapped"]
        known = row["published_memory"]
        table.add_row(
            row["run"], row["mesh"], f"{took:.4g}", f"{row['planned']:.4g}", f"{row['planned'] / took:.2f}",
            f"{row['reached'] / took:.2f}",
            *(f"{row['model_flops'] / row['peak_flops'] / x:.0%}" for x in (took, row["reached"])),
            *(f"{x / took:.2f}" for x in (parts["compute"], parts["memory"], moved, parts["wait"])),
            f"{known / GIB:.1f}" if known else "-", f"{row['memory'] / GIB:.1f}", f"{row['planning']:.1f}",
        )  # fmt: skip
    console.print(table)


def show_families(rows: Rows, console: Console) -> None:
    table = new_table(
        "Time by family, %; at data sheet figures, and with the shares of them that shardc counts on", "row", "runs",
        "ratio", "median", "mean", "within 20", "worst", "with them: ratio", "median", "mean", "within 20", "worst",
        "CPU s", "most",
    )  # fmt: skip
    eight = [row for row in rows if row["run"].startswith(EIGHT)]
    for name, some in [*by_family(rows).items(), ("Phantora's eight", eight), ("all", rows)]:
        if not some:
            continue
        cells = [name, f"{len(some)}"]
        for said in ("planned", "reached"):
            ratios = [row[said] / row["published"] for row in some]
            cells += [f"{statistics.median(ratios):.2f}", *summary([abs(r - 1) for r in ratios])]
        took = [row["planning"] for row in some]
        table.add_row(*cells, f"{statistics.median(took):.1f}", f"{max(took):.1f}")
    console.print(table)


def show_memory(rows: Rows, console: Console) -> None:
    """Peaks of the runs that published theirs. Of a plan that takes more than the device has, that within it."""
    table = new_table("Memory", "row", "GiB published", "GiB planned", "ratio")
    ratios = list[float]()
    for row in rows:
        if row["published_memory"]:
            took, planned = row["published_memory"], row.get("within", row)["memory"]
            ratios.append(planned / took)
            table.add_row(row["run"], f"{took / GIB:.1f}", f"{planned / GIB:.1f}", f"{ratios[-1]:.2f}")
    if ratios:
        missed = [abs(r - 1) for r in ratios]
        console.print(table)
        console.print(f"Median error {statistics.median(missed):.1%}, worst {max(missed):.1%}.")


def show_within(rows: Rows, console: Console) -> None:
    """Plans within the memory of the device, of runs whose fastest plan takes more."""
    table = new_table(
        "Planned again, within the device's memory", "row", "mesh", "GiB of", "fastest GiB", "GiB", "planned s", "ratio"
    )
    for row in rows:
        if "within" in row:
            again, sizes = row["within"], [f"{row[k] / GIB:.1f}" for k in ("hbm", "memory")]
            if "misfit" in again:
                said = "failed" if again["misfit"] == FAILED else "refused"
                table.add_row(row["run"], row["mesh"], *sizes, said, "-", "-")
                continue
            ratio = again["planned"] / row["planned"]
            table.add_row(
                row["run"], row["mesh"], *sizes, f"{again['memory'] / GIB:.1f}", f"{again['planned']:.4g}",
                f"{ratio:.2f}",
            )  # fmt: skip
    if table.rows:
        console.print(table)


def rivals(rows: Rows) -> dict[str, Rows]:
    """The configurations of one model on one machine, three and more, each with its fastest run."""
    fastest = {key(row): row for row in sorted(rows, key=lambda row: -row["published"])}
    found: dict[tuple[Any, ...], Rows] = {}
    for row in fastest.values():
        alike = *(row[k] for k in ("model", "devices", "machine")), round(row["model_flops"] / row["peak_flops"], 6)
        found.setdefault(alike, []).append(row)
    return {f"{model}, {n} {machine}": some for (model, n, machine, _), some in found.items() if len(some) > 2}


def show_order(rows: Rows, console: Console) -> None:
    """The order of a model's configurations by the plans, and with shares that are fitted to the machine's family."""
    table = new_table(
        "Order of the configurations of a model; place: that of the fastest published one", "model", "configurations",
        "place", "Spearman", "the first is slower by", "fitted: place", "Spearman", "the first is slower by",
    )  # fmt: skip
    families = by_family(rows)
    for name, some in sorted(rivals(rows).items()):
        took, cells = [row["published"] for row in some], list[str]()
        family = some[0]["family"]
        shares = fit(families[family], grid(family, "three"))
        for said in ([row["planned"] for row in some], list(seconds(some, [shares])[0])):
            ranked = sorted(range(len(some)), key=said.__getitem__)
            place = ranked.index(took.index(min(took))) + 1
            cells += [f"{place}", f"{order(some, said):.2f}", f"{took[ranked[0]] / min(took) - 1:.1%}"]
        table.add_row(name, f"{len(some)}", *cells)
    console.print(table)


def show_fit(rows: Rows, console: Console) -> None:
    table = new_table(
        "Fitted, and judged on the halves that were held out, %", "row", "what", "runs", "constants", "compute",
        "kernels", "memory", "links", "host ms", "own median", "median", "mean", "within 20", "worst",
    )  # fmt: skip
    for name, some in by_family(rows).items():
        for form, constants in FORMS.items():
            found = judge(some, grid(name, form))
            spread = found.spread or [(x, x) for x in found.shares]
            values = [f"{x:.2f} ({a:.2f}-{b:.2f})" for x, (a, b) in zip(found.shares[:4], spread, strict=False)]
            table.add_row(
                name, form, f"{len(some)}", f"{constants}", *values, f"{1e3 * found.shares.host:.1f}",
                summary(found.own)[0], *summary(found.held),
            )  # fmt: skip
    console.print(table)
    console.print(f"Shares of compute are bounded by what others measured: {MOST}.")
