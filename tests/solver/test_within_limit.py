"""The cheapest candidate that fits, of those that were added."""

from shardc.solver.within_limit import CheapestThatFits


def search(*candidates):
    found = CheapestThatFits[tuple[int, float]](10, size=lambda c: c[0], cost=lambda c: c[1])
    for candidate in candidates:
        assert found.add(candidate) is candidate
    return found


def test_the_cheapest_that_fits():
    found = search((12, 1.0), (10, 3.0), (2, 4.0), (9, 3.0))
    assert found.best == found.nearest == (10, 3.0), "the first of equal ones"
    assert found.smallest == (2, 4.0)


def test_nothing_fits():
    found = search((12, 1.0), (11, 3.0))
    assert found.best is None and found.nearest == found.smallest == (11, 3.0)
    assert found.may_win(1e9)


def test_what_may_win():
    found = search((12, 1.0), (8, 2.0))
    assert found.may_win(1.99) and not found.may_win(2.0)
    assert found.may_win(1.97, 0.01) and not found.may_win(1.99, 0.01)
