"""DualPipeV: pairs of a forward and a backward of different microbatches, whose messages overlap with computation."""

from __future__ import annotations

from collections.abc import Iterator

from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """A rank holds 2p+1 chunks. Bubble (p-1)F of a stage if F, B and W are equal and pairs run one after the other.

    Rank r has stage r on the way down the V and 2p-1-r on the way up; far = p-1-r ranks are below it. It starts with
    2·far forwards down and r+1 of both stages. Then it runs `far` times input gradient, weight gradient and forward up,
    until backwards come down too. Then pairs of forward and backward alternate between up and down. At the end its last
    weight gradients are delayed to fill the idle time.
    """
    return Schedule("dualpipe-v", tuple(tuple(_row(r, ranks, microbatches)) for r in range(ranks)))


def _row(rank: int, ranks: int, m: int) -> Iterator[Action]:
    far = ranks - 1 - rank
    down, up = _StageCounts(rank), _StageCounts(2 * ranks - 1 - rank)
    for _ in range(2 * far):
        yield down.next("F")
    for _ in range(rank + 1):
        yield from (down.next("F"), up.next("F"))
    for _ in range(far):
        yield from (up.next("I"), up.next("W"), up.next("F"))
    for _ in range(m - 2 * ranks + rank + 1):
        yield from (down.next("F"), up.next("B"), up.next("F"), down.next("B"))
    for _ in range(far):
        yield from (up.next("B"), up.next("F"), down.next("B"))
    late: list[Action] = []
    for i in range(2 * (rank + 1)):
        stage = down if i % 2 else up
        if i <= rank:
            yield stage.next("B")
        else:
            yield stage.next("I")
            late.append(stage.next("W"))
    for _ in range(far):
        yield late.pop(0)
        yield down.next("I")
        late.append(down.next("W"))
    yield from late


class _StageCounts:
    """Counts the microbatches of one stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._done = {"F": 0, "back": 0}

    def next(self, kind: str) -> Action:
        """The next microbatch's action; W is that of the last I."""
        if kind == "W":
            return Action(self._stage, "W", self._done["back"] - 1)
        count = "F" if kind == "F" else "back"
        self._done[count] += 1
        return Action(self._stage, kind, self._done[count] - 1)


def refuse(ranks: int, microbatches: int, chunks: int) -> str | None:
    if microbatches >= 2 * ranks:
        return None
    return f"it needs at least 2·ranks = {2 * ranks} microbatches, to fill the V from both ends; zb-v needs fewer"


DUALPIPE_V = Method(
    "dualpipe-v",
    orders,
    "DeepSeek-AI 2025, DualPipe (arXiv 2412.19437); cut in half: Qi et al., sail.sea.com/blog/articles/63",
    chunks=2,
    placement="v",
    refuse=refuse,
)
