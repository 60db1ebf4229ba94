"""The pins of a call: one for each leaf of its arguments and results, as the user placed them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from shardc.calls.constant_leaves import numbered
from shardc.calls.leaves import leaf_of
from shardc.calls.opened import structure_of
from shardc.ir.program import Program
from shardc.machine.mesh import MeshView
from shardc.passes.trace.pins import Leaf, Pins, is_leaf_spec, says_names
from shardc.passes.trace.trace import Arguments, Call, is_number, leaves_by_path, path_text


def argument_pins(call: Call, arguments: Arguments, spec: Any, mesh: MeshView) -> Pins:
    """One pin for each leaf of a call, and all that is wrong with `in_placements`.

    Args:
      arguments: the function's.
      spec: `in_placements`.
    """
    if (structure := structure_of(call)) is not None:
        spec = structure.placements(spec, arguments.names)
    leaves = [leaf_of(path, inner, x) for path, inner, x in zip(call.paths, call.inner, call.leaves, strict=True)]
    leaves = [leaf and replace(leaf, in_list=at) for leaf, at in zip(leaves, _lists_of_numbers(call), strict=True)]
    pins = Pins("in_placements", leaves, mesh)
    numbers: dict[str, Any] = jax.tree.unflatten(call.tree, range(len(leaves)))
    constant = {n for n, _ in call.static} - arguments.static  # numbers that this call leaves out
    if isinstance(spec, tuple | list) and not is_leaf_spec(spec):
        names = [n for n in arguments.names if n in numbers or n in constant]
        many = arguments.var_positional
        if many in names and len(spec) > (at := names.index(many)) + 1:  # as in jax.jit, one for each of `*xs`
            if len(spec) - at != len(numbers[many]):
                wanted = f"{len(spec) - at} for the {len(numbers[many])} arguments of *{many}"
                pins.offenders.append(f"in_placements: {wanted}; write one for each, or one for all of them.")
                return pins
            spec, names = (*spec[:at], tuple(spec[at:])), names[: at + 1]
        if len(spec) > len(names):
            said = f"{len(spec)} for {len(names)} arguments ({', '.join(names)})"
            pins.offenders.append(f"in_placements: {said}; write one for each argument, or a dict by name.")
        for name, part in zip(names, spec, strict=False):
            if name in numbers:
                pins.spread(part, numbers[name], name)
        return pins
    if says_names(spec, arguments.names, mesh):
        spec = arguments.nest_keywords({n: s for n, s in spec.items() if n not in constant})
    pins.spread(spec, numbers)
    return pins


def _lists_of_numbers(call: Call) -> list[str]:
    """For each leaf the path of the list of numbers that it is an item of; empty if it is of none."""

    def is_one(x: Any) -> bool:
        return isinstance(x, list) and all(map(is_number, jax.tree.leaves(x)))

    pairs = leaves_by_path(jax.tree.unflatten(call.tree, call.leaves), is_leaf=is_one)
    found: list[str] = []
    for path, x in pairs:
        found += [path_text(path)] * len(jax.tree.leaves(x)) if is_one(x) else [""]
    return found


def result_pins(program: Program, spec: Any, mesh: MeshView) -> Pins:
    """One pin for each result, and all that is wrong with `out_placements`, the `spec`."""
    each = isinstance(spec, tuple | list) and not is_leaf_spec(spec)  # rules match inside the result they stand for
    leaves = [
        Leaf(f"result {path}".rstrip(), path.partition("/")[2] if each else path, tuple(aval.shape), aval.dtype)
        for path, aval in zip(program.out_paths, program.out_avals, strict=True)
    ]
    pins = Pins("out_placements", leaves, mesh)
    pins.spread(spec, numbered(program.out_tree))
    return pins
