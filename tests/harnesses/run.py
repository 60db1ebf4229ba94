"""Runs a case on one device and under draws."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax

import shardc
from shardc.errors import ShardcError
from tests.harnesses.cases import Case
from tests.harnesses.compare import difference, on_host
from tests.harnesses.draws import Draw, draw_for, mesh_of
from tests.harnesses.surprises import SURPRISES

State: TypeAlias = Literal["passed", "refused", "surprised", "crashed", "wrong", "skipped", "undefined"]
STATES: tuple[State, ...] = ("passed", "skipped", "undefined", "refused", "surprised", "crashed", "wrong")
"""From good to bad: a case is what its worst draw is."""


@dataclass(frozen=True)
class Outcome:
    """What one draw came to.

    Attributes:
      text: what is wrong, or why it was refused or skipped.
      draw: None where no draw was made.
      gathered: primitives that the plan computed whole for want of a rule.
      audited: whether the compiled program sends what the plan says, and nothing else.
    """

    state: State
    text: str = ""
    draw: Draw | None = None
    gathered: tuple[str, ...] = ()
    audited: bool = False


@dataclass
class Result:
    """What a case came to."""

    case: Case
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def worst(self) -> Outcome:
        return max(self.outcomes, key=lambda o: STATES.index(o.state))

    @property
    def audited(self) -> bool:
        return all(o.audited for o in self.outcomes)

    @property
    def gathered(self) -> set[str]:
        return {name for o in self.outcomes for name in o.gathered}


def run_case(case: Case, seed: int, draws: int) -> Result:
    """Compares a case with one device under so many draws. Does not raise for what the case does."""
    result, start = Result(case), time.perf_counter()
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflows and casts that JAX's cases mean
        result.outcomes += _outcomes(case, seed, draws)
    result.seconds = time.perf_counter() - start
    return result


def _outcomes(case: Case, seed: int, draws: int) -> list[Outcome]:
    if case.undefined:
        return [Outcome("undefined", case.undefined)]
    try:
        args = case.arguments(seed)
        want = jax.block_until_ready(jax.jit(case.fn)(*args))
    except Exception as error:  # noqa: BLE001  # of JAX's own: what it says is the outcome
        return [Outcome("skipped", _first_line(error))]
    return [_compare(case, args, want, draw_for(case, args, on_host_tree(want), seed, k)) for k in range(draws)]


def on_host_tree(tree: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), on_host(tree))


def _compare(case: Case, args: Sequence[Any], want: Any, draw: Draw) -> Outcome:
    try:
        function = placed(case.fn, draw)
        gathered = tuple(g.primitive for g in function.plan(*args).gathered)
        text = difference(case.group, args, function(*args), want)
        audit = function.compile(*args).audit()
    except ShardcError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}", draw)
    except Exception:  # noqa: BLE001  # told with its traceback, and the run fails
        return Outcome("crashed", traceback.format_exc(limit=-6), draw)
    if text:
        return Outcome("wrong", text, draw, gathered, audit.ok)
    if audit.ok or case.group in SURPRISES:
        return Outcome("passed", "", draw, gathered, audit.ok)
    return Outcome("surprised", str(audit), draw, gathered)


def placed(fn: Callable[..., Any], draw: Draw) -> Any:
    """The function on the draw's mesh, with its pins."""

    ins, outs = draw.at_border()
    named = {"args": ins} if ins else None
    return shardc.function(draw.inside(fn), mesh=mesh_of(draw.mesh), in_placements=named, out_placements=outs)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
