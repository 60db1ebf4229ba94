"""Turns lookups by the row's own index into batched lookups.

    x[iota[:, None], i]  -->  vmap(lambda x, i: x[i])(x, i)

Programs read the last token of each row, the value of the action taken, or the beams of a cache in the first form. Its
rule has to assume that the index may address any row. In the second form each row reads only itself, so that rows may
be split. The components of an index are evaluated here if they depend on no argument: through broadcasts, reshapes,
conversions, integer division, and the handling of negative and large indices in `jnp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from jax import lax
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.eqns import full_eqn
from shardc.ir.nested import in_bodies, nested_bodies
from shardc.ir.program import Program
from shardc.passes import Context

MOST_COMPUTED: Final = 2**24
"""Elements up to which an index component is evaluated."""


def batch_lookups(program: Program, _: Context) -> Program:
    """The program with batched gathers and scatters by row number."""
    captured = zip(reversed(program.jaxpr.invars), reversed(program.captured), strict=False)
    known = {v: x for v, x in captured if not isinstance(x, compat.Tracer)}
    return program.after("batch_lookups", batched(program.jaxpr, known))


def batched(jaxpr: Jaxpr, known: Mapping[Var, Any]) -> Jaxpr:
    """The canonical jaxpr with batched gathers and scatters by row number; `known`: values of captured arrays."""
    made = _Batcher(known).run(jaxpr)
    return made if made is jaxpr else compat.remove_dead(made, [True] * len(made.outvars))


class _Batcher:
    """The walk that batches lookups.

    Attributes:
      made: the equation that makes each variable seen so far.
      outer: for a variable of a nested body the value outside.
      known: values of captured arrays.
      values: of variables; None if they depend on an argument.
    """

    def __init__(self, known: Mapping[Var, Any]) -> None:
        self.made: dict[Var, Eqn] = {}
        self.outer: dict[Var, Atom] = {}
        self.known = known
        self.values: dict[Var, NDArray[Any] | None] = {}

    def run(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns: list[Eqn] = []
        for eqn in jaxpr.eqns:
            if bodies := nested_bodies(eqn):
                for body in bodies:
                    self.outer |= dict(body.unchanged(eqn))
                eqn = in_bodies(eqn, self.run)
            elif eqn.primitive.name == "gather" or eqn.primitive.name.startswith("scatter"):
                eqns += (found := self.batched(eqn))[:-1]
                eqn = found[-1]
            self.made |= dict.fromkeys(eqn.outvars, eqn)
            eqns.append(eqn)
        if len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
            return jaxpr
        return compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)

    def batched(self, eqn: Eqn) -> list[Eqn]:
        """The equations of a lookup with batching dimensions for row numbers: those of its indices, then the lookup."""
        reads = eqn.primitive.name == "gather"
        operand, indices = eqn.invars[:2]
        numbers = eqn.params["dimension_numbers"]
        names = _GATHER if reads else _SCATTER
        mapped, single, of_indices = (getattr(numbers, name) for name in names)
        pairs = dict(zip(numbers.operand_batching_dims, of_indices, strict=True))
        if compat.is_literal(indices) or eqn.params["mode"] == lax.GatherScatterMode.ONE_HOT:
            return [eqn]
        rows: set[int] = set()  # components that are row numbers
        for j, d in enumerate(mapped):
            if d not in single or operand.aval.shape[d] == 1:
                continue
            b = self.counts_along(indices, j, operand.aval.shape[d], tuple(pairs.values()))
            if b is not None:
                pairs[d] = b
                rows.add(j)
        if not rows:
            return [eqn]
        kept = [j for j in range(len(mapped)) if j not in rows]
        values = tuple(mapped[j] for j in kept), tuple(d for d in single if d not in pairs)
        along = {"operand_batching_dims": tuple(sorted(pairs)), names[2]: tuple(pairs[d] for d in sorted(pairs))}
        numbers = numbers._replace(**dict(zip(names, values, strict=False)), **along)
        eqns, rest = self.components(indices, kept, eqn)
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        return [*eqns, eqn.replace(invars=[operand, rest, *eqn.invars[2:]], params=params)]

    def components(self, indices: Var, kept: Sequence[int], like: Eqn) -> tuple[list[Eqn], Var]:
        """Indices with only some of the components, and the equations that make them."""
        shape, dtype = tuple(indices.aval.shape), indices.aval.dtype

        def of_width(width: int) -> Var:
            return compat.fresh_var(compat.shaped_array((*shape[:-1], width), dtype))

        if not kept:
            return [full_eqn(0, out := of_width(0))], out
        eqns: list[Eqn] = []
        parts: list[Var] = []
        for j in kept:
            part, at = self.part(indices, j)
            if part.aval.shape[-1] > 1:
                starts, limits = [0] * len(shape), [*shape[:-1], at + 1]
                starts[-1] = at
                params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
                eqns.append(compat.new_eqn([part], [part := of_width(1)], lax.slice_p, params, like))
            parts.append(part)
        if len(parts) > 1:
            params = {"dimension": len(shape) - 1}
            eqns.append(compat.new_eqn(parts, [of_width(len(parts))], lax.concatenate_p, params, like))
            parts = [*eqns[-1].outvars]
        return eqns, parts[0]

    def part(self, x: Var, j: int) -> tuple[Var, int]:
        """The operand of a concatenation that has component `j`, and its number there."""
        eqn = self.made.get(x)
        if eqn is not None and _joins_components(eqn):
            for a in eqn.invars:
                if j < a.aval.shape[-1]:
                    return (x, j) if compat.is_literal(a) else self.part(a, j)
                j -= a.aval.shape[-1]
        return x, j

    def counts_along(self, indices: Var, j: int, size: int, taken: Sequence[int]) -> int | None:
        """The dimension of the indices along which component `j` counts from 0 to `size - 1`; None: there is none."""
        batch = indices.aval.shape[:-1]
        fit = [b for b, n in enumerate(batch) if n == size and b not in taken]
        if not fit or (value := self.component(indices, j)) is None:
            return None
        for b in fit:
            rows = np.arange(size).reshape([size if k == b else 1 for k in range(len(batch))])
            if np.array_equal(np.broadcast_to(value, batch), np.broadcast_to(rows, batch)):
                return b
        return None

    # --- values -----------------------------------------------------------------------------------------------------

    def component(self, atom: Atom, j: int) -> NDArray[Any] | None:
        """Component `j` of indices, without their last dimension; None if it depends on an argument."""
        if compat.is_literal(atom) or not atom.aval.shape:
            return self.value(atom)
        x, j = self.part(atom, j)
        eqn = self.made.get(x)
        if eqn is not None and (fn := _elementwise(eqn)) is not None:
            return _computed(fn, [self.component(a, j) for a in eqn.invars])
        value = self.value(x)
        return None if value is None else value[..., j]

    def value(self, atom: Atom) -> NDArray[Any] | None:
        """The value of integers or booleans; None if it depends on an argument, or is not known here."""
        if compat.is_literal(atom):
            return np.asarray(atom.val, atom.aval.dtype)
        if atom in self.outer:
            return self.value(self.outer[atom])
        if atom not in self.values:
            self.values[atom] = self._value(atom)
        return self.values[atom]

    def _value(self, x: Var) -> NDArray[Any] | None:
        if (
            not isinstance(x.aval.dtype, np.dtype)
            or x.aval.dtype.kind not in "iub"
            or compat.size_of(x.aval) > MOST_COMPUTED
        ):
            return None
        if x in self.known:
            held = self.known[x]
            return np.asarray(held) if getattr(held, "is_fully_addressable", True) else None
        eqn = self.made.get(x)
        fn = None if eqn is None else _elementwise(eqn) or _SHAPED.get(eqn.primitive.name)
        if eqn is None or fn is None:
            return None
        fn = fn if _elementwise(eqn) else _with_params(fn, eqn)
        return _computed(fn, [self.value(a) for a in eqn.invars])


_GATHER: Final = ("start_index_map", "collapsed_slice_dims", "start_indices_batching_dims")
_SCATTER: Final = ("scatter_dims_to_operand_dims", "inserted_window_dims", "scatter_indices_batching_dims")


def _joins_components(eqn: Eqn) -> bool:
    return eqn.primitive.name == "concatenate" and eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1


def _computed(fn: Callable[..., Any], operands: Sequence[Any]) -> NDArray[Any] | None:
    if any(x is None for x in operands):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(fn(*operands))


def _elementwise(eqn: Eqn) -> Callable[..., Any] | None:
    if eqn.primitive.name == "convert_element_type":
        dtype = eqn.params["new_dtype"]
        return (lambda x: x.astype(dtype)) if isinstance(dtype, np.dtype) else None
    return _ELEMENTWISE.get(eqn.primitive.name)


def _with_params(fn: Callable[..., Any], eqn: Eqn) -> Callable[..., Any]:
    return lambda *xs: fn(eqn, *xs)


def _quotient(a: Any, b: Any) -> Any:
    """Division rounded to zero, as in `lax.div`; the result of a division by zero is arbitrary."""
    quotient = np.abs(a) // np.where(b == 0, 1, np.abs(b))
    return np.where((a < 0) == (b < 0), quotient, -quotient).astype(a.dtype)


_ELEMENTWISE: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "clamp": lambda low, x, high: np.clip(x, low, high),
    "copy": lambda x: x, "div": _quotient, "eq": np.equal, "ge": np.greater_equal, "gt": np.greater,
    "le": np.less_equal, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal,
    "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "rem": np.fmod, "select_n": lambda which, *cases: (
        np.choose(which, cases)
    ),
    "sign": np.sign, "stop_gradient": lambda x: x, "sub": np.subtract, "xor": np.bitwise_xor,
}  # fmt: skip


def _broadcast(eqn: Eqn, x: Any) -> Any:
    shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return np.broadcast_to(x.reshape([x.shape[at.index(d)] if d in at else 1 for d in range(len(shape))]), shape)


def _iota(eqn: Eqn) -> Any:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    rows = np.arange(shape[d], dtype=eqn.params["dtype"]).reshape([n if k == d else 1 for k, n in enumerate(shape)])
    return np.broadcast_to(rows, shape)


def _slice(eqn: Eqn, x: Any) -> Any:
    p = eqn.params
    steps = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


_SHAPED: Final[Mapping[str, Callable[..., Any]]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "iota": _iota,
    "reshape": lambda eqn, x: x.reshape(eqn.params["new_sizes"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "slice": _slice,
    "squeeze": lambda eqn, x: np.squeeze(x, eqn.params["dimensions"]),
    "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
}
