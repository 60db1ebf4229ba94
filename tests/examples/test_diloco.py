"""The example of DiLoCo."""

import pytest

from examples import diloco


@pytest.mark.sampled(0)
def test_main(compiled_fast, monkeypatch, capsys):
    monkeypatch.setattr(diloco, "fake_cpu_devices", lambda _: None)
    arguments = "--config test --rounds 12 --inner 5 --slow-learner 0.2 --grace 0.02 --compare"
    assert diloco.main(arguments.split()) == 0
    out = capsys.readouterr().out
    outer = int(out.split(" outer steps")[0].split()[-1])
    loss, synchronous = (float(line.split()[-1]) for line in out.splitlines()[-2:])
    assert outer > 10  # the slow learner's changes come late, and in the end alone
    assert loss < 1.1 * synchronous < 3.9
