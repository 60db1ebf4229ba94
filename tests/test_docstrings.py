"""Docstrings begin with what a thing is or does, and a public name of a class stands once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import shardc
from scripts.rooms import modules, nodes_of

HEADLESS = re.compile(
    r"(What|Who|Whatever|Those|All that|As many|As much|If|That which|So many|The same|In which|By which|"
    r"Of (which|what|the|a|each|one|its|all))\b"
)
"""First words of a line that has no subject: `What of a program is in memory`."""
MOST = 0.05
"""Part of the first lines that may begin so."""


def documented() -> Iterator[tuple[str, str]]:
    """Where a docstring stands, and its first line."""
    for name, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{name}:{getattr(node, 'name', '')}", text.partition("\n")[0]


def test_first_lines_have_a_subject():
    lines = list(documented())
    headless = [f"{where}: {line}" for where, line in lines if HEADLESS.match(line)]
    assert len(headless) <= MOST * len(lines), "\n".join(headless)


def test_a_public_class_name_stands_once():
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        module = nodes_of(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_examples_of_public_names_import_what_is_public():
    inner = re.compile(r">>> (from shardc\.|import shardc\.)(?!flax|equinox)")
    public = {name: inspect.getdoc(getattr(shardc, name)) or "" for name in shardc.__all__}
    assert [name for name, text in public.items() if inner.search(text)] == []
