"""A plan as JSON: where every value lives and what is boxed, by the paths of arguments and the order of operations.

It holds nothing of how the plan was found, so that any version of the planner can lower it (`shardc.plan.replay`).
`Compiled.save` puts it into an archive, with the code that XLA made of it.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardc import compat
from shardc.errors import ArgumentError
from shardc.ir.constrain import constrain_p
from shardc.ir.program import Program
from shardc.ir.walk import short_aval
from shardc.machine.mesh import MeshView
from shardc.passes import IMBALANCE
from shardc.passes.trace.pins import Rules
from shardc.plan.digest import digests
from shardc.plan.plan import SpmdPlan
from shardc.plan.rewrites import rewrites_of
from shardc.plan.rows import Row, placement_word, rows_of
from shardc.sbp.placement import REPLICATED, Placement
from shardc.sbp.sub_axes import in_whole_axes
from shardc.typed_json import parsed, typed

FORMAT: Final = 2
"""Of the files that this version writes and reads."""


class SavedLeaf(NamedTuple):
    """The type of an argument or result, `f32[8,128]`, and where it lives."""

    type: str
    placement: Placement


@dataclass(frozen=True)
class MachineCode:
    """The code that XLA made of a plan.

    Attributes:
      facts: what has to be equal where it is loaded, by name: the program, releases, the machine.
      options: those of XLA that it was compiled with.
      binary: JAX's serialized executable, which has pickles in it.
    """

    facts: Mapping[str, str]
    options: Mapping[str, str]
    binary: bytes = field(repr=False)


@dataclass(frozen=True)
class SavedPlan:
    """A plan as it was saved: where every value lives, and how to see whether a program is still the same.

    Attributes:
      function: name of the function.
      mesh: names and sizes of the axes.
      seconds: what a call takes, by the cost model that the plan was made with.
      gap: the part of the seconds by which another plan may be faster, by the same; None where nothing was proved.
      arguments, results: by path.
      captured: the arrays that the function closes over, in order.
      digests: for each primitive, of the parameters and connections of its operations.
      recomputed: which values are computed again and not kept for want of memory (`recompute`); rows and digests are
        those of the program that does so.
      recomputed_for_speed: the same of what is faster to recompute than to keep, in the program that was traced; in
        this one `recomputed` counts.
      rewrites: the rewrites that made the program (`shardc.plan.rewrites`).
      pinned: the arguments that were pinned then, by path; none where there are no rewrites.
      shared: how many devices share the rounds of each loop (`share_loops`).
      scans: the number of chunks of each kind of associative scan (`chunk_scans`).
      rows: of the operations (`shardc.plan.rows`); None if the borders alone were saved, as of a pipeline.
      name: the file's, or the function's.
      offloaded: the values that live on the host (`Offloaded.names`).
      cuts: the devices of the sub-axes of each axis that is cut, `{"data": [4, 2]}`; rows name these.
      imbalance: that of the buffers of sorted rows (`exchange_rows`).
      code: what XLA made of it, if it was saved too.
    """

    function: str
    mesh: Mapping[str, int]
    seconds: float
    gap: float | None
    arguments: Mapping[str, SavedLeaf]
    captured: Sequence[SavedLeaf]
    results: Mapping[str, SavedLeaf]
    digests: Mapping[str, str]
    recomputed: Sequence[str]
    recomputed_for_speed: Sequence[str]
    rewrites: Sequence[str]
    pinned: Sequence[str]
    shared: Sequence[int]
    scans: Sequence[tuple[str, int]]
    rows: Sequence[Row] | None
    name: str
    offloaded: Sequence[str] = ()
    cuts: Mapping[str, Sequence[int]] = field(default_factory=dict[str, "Sequence[int]"])
    imbalance: float = IMBALANCE
    code: MachineCode | None = None

    @cached_property
    def in_placements(self) -> dict[str, Any]:
        """Every argument pinned where the plan has it, for `shardc.function(in_placements=...)`."""
        by_name: dict[str, dict[str, Placement]] = {}
        for path, leaf in self.arguments.items():
            name, _, inner = path.partition("/")
            by_name.setdefault(name, {})[inner] = leaf.placement
        return {name: leaves[""] if "" in leaves else Rules(tuple(leaves.items())) for name, leaves in by_name.items()}

    @cached_property
    def out_placements(self) -> Any:
        """Every result pinned where the plan has it, for `shardc.function(out_placements=...)`."""
        leaves = {path: leaf.placement for path, leaf in self.results.items()}
        return leaves[""] if "" in leaves else Rules(tuple(leaves.items()))

    def __repr__(self) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in self.mesh.items())
        count = None if self.rows is None else sum(row.is_operation for row in self.rows)
        what = "borders alone" if count is None else f"{count} operations"
        code = "" if self.code is None else ", compiled"
        return f"SavedPlan({self.name}: {self.function} on {axes}, {len(self.arguments)} arguments, {what}{code})"


def record(plan: SpmdPlan) -> SavedPlan:
    """The saved form of a plan."""
    jaxpr, placements = plan.all_on_device.jaxpr, plan.all_on_device.placements
    entries = [e for e in jaxpr.eqns if e.primitive is constrain_p][: sum(a.moves for a in plan.arguments)]
    entered = zip((i for i, a in enumerate(plan.arguments) if a.moves), entries, strict=True)
    mesh = plan.mesh
    inputs = dict(enumerate(plan.inputs)) | {i: placements[e.outvars[0]] for i, e in entered}
    whole = [in_whole_axes(p, mesh) for p in inputs.values()]
    borders = record_borders(plan.program, mesh, whole, plan.whole_outputs, plan.seconds, plan.gap)
    pins = zip(borders.arguments, plan.arguments, strict=False)
    return replace(
        borders, pinned=tuple(path for path, a in pins if a.pin is not None) if borders.rewrites else (),
        recomputed=plan.recomputed.names if plan.recomputed else (),
        recomputed_for_speed=plan.recomputed_for_speed.names if plan.recomputed_for_speed else (),
        offloaded=plan.offloaded.names if plan.offloaded else (),
        cuts={axis: tuple(mesh.sizes[a] for a in names) for axis, names in mesh.cuts},
        imbalance=plan.request.imbalance,
        rows=tuple(rows_of(jaxpr.eqns, jaxpr.outvars, placements)[len(entries) :]),
    )  # fmt: skip


def record_borders(
    program: Program, mesh: MeshView, inputs: Sequence[Placement], outputs: Sequence[Placement], seconds: float,
    gap: float | None,
) -> SavedPlan:  # fmt: skip
    """Where the arguments and results of a plan live, without its operations."""
    leaves = [SavedLeaf(short_aval(a), p) for a, p in zip(program.in_avals, inputs, strict=True)]
    results = [SavedLeaf(short_aval(a), p) for a, p in zip(program.out_avals, outputs, strict=True)]
    given = len(leaves) - len(program.captured)
    return SavedPlan(
        program.name, dict(mesh.whole_axes), seconds, gap,
        dict(zip(program.in_paths[:given], leaves[:given], strict=True)), tuple(leaves[given:]),
        dict(zip(program.out_paths, results, strict=True)), digests(program.jaxpr), (), (), rewrites_of(program), (),
        program.shared, program.scans, None, program.name,
    )  # fmt: skip


# -- files

_text: Final = partial(json.dumps, ensure_ascii=False, default=placement_word)


def to_json(saved: SavedPlan) -> str:
    """The text of a file: the attributes in their order, a leaf or an operation to a line."""
    data = {f.name: getattr(saved, f.name) for f in fields(saved) if f.name not in ("name", "code")}
    for name in ("offloaded", "cuts", "imbalance"):
        if data[name] in ((), {}, IMBALANCE):
            del data[name]  # files of plans without them are as they always were
    return "{\n" + ",\n".join(f' "{k}": {_lines(v)}' for k, v in {"shardc plan": FORMAT, **data}.items()) + "\n}\n"


def _lines(value: Any) -> str:
    """An object or a list with each item in a line of its own."""
    if isinstance(value, Mapping) and value:
        return "{\n  " + ",\n  ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "\n }"
    if isinstance(value, tuple) and value:
        return "[\n  " + ",\n  ".join(map(_text, value)) + "\n ]"
    return _text(value)


def from_json(text: str, name: str) -> SavedPlan:
    """The inverse of `to_json`.

    Raises:
      ArgumentError: it is no plan that this version reads.
    """
    try:
        data = parsed(text)
        if not isinstance(data, dict) or "shardc plan" not in data:
            raise ValueError('it has no "shardc plan"')
        made = data.pop("shardc plan")
        if made == FORMAT:
            cheaper = data.pop("cheaper", [])  # the name that `recomputed_for_speed` had
            known = {"offloaded": [], "cuts": {}, "imbalance": IMBALANCE, "recomputed_for_speed": cheaper}
            return typed(SavedPlan, {**known, **data, "name": name, "code": None}, {Placement: _placement})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        wrong = f"{name} is no plan that shardc saved, or was changed so that it is none: {str(why).rstrip('.')}."
        raise ArgumentError(wrong) from error
    raise ArgumentError(
        f"{name} is a plan of format {made}, and this version of shardc reads format {FORMAT}; plan anew and save that."
    )


@lru_cache(maxsize=256)
def _placement(word: str) -> Placement:
    """The inverse of `placement_word`."""
    return REPLICATED if word == "B" else Placement.parse(word)


_PLAN, _ABOUT, _CODE = "plan.json", "compiled.json", "compiled.bin"
"""The members of an archive."""


def write_compiled(saved: SavedPlan, code: MachineCode, path: str | PathLike[str]) -> None:
    """Writes a plan and its code as one archive; one that another process is to read is there whole or not at all."""
    own = f"{fspath(path)}.{os.getpid()}"
    try:
        with zipfile.ZipFile(own, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_PLAN, to_json(saved))
            archive.writestr(_ABOUT, json.dumps({"facts": code.facts, "options": code.options}, indent=1))
            archive.writestr(_CODE, code.binary)
        os.replace(own, path)
    finally:
        Path(own).unlink(missing_ok=True)


def _read_compiled(path: str | PathLike[str], name: str) -> SavedPlan:
    """The inverse of `write_compiled`.

    Raises:
      ArgumentError: it is another archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            plan, about, binary = (archive.read(member) for member in (_PLAN, _ABOUT, _CODE))
        said = parsed(about.decode())
        facts, options = (typed(Mapping[str, str], said[part]) for part in ("facts", "options"))
        code = MachineCode(facts, options, binary)
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ArgumentError(f"{name} is no compiled program that shardc saved, or was changed: {error}.") from error
    return replace(from_json(plan.decode(), name), code=code)


@compat.api_boundary
def load_plan(path: str | PathLike[str]) -> SavedPlan:
    """Reads a plan that `plan.save(path)` or `compiled.save(path)` wrote.

    It goes to `shardc.function(plan=...)`, which lowers it as it was, without a search; or its `in_placements` and
    `out_placements` go to the arguments of these names, which pins the borders and leaves the rest to the planner.

    Raises:
      ArgumentError: there is no such file, or it is no plan.
    """
    if not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"{path!r} is no saved plan; write plan.save('plan.json'), and plan='plan.json'.")
    try:
        if zipfile.is_zipfile(path):
            return _read_compiled(path, Path(path).name)
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{fspath(path)} cannot be read as a plan: {error}.") from error
    return from_json(text, Path(path).name)
