"""The text that `python -m shardc calibrate` prints."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.report.tables import Section, percent_text, report_text, seconds_text
from shardc.tuning.calibrate import Calibration


def calibration_text(found: Calibration, width: int | None = None) -> str:
    """The machine's figures, and a table of the fits with their errors; folded to a width."""
    machine = found.topology
    rows: list[Sequence[str]] = []
    for fit in found.fits:
        seconds = [s.seconds for s in found.samples if (s.axis, s.kind) == (fit.axis, fit.kind)]
        rows.append((
            fit.axis, fit.kind, seconds_text(fit.latency), rate_text(fit.rate, "B/s"), percent_text(fit.error),
            seconds_text(min(seconds)), seconds_text(max(seconds)),
        ))  # fmt: skip
    products = ", ".join(f"{rate_text(rate, 'op/s')} in {dtype}" for dtype, rate in machine.rates)
    head = (
        f"{machine.kind}: each device multiplies matrices at {products}; reads and writes "
        f"{rate_text(machine.memory_bandwidth, 'B/s')}; a collective starts in {seconds_text(machine.launch)}."
    )
    lines = [
        f"The host launches a program in {seconds_text(machine.dispatch)}, with {seconds_text(machine.dispatch_array)} "
        "for each argument and result on each device.",
        f"A device computes {rate_text(machine.vector, 'elements/s')}; "
        + "; ".join([f"a {kind} starts in {seconds_text(s)}" for kind, s in machine.starts])
        + "".join([f"; thin products reach {percent_text(s)} of that rate" for _, s in machine.shares])
        + ".",
    ]
    columns = ("axis", "collective", ">hop", ">rate", ">largest error", ">shortest", ">longest")
    fits = Section("Collectives: seconds = start + hops x hop + bytes sent / rate", columns, rows)
    return report_text((Section(head, lines=lines * bool(machine.dispatch_array)), fits), width)


def rate_text(rate: float, unit: str) -> str:
    """`1.23 GB/s`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= scale:
            return f"{rate / scale:.3g} {prefix}{unit}"
    return f"{rate:.3g} {unit}"
