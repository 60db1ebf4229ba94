"""`shardc doctor`: what it finds here, and what it says where something is wrong."""

import json
import tomllib
from pathlib import Path

import jax
import jaxlib
import pytest

from shardc.__main__ import main
from shardc.doctor import (
    Devices,
    Library,
    check_calibration,
    check_devices,
    check_environment,
    check_versions,
    find_devices,
    find_libraries,
)
from shardc.machine.topology import TOPOLOGIES
from shardc.versions import PYTHONS, VERSION

ROOT = Path(__file__).parents[1]
CPU = Devices("cpu", "cpu", 8)
FLAGS = "--xla_force_host_platform_device_count=8"


def test_a_sound_installation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NPROC", "16")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"shardc {VERSION} in {ROOT / 'shardc'}" in lines
    assert f"jaxlib {jaxlib.__version__}" in lines
    assert "found 8 cpu devices, platform cpu" in lines
    assert "NPROC 16" in lines
    assert lines[-1] == "No problems."


def test_it_is_as_wide_as_the_terminal_and_a_problem_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("NPROC", "4")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 50
    assert "8 fake CPU devices need 16 threads of XLA, and it has 4:" in " ".join(out.split())
    assert out.endswith("\n1 problem.\n")


@pytest.mark.parametrize(
    ("environment", "says", "mend"),
    [
        ({"JAX_PLATFORMS": "cuda"}, "", "JAX_PLATFORMS=cuda allows no other platform. Unset it"),
        ({"XLA_FLAGS": "--xla_no_such_flag=1"}, "--xla_no_such_flag=1", "Take this flag out of XLA_FLAGS"),
    ],
)
def test_a_backend_that_does_not_start(monkeypatch, environment, says, mend):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (finding,) = check_devices(find_devices(60))
    assert finding.what.startswith("JAX's backend does not start: ") and says in finding.what
    assert finding.mend.startswith(mend) and not finding.is_note


def test_a_backend_that_hangs():
    (finding,) = check_devices(find_devices(0.01))
    assert finding.what == "JAX's backend does not start: it did not start within 0.01 seconds."
    assert "--wait gives more time" in finding.mend


def test_a_gpu_that_jax_cannot_use():
    said = (
        "WARNING: An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed. Falling "
        "back to cpu."
    )
    (finding,) = check_devices(Devices("cpu", "cpu", 1, said))
    assert "pip install 'shardc[cuda]'" in finding.mend and not finding.is_note
    (finding,) = check_devices(Devices("cpu", "cpu", 1, "Something else.\nThe end."))
    assert finding.what == "JAX says: The end." and finding.is_note
    said = "Jax plugin configuration error\nTraceback ...\nRuntimeError: Unable to load cuSPARSE. Is it installed?"
    (finding,) = check_devices(Devices("cpu", "cpu", 1, said))
    assert finding.what.endswith("cuSPARSE. Is it installed?") and not finding.is_note


def test_devices_without_figures():
    (finding,) = check_devices(Devices("gpu", "NVIDIA T4", 2))
    assert "no figures for NVIDIA T4 devices" in finding.what and finding.is_note


@pytest.mark.parametrize(
    ("devices", "environment", "wrong"),
    [
        (CPU, {"NPROC": "16", "XLA_FLAGS": FLAGS}, None),
        (CPU, {"NPROC": "4", "PJRT_NPROC": "16"}, None),
        (CPU, {"NPROC": "16", "PJRT_NPROC": "15"}, "Set PJRT_NPROC=16 before Python starts."),
        (CPU, {"NPROC": "15"}, "Set NPROC=16 before Python starts."),
        (Devices("cpu", "cpu", 1), {"NPROC": "1"}, None),
        (Devices("gpu", "h100", 8), {"NPROC": "1"}, None),
        (Devices("gpu", "h100", 8), {"XLA_FLAGS": FLAGS}, "JAX_PLATFORMS=cpu takes the CPU."),
        (Devices("cpu", "cpu", 3), {"XLA_FLAGS": FLAGS, "NPROC": "6"}, "JAX_PLATFORMS=cpu takes the CPU."),
    ],
)
def test_environment(devices, environment, wrong):
    found = list(check_environment(devices, environment))
    assert [f.mend.startswith(wrong) for f in found] == [True] * (wrong is not None)


def test_versions(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.99.1")
    monkeypatch.setattr(jaxlib, "__version__", "0.10.2")
    monkeypatch.setattr("platform.python_version", lambda: "3.19.0")
    libraries = [
        Library("numpy", "1.26.4", "2.0"),
        Library("ray", "", "2.40", ("ray",)),
        Library("scipy", "1.18", "1.13"),
    ]
    found = list(check_versions(libraries, CPU))
    assert [(f.what, f.mend) for f in found if not f.is_note] == [
        ("numpy 1.26.4 is older than 2.0.", "pip install 'numpy>=2.0'"),
    ]
    notes = [f.what for f in found if f.is_note]
    assert len(notes) == 3
    assert "Python 3.19.0" in notes[0] and "0.99.1 is newer" in notes[1] and "39103" in notes[2]
    assert not [f for f in check_versions([], Devices("gpu", "h100", 1)) if "39103" in f.what]


def test_libraries_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {one.name: one for one in find_libraries()}
    assert {d.split(">=")[0] for d in project["dependencies"]} - {"jax", "jaxlib"} <= set(found)
    assert not found["numpy"].extras and found["numpy"].version
    for extra, name in (("fast", "numba"), ("checkpoints", "orbax-checkpoint")):
        assert extra in found[name].extras
    assert not {"pytest", "torch", "mkdocs-material"} & set(found)


def test_tested_pythons_are_those_of_the_locks():
    assert {f"python{v}.txt" for v in PYTHONS} == {p.name for p in (ROOT / "locks").iterdir()}


def test_calibration(tmp_path):
    file = tmp_path / "here.json"
    (finding,) = check_calibration(str(file), CPU)
    assert "cannot be read" in finding.what and "--mesh data=8" in finding.mend
    file.write_text(TOPOLOGIES["cpu"].to_json())
    assert list(check_calibration(str(file), CPU)) == []
    (finding,) = check_calibration(str(file), Devices("gpu", "NVIDIA H100", 8))
    assert "has figures of cpu devices" in finding.what
    file.write_text(json.dumps({"kind": 3}))
    assert len(list(check_calibration(str(file), CPU))) == 1
