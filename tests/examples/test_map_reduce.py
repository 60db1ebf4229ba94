"""k-means is that of NumPy, its reduce is one boxing; words are counted exactly though a reader is lost."""

import re
from collections import Counter

import numpy as np

import shardc
from examples import data, map_reduce


def test_k_means():
    points = data.digits(test=5)[0]["image"].reshape(-1, 64)  # 1792, which 4 devices share alike
    cluster, step = map_reduce.k_means(shardc.make_mesh(data=4))
    moved = step.plan(points[:10], points).collectives
    assert {(c.kind, str(c.src), str(c.dst)) for c in moved} == {("all_reduce", "{data: P(sum)}", "{}")}
    state, squares = map_reduce.converged(cluster, {"centres": points[:10], "points": points}, 100)
    cluster.close()

    centres, plain = points[:10].astype(float), []
    for _ in squares:
        distances = ((points[:, None] - centres) ** 2).sum(-1)
        plain.append(distances.min(1).mean())
        nearest = distances.argmin(1)
        centres = np.stack([points[nearest == k].mean(0) for k in range(10)])
    np.testing.assert_allclose(squares, plain, rtol=1e-4)
    np.testing.assert_allclose(state["centres"], centres, rtol=1e-3, atol=1e-4)
    assert 10 < len(squares) < 100 and squares[-1] < 0.6 * squares[0]  # it has converged


def test_words_are_counted_exactly_though_a_reader_is_lost(tmp_path):
    kill, limit = tmp_path / "kill", 900_001
    kill.touch()
    counted, rounds = map_reduce.word_counts(shardc.make_mesh(data=2), 2, limit, "process", str(kill))
    zero = np.zeros(len(map_reduce.WORDS), np.int32)
    try:
        total, given = counted.run(zero, range(rounds), record=True)
        plan = counted.plan(zero, 0)
    finally:
        counted.close()
    assert not kill.exists() and len(given) == rounds == 5
    assert [n.work.restarts for n in plan.nodes if n.name.startswith("count") and n.work.name == "count"] == [0, 1]
    whole = Counter(re.findall(r"\w+", data.text_bytes(limit).tobytes().decode("ascii", "replace"), re.ASCII))
    assert dict(zip(map_reduce.WORDS, map(int, total), strict=True)) == {w: whole[w] for w in map_reduce.WORDS}
    used = given.chart.tracks[1].timeline.peaks
    assert all(n <= c.registers for n, c in zip(used, plan.network.channels, strict=True))
