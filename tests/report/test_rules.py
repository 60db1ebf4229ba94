"""The table of rules: each primitive has a formula."""

import pytest
from jax import lax

from shardc.report.rules import EXAMPLES, rules_text
from shardc.sbp.signature import family_of


@pytest.fixture(scope="module")
def text():
    return rules_text()


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in ("in_order", "polynomial", "user_operation")])
def test_each_example_gives_a_formula(text, name):
    file = text.partition(f"rules/{family_of(name)}.py\n")[2].partition("\nshardc/")[0]
    rows = [line for line in file.splitlines() if name in line.replace(",", " ").split()]
    assert " -> " in rows[0] and len(rows) == 1 + (
        name == "not" and not hasattr(lax, "polynomial")
    )  # "not in this JAX"


def test_no_rule_is_without_a_formula(text):
    assert text.count("not in this JAX") == (not hasattr(lax, "polynomial"))


def test_an_example_tells_what_a_split_leaves(text):
    assert " d0 d1 -> d0; d1: P(max) " in text
    assert " d0 d1, d0 d1 -> d0 d1; d1: communicates " in text
