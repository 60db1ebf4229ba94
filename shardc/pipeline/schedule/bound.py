"""A makespan that no schedule of a placement can beat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardc.pipeline.schedule.costs import StageCosts


def lower_bound(
    rank_of: Sequence[int],
    microbatches: int,
    costs: StageCosts,
    latency: float = 0.0,
    memory: Sequence[int] | None = None,
) -> float:
    """A lower bound of the makespan of every order of these stages' actions, with the backward split or not.

    It is the largest of four bounds. A full backward is an I directly followed by its W, so a bound for all orders of
    F, I and W also holds for orders with full backwards.

    - A rank's work. Its first I cannot start before one microbatch has reached the end of the pipeline and come back,
      at `first`. Before that the rank runs only forwards, of which it can hold at most `c`. The rest of its work comes
      after `first`: one bound. When its last I ends, all its F and I are done, and all but c of its W; the last
      microbatch still has to reach stage 0: another bound.
    - A stage's forwards one after the other, then the last microbatch's path to the end and back.
    - A stage's input gradients one after the other: before them the first microbatch's path to this point, after them
      the last microbatch's path to stage 0.
    - A rank's memory. Each of the m microbatches holds an activation of stage s from F to the end of W, at least as
      long as its path to the end and back. The sum over a rank's stages is at most c times the makespan.

    Args:
      rank_of: the rank of each stage.
      microbatches: m.
      costs: the costs of the actions.
      latency: the latency of a message between two ranks.
      memory: for each rank, how many activations it may hold, in chunks; None: no limit.
    """
    stages = range(len(rank_of))
    f, i, w = zip(*(costs.of(s) for s in stages), strict=True)
    hop = [latency if a != b else 0.0 for a, b in itertools.pairwise(rank_of)]
    into = [sum(f[:s]) + sum(hop[:s]) for s in stages]  # before the first F of s can start
    way = [sum(f[s:]) + sum(i[s:]) + 2 * sum(hop[s:]) for s in stages]  # from the start of F to the end of I
    after = [w[0]]  # from the end of I to the end of all that depends on it
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
