"""What is done without JAX's public names does what these would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from shardc import compat
from shardc.machine.mesh import meshes_along


@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "data": 2, "model": 2}])
@pytest.mark.parametrize("known", [True, False])
def test_copies_are_those_of_device_put(axes: dict[str, int], known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(compat, "_xla", SimpleNamespace())
    here, there = meshes_along(shardc.make_mesh(**axes), "pipe")
    specs = [PartitionSpec(), PartitionSpec("data") if "data" in axes else PartitionSpec("pipe")]
    values = [np.arange(8.0), np.arange(6).reshape(2, 3)]
    source = [jax.device_put(v, NamedSharding(here, s)) for v, s in zip(values, specs, strict=True)]
    targets = [NamedSharding(there, s) for s in specs]
    copied = compat.copies_to(targets)(source)
    for x, v, s, old in zip(copied, values, targets, source, strict=True):
        assert x.sharding == s
        assert x.dtype == old.dtype
        np.testing.assert_array_equal(np.asarray(x), v)
        for piece, want in zip(x.addressable_shards, jax.device_put(v, s).addressable_shards, strict=True):
            assert piece.device == want.device
            assert piece.index == want.index
        old.delete()
        np.testing.assert_array_equal(np.asarray(x), v)


def test_source_line_of_library_code_is_not_the_line_of_the_call() -> None:
    """The frame that calls the user's function ends the search: what the caller's file does is not the function's."""
    library: dict[str, Any] = {}
    source = "import jax.numpy as jnp\ndef layer(x):\n    return jnp.sin(x)\n"
    exec(compile(source, "/somewhere/site-packages/lib.py", "exec"), library)
    plan = shardc.function(library["layer"], mesh=shardc.make_mesh(a=1)).plan(np.ones(8, np.float32))
    assert [compat.source_line(e) for e in plan.program.jaxpr.eqns] == ["lib.py:3 (layer)"]
