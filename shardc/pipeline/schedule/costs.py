"""The costs of the actions of each stage: forward, input gradient, weight gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardc.errors import PipelineError, all_offenders
from shardc.pipeline.schedule.action import Action

Triple: TypeAlias = tuple[float, float, float]
"""F, B, W as in papers: forward, input gradient, weight gradient. A full backward costs B + W."""


@dataclass(frozen=True)
class StageCosts:
    """Seconds (or any unit) of the actions of each stage. Called with an action, it gives that action's cost.

    Args:
      stages: one triple (F, B, W) for all stages, or one for each stage.

    Examples:
      >>> costs = StageCosts.read((1, 2, 0.5))
      >>> costs(Action(3, "F", 0)), costs(Action(3, "I", 0)), costs(Action(3, "B", 0))
      (1.0, 2.0, 2.5)
    """

    stages: tuple[Triple, ...] = ((1.0, 1.0, 1.0),)

    def of(self, stage: int) -> Triple:
        return self.stages[stage if len(self.stages) > 1 else 0]

    def __call__(self, action: Action) -> float:
        forward, inputs, weights = self.of(action.stage)
        return {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}[action.kind]

    @staticmethod
    def read(given: CostsLike, stages: int | None = None) -> StageCosts:
        """The costs of actions from one triple (F, B, W) for all stages, or from one triple for each stage.

        Raises:
          PipelineError: a cost is negative, infinite or not a number, a triple has not three numbers, or (if `stages`
            is given) the triples are for another number of stages.
        """
        if isinstance(given, StageCosts):
            costs = given
        else:
            one = all(isinstance(x, (int, float)) for x in given)
            costs = StageCosts((_triple(given),) if one else tuple(_triple(row) for row in given))
        if not costs.stages or (stages is not None and len(costs.stages) not in (1, stages)):
            raise PipelineError(
                f"costs has {len(costs.stages)} triples for {stages or 'some'} stages; "
                "give one (F, B, W) for all of them, or one for each."
            )
        wrong = [
            f"stage {s}: {name} costs {cost}"
            for s, row in enumerate(costs.stages)
            for name, cost in zip("FBW", row, strict=True)
            if not 0 <= cost < float("inf")
        ]
        if wrong:
            raise PipelineError(all_offenders("A cost has to be a number of 0 or more:", wrong))
        return costs


CostsLike: TypeAlias = StageCosts | Sequence[float] | Sequence[Sequence[float]]


def _triple(row: object) -> Triple:
    if not isinstance(row, Sequence) or len(row) != 3:
        raise PipelineError(f"costs: {row} has to be three numbers F, B, W (forward, input gradient, weight gradient).")
    forward, inputs, weights = row
    return float(forward), float(inputs), float(weights)
