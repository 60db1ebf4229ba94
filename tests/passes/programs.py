"""Programs as short text, for golden files that show what a pass does: a line for each equation."""

import numpy as np

from shardc import compat
from shardc.ir.loop import Loop
from shardc.ir.nested import bodies_of, parted


class _Names(dict):
    """Names of variables in the order of their first printing: a, b, ..., z, a1, b1, ..."""

    def __missing__(self, v):
        k = len(self)
        self[v] = chr(ord("a") + k % 26) + (str(k // 26) if k >= 26 else "")
        return self[v]


def text_of(jaxpr):
    """A jaxpr as text. Its inputs and results have types, nested bodies are indented.

    Example:
      in a:f32[2] b:f32[2]
      c:f32[2] = add a b
      out c
    """
    return "\n".join(_lines(jaxpr, _Names()))


def before_after(before, after):
    """Two programs, for a golden file."""
    return f"before\n{text_of(before)}\n\nafter\n{text_of(after)}"


def _lines(jaxpr, names):
    def atom(a):
        return np.array2string(np.asarray(a.val), separator=",") if compat.is_literal(a) else names[a]

    def typed(v):
        return f"{names[v]}:{compat.short_text(v.aval.shape, v.aval.dtype)}"

    yield " ".join(("in", *map(typed, jaxpr.invars)))
    for eqn in jaxpr.eqns:
        read = [atom(a) for a in eqn.invars]
        params = f"[{eqn.params['src']} --> {eqn.params['dst']}]" if eqn.primitive.name == "box" else ""
        if eqn.primitive.name == "scan":
            scan = Loop.of(eqn)
            sides = parted(read, scan.consts, scan.carries, scan.rows)
            read = [f"{what} ({' '.join(some)})" for what, some in zip(("consts", "carry", "rows"), sides, strict=True)]
            params = f"[{scan.length} steps]"
        if "dimension_numbers" in eqn.params and hasattr(eqn.params["dimension_numbers"], "operand_batching_dims"):
            params = f"[batching dimensions {eqn.params['dimension_numbers'].operand_batching_dims}]"
        made = " ".join(map(typed, eqn.outvars))
        yield " ".join((f"{made} =", eqn.primitive.name + params, *read))
        for body in bodies_of(eqn):
            yield from (f"  {line}" for line in _lines(body, names))
    yield " ".join(("out", *map(atom, jaxpr.outvars)))
