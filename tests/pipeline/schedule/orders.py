"""Orders of the literature, written out by hand, each in a few lines: oracles that share nothing with the package."""

from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.schedule import Schedule


def _schedule(name, rows):
    return Schedule(name, tuple(tuple(Action(*a) for a in row) for row in rows))


def gpipe(p, m):
    return _schedule("gpipe", [[(i, k, j) for k in "FB" for j in range(m)] for i in range(p)])


def _warm(p, m, forwards):
    """Rank i: `forwards(i)` forwards, then one backward, one forward, and so on."""
    rows = []
    for i in range(p):
        ahead = min(m, forwards(i))
        row = [(i, "F", j) for j in range(ahead)]
        for j in range(m):
            row.append((i, "B", j))
            if ahead + j < m:
                row.append((i, "F", ahead + j))
        rows.append(row)
    return rows


def one_f_one_b(p, m):
    return _schedule("1f1b", _warm(p, m, lambda i: p - i))


def eager(p, m):
    return _schedule("eager-1f1b", _warm(p, m, lambda i: 2 * (p - i) - 1))


def interleaved(p, m, v):
    """Megatron's: groups of p microbatches, chunk after chunk; m is a multiple of p."""
    rows = []
    for r in range(p):
        forward = [(r + p * (k // p % v), "F", k // (p * v) * p + k % p) for k in range(m * v)]
        backward = [(r + p * (v - 1 - k // p % v), "B", k // (p * v) * p + k % p) for k in range(m * v)]
        ahead = min(m * v, 2 * (p - 1 - r) + (v - 1) * p)
        row = forward[:ahead]
        for k in range(m * v):
            row += forward[ahead + k : ahead + k + 1]
            row.append(backward[k])
        rows.append(row)
    return _schedule("interleaved", rows)


def breadth_first(p, m, v):
    rows = []
    for r in range(p):
        chunks = [r + p * c for c in range(v)]
        row = [(s, "F", j) for s in chunks for j in range(m)]
        rows.append(row + [(s, "B", j) for s in reversed(chunks) for j in range(m)])
    return _schedule("breadth-first", rows)


def zb_h1(p, m):
    """1F1B with the weight gradients of rank i held back by i, and after the last forward one after each I."""
    rows = []
    for i in range(p):
        row, weights = [], 0
        for kind, j in [(a[1], a[2]) for a in _warm(p, m, lambda i: p - i)[i]]:
            row.append((i, "I" if kind == "B" else "F", j))
            if kind == "B" and j + 1 - weights > i:
                row.append((i, "W", weights))
                weights += 1
        rows.append(row + [(i, "W", j) for j in range(weights, m)])
    return _schedule("zb-h1", rows)
