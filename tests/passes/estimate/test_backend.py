"""The table of kinds of operations: what works element by element is in it."""

from shardc.passes.estimate import backend
from shardc.sbp import rules, signature

LOOPS = {
    "bessel_i0e", "bessel_i1e", "clz", "igamma", "igamma_grad_a", "igammac", "mulhi", "polygamma", "population_count",
    "regularized_incomplete_beta", "threefry2x32", "zeta",
}  # fmt: skip
"""XLA makes loops or calls of these, and joins them with nothing."""


def test_what_works_element_by_element_is_joined_to_loops():
    """A primitive that is missing counts as memory that XLA never takes, and other values are kept for it."""
    elementwise = {n for n, rule in signature._RULES.items() if rule.__module__ == rules.elementwise.__name__}
    assert elementwise - backend._KINDS.keys() == LOOPS
