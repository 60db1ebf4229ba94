"""The collectives of a compiled program, read from the text of its optimized HLO (`compiled.as_text()`).

XLA offers no stable programmatic view of an executable, but the form of its text has been stable for years:

    HloModule jit_f, ..., num_partitions=8
    FileNames / FunctionNames / FileLocations / StackFrames   (tables that `stack_frame_id=3` points into)
    %body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
      %psum.1 = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={...}
    }
    ENTRY %main (...) -> ... {
      %w = (...) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"4"}}
    }

The walk starts at ENTRY and follows calls, fusions, branches and loops, multiplying trip counts. Sizes come from the
operands of an instruction, never from its result: the results of the `-start` half of an asynchronous pair differ from
backend to backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, NamedTuple

from shardc.passes.audit.hlo_groups import Groups, read_groups, read_pairs
from shardc.passes.audit.hlo_text import Instruction, Module, Operand, parse_module, trip_count


class Tensor(NamedTuple):
    """One operand of a collective; XLA's combiner merges several into one instruction.

    Attributes:
      dtype, shape: of the whole value: the result of an all-gather, the operand of the others.
      bytes: sent per device in one execution, as found on the wire.
      promoted: the wire carries a type twice as wide as the program's (XLA:CPU moves bf16 as f32).
      padding: the part of `bytes` that XLA added to make the shape divisible.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    promoted: bool = False
    padding: int = 0


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective instruction of the optimized HLO.

    Attributes:
      kind: a kind of shardc.ir.collective, or the HLO opcode of one that shardc never emits (`ragged-all-to-all`).
      groups: positions of devices in the mesh, row-major; the (source, target) pairs of a permute.
      tensors: its operands.
      trips: executions in one call, the product of the trip counts of the loops around it; None if one is unknown.
      source: line of user code, as `file.py:12 (function)`; else the name JAX gave the operation; may be empty.
      name: of the instruction.
      looped: it is in a loop.
      added: it belongs to a rewrite of the backend (the permute after XLA:TPU's all-reduce-scatter).
      computation: the one that it is in.
    """

    kind: str
    groups: Groups
    tensors: tuple[Tensor, ...]
    trips: int | None
    source: str
    name: str
    looped: bool = False
    added: bool = False
    computation: str = field(default="", compare=False)

    @property
    def bytes(self) -> int:
        """Sent per device in one execution."""
        return sum(t.bytes for t in self.tensors)

    @property
    def promoted(self) -> bool:
        return any(t.promoted for t in self.tensors)


def parse_collectives(text: str) -> list[HloCollective]:
    """Returns the collectives that one call of the program executes, groups of one device left out.

    Args:
      text: of the optimized module: CPU, GPU or TPU.

    An instruction that is reached from two places is listed once for each.
    """
    return collectives_of(parse_module(text))


def collectives_of(module: Module) -> list[HloCollective]:
    """The collectives of a parsed module."""
    return list(_walk(module, module.entry, 1, looped=False))


def _walk(module: Module, computation: str, trips: int | None, looped: bool) -> Iterator[HloCollective]:
    resumed = _resumes(module, computation)
    for instruction in module.computations[computation].values():
        found = None if resumed else _collective(module, computation, instruction, trips, looped)
        if found is not None:
            yield found
        times = trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
        inner = None if trips is None or times is None else trips * times
        for callee in instruction.callees:
            yield from _walk(module, callee, inner, looped or instruction.opcode == "while")


def _resumes(module: Module, computation: str) -> bool:
    """Whether a computation continues, or waits for, a collective that an earlier fusion of XLA:TPU has started: each
    of these contains the instruction once more."""
    instructions = module.computations[computation].values()
    return computation.startswith("async_collective_fusion") or any(
        '"AsyncCollectiveDone"' in i.attributes for i in instructions
    )


# --- one instruction -----------------------------------------------------------------------------------------------

# HLO opcode: kind, and bytes sent per device on a ring of n for an operand of b bytes.
_KINDS: Final[dict[str, tuple[str, Callable[[int, int], int]]]] = {
    "all-reduce": ("all_reduce", lambda n, b: _ceil(2 * (n - 1) * b, n)),
    "all-gather": ("all_gather", lambda n, b: (n - 1) * b),
    "reduce-scatter": ("reduce_scatter", lambda n, b: _ceil((n - 1) * b, n)),
    "all-to-all": ("all_to_all", lambda n, b: _ceil((n - 1) * b, n)),
    "collective-permute": ("permute", lambda n, b: b),
    "send": ("permute", lambda n, b: b),  # to another device; one to the host has no pairs
    "ragged-all-to-all": ("ragged-all-to-all", lambda n, b: b),  # at most
    "collective-broadcast": ("collective-broadcast", lambda n, b: b),
}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _collective(
    module: Module, computation: str, i: Instruction, trips: int | None, looped: bool
) -> HloCollective | None:
    opcode = i.opcode.removesuffix("-start")
    if opcode == "all-reduce" and "all-reduce-scatter" in computation:  # XLA:TPU's fusion: its result is a slice
        opcode = "reduce-scatter"
    if opcode not in _KINDS:
        return None
    kind, sent = _KINDS[opcode]
    groups = read_pairs(i.attributes) if kind == "permute" else read_groups(i.attributes, module.devices)
    n = max(map(len, groups), default=1)
    if n == 1 or (kind == "permute" and all(a == b for a, b in groups)):
        return None
    operands = _whole_operands(module, computation, i, opcode)
    tensors = tuple(_tensor(module, computation, i, n, operand, sent) for operand in operands)
    added = kind == "permute" and _comes_from_scatter_fusion(module, computation, i)
    return HloCollective(kind, groups, tensors, trips, module.source(i), i.name, looped, added, computation)


def _whole_operands(module: Module, computation: str, i: Instruction, opcode: str) -> list[Operand]:
    """The operands that move; the n slices of an all-to-all in tuple form are one operand."""
    operands = [module.operand(computation, name) for name in i.operands]
    if opcode == "all-to-all" and "dimensions=" not in i.attributes:
        first = operands[0]
        return [first._replace(shape=(len(operands), *first.shape))]
    if opcode in ("ragged-all-to-all", "send") or "slice_sizes=" in i.attributes:  # the others are buffers and the like
        return operands[:1]
    return operands


def _tensor(
    module: Module, computation: str, i: Instruction, n: int, operand: Operand, sent: Callable[[int, int], int]
) -> Tensor:
    moved = sent(n, operand.bytes)
    shape = operand.shape
    if (axis := re.search(r"\bdimensions=\{(\d+)\}", i.attributes)) and i.opcode.startswith("all-gather"):
        shape = (*shape[: int(axis[1])], shape[int(axis[1])] * n, *shape[int(axis[1]) + 1 :])
    unpadded = operand
    producer = module.computations[computation].get(operand.name)
    if producer is not None and producer.opcode == "pad" and "all-reduce-scatter" in computation:
        unpadded = module.operand(computation, producer.operands[0])
        shape = unpadded.shape
    named = re.search(r"to_apply=%?[\w.\-]*promoted", i.attributes) is not None
    promoted = named or _converted_from(module, computation, operand.name) * 2 == operand.itemsize
    return Tensor(operand.dtype, shape, moved, promoted, moved - sent(n, unpadded.bytes))


_MOVES_ONLY: Final = frozenset({"copy", "bitcast", "reshape", "transpose", "slice"})


def _converted_from(module: Module, computation: str, name: str) -> Fraction:
    """Item size of the value that this one was converted from, looking through fusions; 0 if it was not."""
    i = module.computations[computation].get(name)
    if i is None:
        return Fraction(0)
    if i.opcode == "fusion":
        return _converted_from(module, i.callees[0], module.roots[i.callees[0]])
    if i.opcode == "convert":
        return module.operand(computation, i.operands[0]).itemsize
    return _converted_from(module, computation, i.operands[0]) if i.opcode in _MOVES_ONLY else Fraction(0)


def _comes_from_scatter_fusion(module: Module, computation: str, i: Instruction) -> bool:
    producer = module.computations[computation].get(i.operands[0])
    while producer is not None and producer.opcode in _MOVES_ONLY:
        producer = module.computations[computation].get(producer.operands[0])
    return producer is not None and any("all-reduce-scatter" in callee for callee in producer.callees)
