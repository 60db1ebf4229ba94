"""The seconds of nodes by a recorded run, without those in which they waited for a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardc.dataflow.network import NodeStep
from shardc.dataflow.round import FlowNode
from shardc.pipeline.schedule.turns import PartlyHeld
from shardc.runtime.actor import Network, Span


def seconds_by_node(
    net: Network, nodes: Sequence[FlowNode], spans: Sequence[Span], python: Mapping[str, Sequence[float]]
) -> dict[int, list[float]]:
    """The seconds that each node took, by its number, run by run.

    - On devices that several actors use, a program begins when the one before it has ended.
    - A call in a thread is taken to hold Python's interpreter for the processor's time of its thread. It may have
      waited while others held it, so that time is not counted: at least the rest is its own.

    Args:
      net, nodes: of the flow.
      spans: the times of all nodes, from the arrival of their arguments to the end of their results.
      python: of host functions in threads, by the names of nodes, for each run the processor's time of its thread.
    """
    waited = _waited_for_devices(net, nodes, spans) | _waited_for_python(nodes, spans, python)
    each: dict[int, list[float]] = {}
    for i, span in enumerate(spans):
        times = each.setdefault(_node(span), [])
        seconds = span.end - span.start - waited.get(i, 0.0)
        known = python.get(nodes[_node(span)].name, ())
        times.append(PartlyHeld(seconds, known[len(times)]) if len(times) < len(known) else seconds)
    return each


def _node(span: Span) -> int:
    assert isinstance(span.label, NodeStep)
    return span.label.node


def mean_seconds(times: Sequence[float]) -> float:
    """The mean of the seconds of a node, and of those of them in Python."""
    mean = sum(times) / len(times)
    held = [t.held for t in times if isinstance(t, PartlyHeld)]
    return PartlyHeld(mean, sum(held) / len(held)) if len(held) == len(times) else mean


def _waited_for_devices(net: Network, nodes: Sequence[FlowNode], spans: Sequence[Span]) -> dict[int, float]:
    """By the number of a span the seconds in which others held its devices."""
    on_devices = {n.number for n in nodes if n.work.meshes}
    steps = [(s.label, s.uses) for row in net.actors for s in row if s.uses]
    uses: dict[Any, Sequence[int]] = {
        label: uses for label, uses in steps if isinstance(label, NodeStep) and label.node in on_devices
    }
    free: dict[int, float] = {}
    waited: dict[int, float] = {}
    for i, span in sorted(enumerate(spans), key=lambda pair: pair[1].end):
        mine = uses.get(span.label, ())
        waited[i] = max([0.0, *(free[r] - span.start for r in mine if r in free)])
        free |= dict.fromkeys(mine, span.end)
    return waited


def _waited_for_python(
    nodes: Sequence[FlowNode], spans: Sequence[Span], python: Mapping[str, Sequence[float]]
) -> dict[int, float]:
    """By the number of a span the seconds in which others held the interpreter, as if each had held it evenly."""
    known = {name: iter(times) for name, times in python.items()}
    held = {
        i: t for i, s in enumerate(spans) if (t := next(known.get(nodes[_node(s)].name, iter(())), None)) is not None
    }
    if not held:
        return {}
    numbers = list(held)
    starts, ends = (np.array([getattr(spans[i], side) for i in numbers]) for side in ("start", "end"))
    seconds = np.array([held[i] for i in numbers])
    lengths = np.maximum(ends - starts, 1e-9)
    at = np.concatenate([starts, ends])
    order = np.argsort(at, kind="stable")
    rates = np.cumsum(np.concatenate([seconds / lengths, -seconds / lengths])[order])
    at = at[order]
    used = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(at))])
    inside = np.interp(ends, at, used) - np.interp(starts, at, used)
    most = lengths - seconds
    return dict(zip(numbers, np.clip(inside - seconds, 0.0, np.maximum(most, 0.0)).tolist(), strict=True))
