"""The runner from end to end: what a newcomer does."""

import json

import pytest

from examples.loop import train
from examples.train import parse
from shardc.pipeline.schedule.methods import make_schedule
from shardc.pipeline.schedule.schedule import Schedule

RUNS = {
    "mlp": "--model mlp --mesh data=4,model=2 --plan data_tensor --steps 30",
    "pipeline": "--config test --mesh pipe=2,data=2,model=2 --plan pipeline --batch 8 --microbatches 4 --steps 4",
}
MORE = {
    "chosen mesh": "--model mlp --mesh auto --plan data_tensor --steps 10",
    "resnet": "--model resnet --config test --mesh data=8 --plan zero1 --steps 4",
    "gpt2": "--config test --mesh data=4,model=2 --plan zero1 --microbatches 2 --steps 4",
    "fsdp": "--config test --mesh data=8 --plan fsdp --scan --remat --steps 4",
    "llama": "--model llama --config test --mesh data=4,model=2 --plan data_tensor --scan --steps 4",
    "moe": "--model moe --config test --mesh data=8 --plan gshard --steps 4",
    "t5": "--model t5 --config test --mesh data=4,model=2 --plan tensor --microbatches 2 --steps 4",
    "vit": "--model vit --config test --mesh data=4,model=2 --plan data_tensor --steps 4",
    "bert": "--model bert --config test --mesh data=4,model=2 --plan data_tensor --microbatches 2 --steps 4",
    "dlrm": "--model dlrm --mesh data=4,model=2 --plan tables --steps 4",
    "ppo": "--model ppo --mesh data=8 --plan data --steps 4",  # of more, a last digit decides some carts' moves
    "vit in stages": "--model vit --config test --mesh pipe=2,data=2,model=2 --plan pipeline --steps 4",
    "mixer in stages": "--model mixer --config test --mesh pipe=2,data=2,model=2 --plan pipeline --steps 4",
    "bert in stages": "--model bert --config test --mesh pipe=2,data=4 --plan pipeline --steps 4",
    "unet": "--model unet --config test --mesh data=8 --plan zero1 --steps 4",
    "llama in stages": "--model llama --config test --layers 3 --mesh pipe=3,model=2 --plan pipeline --remat --steps 3",
    "moe in stages": "--model moe --config test --mesh pipe=2,data=4 --plan pipeline --schedule gpipe --steps 4",
    "t5 in stages": "--model t5 --config test --mesh pipe=4,data=2 --plan pipeline --schedule zb-h1 --steps 4",
    "unet in stages": "--model unet --config test --mesh pipe=4,data=2 --plan pipeline --microbatches 8 --steps 4",
    "gpt2 in a V": "--config test --layers 4 --mesh pipe=2,data=2 --plan pipeline --schedule zb-v --steps 4",
    "uneven": "--config test --mesh data=2,model=4 --plan vocab --vocab 509 --steps 4",
}


def run(options, capsys, tmp_path):
    log = tmp_path / "loss.jsonl"
    status = train(parse([*options.split(), "--check-against-one-device", "--loss-log", str(log)]))
    text = capsys.readouterr().out
    assert status == 0, text
    assert "Moves, in program order" in text or "Moves within stages" in text
    assert "audit: planned = found" in text or "audit: found within plan" in text
    assert "differ from those of one device" in text
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_audits_and_equals_one_device(name, capsys, tmp_path, request):
    if name == "pipeline":  # those of the pages are compiled as users' are
        request.getfixturevalue("compiled_fast")
    run(RUNS[name], capsys, tmp_path)


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("name", ["mlp", "pipeline"])
def test_the_same_command_again_goes_on(name, capsys, tmp_path):
    log = tmp_path / "loss.jsonl"
    command = [*RUNS[name].split(), "--checkpoints", str(tmp_path / "saved"), "--every", "2", "--loss-log", str(log)]
    assert train(parse([*command, "--steps", "3"])) == 0
    assert train(parse([*command, "--steps", "5", "--check-against-one-device"])) == 0
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2, 2, 3, 4]
    assert "differ from those of one device" in capsys.readouterr().out
    assert train(parse([*command, "--steps", "4", "--check-against-one-device"])) == 0  # they are done
    assert len(log.read_text().splitlines()) == 6


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("name", MORE)
def test_other_plans(name, capsys, tmp_path):
    run(MORE[name], capsys, tmp_path)


def losses_of(options, tmp_path):
    log = tmp_path / "loss.jsonl"
    model = "--model mlp --config test --mesh pipe=2,model=2 --plan pipeline --steps 3"
    assert train(parse([*model.split(), *options, "--loss-log", str(log)])) == 0
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.sampled(0)
def test_a_pipeline_has_the_losses_of_its_plan_on_one_device_and_of_a_schedule_from_a_file(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text(make_schedule("gpipe", 2, 4).to_csv())
    want = losses_of(["--devices", "1"], tmp_path)
    assert losses_of([], tmp_path) == pytest.approx(want, rel=1e-5)
    capsys.readouterr()
    assert losses_of(["--schedule", str(file)], tmp_path) == pytest.approx(want, rel=1e-5)
    grid = str(make_schedule(Schedule.from_csv(file.read_text(), "mine"), 2, 4)).splitlines()[1:]
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert set(grid) <= set(shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mesh data=8", "--plan pipeline wants an axis pipe in --mesh: pipe=2,data=2,model=2"),
        ("--mesh pipe=4", "4 stages want 4 blocks or more, the model has 2. Say --layers, or take a smaller axis pipe"),
        ("--mesh pipe=2 --chunks 2 --schedule zb-v", "4 stages want 4 blocks"),
        ("--mesh pipe=2 --schedule 1f1bb", 'Did you mean "1f1b"?'),
        ("--mesh pipe=2 --layers 4 --schedule dualpipe-v --microbatches 2", "it needs at least 2·ranks = 4"),
        ("--mesh data=2 --plan data --schedule gpipe", "--chunks and --stages are for --plan pipeline, not for data"),
    ],
)
def test_pipelines_that_cannot_be(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        train(parse(["--model", "mlp", "--config", "test", "--plan", "pipeline", *options.split()]))
    assert message in str(error.value)


def test_a_scan_over_layers_has_no_place_for_a_boundary(capsys):
    with pytest.raises(SystemExit, match="--scan leaves no place between blocks"):
        train(parse(["--config", "test", "--plan", "pipeline", "--mesh", "pipe=2", "--scan"]))
