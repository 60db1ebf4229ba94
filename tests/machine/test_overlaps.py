"""Shares of what XLA hides, as plans use them."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardc
from shardc import S
from shardc.machine.overlaps import FULL, KINDS, NONE, RING_OPTIONS, SHARES
from shardc.machine.topology import TOPOLOGIES


def test_every_machine_has_shares_of_known_kinds() -> None:
    assert set(SHARES) == set(TOPOLOGIES)
    assert all(kind in KINDS and 0 < share <= 1 for shares in SHARES.values() for kind, share in shares)


def planned(machine: str, overlaps: Any, tmp_path: Any) -> Any:
    """Products with split rows, on a machine with these shares, read from its file."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(json.loads(TOPOLOGIES[machine].to_json()) | {"overlaps": overlaps}))

    def f(w: Any, x: Any) -> Any:
        return jax.nn.relu(x @ w["up"]) @ w["down"]

    up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 16384), (16384, 4096)))
    mesh = shardc.make_mesh(topology=str(path), model=8)
    pins = {"w": {"up": {"model": S(1)}, "down": {"model": S(0)}}, "x": {"model": S(0)}}
    function = shardc.function(f, mesh=mesh, in_placements=pins, out_placements={"model": S(0)})
    return function.plan({"up": up, "down": down}, jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16))


def test_rings_are_planned_at_the_share_that_is_hidden(tmp_path: Any) -> None:
    whole, half, none = (planned("h100", told, tmp_path) for told in (True, {"ring": 0.5}, False))
    assert whole.seconds < half.seconds <= none.seconds
    assert whole.xla_options == RING_OPTIONS and not none.xla_options and not none.overlaps
    assert {o.kind for o in whole.overlaps} >= {"ring"} and whole.mesh.topology.overlaps == FULL
    assert none.mesh.topology.overlaps == NONE and not [c for c in none.collectives if c.kind == "permute"]
    assert "XLA is given xla_disable_hlo_passes=dot-merger" in whole.explain()
    assert whole.digest != none.digest


@pytest.mark.parametrize("machine", ["h100", "v5e"])
def test_what_is_listed_adds_up_to_what_is_counted(machine: str, tmp_path: Any) -> None:
    plan = planned(machine, dict(SHARES[machine]), tmp_path)
    assert plan.time.overlapped > 0
    assert sum(o.hidden for o in plan.overlaps) == pytest.approx(plan.time.overlapped)
    assert all(0 < o.hidden <= o.could <= o.seconds and o.source and o.beside for o in plan.overlaps)
