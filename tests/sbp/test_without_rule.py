"""Rules taken away one by one (`without_rule`): a sample, and all cases in parts."""

from __future__ import annotations

import pytest

from tests.sbp.without_rule import ENOUGH, Case, cases, compare

PARTS = 9


def check(numbers: slice, primitives: int, enough: float) -> None:
    """What is found moves the bytes of the rule and gives its values."""
    outcomes = [compare(c) for c in cases()[numbers]]
    found = {o.case.primitive for o in outcomes}
    assert len(found) > primitives
    assert [(o.case, o.wrong) for o in outcomes if o.wrong] == []
    more = {o.case.primitive for o in outcomes if not o.same}
    assert len(found - more) >= enough * len(found), sorted(more)


def test_a_dimension_as_long_as_one_that_the_search_tries() -> None:
    """Of three rows split in two: the target shape among the parameters holds the three."""
    assert compare(Case("expand_dims", "broadcast_in_dim", (0,))).same


@pytest.mark.sampled(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_of_the_cases(part: int) -> None:
    check(slice(part, None, PARTS), 20, ENOUGH - 0.1)


@pytest.mark.sampled(0)
def test_all_cases() -> None:
    check(slice(None), 100, ENOUGH)
