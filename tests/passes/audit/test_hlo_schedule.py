"""What runs beside collectives, read from texts of GPU and TPU that lie in hlo/, and from texts as small as can be."""

from pathlib import Path

import pytest

from shardc.passes.audit.hlo_schedule import Scheduled, read_schedule


def fixture(name: str) -> list[Scheduled]:
    return read_schedule([(Path(__file__).parent / "hlo" / f"{name}.txt").read_text()])


def beside(*between: str, done: str = "%d = f32[64]{0} all-gather-done(%s)") -> list[tuple[str, str]]:
    """What an all-gather of 8 devices runs beside, with these instructions between its start and its done."""
    lines = (
        "HloModule m, is_scheduled=true, num_partitions=8",
        "",
        "%inner (p: f32[8]) -> f32[8] {",
        "  %p = f32[8,8]{1,0} parameter(0)",
        "  ROOT %dot = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "}",
        "",
        "%plain (q: f32[8]) -> f32[8] {",
        "  %q = f32[8]{0} parameter(0)",
        "  ROOT %add = f32[8]{0} add(%q, %q)",
        "}",
        "",
        "ENTRY %main (x: f32[8]) -> f32[64] {",
        "  %x = f32[8]{0} parameter(0)",
        "  %s = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}",
        *(f"  {line}" for line in between),
        f"  {done}",
        "  ROOT %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner",
        "}",
    )
    return [(row.kind, row.beside) for row in read_schedule(["\n".join(lines)])]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ([], "nothing"),
        (["%t = (f32[8]{0}) tuple(%x)", "%c = f32[] constant(0)", "%y = f32[8]{0} copy(%x)"], "nothing"),
        (["%g = f32[8]{0} fusion(%x), kind=kLoop, calls=%plain"], "other work"),
        (
            ["%g = f32[8]{0} fusion(%x), kind=kLoop, calls=%plain", "%h = f32[8]{0} fusion(%x), calls=%inner"],
            "a product",
        ),
        (["%g = f32[8]{0} call(%x), to_apply=%inner"], "a product"),
        (['%g = f32[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"'], "a product"),
        (['%g = f32[8]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"'], "a product"),
        (['%g = f32[8]{0} custom-call(%x), custom_call_target="TopK"'], "other work"),
    ],
)
def test_what_lies_between_start_and_done(between: list[str], expected: str) -> None:
    assert beside(*between) == [("all_gather", expected)]


def test_a_collective_without_a_done_of_its_own_hides_nothing() -> None:
    """XLA:GPU writes one that nothing may hide without a pair; on CPU there are no pairs."""
    assert fixture("gpu_all_to_all") == [Scheduled("all_to_all", "nothing", 1, 3584)]
    assert {row.beside for row in fixture("tpu_cond")} == {"nothing"}


def test_collectives_in_loops_count_for_each_iteration() -> None:
    assert fixture("gpu_scan") == [
        Scheduled("all_gather", "nothing", 4, 229376),
        Scheduled("all_reduce", "other work", 4, 28672),
        Scheduled("permute", "a product", 4, 16384),
    ]


def test_a_gather_that_fusions_of_tpus_continue_runs_beside_their_products() -> None:
    assert fixture("tpu_async_gather") == [
        Scheduled("all_gather", "a product", 3, 88080384),
        Scheduled("all_gather", "nothing", 3, 88080384),
    ]


def test_collectives_of_sparsecores_begin_when_their_operands_are_there() -> None:
    assert fixture("tpu_sparsecore") == [
        Scheduled("all_gather", "nothing", 1, 57344),
        Scheduled("reduce_scatter", "nothing", 1, 57344),
    ]
    start = "%c = ((), ()) call-start(), to_apply=%inner"
    update = "%u = ((f32[8]{0}), f32[64]{0}) call-update(%s, %x)"
    fusion = "%g = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner"
    done = "%d = f32[64]{0} call-done(%u)"
    assert beside(start, fusion, update, done=done) == [("all_gather", "nothing")]
    assert beside(start, update, fusion, done=done) == [("all_gather", "a product")]


def test_a_collective_inside_of_an_async_computation_is_as_its_call() -> None:
    assert {(row.kind, row.beside) for row in fixture("gpu_by_hand") if row.kind == "reduce_scatter"} == {
        ("reduce_scatter", "nothing")
    }


def test_programs_are_added_up() -> None:
    texts = [(Path(__file__).parent / "hlo" / "gpu_scan.txt").read_text()] * 2
    assert [row.count for row in read_schedule(texts)] == [8, 8, 8]
