"""No plan sends more than `jax.jit` with the same pins: bytes of plans against the collectives that XLA's partitioner
puts into the compiled program. Plans are made for a machine where only bytes take time: elsewhere one collective of more
bytes may be faster than two of fewer.
"""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from examples.zoo import MODELS
from shardc import S
from shardc.machine.topology import TOPOLOGIES
from shardc.passes.audit.hlo import parse_collectives
from shardc.sbp.placement import Placement, is_even
from tests.harnesses.cases import Case, all_cases, choose
from tests.harnesses.draws import MESHES, mesh_of

pytestmark = pytest.mark.usefixtures("compiled_fast")

DEARER: Final[dict[str, str]] = {}
"""Cases whose plans may send more, each with the reason. The fewer the better."""


@functools.cache
def only_bytes(number: int) -> Any:
    """The mesh of this number, without devices, on a machine where only bytes take time."""
    cpu = TOPOLOGIES["cpu"]
    fabrics = tuple(replace(f, latency=0.0) for f in cpu.fabrics)
    machine = replace(cpu, flops=1e24, memory_bandwidth=1e24, launch=0.0, fabrics=fabrics, vector=0.0, dispatch=0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.json")
        path.write_text(machine.to_json(), "utf-8")
        return shardc.make_mesh(topology=str(path), **MESHES[number])


def sent(fn: Callable[..., Any], args: Sequence[Any], ins: Any, outs: Any, number: int) -> tuple[float, int]:
    """Bytes that each device sends: in the plan, and in the program of jit. `ins` and `outs` are pytrees of placements
    beside the arguments and the results."""
    plan = shardc.function(fn, mesh=only_bytes(number), in_placements=tuple(ins), out_placements=outs).plan(*args)
    at = partial(jax.tree.map, lambda p: p.to_sharding(mesh_of(number)), is_leaf=lambda p: isinstance(p, Placement))
    jitted = jax.jit(fn, in_shardings=at(tuple(ins)), out_shardings=at(outs))
    found = parse_collectives(jitted.lower(*args).compile().as_text())
    return plan.bytes_per_device, sum(c.bytes * (c.trips or 1) for c in found)


def drawn(shape: Sequence[int], mesh: Any, rng: np.random.Generator) -> Placement:
    """A random placement that splits dimensions evenly."""
    rank = len(shape)
    for _ in range(8):
        dims = {axis: int(rng.integers(-1, rank)) for axis in mesh.shape}
        found = Placement({axis: S(d) for axis, d in dims.items() if d >= 0})
        if is_even(shape, found, mesh.shape):
            return found
    return Placement()


def _usable(case: Case) -> bool:
    return not case.undefined and case.group not in ("random_bits", "random_split", "random_wrap")


CASES: Final = {c.name: c for c in choose(limit=2) if _usable(c)}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", list(CASES))
def test_operations_send_no_more_than_under_jit(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(zlib.crc32(name.encode()))
    number = int(rng.integers(len(MESHES)))
    mesh = mesh_of(number)
    with jax.enable_x64(True):
        args = case.arguments(0)
        ins = [jax.tree.map(lambda x: drawn(np.shape(x), mesh, rng), a) for a in args]
        outs = jax.tree.map(lambda x: drawn(x.shape, mesh, rng), jax.eval_shape(case.fn, *args))
        ours, theirs = sent(case.fn, args, ins, outs, number)
    assert ours <= theirs or name in DEARER, f"{ours} bytes, jit {theirs}; {mesh.shape}, {ins} -> {outs}"
