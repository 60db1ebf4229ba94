"""Minimum of a sum of cost tables over discrete variables, within a limit on memory. Knows no placements."""

from shardc.solver.cost_tables import FORBIDDEN, Memo
from shardc.solver.eliminate import elimination_order
from shardc.solver.memory import Memory
from shardc.solver.move import choices_of, move
from shardc.solver.solve import Assignment, Solution, alike, by_cost, minimize, relative_gap, solve

__all__ = [
    "FORBIDDEN", "Assignment", "Memo", "Memory", "Solution", "alike", "by_cost", "choices_of", "elimination_order",
    "minimize", "move", "relative_gap", "solve",
]  # fmt: skip
