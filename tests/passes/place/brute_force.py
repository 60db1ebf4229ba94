"""The least cost of a small placement problem, by trying everything: the truth that the planner is held against.

Nothing of the planner's search is used: every operation, argument and result takes each of its choices, and the boxings
of a value from where it is made to where it is read are the cheapest tree (Dreyfus and Wagner 1971).
"""

from __future__ import annotations

import itertools
from functools import cache
from math import prod

import numpy as np

from shardc.passes.place.domain import Domains


def trees(seconds, readers):
    """Cost of the cheapest tree from each placement to the placements of `readers` values: an array (born, *wants)."""
    count = len(seconds)

    @cache
    def reach(terminals):
        """For each root the cost of a tree to all of a sorted tuple of placements."""
        if len(terminals) == 1:
            return seconds[:, terminals[0]]
        parts = np.full(count, np.inf)
        for k in range(1, len(terminals)):
            for chosen in itertools.combinations(terminals, k):
                rest = tuple(t for t in terminals if t not in chosen)
                parts = np.minimum(parts, reach(chosen) + reach(rest))
        return (seconds + parts[None, :]).min(1)

    found = np.zeros((count,) * (readers + 1))
    for wants in itertools.product(range(count), repeat=readers):
        found[(slice(None), *wants)] = reach(tuple(sorted(set(wants))))
    return found


def readers_of(problem, value):
    """The nodes and ports that read a value, through its hold if it has one."""
    hold = problem.holds.get(id(value))
    return list(value.readers) if hold is None else list(hold.results[0].readers)


def assignments(problem, domains):
    """The number of combinations of choices, without holds."""
    return prod(len(domains.of[n.number].seconds) for n in problem.nodes if n.kind != "hold")


def least(problem, mesh, axes):
    """The minimum over all assignments."""
    domains = Domains(problem, mesh, axes)
    nodes = [n for n in problem.nodes if n.kind != "hold"]
    at = {n.number: k for k, n in enumerate(nodes)}

    def spread(table, places):
        order = np.argsort(places)
        shape = [1] * len(nodes)
        for k in order:
            shape[places[k]] = table.shape[k]
        return table.transpose(order).reshape(shape)

    total = np.zeros((1,) * len(nodes))
    for n in nodes:
        total = total + spread(domains.of[n.number].seconds, [at[n.number]])
        for value in n.results:
            readers = readers_of(problem, value)
            assert all(r.weight == 1 and not r.small for r in readers)
            if not readers:
                continue
            port = len(n.operands) + value.port
            rows = [domains.of[n.number].rows[port], *(domains.of[r.node.number].rows[r.port] for r in readers)]
            table = trees(domains.table(value).seconds, len(readers))[np.ix_(*rows)]
            places = [at[n.number], *(at[r.node.number] for r in readers)]
            for k in reversed(range(1, len(places))):  # a node that reads a value twice stands in it once
                first = places.index(places[k])
                if first < k:
                    table = np.diagonal(table, axis1=first, axis2=k)
                    table = np.moveaxis(table, -1, first)
                    del places[k]
            total = total + spread(table, places)
    return float(total.min())
