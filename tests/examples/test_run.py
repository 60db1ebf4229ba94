"""The runner from end to end: what a newcomer does."""

import json

import pytest

from examples.loop import train
from examples.train import parse

RUNS = {
    "mlp": "--model mlp --mesh data=4,model=2 --plan data_tensor --steps 30",
    "resnet": "--model resnet --config test --mesh data=8 --plan zero1 --steps 4",
    "gpt2": "--config test --mesh data=4,model=2 --plan zero1 --microbatches 2 --steps 4",
}
SLOW = {
    "fsdp": "--config test --mesh data=8 --plan fsdp --scan --remat --steps 4",
    "llama": "--model llama --config test --mesh data=4,model=2 --plan data_tensor --scan --steps 4",
    "moe": "--model moe --config test --mesh data=8 --plan gshard --steps 4",
    "t5": "--model t5 --config test --mesh data=4,model=2 --plan tensor --microbatches 2 --steps 4",
    "unet": "--model unet --config test --mesh data=8 --plan zero1 --steps 4",
    "uneven": "--config test --mesh data=2,model=4 --plan vocab --vocab 509 --steps 4",
}


def run(options, capsys, tmp_path):
    log = tmp_path / "loss.jsonl"
    status = train(parse([*options.split(), "--check-against-one-device", "--loss-log", str(log)]))
    text = capsys.readouterr().out
    assert status == 0, text
    assert "Moves, in the order of the program" in text
    assert "audit: planned = found" in text or "audit: found within plan" in text
    assert "differ from those of one device" in text
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_audits_and_equals_one_device(name, capsys, tmp_path):
    run(RUNS[name], capsys, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_plans(name, capsys, tmp_path):
    run(SLOW[name], capsys, tmp_path)
