"""Seconds of single instructions, by what they multiply, read and write."""

from __future__ import annotations

import pytest

from shardc.machine.topology import Fabric, Topology
from shardc.passes.audit.hlo_seconds import InstructionSeconds
from shardc.passes.audit.hlo_text import parse_module

MACHINE = Topology("odd", 1.0, 1e3, 10**9, 0.0, (Fabric("switch", 1.0, 0.0),))
"""One operation a second, and 1000 bytes."""
FUSED = """%sliced (p: f32[8,4], k: s32[]) -> f32[1,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,4]{1,0} dynamic-slice(%p, %k, %zero), dynamic_slice_sizes={1,4}
}

%updated (p: f32[8,4], new: f32[1,4], k: s32[]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %new = f32[1,4]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[8,4]{1,0} dynamic-update-slice(%p, %new, %k, %zero)
}

%multiplied (p: f32[8,4]) -> f32[8,8] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""


def seconds(line: str) -> float:
    """The seconds of an instruction that reads x: f32[8,4], y: f32[1,4], k."""
    text = f"""HloModule m, is_scheduled=true, num_partitions=8

{FUSED}
ENTRY %main (x: f32[8,4], y: f32[1,4], k: s32[]) -> f32[] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %y = f32[1,4]{{1,0}} parameter(1)
  %k = s32[] parameter(2)
  %found = {line}
  ROOT %r = f32[] constant(0)
}}
"""
    module = parse_module(text)
    return InstructionSeconds(module, MACHINE)("main", module.computations["main"]["found"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[8,4]{1,0} add(%x, %x)", 0.384),
        ("f32[8,4]{1,0} bitcast(%x)", 0),
        ("f32[1,4]{1,0} fusion(%x, %k), kind=kLoop, calls=%sliced", 0.036),
        ("f32[8,4]{1,0} fusion(%x, %y, %k), kind=kLoop, calls=%updated", 0.036),
        ("f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%multiplied", 2 * 8 * 8 * 4),
        ("f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}", 2 * 8 * 8 * 4),
        ("f32[8,4]{1,0:T(8,128)S(1)} copy-start(%x)", 0),
        ("f32[8,8]{1,0} convolution(%x, %x), dim_labels=bf_oi->bf", 2 * 8 * 8 * 4),
    ],
)  # fmt: skip
def test_the_longer_of_arithmetic_and_memory(line: str, expected: float) -> None:
    assert seconds(line) == pytest.approx(expected)


def test_padding_is_not_multiplied() -> None:
    whole = "f32[4,8,1]{2,1,0} convolution(%a, %b), window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=0bf_0io->0bf"
    text = f"""HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (a: f32[1,8,16], b: f32[4,16,1]) -> f32[4,8,1] {{
  %a = f32[1,8,16]{{2,1,0}} parameter(0)
  %b = f32[4,16,1]{{2,1,0}} parameter(1)
  ROOT %found = {whole}
}}
"""
    module = parse_module(text)
    found = InstructionSeconds(module, MACHINE)("main", module.computations["main"]["found"])
    assert found == 2 * 8 * 16 * 4  # four heads of one row each: not 4 x 4 of them
