"""A plan compiled for the devices of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from shardc import compat
from shardc.errors import MeshError, StepFailedError
from shardc.mesh import AnyMesh
from shardc.passes.audit import Audit, audit
from shardc.passes.lower import Lowering
from shardc.passes.plan import Plan
from shardc.runtime.placed import PlacedArray, is_placed, put_leaf
from shardc.sbp.layout import is_plain, physical_shape, physical_spec


class Executable:
    """A compiled plan. Calling it takes the flat arguments that are arrays and gives the flat results."""

    def __init__(self, plan: Plan, mesh: AnyMesh) -> None:
        if not isinstance(mesh, Mesh):
            raise MeshError(
                f"{plan.program.name} is planned for {plan.mesh}, a mesh without devices; make the mesh without "
                "`topology=` to run it."
            )
        self.plan, self.mesh = plan, mesh
        self._sizes = plan.mesh.sizes
        shapes_in = [tuple(a.shape) for a in plan.program.in_avals]
        shapes_out = [tuple(a.shape) for a in plan.program.out_avals]
        self._plain_in = [is_plain(s, p, self._sizes) for s, p in zip(shapes_in, plan.inputs, strict=True)]
        self._plain_out = [is_plain(s, p, self._sizes) for s, p in zip(shapes_out, plan.outputs, strict=True)]
        self._shapes_out = shapes_out
        self._in_shardings = [NamedSharding(mesh, physical_spec(p)) for p in plan.inputs]
        self._out_shardings = [NamedSharding(mesh, physical_spec(p)) for p in plan.outputs]
        self._donated = self._donations()
        self._jitted = jax.jit(
            self._sharded(),
            in_shardings=tuple(self._in_shardings),
            out_shardings=self._out_shardings,
            donate_argnums=self._donated,
        )
        self._compiled: Any = None
        self._captured = [
            self._enter(i, x) for i, x in enumerate(plan.program.captured, len(shapes_in) - len(plan.program.captured))
        ]

    def _donations(self) -> tuple[int, ...]:
        """Inputs whose buffer a result can take: tied, and lying as the result does."""
        plan = self.plan
        found = {
            tie
            for tie, out, aval in zip(plan.ties, plan.outputs, plan.program.out_avals, strict=True)
            if tie is not None
            and plan.inputs[tie] == out
            and plan.program.in_avals[tie].dtype == aval.dtype
        }
        return tuple(sorted(found))

    def _sharded(self) -> Any:
        plan, low = self.plan, Lowering(self.plan.boxed, self.plan.mesh)
        partial_in = [bool(p.partial_axes) for p in plan.inputs]

        def local(*pieces: Any) -> list[Any]:
            args = [lax.squeeze(x, (0,)) if partial else x for x, partial in zip(pieces, partial_in, strict=True)]
            results = low.run(plan.boxed.jaxpr, args)
            done: list[Any] = []
            for x, p, aval in zip(results, plan.outputs, plan.program.out_avals, strict=True):
                x = low.hide_padding(jax.numpy.asarray(x, aval.dtype), tuple(aval.shape), p)
                x = compat.as_aval(x, aval)
                done.append(lax.expand_dims(x, (0,)) if p.partial_axes else x)
            return done

        local.__name__ = plan.program.name
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(physical_spec(p) for p in plan.inputs),
            out_specs=[physical_spec(p) for p in plan.outputs],
            check_vma=False,
        )

    def _enter(self, i: int, x: Any) -> Any:
        """The physical array of argument `i`."""
        if is_placed(x):
            return x.physical
        if self._plain_in[i]:
            if isinstance(x, jax.Array):
                return x
            aval = self.plan.program.in_avals[i]
            return np.asarray(x, aval.dtype)
        placed = put_leaf(x, self.mesh, self.plan.inputs[i])
        assert isinstance(placed, PlacedArray)
        return placed.physical

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Runs the plan. Raises StepFailedError if it fails after donated buffers were taken."""
        args = [*(self._enter(i, x) for i, x in enumerate(leaves)), *self._captured]
        try:
            out = self._jitted(*args)
        except (RuntimeError, ValueError, TypeError, FloatingPointError) as error:
            self._report_failure(leaves, error)
            raise
        return [
            x if plain else PlacedArray(x, shape, p, self.mesh)
            for x, plain, shape, p in zip(out, self._plain_out, self._shapes_out, self.plan.outputs, strict=True)
        ]

    def _report_failure(self, leaves: Sequence[Any], error: Exception) -> None:
        arrays = [getattr(x, "physical", x) for x in leaves]
        gone = [
            path for path, x in zip(self.plan.program.in_paths, arrays, strict=False)
            if isinstance(x, jax.Array) and x.is_deleted()
        ]  # fmt: skip
        if gone:
            raise StepFailedError(
                f"{self.plan.program.name} failed while it ran: {error}\n"
                f"  gone (donated): {', '.join(gone)}\n  all other arguments are as they were."
            ) from error

    def _physical_avals(self) -> list[jax.ShapeDtypeStruct]:
        plan = self.plan
        return [
            jax.ShapeDtypeStruct(physical_shape(a.shape, p, self._sizes), a.dtype, sharding=s)
            for a, p, s in zip(plan.program.in_avals, plan.inputs, self._in_shardings, strict=True)
        ]

    @property
    def compiled(self) -> Any:
        """JAX's compiled object."""
        if self._compiled is None:
            self._compiled = self._jitted.lower(*self._physical_avals()).compile()
        return self._compiled

    def hlo(self) -> str:
        """The optimized HLO of the program that runs."""
        return self.compiled.as_text()

    def memory_stats(self) -> Any:
        """XLA's memory analysis: argument, output, temporary and code sizes in bytes per device."""
        return self.compiled.memory_analysis()

    def audit(self) -> Audit:
        """Compares the collectives in the compiled HLO with the plan's."""
        platform = self.mesh.devices.flat[0].platform
        return audit(self.plan.collectives, self.hlo(), self._sizes, platform=platform)
