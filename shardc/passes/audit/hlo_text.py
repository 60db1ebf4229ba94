"""The text of an HLO module as computations and instructions: as much as its collectives need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, NamedTuple, TypeAlias


class Operand(NamedTuple):
    """An array that an instruction reads."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> Fraction:
        return itemsize(self.dtype)

    @property
    def bytes(self) -> int:
        return math.ceil(self.itemsize * math.prod(self.shape))


def itemsize(dtype: str) -> Fraction:
    """Returns the bytes of one element: `bf16` 2, `f8e4m3fn` 1, `s4` 1/2, `pred` 1."""
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return Fraction(int(bits[1]), 8) if bits else Fraction(1)


@dataclass(frozen=True, slots=True)
class Instruction:
    """`%name = shape opcode(arguments), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    @property
    def callees(self) -> list[str]:
        """Computations that it runs, without those that reduce scalars; of an asynchronous pair the start runs them."""
        if self.opcode.endswith(("-done", "-update")):
            return []
        pattern = _APPLIED if self.opcode in ("call", "call-start") else _CALLEES
        return [name for names in pattern.findall(self.attributes) for name in re.findall(r"[\w.\-]+", names)]

    def callee(self, attribute: str) -> str:
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


# Computations named by an attribute, one (`body=%b`) or several (`branch_computations={%a, %b}`).
_CALLEES: Final = re.compile(
    r"\b(?:calls|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_APPLIED: Final = re.compile(r"\b(?:to_apply|calls)=(%?[\w.\-]+)")


@dataclass(frozen=True, slots=True)
class Module:
    """Computations by name, each a dict of its instructions by name, in the order of the text."""

    entry: str
    devices: int
    computations: dict[str, dict[str, Instruction]]
    roots: dict[str, str]
    frames: dict[str, str] = field(default_factory=dict[str, str])

    def operand(self, computation: str, name: str) -> Operand:
        array = re.match(r"(\w+)\[([^\]]*)\]", self.computations[computation][name].shape)
        dtype, dims = array.groups() if array else ("", "")
        return Operand(name, dtype, tuple(map(int, re.findall(r"\d+", dims))))

    def source(self, i: Instruction) -> str:
        """Returns the line of user code that an instruction comes from, else the name of its operation."""
        if frame := re.search(r"\bstack_frame_id=(\d+)", i.attributes):
            return self.frames.get(frame[1], "")
        if m := re.search(r'\bsource_file="([^"]*)" source_line=(\d+)', i.attributes):
            return f"{_base(m[1])}:{m[2]}"
        named = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', i.attributes)
        return named[1] if named else ""


# `ENTRY %main.0_spmd (p: f32[8]) -> f32[8] {`
_HEADER: Final = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
# `  ROOT %x.1 = (f32[8]{0:T(128)}, u32[]) opcode(%a, %b), attributes`; arrays and tokens hold no space outside a tuple
_INSTRUCTION: Final = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*?)\)(?:, (.*))?$")


def parse_module(text: str) -> Module:
    """Parses the text of one HLO module.

    Raises:
      ValueError: no ENTRY computation: this is not the text of an HLO module.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    roots: dict[str, str] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if m := _INSTRUCTION.match(line):
            root, name, shape, opcode, arguments, attributes = m.groups(default="")
            computations[current][name] = Instruction(name, shape, opcode, arguments, attributes)
            if root:
                roots[current] = name
        elif m := _HEADER.match(line):
            current = m[2]
            computations[current] = {}
            entry = current if m[1] else entry
    if not entry:
        raise ValueError("the text has no ENTRY computation: pass the optimized HLO, compiled.as_text()")
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header[0]) if header else []
    return Module(entry, math.prod(map(int, counts)), computations, roots, _read_frames(text))


def _read_frames(text: str) -> dict[str, str]:
    """Resolves the tables before the first computation: stack frame -> `file.py:12 (function)`."""
    preamble = text.split("\n\n%", 1)[0].split("\nENTRY", 1)[0]

    def table(title: str, pattern: str) -> list[tuple[str, ...]]:
        lines = re.search(rf"^{title}\n((?:\d+ .*\n?)*)", preamble, re.MULTILINE)
        return re.findall(pattern, lines[1], re.MULTILINE) if lines else []

    files = {k: _base(v) for k, v in table("FileNames", r'^(\d+) "(.*)"$')}
    functions = {k: v.rsplit(".<locals>.", 1)[-1] for k, v in table("FunctionNames", r'^(\d+) "(.*)"$')}
    location = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
    places = {k: f"{files[f]}:{line} ({functions[g]})" for k, f, g, line in table("FileLocations", location)}
    return {k: places[v] for k, v in table("StackFrames", r"^(\d+) \{file_location_id=(\d+)")}


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


# --- trip counts ---------------------------------------------------------------------------------------------------

# A scalar inside a loop: the loop-carried element of this index (None: no element) plus a constant.
_Scalar: TypeAlias = tuple[int | None, int]


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Returns the number of iterations of a while instruction: as noted by XLA, else for loops that count up to a
    constant.

    XLA:TPU does not note it. There the condition is `compare(element i, constant), direction=LT`, the body adds a
    constant to element i, and element i starts as a constant.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(noted[1])
    init = module.computations[computation][loop.operands[0]]
    starts = init.operands if init.opcode == "tuple" else [init.name]
    carried: dict[int, _Scalar | None] = {k: (k, 0) for k in range(len(starts))}
    body, condition = loop.callee("body"), loop.callee("condition")

    def start(k: int | None) -> int | None:
        value = None if k is None else _scalar(module, computation, starts[k], {})
        return value[1] if value and value[0] is None else None

    def step(k: int) -> int | None:
        root = module.computations[body][module.roots[body]]
        after = _scalar(module, body, root.operands[k] if root.opcode == "tuple" else root.name, carried)
        return after[1] if after and after[0] == k else None

    comparison, sides = _comparison(module, condition, module.roots[condition], carried)
    if comparison is None or len(sides) != 2:
        return None
    counter, bound = sides
    if counter is None or bound is None or counter[0] is None:
        return None
    first, by = start(counter[0]), step(counter[0])
    last = bound[1] if bound[0] is None else start(bound[0]) if step(bound[0]) == 0 else None
    if first is None or not by or by < 0 or last is None or comparison.callee("direction") not in ("LT", "LE"):
        return None
    last += comparison.callee("direction") == "LE"
    return max(0, math.ceil((last - first - counter[1]) / by))


def _comparison(
    module: Module, computation: str, name: str, values: Mapping[int, _Scalar | None]
) -> tuple[Instruction | None, list[_Scalar | None]]:
    """The compare instruction that a condition ends in, inside a fusion or not, and its two sides."""
    i = module.computations[computation][name]
    operands = [_scalar(module, computation, operand, values) for operand in i.operands]
    if i.opcode == "fusion":
        callee = i.callees[0]
        return _comparison(module, callee, module.roots[callee], dict(enumerate(operands)))
    return (i, operands) if i.opcode == "compare" else (None, [])


def _scalar(module: Module, computation: str, name: str, values: Mapping[int, _Scalar | None]) -> _Scalar | None:
    """Evaluates an integer scalar; `values` are the parameters, or the elements of the one that is a tuple."""
    i = module.computations[computation].get(name)
    if i is None:
        return None

    def operand(k: int) -> _Scalar | None:
        return _scalar(module, computation, i.operands[k], values)

    match i.opcode:
        case "constant":
            return (None, int(i.arguments)) if re.fullmatch(r"-?\d+", i.arguments) else None
        case "parameter":
            return values.get(int(i.arguments))
        case "get-tuple-element":
            owner = module.computations[computation][i.operands[0]]
            return values.get(int(i.callee("index"))) if owner.opcode == "parameter" else None
        case "copy" | "bitcast" | "convert" | "reshape":
            return operand(0)
        case "add":
            a, b = operand(0), operand(1)
            if a is None or b is None or None not in (a[0], b[0]):
                return None
            return (b[0] if a[0] is None else a[0], a[1] + b[1])
        case "fusion":
            callee = i.callees[0]
            inner = {k: operand(k) for k in range(len(i.operands))}
            return _scalar(module, callee, module.roots[callee], inner)
        case _:
            return None
