"""The example of a parameter server."""

import pytest

from examples import ps


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        ("--model logistic --mode bsp", 0.85),
        pytest.param("--model mlp --mode ssp --stale 1", 0.88, marks=pytest.mark.sampled(0)),
        pytest.param("--model logistic --mode asp --slow-worker 0.01", 0.85, marks=pytest.mark.sampled(0)),
    ],
)
def test_main(arguments, least, compiled_fast, monkeypatch, capsys):
    monkeypatch.setattr(ps, "fake_cpu_devices", lambda _: None)
    assert ps.main([*arguments.split(), "--rounds", "40"]) == 0
    out = capsys.readouterr().out
    assert "Flow rounds" in out
    assert "123 changes" in out
    told = float(out.splitlines()[-1].partition("%")[0]) / 100
    assert told > least


def test_a_slow_worker_alone_is_slow_without_a_bound():
    held, train, seen = ps.make("logistic", 3, None, slow=0.1)
    train.run(seen, range(1))
    _, given = train.run(seen, range(15), record=True)
    train.close()
    slow, *fast = ps.seconds_of(given.spans, "update", 3)
    assert slow > 0.1
    assert max(fast) < slow
    assert held.changes == 48
