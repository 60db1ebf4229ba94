"""A makespan that no schedule of a placement can beat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardc.pipeline.schedule.costs import Costs


def lower_bound(
    rank_of: Sequence[int],
    microbatches: int,
    costs: Costs,
    latency: float = 0.0,
    memory: Sequence[int] | None = None,
) -> float:
    """A time below which no order of these stages' actions ends, backward split or not.

    Four arguments; the bound is the largest number that one of them gives. A full backward is an I with its W right
    behind it, so that what holds for all orders of F, I and W holds for those too.

    - A rank's work. Its first I cannot start before one microbatch has come to the end of the pipeline and back, at
      `first`. Until then it does nothing but forwards, of which it can hold `c` at most, and has time for those after
      its first one can start. The rest of its work comes after `first`: that is one bound. When its last I ends, all
      its F and I are done and all but c of its W; the way from there down to stage 0 is still to go: another.
    - A stage's forwards, one after the other, then the way of the last microbatch to the end and back.
    - A stage's input gradients, one after the other: before them the way of the first microbatch to there, after them
      the way of the last to stage 0.
    - A rank's memory. Each of the m microbatches holds an activation of stage s from F to the end of W, at least as
      long as the way to the end and back. The sum over a rank's stages is at most c times the time that there is.

    Args:
      rank_of: the rank of each stage.
      microbatches: m.
      costs: of the actions.
      latency: of a message between two ranks.
      memory: for each rank, how many chunks' activations it may hold; None: no limit.
    """
    stages = range(len(rank_of))
    f, i, w = zip(*(costs.of(s) for s in stages), strict=True)
    hop = [latency if a != b else 0.0 for a, b in itertools.pairwise(rank_of)]
    into = [sum(f[:s]) + sum(hop[:s]) for s in stages]  # before the first F of s can start
    way = [sum(f[s:]) + sum(i[s:]) + 2 * sum(hop[s:]) for s in stages]  # from the start of F to the end of I
    after = [w[0]]  # from the end of I to the end of all that follows from it
    for s in stages[1:]:
        after.append(max(w[s], hop[s - 1] + i[s - 1] + after[s - 1]))

    m = microbatches
    bounds = [into[s] + m * f[s] + way[s] - f[s] + after[s] for s in stages]
    bounds += [into[s] + way[s] + (m - 1) * i[s] + after[s] for s in stages]
    for rank in set(rank_of):
        mine = [s for s in stages if rank_of[s] == rank]
        c = m * len(mine) if memory is None else memory[rank]
        start = min(into[s] for s in mine)
        first = min(into[s] + way[s] - i[s] for s in mine)
        dearest = sorted((f[s] for s in mine for _ in range(m)), reverse=True)[:c]
        before = min(first - start, sum(dearest))
        work = m * sum(f[s] + i[s] for s in mine)
        owed = max(0, m * len(mine) - c) * min(w[s] for s in mine)
        whole = work + m * sum(w[s] for s in mine)
        bounds.append(first - before + max(whole, work + owed + min(after[s] for s in mine)))
        bounds.append(start + m * sum(way[s] + w[s] for s in mine) / c)
    return max(bounds)
