"""Counts the tuned constants of shardc by room: names in capitals at the top of a module whose value is computed from
numbers alone. `python -m scripts.constants --list` names them."""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator

from scripts.rooms import modules, room_of


def constants() -> Iterator[tuple[str, str, str]]:
    """Module, name and source of each."""
    for module, path in sorted(modules().items()):
        for node in ast.parse(path.read_text("utf-8")).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if (
                isinstance(target, ast.Name)
                and value is not None
                and target.id.strip("_").isupper()
                and _is_number(value)
            ):
                yield module, target.id, ast.unparse(value)


def _is_number(value: ast.AST) -> bool:
    """Whether an expression is a number other than 0 and 1, or arithmetic on numbers."""
    parts = list(ast.walk(value))
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    numbers = [p.value for p in parts if isinstance(p, ast.Constant)]
    plain = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
    return plain and all(isinstance(p, allowed) for p in parts) and numbers not in ([0], [1], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name each constant")
    args = parser.parse_args()
    found = list(constants())
    if args.list:
        for module, name, source in found:
            print(f"{module}.{name} = {source}")
    for room, n in Counter(room_of(module) for module, _, _ in found).most_common():
        print(f"{n:4} {room}")
    print(f"{len(found):4} in all")


if __name__ == "__main__":
    main()
