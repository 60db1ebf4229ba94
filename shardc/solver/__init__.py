"""Minimizes a sum of cost tables over discrete variables, with a proved lower bound. Knows nothing of placements."""

from shardc.solver.assignment_cost import ROUNDING, Assignment, AssignmentCost, relative_gap
from shardc.solver.cost_tables import FORBIDDEN, Memo
from shardc.solver.search import SETTLED, SolverOptions
from shardc.solver.solve import alike, by_cost, choices_of, minimize, move

__all__ = [
    "FORBIDDEN", "ROUNDING", "SETTLED", "Assignment", "AssignmentCost", "Memo", "SolverOptions", "alike", "by_cost",
    "choices_of", "minimize", "move", "relative_gap",
]  # fmt: skip
