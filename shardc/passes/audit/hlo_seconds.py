"""Seconds of the instructions of a compiled program, by the figures of a machine: what a schedule hides is read off
these.

An instruction takes the longer of its products and of the memory that it reads and writes. Of a fusion count what it
reads of its operands and what it writes of its results: slices of a stack, not the stack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from shardc.machine.topology import Topology
from shardc.passes.audit.hlo_text import Instruction, Module, itemsize


class InstructionSeconds:
    """The seconds of instructions of a module on a device of a machine, without their collectives."""

    def __init__(self, module: Module, machine: Topology) -> None:
        self._module, self._machine = module, machine
        self._of_products = cache(self._products)

    def __call__(self, computation: str, i: Instruction) -> float:
        """The seconds of one execution: of a loop without its body, and of what only starts or waits none."""
        if i.opcode in NO_WORK or i.opcode.endswith(("-start", "-done", "-update")):
            return 0.0
        products = self._product(computation, i) + sum(
            map(self._of_products, i.callees if i.opcode == "fusion" else ())
        )
        return max(products, self._moved(computation, i) / self._machine.memory_rate)

    def _products(self, computation: str) -> float:
        found = self._module.computations[computation].values()
        return sum(self._product(computation, i) + sum(map(self._of_products, i.callees)) for i in found)

    def _product(self, computation: str, i: Instruction) -> float:
        """Seconds of the arithmetic of a product; 0 for others."""
        library = i.opcode == "custom-call" and _LIBRARY.search(i.attributes)
        if i.opcode not in ("dot", "convolution") and not library:
            return 0.0
        one, other = (self._module.operand(computation, name) for name in i.operands[:2])
        (_, result), *_ = _shapes(i.shape)
        if i.opcode == "convolution":
            multiplied = _convolved(i, one.shape, other.shape, result)
        else:
            said = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]', i.attributes)
            dims = map(int, re.findall(r"\d+", said[1])) if said else ()
            multiplied = math.prod(result) * math.prod(one.shape[d] for d in dims)
        return 2 * multiplied / self._machine.flops_in(_TYPES.get(one.dtype, one.dtype))

    def _moved(self, computation: str, i: Instruction) -> float:
        """Bytes that an instruction reads and writes."""
        if i.opcode == "fusion":
            return self._moved_by_fusion(i.callees[0])
        if i.opcode in ("slice", "dynamic-slice", "gather"):
            return 2 * _bytes(i.shape)
        if i.opcode == "dynamic-update-slice":
            return 2 * self._module.operand(computation, i.operands[1]).bytes
        inside = self._module.computations[computation]
        return _bytes(i.shape) + sum(_bytes(inside[name].shape) for name in i.operands if name in inside)

    def _moved_by_fusion(self, computation: str) -> float:
        inside = self._module.computations[computation]
        readers: dict[str, list[Instruction]] = {}
        for i in inside.values():
            for name in i.operands:
                readers.setdefault(name, []).append(i)
        read = sum(_read(i.name, inside, readers) for i in inside.values() if i.opcode == "parameter")
        return read + _written(self._module.roots[computation], inside)


def _read(name: str, inside: Mapping[str, Instruction], readers: Mapping[str, Sequence[Instruction]]) -> float:
    """Bytes of a value that instructions of a fusion read."""
    whole, parts = _bytes(inside[name].shape), 0.0
    for i in readers.get(name, ()):
        if i.opcode in ("slice", "dynamic-slice", "gather") and i.operands[0] == name:
            parts += _bytes(i.shape)
        elif i.opcode == "bitcast":
            parts += _read(i.name, inside, readers)
        elif i.opcode not in _PASSED and (i.opcode != "dynamic-update-slice" or i.operands[0] != name):
            return whole
    return min(parts, whole)


def _written(name: str, inside: Mapping[str, Instruction]) -> float:
    """Bytes of a result of a fusion that it writes."""
    i = inside[name]
    if i.opcode in ("tuple", "bitcast"):
        return sum(_written(operand, inside) for operand in i.operands)
    if i.opcode in _PASSED:
        return 0.0
    return _bytes(inside[i.operands[1]].shape if i.opcode == "dynamic-update-slice" else i.shape)


def _convolved(i: Instruction, operand: Sequence[int], kernel: Sequence[int], result: Sequence[int]) -> int:
    """The multiplications of a convolution, without those of padding and of holes: XLA:TPU writes batched products as
    convolutions whose windows are mostly such."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        return 0
    given, weights, made = (
        dict(zip(names, sizes, strict=True))
        for names, sizes in zip(labels.groups(), (operand, kernel, result), strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", i.attributes)
    spread = dict(re.findall(r"(\w+)=([\dx_\-]+)", window[1])) if window else {}
    found = made["b"] * made["f"] * weights["i"]
    for dim in (d for d in given if d.isdigit()):
        at = int(dim)

        def told(name: str, default: str, at: int = at) -> list[int]:
            return [int(n) for n in spread[name].split("x")[at].split("_")] if name in spread else [int(default)]

        (stride,), (before, *_) = told("stride", "1"), told("pad", "0")
        (holes,), (apart,) = told("lhs_dilate", "1"), told("rhs_dilate", "1")
        places = (o * stride + k * apart - before for o in range(made[dim]) for k in range(weights[dim]))
        found *= sum(0 <= p <= (given[dim] - 1) * holes and p % holes == 0 for p in places)
    return found


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(map(int, re.findall(r"\d+", dims))))
        for dtype, dims in re.findall(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]", text)
    ]


def _bytes(text: str) -> float:
    """Bytes of an array, or of all arrays of a tuple, by its shape; those in a TPU's own memory cost nothing."""
    return sum(float(itemsize(dtype)) * math.prod(dims) for dtype, dims in _shapes(_ON_CHIP.sub("", text)))


NO_WORK: Final = frozenset(
    {
        "parameter", "constant", "iota", "get-tuple-element", "tuple", "bitcast", "opt-barrier", "after-all", "copy",
        "partition-id", "replica-id", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    }
)  # fmt: skip
"""Opcodes that hide nothing. A copy is one of a few bytes, or one that the backend drops."""
_ON_CHIP: Final = re.compile(r"[a-z]+\d*\w*\[[\d,]*\]\{[^}]*S\(\d+\)\}")
_PASSED: Final = NO_WORK - {"constant", "copy", "iota"}
"""Opcodes in a fusion that leave arrays where they are: a fusion of XLA:TPU passes a collective's buffers on."""
_LIBRARY: Final = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas)', re.IGNORECASE)
_TYPES: Final = {
    "bf16": "bfloat16", "f32": "float32", "f16": "float16", "f64": "float64", "s8": "int8",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
