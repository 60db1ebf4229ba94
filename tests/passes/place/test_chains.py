"""Chains: several axes that cut one run of a reshape, against pieces of the whole."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from shardc.ir.walk import operation_of
from shardc.machine.mesh import MeshView
from shardc.machine.topology import TOPOLOGIES
from shardc.passes.place.domain import Domains
from shardc.passes.place.problem import Requirement, build_problem
from shardc.sbp.placement import Placement, local_extent, local_shape

SHAPES = [((64, 3), (4, 16, 3)), ((4, 16, 3), (64, 3)), ((2, 2, 6), (4, 6)), ((8, 6), (2, 2, 12)), ((6, 4), (2, 12))]


def pieces(x, p, sizes):
    """The piece of each device, in their order."""
    found = []
    for at in itertools.product(*map(range, sizes.values())):
        coords = dict(zip(sizes, at, strict=True))
        cut = [local_extent(n, p.axes_of(d), sizes, coords) for d, n in enumerate(x.shape)]
        found.append(x[tuple(slice(a, a + n) for a, n in cut)])
    return found


def ports_of(old, new, axes):
    """All pairs of placements without partial values that a reshape may have."""
    jaxpr = jax.make_jaxpr(lambda x: x.reshape(new))(np.zeros(old, "float32")).jaxpr
    mesh = MeshView(axes, TOPOLOGIES["cpu"])
    problem = build_problem(jaxpr, [Requirement()], [Requirement()], ["x"], [""])
    node = next(n for n in problem.nodes if n.eqn is not None)
    domains = Domains(problem, mesh, [a for a, _ in axes])
    assert operation_of(node.equation).name == "reshape"
    found = [domains.placements(node, k) for k in range(len(domains.of[node.number].options))]
    return mesh.sizes, [(a, b) for a, b in found if not a.partial_axes]


@pytest.mark.parametrize("axes", [(("a", 4), ("b", 2)), (("a", 2), ("b", 2), ("c", 2))], ids=["4x2", "2x2x2"])
@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_devices_keep_their_elements(old, new, axes):
    x = np.arange(np.prod(old)).reshape(old)
    sizes, ports = ports_of(old, new, axes)
    assert len(set(ports)) == len(ports)
    for before, after in ports:
        shape = local_shape(new, after, sizes)
        for ours, want in zip(pieces(x, before, sizes), pieces(x.reshape(new), after, sizes), strict=True):
            if ours.size and 0 not in want.shape and ours.size == np.prod(shape):
                np.testing.assert_array_equal(ours.reshape(shape), want)


def test_axes_go_on_behind_each_other():
    _, ports = ports_of((64, 3), (4, 16, 3), (("a", 4), ("b", 2)))
    assert (Placement.parse("{a: S(0), b: S(0)}"), Placement.parse("{a: S(0), b: S(1)}")) in ports
    assert (Placement.parse("{b: S(0), a: S(0)}"), Placement.parse("{b: S(0), a: S(1)}")) not in ports


def test_one_axis_has_no_chains():
    _, ports = ports_of((64, 3), (4, 16, 3), (("a", 8),))
    assert all(after.axes_of(1) == () for _, after in ports)
