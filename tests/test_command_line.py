"""The command line as a whole, and `schedule`: what a person sees, what a program reads, and how it says no."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardc.__main__ import main
from shardc.pipeline.schedule.methods import METHODS, make_schedule
from shardc.pipeline.schedule.schedule import Schedule
from shardc.sbp.signature import rule_names
from shardc.versions import VERSION


def run(capsys, *arguments):
    try:
        code = main(["schedule", *arguments])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def figures(capsys, *arguments):
    code, out, err = run(capsys, "--json", *arguments)
    assert err == ""
    assert out.count("\n") == 1
    return code, json.loads(out)


def test_a_process_of_its_own_starts_no_backend():
    program = (
        "import sys, shardc.__main__ as m\n"
        "code = m.main(['schedule', '--stages', '4', '--microbatches', '8', '--schedule', 'zb-h1', '--json'])\n"
        "from jax._src import xla_bridge\n"
        "sys.exit(code or bool(xla_bridge._backends))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bubble"] == 3


def test_json(capsys):
    assert figures(capsys, "--stages", "4", "--microbatches", "8", "--schedule", "zb-h1") == (
        0,
        {
            "schedule": "zb-h1",
            "stages": 4,
            "microbatches": 8,
            "chunks": 1,
            "makespan": 27,
            "bubble": 3,
            "bubble_per_rank": [3, 2, 1, 0],
            "peak_activations": [4, 4, 4, 4],
            "messages": 48,
            "deadlock": None,
        },
    )


@pytest.mark.parametrize("name", [*METHODS, "auto"])
def test_every_name(capsys, name):
    code, got = figures(capsys, "--stages", "2", "--microbatches", "4", "--schedule", name)
    assert code == 0
    assert got["deadlock"] is None
    assert len(got["peak_activations"]) == len(got["bubble_per_rank"]) == 2


def test_a_name_alone_is_shown_for_four_ranks_and_eight_microbatches(capsys):
    assert run(capsys, "gpipe") == run(capsys, "--stages", "4", "--microbatches", "8", "--schedule", "gpipe")
    assert figures(capsys, "gpipe", "--stages", "2")[1]["peak_activations"] == [8, 8]


def test_all_rules(capsys):
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    listed = set(re.findall(r"[\w-]+", out))
    assert set(rule_names()) <= listed
    assert "  dot_general          m0 k0, k0 n1 -> m0 n1; k0: P(sum) " in out
    assert "\nshardc/sbp/rules/gather.py\n" in out


def test_costs_latency_and_chunks(capsys):
    ask = ["--stages", "4", "--microbatches", "16"]
    assert figures(capsys, *ask, "--latency", "0.5")[1]["bubble"] == 23
    assert figures(capsys, *ask, "--latency", "0.5", "--schedule", "eager-1f1b")[1]["bubble"] == 12
    assert figures(capsys, *ask, "--costs", "2,3,1")[1]["bubble"] == 18
    assert figures(capsys, *ask, "--chunks", "4", "--schedule", "interleaved")[1]["peak_activations"][0] == 19
    assert figures(capsys, "--stages", "2", "--microbatches", "3", "--costs", "1,1,1;2,2,2")[1]["makespan"] == 21


def test_auto_says_how_far_it_can_be_from_the_best(capsys):
    code, got = figures(capsys, "--stages", "4", "--microbatches", "8", "--schedule", "auto", "--memory", "4")
    assert (code, got["makespan"], got["bound"], got["gap"]) == (0, 27, 27, 0)
    assert got["tried"] > 0
    _, out, _ = run(capsys, "--stages", "4", "--microbatches", "8", "--schedule", "auto", "--memory", "3")
    assert "lower bound of makespan: 28, an optimal schedule is at most 10.7% faster (" in out


def test_credits(capsys):
    ask = ["--stages", "3", "--microbatches", "4"]
    assert figures(capsys, *ask, "--credits", "3")[0] == 0
    code, got = figures(capsys, *ask, "--credits", "auto")
    assert (code, got["makespan"]) == (0, 18)
    assert [got["registers"][f"stash {s}"] for s in range(3)] == [3, 2, 1]
    code, got = figures(capsys, *ask, "--credits", "2")
    assert (code, got["makespan"]) == (1, None)
    assert got["deadlock"].startswith("The pipeline deadlocks: actor 0 waits for itself")
    code, got = figures(capsys, *ask, "--credits", "0")
    assert code == 1
    assert got["deadlock"].startswith("The pipeline deadlocks: rank 0 waits for itself. It is at 0F0")


def test_what_a_person_sees(capsys, golden):
    asked = [
        ["--stages", "4", "--microbatches", "8", "--schedule", "zb-h1"],
        ["--stages", "3", "--microbatches", "4", "--costs", "1,1.2,.8", "--credits", "auto"],
        ["--stages", "2", "--microbatches", "4", "--schedule", "zb-v"],
        ["--stages", "3", "--microbatches", "6", "--schedule", "auto", "--memory", "3"],
        ["--stages", "3", "--microbatches", "4", "--credits", "2"],
        ["--stages", "3", "--microbatches", "4", "--credits", "0"],
    ]
    texts = []
    for arguments in asked:
        code, out, err = run(capsys, *arguments)
        assert code == ("--credits" in arguments and arguments[-1] in "02")
        assert err == ""
        texts.append(f"$ python -m shardc schedule {' '.join(arguments)}\n{out}")
    golden("command_line", re.sub(r"\d+ tried", "... tried", "\n".join(texts).rstrip("\n")))


def test_files(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    code, _, _ = run(capsys, "--stages", "4", "--microbatches", "8", "--schedule", "zb-v", "--save", str(file))
    assert code == 0
    assert Schedule.from_csv(file.read_text(), "zb-v") == make_schedule("zb-v", 4, 8)
    code, got = figures(capsys, "--file", str(file))
    assert (code, got["schedule"], got["stages"], got["chunks"], got["bubble"]) == (0, "mine", 4, 2, 3)
    grid = tmp_path / "grid.txt"
    grid.write_text(str(make_schedule("1f1b", 2, 3)))
    assert figures(capsys, "--file", str(grid), "--stages", "2")[1]["schedule"] == "1f1b"


def test_a_picture_and_a_trace(capsys, tmp_path):
    picture, trace = tmp_path / "grid.svg", tmp_path / "grid.json"
    code, out, _ = run(
        capsys, "--stages", "2", "--microbatches", "4", "--svg", str(picture), "--trace", str(trace), "--json"
    )
    assert code == 0
    assert "units of the costs" in picture.read_text()
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 16 and max(e["ts"] + e["dur"] for e in slices) == json.loads(out)["makespan"]
    code, _, err = run(capsys, "--stages", "2", "--microbatches", "4", "--svg", str(tmp_path / "grid.jpg"))
    assert code == 2 and "a picture has to be a .svg or .png file" in err


def test_a_file_that_deadlocks(capsys, tmp_path):
    file = tmp_path / "stuck.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n")
    code, out, err = run(capsys, "--file", str(file))
    assert (code, err) == (1, "")
    assert "The pipeline deadlocks: actors 0 and 1 wait for each other" in out
    code, got = figures(capsys, "--file", str(file))
    assert code == 1
    assert "0B0 and waits for message 0" in got["deadlock"]


def test_a_file_that_is_no_schedule(capsys, tmp_path):
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n")
    code, out, err = run(capsys, "--file", str(file), "--json")
    assert (code, out) == (2, "")
    assert err == (
        'python -m shardc schedule: Schedule "bad" is not valid:\n'
        "  rank 1, column 1: 1B1 comes before 1F1 (column 2), which it needs.\n"
        "    rank 1 | 1F0 [1B1] 1F1 1B0\n"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "--stages and --microbatches are missing; give them, or read a schedule with --file."),
        ("--stages 4", "--microbatches is missing; give it, or read a schedule with --file."),
        ("--stages 0 --microbatches 8", "'--stages': \"0\" is not a whole number of 1 or more"),
        ("--stages 4 --microbatches x", "'--microbatches': \"x\" is not a whole number of 1 or more"),
        ("--stages 4 --microbatches 8 --schedule zbh1", 'Did you mean "zb-h1"?'),
        ("--stages 4 --microbatches 7 --schedule dualpipe-v", "it needs at least 2·ranks = 8 microbatches"),
        ("--stages 4 --microbatches 8 --chunks 2", 'Schedule "1f1b" has 1 stage on each rank, not 2'),
        ("--stages 4 --microbatches 8 --costs 1,2", "'--costs': \"1,2\" has to be three numbers F,B,W"),
        ("--stages 4 --microbatches 8 --costs 1,2,-1", "'--costs': \"-1\" is not a cost of 0 or more"),
        ("--stages 4 --microbatches 8 --costs 1,2,nan", "'--costs': \"nan\" is not a cost of 0 or more"),
        ("--stages 4 --microbatches 8 --costs 1,2,3;1,2,3", "costs has 2 triples for 4 stages"),
        ("--stages 4 --microbatches 8 --latency -1", "'--latency': \"-1\" is not a time of 0 or more"),
        (
            "--stages 4 --microbatches 8 --credits -1",
            '\'--credits\': "-1" is not a whole number of 0 or more, or "auto"',
        ),
        ("--stages 4 --microbatches 8 --memory 3", "--memory is for --schedule auto"),
        ("--stages 4 --microbatches 8 --chunks 2 --schedule auto --memory 1", "one microbatch alone needs 2"),
        ("--file /nowhere/x.csv", "/nowhere/x.csv: No such file or directory."),
        ("--file x.csv --schedule 1f1b", "--schedule and --file exclude each other"),
        ("gpipe --schedule 1f1b", "NAME and --schedule exclude each other"),
        ("zbh1", 'Did you mean "zb-h1"?'),
        ("--stages 4 --microbatches 8 --frobnicate", "No such option"),
    ],
)
def test_one_clear_line_for_options_that_cannot_be(capsys, options, says):
    code, out, err = run(capsys, *options.split())
    assert (code, out) == (2, "")
    assert err.startswith("python -m shardc")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "schedule gpipe --stages 8 --microbatches 64",
        "schedule gpipe --json",
        "passes",
        "rules",
        "--help",
        f"explain {Path(__file__).parent / 'commands' / 'scripts' / 'flow.py'}",
    ],
)
def test_a_reader_that_ends_early(command):
    """As `| head -1`: no traceback, no text."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "shardc", *command.split()], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("called", "name"),
    [("/usr/bin/shardc", "shardc"), (r"shardc.exe", "shardc"), ("/x/shardc/__main__.py", "python -m shardc")],
)
def test_usage_lines_have_the_name_by_which_it_was_called(capsys, monkeypatch, called, name):
    monkeypatch.setattr(sys, "argv", [called])
    for arguments in (["run", "--help"], ["schedule", "--help"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith(f"Usage: {name} {arguments[0]} [")
    assert main(["schedule", "zbh1"]) == 2
    assert capsys.readouterr().err.startswith(f"{name} schedule: ")


def test_without_a_command_it_prints_its_help(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("Usage: ")
    commands = re.findall(r"^  ([a-z]+)  ", out, re.MULTILINE)
    assert commands == [
        "plan", "explain", "why", "show", "diff", "report", "compile", "tune", "schedule", "run", "autopsy",
        "calibrate", "doctor", "passes", "rules",
    ]  # fmt: skip


def test_version(capsys):
    assert (main(["--version"]), capsys.readouterr().out) == (0, f"shardc {VERSION}\n")


def test_version_and_help_do_without_jax():
    program = "import sys, shardc.__main__ as m; m.main(['--version']); m.main([]); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


def test_the_version_is_that_of_the_package():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    pattern = project["tool"]["hatch"]["version"]["pattern"]
    assert re.search(pattern, (root / "shardc" / "versions.py").read_text())["version"] == VERSION
    assert project["project"]["scripts"] == {"shardc": "shardc.__main__:main"}
