"""Verifies inferred signatures: runs a boxed program on one device and compares pieces with whole values.

At each operation whose signatures were found (`find_signatures`), the pieces that the plan gives to the devices are
computed one after the other and compared with the same pieces of the whole.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardc import compat
from shardc.compat import Eqn
from shardc.errors import SignatureError, all_offenders
from shardc.ir.user_shard_map import is_unit
from shardc.machine.mesh import MeshView
from shardc.passes.lower.lower import WholeLowering
from shardc.passes.trace.find_signatures import OperationSignatures, found_of
from shardc.plan.plan import SpmdPlan
from shardc.sbp.placement import Placement, local_extent
from shardc.sbp.signature import is_extended

SLACK = 64
"""Units in the last place, of the largest element, by which pieces may differ from the whole."""


def check_found(plan: SpmdPlan, args: Sequence[Any], where: str) -> int:
    """Runs a plan's program on one device, and raises if an operation's pieces are not those of the whole.

    Callbacks run, as in a call.

    Args:
      plan: the plan.
      args: its flat arguments, logical arrays, captured ones included.
      where: the function and its line, for the error.

    Returns:
      The number of operations that were compared.

    Raises:
      SignatureError: for each primitive where its pieces differ first, and how to refuse what was found.
    """
    low = _Checking(plan, plan.mesh)
    jax.block_until_ready(low.run(plan.boxed.jaxpr, [jnp.asarray(x) for x in args]))
    jax.effects_barrier()
    if low.wrong:
        names = ", ".join(f'"{n}"' for n in low.wrong)
        lines = [f"{name}: {text}" for name, text in low.wrong.items()]
        raise SignatureError(
            all_offenders(f"{where}: signatures that were found for operations without a rule are wrong", lines)
            + f"\nRefuse them: shardc.function(..., replicate=[{names}]); or say what is true, with shardc.signature."
        )
    return low.compared


class _Checking(WholeLowering):
    """Runs a program on whole values, and the operations whose signatures were found on pieces too."""

    def __init__(self, plan: SpmdPlan, mesh: MeshView) -> None:
        super().__init__(plan.boxed, mesh)
        self.wrong: dict[str, str] = {}
        self.compared = 0
        self._lock = threading.Lock()

    def operation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if is_unit(eqn):
            raise SignatureError(
                f"{compat.source_line(eqn)}: a shard_map of one's own runs on all devices alone; check the function "
                "without it."
            )
        whole = compat.bind_with(eqn.primitive, eqn.params)(*operands)
        found = found_of(eqn)
        if found is not None:
            self.compare(eqn, found, operands, whole)
        return whole

    def compare(self, eqn: Eqn, found: OperationSignatures, operands: Sequence[Any], whole: Sequence[Any]) -> None:
        """Runs the pieces of every device, and notes the first that differs."""
        placed = [self.placement(a) for a in (*eqn.invars, *eqn.outvars)]
        axes = list(dict.fromkeys(a for p in placed for a in p if a in self.sizes))
        self.compared += 1
        for at in itertools.product(*(range(self.sizes[a]) for a in axes)):
            here = dict(zip(axes, at, strict=True))
            pieces = [_piece(x, p, here, self.sizes) for x, p in zip(operands, placed, strict=False)]
            if any(0 in np.shape(x) for x in pieces):
                continue
            for k, (y, all_of_it, p) in enumerate(zip(found.fn(*pieces), whole, placed[len(operands) :], strict=True)):
                self.look(eqn, k, y, _piece(all_of_it, p, here, self.sizes), f"{p} on device {here}")

    def look(self, eqn: Eqn, k: int, got: Any, want: Any, where: str) -> None:
        primitive = eqn.params["fn"].primitive.name
        line, kind = compat.source_line(eqn), compat.short_text(eqn.outvars[k].aval.shape, eqn.outvars[k].aval.dtype)

        def hold(a: Any, b: Any) -> None:
            text = _difference(np.asarray(a), np.asarray(b))
            with self._lock:
                if text:
                    self.wrong.setdefault(primitive, f"{line}: result {k}, {kind} at {where}: {text}")

        if is_extended(want.dtype):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        jax.debug.callback(hold, got, want)


def _extents(shape: Sequence[int], p: Placement, at: Mapping[str, int], sizes: Mapping[str, int]) -> list[slice]:
    found: list[slice] = []
    for dim, n in enumerate(shape):
        offset, valid = local_extent(n, p.axes_of(dim), sizes, at)
        found.append(slice(offset, offset + valid))
    return found


def _piece(x: Any, p: Placement, at: Mapping[str, int], sizes: Mapping[str, int]) -> Any:
    """The piece of a logical value that a device holds, without padding."""
    return x[tuple(_extents(np.shape(x), p, at, sizes))] if p and np.ndim(x) else x


def _difference(a: np.ndarray, b: np.ndarray) -> str:
    if a.shape != b.shape:
        return f"shape {a.shape}, on one device {b.shape}"
    if jnp.issubdtype(b.dtype, np.inexact):
        wide = np.complex128 if b.dtype.kind == "c" else np.float64
        eps = SLACK * float(jnp.finfo(b.dtype).eps)
        x, y = a.astype(wide), b.astype(wide)
        largest = np.abs(y[np.isfinite(y)]).max(initial=0.0)
        close = np.isclose(x, y, rtol=eps, atol=eps * float(largest), equal_nan=True)
    else:
        close = a == b
    if close.all():
        return ""
    where = tuple(int(i) for i in np.argwhere(~close)[0])
    return f"{(~close).sum()} of {close.size} elements; {where} is {a[where]}, on one device {b[where]}"
