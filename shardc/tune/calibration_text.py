"""The text that `python -m shardc calibrate` prints."""

from __future__ import annotations

from shardc.report.tables import make_table, percent_text, seconds_text, section
from shardc.tune.calibrate import Calibration


def calibration_text(found: Calibration) -> str:
    """The machine's figures, and a table of the fits with their errors."""
    machine = found.topology
    table = make_table("axis", "collective", ">hop", ">rate", ">largest error", ">shortest", ">longest")
    for fit in found.fits:
        seconds = [s.seconds for s in found.samples if (s.axis, s.kind) == (fit.axis, fit.kind)]
        table.add_row(
            fit.axis, fit.kind, seconds_text(fit.latency), rate_text(fit.rate, "B/s"), percent_text(fit.error),
            seconds_text(min(seconds)), seconds_text(max(seconds)),
        )  # fmt: skip
    products = ", ".join(f"{rate_text(rate, 'op/s')} in {dtype}" for dtype, rate in machine.rates)
    head = (
        f"{machine.kind}: each device multiplies matrices at {products}; reads and writes "
        f"{rate_text(machine.memory_bandwidth, 'B/s')}; a collective starts in {seconds_text(machine.launch)}."
    )
    return f"{head}\n\n{section('Collectives: seconds = start + hops x hop + bytes sent / rate', table)}"


def rate_text(rate: float, unit: str) -> str:
    """`1.23 GB/s`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= scale:
            return f"{rate / scale:.3g} {prefix}{unit}"
    return f"{rate:.3g} {unit}"
