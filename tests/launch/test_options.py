"""Options of `python -m shardc run`, and the errors for those that do not fit."""

import sys
from pathlib import Path

import pytest

from shardc.__main__ import main
from shardc.launch import run as launch
from shardc.launch.job import Script
from shardc.launch.options import RunOptions


def refused(capsys, *words):
    try:
        code = main(["run", *map(str, words)])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("python -m shardc run: ").rstrip("\n")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--processes", 0],
            "Invalid value for '--processes': \"0\" is not a whole number of 1 or more, or two, the least",
        ),
        (["--processes", "5:4"], "Invalid value for '--processes': \"5:4\": the least, 5, is more than the most, 4"),
        (["--processes", "2:x"], "Invalid value for '--processes': \"x\" is not a whole number of 1 or more, or two"),
        (["--restarts", -1], "Invalid value for '--restarts': "),
        (["--restarts", "3/1y"], "Invalid value for '--restarts': \"3/1y\" is not a whole number of 0 or more, or one"),
        (["--restarts", "3/h"], "Invalid value for '--restarts': \"\" is not a whole number of 0 or more, or one with"),
        (["--metrics", "a"], "Invalid value for '--metrics': \"a\" is not an address with a port, such as a:4711"),
        (["--silence", 0], "Invalid value for '--silence': \"0\" is not a time of more than 0 seconds"),
        (
            ["--processes", 3, "--islands", 2],
            "3 processes cannot form 2 islands of one size: 3 / 2 is not a whole number.",
        ),
        (
            ["--processes", 1, "--islands", 2],
            "1 process cannot form 2 islands of one size: 1 / 2 is not a whole number.",
        ),
        (["--secret", "nowhere"], "--secret: there is no file nowhere; make one with: openssl rand -hex 32 > nowhere"),
        (["--processes", 2, "--host-0-deadline", 9], "--host-0-deadline: other hosts can wait for a new host 0 where"),
        (["--ray"], "--ray needs the number of processes: --processes N."),
        ([], "no cluster has started this process: JAX finds neither Slurm, nor Open MPI, nor Kubernetes. Give"),
    ],
)
def test_options_that_do_not_fit(capsys, script, words, error):
    assert refused(capsys, *words, script).startswith(error)


def test_a_script_that_does_not_exist(capsys):
    assert refused(capsys, "--processes", 2, "nowhere.py") == "there is no script nowhere.py."
    assert refused(capsys, "nowhere") == "there is no script nowhere. Or is it a module: -m nowhere?"


def test_without_a_script(capsys):
    error = refused(capsys, "--processes", 2)
    assert error == "Missing argument 'SCRIPT' (see python -m shardc run --help)"


@pytest.mark.parametrize("words", [["--processes", "2"], ["--steps", "3", "--processes=2"]])
def test_options_after_the_script(capsys, script, words):
    late = words[0] if len(words) == 2 else words[-1]
    assert refused(capsys, script, *words) == (
        f"{late} stands after the script, so that the script gets it; options of run stand before it: "
        f"python -m shardc run --processes N {script}."
    )


def test_a_log_directory_that_cannot_be_made(capsys, script):
    assert refused(capsys, "--processes", 2, "--log", script, script) == f"{script}: File exists."


def test_ray_that_is_not_installed(capsys, script, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    error = refused(capsys, "--ray", "--processes", 2, script)
    assert error == "--ray: Ray is not installed; pip install 'shardc[ray]'."


def test_put_wants_a_runtime_of_several_processes(capsys, script):
    error = refused(capsys, "--processes", 2, "--islands", 2, "--carrier", "put", script)
    assert error.startswith("--carrier put: with 2 islands each process has a JAX runtime of its own")


def test_options_arrive(script, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run_on_this_machine", lambda *args: seen.append(args) or 5)
    words = [
        "--processes",
        "4",
        "--islands",
        "2",
        "--devices",
        "3",
        "--restarts",
        "1",
        "--silence",
        "2.5",
        "--plain-data",
        "--carrier",
        "links",
    ]
    assert main(["run", *words, str(script), "--processes", "9", "-m"]) == 5
    made = Script(str(script), ("--processes", "9", "-m"), False, 3)
    assert seen == [(RunOptions(made, 4, None, 2, 1, silence=2.5, plain_data=True, carrier="links"), 4)]
    config = seen[0][0].job(4, "", b"").config
    assert config.plain_data and config.carrier == "links"
    assert main(["run", "--processes", "4", str(script), "--", "--steps", "9", "--"]) == 5
    assert seen.pop()[0].script.arguments == ("--steps", "9", "--")
    assert main(["run", "--processes", "1", "--log", str(script.parent / "a" / "b"), "-m", "package.module"]) == 5
    assert seen[1][0].script == Script("package.module", (), True, None)
    words = ["--restarts", "3/1.5h", "--spares", "1", "--metrics", "9100", "--status", "x.json"]
    assert main(["run", "--processes", "2", *words, str(script)]) == 5
    options, _ = seen.pop()
    assert (options.restarts, options.window, options.spares) == (3, 5400.0, 1)
    assert (options.metrics, options.status, options.places(0)) == (":9100", Path("x.json"), 3)
    assert options.job(2, "", b"").config.window == 5400.0
    assert (script.parent / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert seen[1][0].log_of(7) == Path(script.parent / "a" / "b" / "process-7.log")
