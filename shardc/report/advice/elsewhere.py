"""The plan that is explained, and the same with what is pinned elsewhere, without a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardc import compat
from shardc.ir.walk import is_narrow_copy
from shardc.passes.place.problem import Node
from shardc.pipeline.plan import PlanView
from shardc.plan.counterfactual import Counterfactual
from shardc.plan.plan import SpmdPlan
from shardc.report.advice.pieces import TimePiece
from shardc.sbp.placement import Placement


@dataclass(frozen=True)
class Asked:
    """A plan of any kind, of which is asked what its costs are."""

    plan: PlanView

    @cached_property
    def _problem(self) -> Counterfactual | None:
        """The placement problem, which is made for the first cost that asks. None: of no one program, or one whose
        values live on the host."""
        plan = self.plan
        return Counterfactual(plan) if isinstance(plan, SpmdPlan) and plan.offloaded is None else None

    def elsewhere(self, pieces: Sequence[TimePiece]) -> tuple[dict[str, Placement], SpmdPlan] | None:
        """The plan with the pinned values of boxings placed where the other end of the dearest boxing of each is.

        Returns:
          The new placements, by path or line, and the plan; None: there is none.
        """
        if (asked := self._problem) is None:
            return None
        places, nodes = dict[str, Placement](), dict[Node, Placement]()
        for piece in pieces:  # the dearest first
            assert piece.eqn is not None
            at = piece.eqn.params["dst" if piece.reason == "argument" else "src"]
            for name, node in _nodes(asked, piece):
                if node in asked.pins and node not in nodes:
                    nodes[node] = places[name] = at
            if nodes:
                for node in _narrowed(asked, piece):
                    nodes[node] = at
        other = asked.moved(nodes) if nodes else None
        return None if other is None else (places, other)


def _narrowed(asked: Counterfactual, piece: TimePiece) -> list[Node]:
    """The conversions of an argument to the type in which the machine multiplies."""
    program = asked.plan.program
    path = piece.name.original.word if piece.reason == "argument" else None
    given = [v for p, v in zip(program.in_paths, program.jaxpr.invars, strict=True) if p == path]
    made = (n for n in asked.problem.nodes if n.eqn is not None and is_narrow_copy(n.eqn))
    return [n for n in made if n.equation.invars[0] in given]


def _nodes(asked: Counterfactual, piece: TimePiece) -> list[tuple[str, Node]]:
    """The nodes that hold a value where it is, with its name: of an argument also the result that takes its buffer."""
    plan, problem = asked.plan, asked.problem
    if piece.reason == "argument":
        path = piece.name.original.word
        i = plan.program.in_paths.index(path)
        tied = [problem.sinks[k] for k, tie in enumerate(plan.ties) if tie == i]
        return [(path, problem.sources[i]), *((path, node) for node in tied)]
    assert piece.reader is not None
    if piece.reason == "result":
        path = piece.reader.word
        return [(path or "result", problem.sinks[plan.program.out_paths.index(path)])]
    line = piece.reader.line
    held = [n for n in asked.pins if n.kind == "carrier" and compat.source_line(n.equation) == line]
    return [(f"the constraint at {line}", n) for n in held]
