"""The sdist makes a wheel without a warning, and README's start page runs with that wheel from an empty folder."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import shardc

ROOT = Path(__file__).parents[1]
START_PAGE = """
import sys
from pathlib import Path
import shardc
from tests.test_readme import ROOT, test_blocks_run_and_print_what_they_say
assert Path(shardc.__file__).is_relative_to(sys.argv[1]), shardc.__file__
test_blocks_run_and_print_what_they_say(ROOT / "README.md")
"""


def python(*arguments: str, cwd: Path, first: Sequence[Path] = ()) -> str:
    """What Python prints in a folder, where it looks for modules in the folders `first` before all others."""
    path = os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(folder: Path, kind: str, into: Path) -> Path:
    out = python("-W", "error", "-m", "hatchling", "build", "--target", kind, "--directory", str(into), cwd=folder)
    assert "warn" not in out.lower()
    return next(into.iterdir())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not os.environ.get("CI"):
        pytest.importorskip("hatchling", reason="hatchling is of the extra dev: make test installs it")
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the wheel that the sdist makes."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    wheel = build(next(source.iterdir()), "wheel", tmp_path_factory.mktemp("wheel"))
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel), cwd=target)
    return target


def test_the_sdist_has_what_a_user_needs_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/")[1] for name in archive.getnames()}
    assert names - {".gitignore"} == {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "shardc"}


def test_the_wheel_has_every_file_of_the_package(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (p for p in (folder / "shardc").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {p.relative_to(folder).as_posix() for p in found}

    assert files(installed) == files(ROOT)


def test_the_start_page_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    python("-c", START_PAGE, str(installed), cwd=tmp_path, first=[installed, ROOT])


def test_the_command_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "shardc"
    assert python(str(command), "--version", cwd=tmp_path, first=[installed]) == f"shardc {shardc.__version__}\n"


def test_the_pages_have_every_extra_the_version_and_the_versions_of_the_locks() -> None:
    page, tested = ((ROOT / "docs" / name).read_text() for name in ("install.md", "tested.md"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(extras) - {"dev", "docs", "peers"}
    assert set(re.findall(r"shardc-([\d.]+)-py3", page)) == {shardc.__version__}
    rows = re.findall(r"^\| (3\.\d+) \| (.*) \|$", tested, re.MULTILINE)
    assert {f"python{version}.txt" for version, _ in rows} == {p.name for p in (ROOT / "locks").iterdir()}
    for version, row in rows:
        locked = dict(
            re.findall(r"^([\w-]+)==(.*)$", (ROOT / "locks" / f"python{version}.txt").read_text(), re.MULTILINE)
        )
        names = ("jax", "numpy", "flax", "optax", "orbax-checkpoint", "equinox")
        assert row.split(" | ")[:-1] == [locked[name] for name in names]
