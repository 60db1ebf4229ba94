"""README.md, CONTRIBUTING.md and the pages of docs/ and benchmarks/ keep their word.

Python blocks run, and links lead somewhere. The blocks of one page run in order and share their names. A `text` block
right after a Python block is what that one prints; `...` in it stands for anything. Where a `console` block begins with
`$ python -m shardc`, what follows in it is what that command prints. The API page is made of docstrings, whose examples
run too.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import pkgutil
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import shardc
import shardc.errors
from shardc.__main__ import main

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.md"))
DEAR = ("libraries", "parameter-servers", "evaluation", "fine-tuning", "mixed-precision")
"""Pages that take 15 s or more, and show what other tests look at."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *BENCHMARKS]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<printed>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```console\n\$ python -m shardc (?P<options>.*)\n(?P<printed>(?:(?!```).*\n)+)", re.MULTILINE)

API = (ROOT / "docs" / "api").glob("*.md")
DOCUMENTED = sorted(name for page in API for name in re.findall(r"^::: (.*)$", page.read_text(), re.MULTILINE))


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what a page writes."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.sampled(0)] * (p.stem in DEAR), id=page_id(p))
        for p in PAGES
        if BLOCK.search(p.read_text())
    ],
)
def test_blocks_run_and_print_what_they_say(page: Path) -> None:
    text, names = page.read_text(), {"__name__": "page"}
    for block in BLOCK.finditer(text):
        line = text[: block.start("code")].count("\n")
        code = compile("\n" * line + block["code"], str(page), "exec")  # errors name the line of the page
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, names)
        if block["printed"]:
            fits = doctest.OutputChecker().check_output(block["printed"], out.getvalue(), doctest.ELLIPSIS)
            assert fits, f"{page.name}:{line + 1} prints\n{out.getvalue()}\nthe page says\n{block['printed']}"


@pytest.mark.parametrize("page", [p for p in PAGES if COMMAND.search(p.read_text())], ids=page_id)
def test_commands_print_what_they_say(page: Path) -> None:
    for block in COMMAND.finditer(page.read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            main(block["options"].split())
        assert out.getvalue() == block["printed"], f"$ python -m shardc {block['options']}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_in_docstrings_of_the_api_pages_run(name: str) -> None:
    thing = pkgutil.resolve_name(name)
    public = {name: getattr(shardc, name) for name in shardc.__all__}
    names = {**vars(inspect.getmodule(thing) or shardc), **public, "jax": jax, "np": np}
    runner, out = doctest.DocTestRunner(), io.StringIO()
    for example in doctest.DocTestFinder(recurse=False).find(thing, name, globs=names):
        runner.run(example, out=out.write)
    assert not runner.failures, out.getvalue()


def test_the_api_pages_have_every_public_name() -> None:
    described = {"AUTO", "B"}  # in a sentence, as they are no functions or classes
    errors = {name for name in shardc.__all__ if getattr(shardc.errors, name, None) is not None}
    names = {name.removeprefix("shardc.") for name in DOCUMENTED}
    assert set(shardc.__all__) - names - described - errors == set()
