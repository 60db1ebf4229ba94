"""Imports of the pure rooms: schedules know actors and no devices, the runtime no schedules, neither JAX."""

import ast
from pathlib import Path

import pytest

import shardc

ROOT = Path(shardc.__file__).parent
MAY = {
    "runtime": ("shardc.errors", "shardc.runtime"),
    "pipeline/schedule": (
        "shardc.errors",
        "shardc.pipeline.schedule",
        "shardc.runtime.actor",
        "shardc.runtime.deadlock",
    ),
}

FORBIDDEN = {"runtime": ("jax", "jaxlib", "numba", "numpy"), "pipeline/schedule": ("jax", "jaxlib", "numba")}


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("room", MAY)
def test_arrows(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert len(files) > 4
    for file in files:
        names = set(imported(file))
        assert not {n for n in names if n.split(".")[0] in FORBIDDEN[room]}, file
        assert not {n for n in names if n.startswith("shardc") and not n.startswith(MAY[room])}, file
