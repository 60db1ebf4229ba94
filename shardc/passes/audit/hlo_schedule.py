"""What runs beside the collectives of a compiled program, read from the order of its instructions.

The text of a scheduled module has instructions in the order in which they start. A collective that other work may
hide is a pair: what stands between its start and its done runs beside it.

    %s = all-gather-start(%a)
    %f = fusion(%x, %y), kind=kOutput, calls=%a_product    --> beside a product
    %d = all-gather-done(%s)

The start and the done may also be calls of a computation that holds the collective: `async-start` on GPU; on TPU
fusions, of which further ones may continue the collective inside a product, or `call-start` on a SparseCore, which
waits for the operands of its `call-update`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeAlias

from shardc.passes.audit.hlo import HloCollective, collectives_of
from shardc.passes.audit.hlo_text import Instruction, Module, parse_module

Beside: TypeAlias = Literal["a product", "other work", "nothing"]
BESIDE: Final[tuple[Beside, ...]] = ("a product", "other work", "nothing")


@dataclass(frozen=True)
class Scheduled:
    """The collectives of one kind that run beside the same: how often in one call, and bytes sent per device."""

    kind: str
    beside: Beside
    count: int
    bytes: int


def read_schedule(texts: Iterable[str]) -> list[Scheduled]:
    """The collectives of scheduled modules, by kind and by what runs beside them.

    Args:
      texts: of the optimized modules, `compiled.as_text()`. A loop whose trip count is not known counts once.
    """
    counts: Counter[tuple[str, Beside]] = Counter()
    sent: Counter[tuple[str, Beside]] = Counter()
    for text in texts:
        module = parse_module(text)
        beside = _Reader(module)
        for op in collectives_of(module):
            key: tuple[str, Beside] = (op.kind, beside.of(op))
            times = op.trips or 1
            counts[key] += times * len(op.tensors)
            sent[key] += times * op.bytes
    order = sorted(counts, key=lambda key: (key[0], BESIDE.index(key[1])))
    return [Scheduled(*key, counts[key], sent[key]) for key in order]


class _Reader:
    """Finds what runs beside a collective of a module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._callers: dict[str, tuple[str, str]] = {}
        for computation, instructions in module.computations.items():
            for i in instructions.values():
                for callee in i.callees:
                    self._callers.setdefault(callee, (computation, i.name))
        self._has_product = cache(self._holds_product)

    def of(self, op: HloCollective) -> Beside:
        computation, name = op.computation, op.name
        if not self._is_start(computation, name) and computation in self._callers:
            computation, name = self._callers[computation]  # the pair may be calls of what holds the collective
        if not self._is_start(computation, name):
            return "nothing"
        found: list[Beside] = ["nothing", *map(self._work, self._between(computation, name))]
        return min(found, key=BESIDE.index)

    def _is_start(self, computation: str, name: str) -> bool:
        i = self._module.computations[computation][name]
        return i.opcode.endswith("-start") or self._targets(i, "AsyncCollectiveStart")

    def _targets(self, i: Instruction, target: str) -> bool:
        """Whether a fusion contains a custom call of XLA:TPU."""
        if i.opcode != "fusion":
            return False
        inside = (x for callee in i.callees for x in self._module.computations[callee].values())
        return any(f'"{target}"' in x.attributes for x in inside)

    def _between(self, computation: str, start: str) -> Sequence[Instruction]:
        """The instructions from a start to its done, without both."""
        instructions = list(self._module.computations[computation].values())
        at = next(k for k, i in enumerate(instructions) if i.name == start)
        pending, found = {start}, list[Instruction]()
        for i in instructions[at + 1 :]:
            if pending & set(i.operands):
                if i.opcode.endswith("-done") or self._targets(i, "AsyncCollectiveDone"):
                    return found
                if i.opcode in _PASSED_ON or _continues(i):
                    pending.add(i.name)
                if i.opcode == "call-update":
                    found.clear()
            found.append(i)
        return found

    def _work(self, i: Instruction) -> Beside:
        if i.opcode in _NO_WORK or i.opcode.endswith(("-start", "-done", "-update")):
            return "nothing"
        return "a product" if self._is_product(i) else "other work"

    def _is_product(self, i: Instruction) -> bool:
        if i.opcode in ("dot", "convolution") or (i.opcode == "custom-call" and _PRODUCT.search(i.attributes)):
            return True
        return any(self._has_product(callee) for callee in i.callees)

    def _holds_product(self, computation: str) -> bool:
        return any(map(self._is_product, self._module.computations[computation].values()))


def _continues(i: Instruction) -> bool:
    """Whether a fusion of XLA:TPU continues a collective that an earlier one has started."""
    return i.opcode == "fusion" and any(c.startswith("async_collective_fusion") for c in i.callees)


_PASSED_ON: Final = frozenset({"get-tuple-element", "tuple", "bitcast", "async-update", "call-update", "opt-barrier"})
_NO_WORK: Final = frozenset(
    {
        "parameter", "constant", "iota", "get-tuple-element", "tuple", "bitcast", "opt-barrier", "after-all", "copy",
        "partition-id", "replica-id", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    }
)  # fmt: skip
_PRODUCT: Final = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|cudnn)', re.IGNORECASE)
