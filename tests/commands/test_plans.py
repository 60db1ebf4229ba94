"""`shardc plan`, `explain`, `why`, `show`, `diff`, `report`, `tune`: what methods print, folded to the terminal."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import shardc
from shardc.__main__ import main
from shardc.__main__ import shardc as shardc_command
from shardc.launch.job import Script
from tests.commands.test_source import MLP, SCRIPTS

ROOT = Path(__file__).parents[2]
PIPELINE, FLOW, MODULES = (SCRIPTS / f"{name}.py" for name in ("pipeline", "flow", "modules"))


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([*map(str, words)])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


@pytest.fixture
def refused(capsys):
    def call(*words):
        assert main([*map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err.splitlines()[-1]

    return call


def test_plan_prints_the_head_costs_totals_and_memory_of_explain(run):
    plan, report = run("plan", MLP).split("\n\n"), run("explain", MLP).split("\n\n")
    assert [part.strip() for part in plan] == [report[i].strip() for i in (0, 1, 6, 8)]


def test_json(run):
    got = json.loads(run("plan", MLP, "--json"))
    assert (got["function"], got["mesh"], got["topology"]) == ("step", {"data": 4, "model": 2}, "cpu")
    assert got["bytes_per_device"] == sum(c["bytes"] for c in got["collectives"]) > 0
    assert got["seconds"] > 0 and got["peak"] > 0 and 0 <= got["gap"] < 0.01
    pipeline = json.loads(run("plan", PIPELINE, "--json"))
    assert (pipeline["stages"], pipeline["schedule"], pipeline["microbatches"]) == (2, "1f1b", 4)
    assert len(pipeline["transfers"]) == 2
    flow = json.loads(run("plan", FLOW, "--json"))
    assert [n["name"] for n in flow["nodes"]] == ["inputs", "grad", "update"]


def test_explain(run):
    assert "made by" in run("explain", f"{MODULES}:step")
    assert "Pins" in run("explain", MLP, "--pins")
    assert run("explain", MLP, "--after", "canonicalize").startswith("# After canonicalize\n")
    assert "Schedule: stage, task" in run("explain", PIPELINE)


def test_why(run, refused):
    assert "params/up" in run("why", MLP, "params/up").splitlines()[0]
    assert "nothing" in refused("why", MLP, "nothing")
    assert run("why", FLOW, "weights").splitlines()[0] == "grad: one call"


def test_show(run, refused):
    out = run("show", MLP)
    assert (
        out.startswith("Arguments: 3 arrays, 6.0 KiB per device\n")
        and "\nResults: 1 array, 4 bytes per device\n" in out
    )
    assert run("show", MLP, "batch").splitlines()[-1].split() == ["3", "*", "[48:64,", ":]"]
    assert "batsh is no argument or result. Did you mean" in refused("show", MLP, "batsh")
    assert "first" in run("show", PIPELINE)


def test_diff(run, refused, tmp_path):
    assert "the plans" in run("diff", MLP, MLP).lower()
    out = run("diff", MLP, "--mesh", "data=8")
    assert out.startswith("step on data=4 x model=2, and step on data=8\n") and "Arguments that differ: 2 of 3" in out
    assert out == run("diff", MLP, "--mesh", "data=8", "--topology", "cpu")
    one, two = run("diff", MLP, "--topology", "v5e:4x2").splitlines()[0].split(", and ")
    assert one == "step on data=4 x model=2: 8 cpu devices" and two == "step on data=4 x model=2: 8 v5e devices (4x2)"
    assert "give two scripts or saved plans, or one and --mesh or --topology." in refused("diff", MLP)
    assert "give two" in refused("diff", MLP, MLP, "--mesh", "data=8")


def test_a_file_that_cannot_be_written(run, refused, tmp_path):
    nowhere, folder = tmp_path / "nowhere", tmp_path / "folder.json"
    for words in (["plan", MLP, "--save", nowhere / "p.json"], ["report", MLP, "--save", nowhere / "p.html"]):
        assert refused(*words).endswith(f"{words[-1]} cannot be written: there is no folder {nowhere}.")
    folder.mkdir()
    assert refused("plan", MLP, "--save", folder).endswith("folder.json cannot be written: Is a directory.")
    assert refused("plan", "nowhere.py", "--save", "p.txt").endswith(
        "--save p.txt: a saved plan has to be a .json file."
    )
    mesh = shardc.make_mesh(pipe=2)
    first, second = jnp.ones((8, 8)), jnp.ones((8, 8))

    def staged(first, second, x):
        return shardc.accumulate(lambda x: (shardc.stage_boundary(x @ first) @ second).sum(), microbatches=2)(x)

    plain = shardc.function(lambda x: 2 * x, mesh=shardc.make_mesh(data=2)).plan(first)
    pipeline = shardc.function(staged, mesh=mesh, pipeline=shardc.Pipeline()).plan(first, second, first)
    for plan in (plain, pipeline):
        for write, name in ((plan.save, "p.json"), (plan.report, "p.html"), (plan.draw, "p.svg")):
            with pytest.raises(shardc.ArgumentError, match=f"{name} cannot be written: there is no folder .*nowhere"):
                write(nowhere / name)
    with pytest.raises(shardc.ArgumentError, match="cannot be written"):
        pipeline.trace(nowhere / "p.json")


def test_saved_plans(run, refused, tmp_path):
    one, other, pipeline = (tmp_path / f"{name}.json" for name in ("one", "other", "pipeline"))
    run("plan", MLP, "--save", one)
    run("plan", MLP, "--save", other, "--mesh", "data=8")
    run("plan", PIPELINE, "--save", pipeline)
    assert shardc.load_plan(one).mesh == {"data": 4, "model": 2}
    assert run("plan", one).startswith("step on data=4, model=2, as one.json has it\n")
    assert run("plan", pipeline).endswith("borders alone\n")
    assert json.loads(run("plan", other, "--json"))["mesh"] == {"data": 8}
    assert run("show", one).startswith("Arguments: 3 arrays\n")
    assert (
        run("diff", one, MLP)
        == run("diff", one, one)
        == "The plans are the same: they have equal placements and equal moves.\n"
    )
    out = run("diff", one, other)
    assert out.startswith("step of one.json, and step of other.json\n") and "operations read or make a value" in out
    assert "Arguments that differ: " in run("diff", pipeline, MLP)
    for words in (["explain", one], ["why", one, "x"], ["report", one], ["tune", one]):
        assert "one.json is a saved plan: it says where values live, and this needs the program too" in refused(*words)
    assert "what a device holds of batch needs the script" in refused("show", one, "batch")
    assert "a saved plan is for one: name it" in refused("plan", FLOW, "--save", one)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1}', 'it has no "shardc plan"'),
        ("[1]", 'it has no "shardc plan"'),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_a_file_that_is_no_saved_plan(refused, tmp_path, text, why):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert refused("plan", path).endswith(
        f"bad.json is no plan that shardc saved, or was changed so that it is none: {why}."
    )


@pytest.mark.parametrize("source", [MLP, PIPELINE, MODULES, FLOW])
def test_report(run, tmp_path, source):
    page = tmp_path / "plan.html"
    assert run("report", source, "--save", page) == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("source", [MLP, PIPELINE, MODULES, f"{FLOW}:Learner.update"])
def test_tune(run, source):
    out = run("tune", source, "--tries", "3")
    assert "3 candidates planned" in out and "\nThe best: shardc.function(..., mesh=" in out


def test_tune_for_another_machine(run, refused, monkeypatch):
    assert run("tune", MLP, "--tries", "2", "--topology", "v5p:4x4x4").startswith("step on 64 v5p devices (4x4x4)\n")
    assert "--topology v5p has no number of devices: add a shape" in refused("tune", MLP, "--topology", "v5p")
    monkeypatch.setattr(Script, "environment", lambda self: {})
    fitting = run("tune", MLP, "--tries", "2", "--topology", "v5p", "--devices", "8")
    assert fitting.startswith("step on 8 v5p devices (2x2x2)\n")
    sliced = run("tune", MLP, "--tries", "2", "--topology", "v5p:4x4x4", "--devices", "8")
    assert sliced.startswith("step on 64 v5p devices (4x4x4)\n")
    assert "is a flow" in refused("tune", FLOW)


@pytest.mark.sampled(by=lambda words, width: {str(words), width})
@pytest.mark.parametrize("width", [50, 80])
@pytest.mark.parametrize(
    "words",
    [
        ["explain", MLP, "--pins"], ["explain", PIPELINE], ["explain", FLOW], ["why", MLP, "params/up"], ["show", MLP],
        ["diff", MLP, "--mesh", "data=8"], ["tune", MLP, "--tries", "2"], ["schedule", "gpipe", "--stages", "32"],
        ["schedule", "gpipe", "--credits", "auto"], ["passes"], ["rules"], ["explain", MLP, "--after", "canonicalize"],
    ],
    ids=str,
)  # fmt: skip
def test_everything_is_folded(run, monkeypatch, words, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = run(*words)
    assert max(map(len, out.splitlines())) <= width


def test_in_a_pipe_a_schedule_is_120_wide_and_a_report_as_wide_as_it_is(run):
    assert max(map(len, run("schedule", "gpipe", "--stages", "64").splitlines())) <= 120
    assert max(map(len, run("explain", MLP).splitlines())) > 120


def test_the_page_shows_what_is_printed(run, monkeypatch, tmp_path):
    """The blocks of docs/command-line.md, of which one may end in dots; the tests have the devices that it asks for."""
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    blocks = re.findall(r"```console\n\$ shardc ([^\n]*)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    for words, printed in blocks:
        out = run(*words.replace(" --devices 8", "").split())
        beginning, dots, _ = printed.partition("...\n")
        assert out.startswith(beginning) if dots else out == printed, words


def test_every_command_is_on_the_page():
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    assert [name for name in shardc_command.list_commands(None) if f"`{name}`" not in page] == []


def test_what_may_not_move_does_not_move_elsewhere_either(run, refused, tmp_path):
    script = tmp_path / "strict.py"
    script.write_text(
        "import jax.numpy as jnp, shardc\n"
        "mesh = shardc.make_mesh(data=8)\n"
        "@shardc.function(mesh=mesh, in_placements={'x': {'data': shardc.S(0)}}, forbid={'data'})\n"
        "def f(x):\n    return 2 * x\n"
        "f(jnp.ones(64))\n"
    )
    assert "Nothing moves between devices" in run("plan", script, "--mesh", "data=4")
    assert "The best: " in run("tune", script, "--tries", "2")
