"""The benchmark of edges runs over each kind of socket. No time is looked at."""

import pytest

from benchmarks.edges import PLANES, main


@pytest.mark.parametrize("plane", PLANES)
def test_a_plane(capsys, plane):
    main(["--rounds", "1", "--sizes", "4", "131072", "--kinds", "numpy", "--planes", plane])
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{plane}: ms") and head.split()[:6] == ["kind", "size", "what", "plain", "link", "edge"]
    assert [row.split()[0] for row in rows] == ["numpy"] * 4
