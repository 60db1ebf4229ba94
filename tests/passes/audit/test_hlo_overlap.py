"""What schedules hide of planned overlaps, read from texts as small as can be, and from those in hlo/."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import shardc
from shardc.machine.mesh import view
from shardc.passes.audit.audit import Audit
from shardc.passes.audit.hlo_overlap import FoundOverlap, find_overlaps
from shardc.passes.estimate.overlap import Overlap

MESH = view(shardc.make_mesh(topology="h100:8", data=8))
GATHER = Overlap("all_gather", ("data",), "f32[8000000]", "a.py:1", "dot_general a.py:2", 28 * 10**6, 1e-4, 1e-4, 0.5)
RING = replace(GATHER, kind="ring", bytes=4 * 10**6, seconds=1e-4, could=1e-4)
HEAD = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[1000000], y: f32[100000000]) -> f32[] {
  %x = f32[1000000]{0} parameter(0)
  %y = f32[100000000]{0} parameter(1)
"""
START = (
    "  %s = (f32[1000000]{0}, f32[8000000]{0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, "
    'dimensions={0}, metadata={op_name="g" source_file="a.py" source_line=1}'
)
DONE = "  %d = f32[8000000]{0} all-gather-done(%s)"
LONG = "  %long = f32[100000000]{0} add(%y, %y)"
SHORT = "  %short = f32[1000000]{0} add(%x, %x)"
PERMUTE = "  %p = f32[1000000]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"


def found(*lines: str, planned: Overlap = GATHER) -> FoundOverlap:
    (one,) = find_overlaps([planned], ["\n".join([HEAD.rstrip(), *lines, "  ROOT %r = f32[] constant(0)", "}"])], MESH)
    return one


@pytest.mark.parametrize(
    ("lines", "hidden"),
    [((START, LONG, DONE), 1), ((START, DONE, LONG), 0), ((LONG, START, DONE), 0)],
)
def test_what_runs_between_start_and_done_hides(lines: tuple[str, ...], hidden: float) -> None:
    one = found(*lines)
    assert one.hidden == pytest.approx(hidden * GATHER.hidden) and one.exposed == pytest.approx((1 - hidden) * 5e-5)
    assert [name for name, _ in one.names] == ["s"] * (not hidden)


def test_work_hides_as_long_as_it_takes() -> None:
    one = found(START, SHORT, DONE)
    assert one.hidden == pytest.approx(12e6 / MESH.topology.memory_rate)
    ((name, waits),) = one.names
    assert name == "s" and waits > one.exposed > 0


def test_what_is_no_pair_is_waited_for() -> None:
    assert found(PERMUTE, LONG, planned=RING).exposed == RING.hidden


def test_collectives_of_other_lines_count_for_what_is_left() -> None:
    elsewhere = replace(GATHER, source="b.py:7")
    text = "\n".join([HEAD.rstrip(), START, LONG, DONE, "  ROOT %r = f32[] constant(0)", "}"])
    one, other = find_overlaps([elsewhere, GATHER], [text], MESH)
    assert other.hidden == pytest.approx(5e-5) and 0 < one.hidden <= 5e-5


def test_a_saved_program_of_a_gpu_hides_what_its_loop_does() -> None:
    text = (Path(__file__).parent / "hlo" / "gpu_scan.txt").read_text()
    permute = replace(RING, bytes=16384, seconds=4e-9, could=4e-9)
    one, other = find_overlaps([permute, replace(GATHER, could=1e-9)], [text], MESH)
    assert one.exposed == pytest.approx(0) and other.hidden == 0


def test_a_ring_of_a_gpu_is_hidden_but_for_what_begins_it() -> None:
    """Two products for h100:4, compiled with the options that programs with rings have."""
    text = (Path(__file__).parent / "hlo" / "gpu_ring.txt").read_text()
    ring = Overlap("ring", ("model",), "bf16[4096,16384]", "mlp.py:4 (f)", "", 100663296, 3.87e-4, 3.63e-4, 0.9)
    rings = find_overlaps([ring, ring], [text], view(shardc.make_mesh(topology="h100:4", model=4)))
    assert sum(r.hidden for r in rings) == pytest.approx(0.83 * 2 * ring.hidden, rel=0.05)
    assert sum(r.exposed for r in rings) == pytest.approx(2 * ring.hidden - sum(r.hidden for r in rings))
    assert rings[1].names[0][0].startswith("ppermute")  # nothing is computed before the first piece is there


def test_an_audit_says_what_is_exposed_and_which_options_are_in_force() -> None:
    one = found(START, DONE, LONG)
    text = str(Audit((), (), (), (), (), overlaps=(one,), options={"xla_a": "4"}, refused={"xla_b": "1"}))
    assert "hidden beside computation: 0.05 ms planned, 0 ms of it in the compiled schedule" in text
    assert "planned hidden, compiled exposed: 0.05 ms of all_gather of f32[8000000] at a.py:1 (%s " in text
    assert "compiled with xla_a=4" in text and "this XLA refuses xla_b=1" in text
