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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeAlias

from shardc.passes.audit.hlo import HloCollective, collectives_of
from shardc.passes.audit.hlo_seconds import NO_WORK
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
        pairs = Pairs(module)
        for op in collectives_of(module):
            key: tuple[str, Beside] = (op.kind, pairs.beside(op))
            times = op.trips or 1
            counts[key] += times * len(op.tensors)
            sent[key] += times * op.bytes
    order = sorted(counts, key=lambda key: (key[0], BESIDE.index(key[1])))
    return [Scheduled(*key, counts[key], sent[key]) for key in order]


class Pairs:
    """Finds where the collectives of a module start and are done, and what runs in between."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._callers: dict[str, tuple[str, str]] = {}
        for computation, instructions in module.computations.items():
            for i in instructions.values():
                for callee in i.callees:
                    self._callers.setdefault(callee, (computation, i.name))
        self._has_product = cache(self._holds_product)

    def beside(self, op: HloCollective) -> Beside:
        computation, name = self.place_of(op)
        if not self.is_start(computation, name):
            return "nothing"
        begin, end = self.span(computation, name)
        between = list(self._module.computations[computation].values())[begin:end]
        found: list[Beside] = ["nothing", *map(self._work, between)]
        return min(found, key=BESIDE.index)

    def place_of(self, op: HloCollective) -> tuple[str, str]:
        """The computation and the instruction that start a collective, or run it as a whole: that of a call or a fusion
        that holds it."""
        computation, name = op.computation, op.name
        if self.is_start(computation, name) or computation not in self._callers:
            return computation, name
        outer, caller = self._callers[computation]
        held = self.is_start(outer, caller) or self._module.computations[outer][caller].opcode == "fusion"
        return (outer, caller) if held else (computation, name)

    def is_start(self, computation: str, name: str) -> bool:
        i = self._module.computations[computation][name]
        return i.opcode.endswith("-start") or self._targets(i, "AsyncCollectiveStart")

    def is_done(self, i: Instruction) -> bool:
        return i.opcode.endswith("-done") or self._targets(i, "AsyncCollectiveDone")

    def _targets(self, i: Instruction, target: str) -> bool:
        """Whether a fusion contains a custom call of XLA:TPU."""
        if i.opcode != "fusion":
            return False
        inside = (x for callee in i.callees for x in self._module.computations[callee].values())
        return any(f'"{target}"' in x.attributes for x in inside)

    def span(self, computation: str, start: str) -> tuple[int, int]:
        """The positions in a computation of the first instruction that runs beside a collective, and of its done."""
        instructions = list(self._module.computations[computation].values())
        begin = 1 + next(k for k, i in enumerate(instructions) if i.name == start)
        pending = {start}
        for k, i in enumerate(instructions[begin:], begin):
            if pending & set(i.operands):
                if self.is_done(i):
                    return begin, k
                if i.opcode in _PASSED_ON or _continues(i):
                    pending.add(i.name)
                if i.opcode == "call-update":
                    begin = k + 1
        return begin, len(instructions)

    def _work(self, i: Instruction) -> Beside:
        if i.opcode in NO_WORK or i.opcode.endswith(("-start", "-done", "-update")):
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
_PRODUCT: Final = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|cudnn)', re.IGNORECASE)
