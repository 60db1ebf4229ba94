"""Rules taken away one by one (`without_rule`): a sample, and all cases with `--every-case`."""

from __future__ import annotations

import pytest

from tests.sbp.without_rule import ENOUGH, cases, compare

SAMPLE = 9
"""The suite runs one of this many consecutive cases."""


def test_what_is_found_moves_the_bytes_of_the_rule_and_gives_its_values(request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("--every-case")
    outcomes = [compare(c) for c in cases()[:: 1 if every else SAMPLE]]
    assert len({o.case.primitive for o in outcomes}) > (100 if every else 20)
    assert [(o.case, o.wrong) for o in outcomes if o.wrong] == []
    primitives = {o.case.primitive for o in outcomes}
    more = {o.case.primitive for o in outcomes if not o.same}
    enough = ENOUGH if every else ENOUGH - 0.1  # of a sample
    assert len(primitives - more) >= enough * len(primitives), sorted(more)
