"""What the command measures: one record for each section, with its share of the time, its processes and its table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import spearmanr

from benchmarks.gpu import memory, programs, steps
from benchmarks.gpu.child import figure
from benchmarks.measure import MIB

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


@dataclass(frozen=True, eq=False)
class Section:
    """One part of the benchmark.

    Attributes:
      name: the module `benchmarks.gpu.<name>` measures it.
      title: of its table.
      seconds: its share of the time, in relation to those of other sections.
      jobs: of (tiny, processes at once): what each process measures.
      columns: of the table, by title.
      summary: of the rows: the figures under the table.
      many: whether its processes run side by side, as many as may be.
      in_turn: whether they use the device one at a time.
      apart: whether no other section runs at the same time, for it measures time.
    """

    name: str
    title: str
    seconds: float
    jobs: Callable[[bool, int], Sequence[str]]
    columns: Mapping[str, Cell]
    summary: Callable[[Sequence[Row]], dict[str, Any]]
    many: bool = False
    in_turn: bool = False
    apart: bool = False


def word(key: str) -> Cell:
    return lambda row: str(row.get(key, "-"))


def number(key: str, scale: float = 1.0, form: str = ".2f") -> Cell:
    def cell(row: Row) -> str:
        value = row.get(key)
        return "-" if value is None else value if isinstance(value, str) else format(scale * value, form)

    return cell


def ratio(a: str, b: str) -> Cell:
    return lambda row: f"{row[a] / row[b]:.3f}" if row.get(a) is not None and row.get(b) else "-"


def difference(key: str) -> Cell:
    return number(key, form=".0e")


def result(row: Row) -> str:
    return "equal" if row.get("ok") else "WRONG"


# --- figures under the tables ----------------------------------------------------------------------------------------


def checks(rows: Sequence[Row]) -> dict[str, Any]:
    return {"checks": len(rows), "equal": sum(bool(r.get("ok")) for r in rows)}


def models(rows: Sequence[Row]) -> dict[str, Any]:
    found = [r["ratio"] for r in rows if r.get("unit") == "ms"]
    return {"models": len(found), "median ratio of a step": statistics.median(found) if found else None}


def peaks(rows: Sequence[Row]) -> dict[str, Any]:
    """Without the rows whose peak is the compiler's."""
    measured = [r for r in rows if r.get("measured")]
    ratios = [r["planned"] / r["measured"] for r in measured if r["note"] != memory.HIDDEN]
    if not measured:
        return {"programs": len(rows), "planned : measured": memory.NOT_MEASURED if rows else None}
    found: dict[str, Any] = {"programs": len(ratios), "hidden by the compiler's own peak": len(measured) - len(ratios)}
    if ratios:
        found |= {"median planned : measured": statistics.median(ratios)}
        found |= {"least": min(ratios), "greatest": max(ratios)}
    return found


def ranks(rows: Sequence[Row]) -> dict[str, Any]:
    pairs = [(r["planned"], r["measured"]) for r in rows if r.get("measured")]
    errors = [abs(p / m - 1) for p, m in pairs]
    rank: Any = spearmanr(*zip(*pairs, strict=True)).statistic if len(pairs) > 2 else None
    return {
        "programs": len(pairs), "Spearman's rank correlation": None if rank is None else figure(rank),
        "median relative error": statistics.median(errors) if errors else None,
    }  # fmt: skip


# --- the sections ----------------------------------------------------------------------------------------------------


def step_time(key: str) -> Cell:
    return lambda row: number(key, 1e3 if row.get("unit") == "ms" else 1e6)(row)


def striped(names: Sequence[str], parts: int) -> list[str]:
    """The names in so many jobs of about equal size."""
    return [",".join(part) for i in range(parts) if (part := names[i::parts])]


MACHINE = Section(
    "machine", "The machine", 75, lambda tiny, at_once: ("all",),
    {"float32 Tflop/s": lambda r: number("float32", 1e-12, ".1f")(r.get("flops", {})),
     "bfloat16 Tflop/s": lambda r: number("bfloat16", 1e-12, ".1f")(r.get("flops", {})),
     "memory GB/s": number("memory_bandwidth", 1e-9, ".0f"), "first step s": number("first_step", form=".1f")},
    lambda rows: {}, apart=True,
)  # fmt: skip

SECTIONS: Mapping[str, Section] = {
    s.name: s
    for s in (
        Section(
            "steps", "Training steps in bfloat16: shardc on a mesh of one device, and jax.jit", 180,
            lambda tiny, at_once: steps.TINY if tiny else steps.JOBS,
            {"what": word("what"), "unit": word("unit"), "shardc": step_time("ours"), "jit": step_time("peer"),
             "ratio": number("ratio", form=".3f"),
             "(least-greatest)": lambda r: f"({r['low']:.2f}-{r['high']:.2f})" if "low" in r else "-",
             "losses apart by": difference("apart"), "plan s": number("planning", form=".1f"),
             "compile s": number("compiling", form=".1f"), "jit compile s": number("peer_compiling", form=".1f")},
            models, many=True, in_turn=True, apart=True,
        ),
        Section(
            "memory", "Memory: the peak of the plan, and of the device's allocator", 150,
            lambda tiny, at_once: programs.TINY[:2] if tiny else programs.PROGRAMS,
            {"program": word("program"), "planned MiB": number("planned", 1 / MIB),
             "measured MiB": number("measured", 1 / MIB), "ratio": ratio("planned", "measured"),
             "XLA MiB": number("xla", 1 / MIB), "ratio to XLA": ratio("planned", "xla"),
             "while compiling MiB": number("compiling", 1 / MIB), "note": word("note")},
            peaks, many=True,
        ),
        Section(
            "seconds", "Time: the plan for the calibrated machine, and the clock", 120,
            lambda tiny, at_once: striped(programs.TINY if tiny else programs.PROGRAMS, at_once),
            {"program": word("program"), "planned ms": number("planned", 1e3, ".3g"),
             "measured ms": number("measured", 1e3, ".3g"), "ratio": ratio("planned", "measured"),
             "computing ms": lambda r: number("compute", 1e3, ".3g")(r.get("parts", {})),
             "memory ms": lambda r: number("memory", 1e3, ".3g")(r.get("parts", {}))},
            ranks, many=True, in_turn=True, apart=True,
        ),
        Section(
            "pipeline", "Pipelines: two ranks on one device", 130, lambda tiny, at_once: ("all",),
            {"schedule": word("schedule"), "stages": word("stages"), "result": result,
             "apart by": difference("apart"), "ms a call": number("call", 1e3), "compile s": number("compiling")},
            checks,
        ),
        Section(
            "values", "Values: shardc on the device, jax.jit on the device, and the CPU", 100,
            lambda tiny, at_once: ("all",),
            {"check": word("check"), "result": result, "off from jit": difference("here"),
             "off from the CPU": difference("cpu"), "callbacks": word("calls")},
            checks,
        ),
    )
}  # fmt: skip
LETTERS = dict(zip("abcde", SECTIONS, strict=True))
