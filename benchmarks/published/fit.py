"""Shares of the machines' figures that published runs reach, fitted to saved plans, and judged on other runs.

    seconds = (products / e + kernels / a + memory / b + moved / l + h * layers * microbatches) * (1 + wait / busy)

`moved` is what does not overlap; the bubble of a pipeline grows in proportion. e, b and l are the shares of the data
sheet's peak, memory bandwidth and links that products, light operations and collectives reach; a is that of the peak in
flash kernels; h is seconds for the host to launch a layer forward and backward. No form has more than four of them.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.tables import Rows
from shardc.machine.topology import TOPOLOGIES
from shardc.sbp.cost import COLLECTIVES

MOST = {
    "A100": 0.86, "A100, one node": 0.86, "A100, torchtitan": 0.86, "H100": 0.80, "H100 at 500 W": 0.80, "GB200": 0.78,
    "GB300": 0.78,
}  # fmt: skip
"""The largest share of peak that any product reaches, measured by others: stas00/ml-engineering, "MAMF"."""

SPLITS = 12


class Shares(NamedTuple):
    """What is fitted for a family of machines."""

    compute: float = 1.0
    kernels: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    host: float = 0.0


FORMS: Mapping[str, int] = {"one share": 1, "three": 3, "three, kernels": 4, "three, host": 4}
"""How many constants each form of the model has."""


def grid(family: str, form: str) -> list[Shares]:
    """All shares that are tried: those of compute in steps of 4 %, others of 10 %."""
    if form == "one share":
        kernels = dict(TOPOLOGIES["h100"].shares)["attention"] if family in MOST else 1.0
        return [Shares(s / 100, kernels * s / 100, s / 100, s / 100) for s in range(100, 20, -1)]
    host = (0.0, 2e-4, 5e-4, 1e-3, 2e-3, 3.5e-3, 5e-3) if form == "three, host" else (0.0,)
    shares = itertools.product(
        np.arange(MOST.get(family, 1.0), 0.3, -0.04), np.arange(1.0, 0.15, -0.1), np.arange(1.0, 0.15, -0.1), host
    )
    return [
        Shares(float(e), float(a), float(b), float(links), h)
        for e, b, links, h in shares
        for a in (np.arange(e, 0.15, -0.1) if form == "three, kernels" else (e,))
    ]


def seconds(rows: Rows, shares: Sequence[Shares]) -> NDArray[Any]:
    """Seconds of each row (second dimension) with each of the shares (first)."""
    parts, kernels = [row["parts"] for row in rows], [row["attention"] for row in rows]
    moved = [sum(p[kind] for kind in COLLECTIVES) - p["overlapped"] for p in parts]
    wait = np.array([p["wait"] / (row["planned"] - p["wait"]) for p, row in zip(parts, rows, strict=True)])
    products = [p["compute"] - k for p, k in zip(parts, kernels, strict=True)]
    work = np.array([products, kernels, [p["memory"] for p in parts], moved])
    s = np.asarray(shares)
    busy = (1 / s[:, :4]) @ work + s[:, 4:] * np.array([row["layers"] * row["microbatches"] for row in rows])
    return busy * (1 + wait)


def errors(rows: Rows, shares: Shares) -> list[float]:
    took = np.array([row["published"] for row in rows])
    return [float(x) for x in abs(seconds(rows, [shares])[0] / took - 1)]


def fit(rows: Rows, tried: Sequence[Shares]) -> Shares:
    """The shares of the least mean error, as a logarithm."""
    took = np.array([row["published"] for row in rows])
    wrong = np.abs(np.log(seconds(rows, tried) / took)).mean(1)
    return tried[int(wrong.argmin())]


class Judged(NamedTuple):
    """Constants of a family of machines, and what they miss.

    Attributes:
      shares: fitted to all rows.
      own: errors on these.
      held: errors on the half that was held out, of all random splits.
      spread: the least and the greatest of each constant in the splits.
    """

    shares: Shares
    own: list[float]
    held: list[float]
    spread: list[tuple[float, float]]


def judge(rows: Rows, tried: Sequence[Shares]) -> Judged:
    """Fits to random halves. Runs of one configuration stand on one side."""
    names = sorted({key(row) for row in rows})
    found, held = list[Shares](), list[float]()
    for seed in range(SPLITS if len(names) > 3 else 0):
        half = set(random.Random(seed).sample(names, len(names) // 2))
        found.append(fit([row for row in rows if key(row) in half], tried))
        held += errors([row for row in rows if key(row) not in half], found[-1])
    shares = fit(rows, tried)
    return Judged(shares, errors(rows, shares), held, [(min(c), max(c)) for c in zip(*found, strict=True)])


def key(row: Mapping[str, Any]) -> str:
    return f"{row['machine']} {row['model']} {row['planned']!r}"


def summary(missed: Sequence[float]) -> list[str]:
    """Median, mean, the share within 20 %, and worst."""
    if not missed:
        return ["-"] * 4
    within = sum(e <= 0.2 for e in missed) / len(missed)
    found = statistics.median(missed), statistics.fmean(missed), within, max(missed)
    return [f"{100 * x:.1f}" for x in found]


def order(rows: Rows, of: Sequence[float]) -> float:
    """Spearman's correlation of predicted with published seconds."""
    found: Any = spearmanr(of, [row["published"] for row in rows])
    return float(found.statistic)
