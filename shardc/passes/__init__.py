"""The passes, in their order: what each takes and gives, an example, and how those run that rewrite a program.

`python -m shardc passes` prints the list, `plan.explain(after="sink_constants")` the program after one of them. No pass
is imported before it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final, Literal, Protocol, TypeAlias

from shardc.ir.program import Program
from shardc.machine.mesh import MeshView
from shardc.sbp.placement import Pin

Runs: TypeAlias = Literal["after a trace", "if cheaper", "before placing", "in the search"]
"""When a pass runs: on every traced program; if the plan of what it makes is cheaper than the plan without it; on every
program that is placed; or where the search for a plan calls it with what it has found."""
IMBALANCE: Final = 1.25
"""Rows of the busiest device over the mean, for which an exchange of sorted rows has room: the capacity factor of
Switch Transformers (Fedus et al. 2021, section 2.2), which keeps over 99 % of the tokens there."""


class Choices(Protocol):
    """The choices of a saved plan.

    Attributes:
      rewrites: the passes that run if they are cheaper and were, and those that the machine asked for.
      shared: `Program.shared`.
      recomputed_for_speed, recomputed: names of recomputed values.
    """

    @property
    def rewrites(self) -> Sequence[str]: ...
    @property
    def shared(self) -> Sequence[int]: ...
    @property
    def recomputed_for_speed(self) -> Sequence[str]: ...
    @property
    def recomputed(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Context:
    """The knowledge of a pass besides the program.

    Attributes:
      mesh: where the program is to be placed; None while it is traced.
      pins: of its arguments.
      replicate: primitives without a rule that get no signatures.
      known: the choices of a saved plan; None: they are to be made.
      grain: chunks of a dimension, at most, whose sums have a fixed order; 0: no order is asked for.
      imbalance: rows of the busiest device over the mean, for which an exchange of sorted rows has room.
    """

    mesh: MeshView | None = None
    pins: Sequence[Pin | None] = ()
    replicate: Sequence[str] = ()
    known: Choices | None = None
    grain: int = 0
    imbalance: float = IMBALANCE

    @property
    def view(self) -> MeshView:
        """The mesh."""
        assert self.mesh is not None
        return self.mesh


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
      name: of the pass.
      module: where the function is.
      takes, gives: what it reads and what it makes. A pass that runs from this list and takes a program is a function
        of (program, context) that gives a program, or several of which the cheapest is wanted; itself if it changes
        nothing. One that takes a jaxpr is a function of that alone.
      example: before --> after.
      of: the plans that it makes: "all", "one program" or "pipelines".
      runs: when it runs.
      function: the name of its function, where that is not the name of the pass.
    """

    name: str
    module: str
    takes: str
    gives: str
    example: str
    of: str = "all"
    runs: Runs = "in the search"
    function: str = ""

    def made(self, program: Program, context: Context) -> Iterator[Program]:
        """The programs that it makes of one; none if it changes nothing."""
        work = getattr(import_module(self.module), self.function or self.name)
        if self.takes == "jaxpr":
            yield program.after(self.name, work(program.jaxpr))
            return
        made: Any = work(program, context)
        yield from (p for p in ([made] if isinstance(made, Program) else made) if p is not program)


def run(passes: Iterable[Pass], program: Program, context: Context) -> Program:
    """The program after these passes, in the order of the list."""
    for p in passes:
        program = next(p.made(program, context), program)
    return program


def passes_that_run(runs: Runs, of: str = "all") -> list[Pass]:
    """The passes that run then, of all plans and of those named, in their order."""
    return [p for p in PASSES if p.runs == runs and p.of in ("all", of)]


def after_trace(program: Program, mesh: MeshView | None = None, grain: int = 0) -> Program:
    """A traced program after the passes that every one goes through; without a mesh those that depend on one do
    nothing, and without a `grain` no order of additions is fixed."""
    return run(passes_that_run("after a trace"), program, Context(mesh, grain=grain))


def as_saved(program: Program, context: Context, known: Choices) -> Program:
    """The program that a saved plan is of, from the traced one."""
    taken = {*known.rewrites, "recompute"}
    one = [p for p in PASSES if p.of != "pipelines" and (p.runs == "before placing" or p.name in taken)]
    return run(one, program, replace(context, known=known))


_REWRITE, _RECOMPUTE = "shardc.passes.rewrite", "shardc.passes.recompute"
_CUT, _CUT_SEARCH = "shardc.pipeline.cut", "shardc.pipeline.cut_search"

PASSES: Final[tuple[Pass, ...]] = (
    Pass(
        "canonicalize",
        "shardc.passes.trace.canonicalize",
        "what JAX traced",
        "one flat program",
        "y = jit[f] x --> the equations of f; z = dead(y) --> nothing",
    ),
    Pass(
        "batch_lookups",
        f"{_REWRITE}.batch_lookups",
        "program",
        "program",
        "x[iota, i] --> gather whose dimension 0 is a batching dimension",
        runs="after a trace",
    ),
    Pass(
        "fold_transposes",
        f"{_REWRITE}.fold_transposes",
        "jaxpr",
        "jaxpr",
        "y = h @ transpose w --> y = dot_general that contracts the last dimensions",
        runs="after a trace",
    ),
    Pass(
        "fold_reversals",
        f"{_REWRITE}.fold_reversals",
        "jaxpr",
        "jaxpr",
        "y = rev[0] cumsum[0] rev[0] x --> y = cumsum[0, reverse] x",
        runs="after a trace",
    ),
    Pass(
        "drop_zero_sums",
        f"{_REWRITE}.drop_zero_sums",
        "jaxpr",
        "jaxpr",
        "scan c = c + 0 --> scan without c",
        runs="after a trace",
    ),
    Pass(
        "sink_constants",
        f"{_REWRITE}.sink_constants",
        "jaxpr",
        "jaxpr",
        "m = broadcast v; scan ... m[i] --> scan ... broadcast v",
        runs="after a trace",
    ),
    Pass(
        "fix_order",
        f"{_REWRITE}.fix_order",
        "program, grain",
        "program",
        "s = reduce_sum x --> s = in_order[of=reduce_sum] x",
        runs="after a trace",
    ),
    Pass(
        "sink_merges",
        f"{_REWRITE}.sink_merges",
        "program, mesh",
        "program",
        "s = reduce_sum[0] exp reshape[6, 5] x --> s = reduce_sum[0, 1] exp x",
        runs="after a trace",
    ),
    Pass(
        "compose_windows",
        f"{_REWRITE}.windows.compose_windows",
        "program",
        "program",
        "q = pad x (1, 1); y = q[2:] --> y = pad x (-1, 1); concatenate x[1:] x[:1] --> join_ranges x",
        runs="if cheaper",
    ),
    Pass(
        "chain_transforms",
        f"{_REWRITE}.chain_transforms",
        "program, pins",
        "program",
        "fft of 3 dimensions --> fft along dimension 2, then 1, then 0",
        runs="if cheaper",
    ),
    Pass(
        "repeat_keys",
        f"{_REWRITE}.repeat_keys",
        "program, mesh",
        "program",
        "y = attention q[32 heads] k[4 heads] --> k' = repeat k; y = attention q k'[8 heads]",
        runs="if cheaper",
    ),
    Pass(
        "share_loops",
        f"{_REWRITE}.share_loops",
        "program, pins, mesh",
        "program",
        "scan over 8 split rows --> shard_map: each device scans its own rows",
        runs="if cheaper",
    ),
    Pass(
        "exchange_rows",
        f"{_REWRITE}.experts.exchange_rows",
        "program, pins, mesh, imbalance",
        "program",
        "y = x.at[i].set(ragged_dot(x[i], w, n)) --> y = cond fits (rows to their groups and back) (as before)",
        runs="if cheaper",
    ),
    Pass(
        "narrow_products",
        f"{_REWRITE}.narrow_products",
        "program, mesh",
        "program",
        "y = x:f32 @ w:f32 --> x' = convert[bf16] x; w' = convert[bf16] w; y:f32 = x' @ w'",
        runs="before placing",
    ),
    Pass(
        "share_equal",
        f"{_REWRITE}.share_equal",
        "jaxpr",
        "jaxpr",
        "a = reduce_sum x; b = reduce_sum x --> a = reduce_sum x",
        of="one program",
        runs="before placing",
    ),
    Pass(
        "precompute_state",
        f"{_CUT}.precompute_state",
        "program",
        "program",
        "a key split in each microbatch --> all keys before the loop, as rows",
        of="pipelines",
        runs="before placing",
    ),
    Pass(
        "recompute_residuals",
        f"{_RECOMPUTE}.recompute",
        "program, mesh",
        "program",
        "scan stacks y = f x; scan reads y --> scan stacks x; scan reads f x",
        runs="before placing",
        function="recompute_for_speed",
    ),
    Pass(
        "split_scans",
        f"{_CUT_SEARCH}.split_scans",
        "program, layers of each stage",
        "program, its pieces",
        "scan over 8 layers --> scan over 4 layers; scan over 4 layers",
        of="pipelines",
    ),
    Pass(
        "mark_stages",
        f"{_CUT_SEARCH}.mark_stages",
        "program, cuts",
        "program",
        "y = f x; z = g y --> y = f x; y' = stage_boundary y; z = g y'",
        of="pipelines",
    ),
    Pass(
        "cut_stages",
        f"{_CUT}.cut_stages",
        "program with its marks",
        "a program for each stage",
        "y' = stage_boundary y --> stage 0: send y; stage 1: y' = receive",
        of="pipelines",
    ),
    Pass(
        "pin_transfers",
        "shardc.pipeline.place_stages",
        "the program of a stage, and where the other ends of its transfers live",
        "program",
        "send x --> send[pin] x",
        of="pipelines",
    ),
    Pass(
        "recompute",
        f"{_RECOMPUTE}.recompute",
        "program, a memory limit",
        "program",
        "y = f x; ...; z = g y --> y = f x; ...; z = g (f x)",
        of="one program",
        function="recompute_again",
    ),
    Pass(
        "cut_axes",
        "shardc.passes.place.cut_axes",
        "a plan",
        "a mesh with sub-axes",
        "reshape f32[64] --> f32[4,16] on data=8 --> the same on data[0]=4, data[1]=2",
        of="one program",
    ),
    Pass(
        "insert_boxing",
        "shardc.passes.place.insert_boxing",
        "program, a placement for each value",
        "boxed program",
        "y = f x --> x' = box[src dst] x; y = f x'",
    ),
    Pass(
        "offload",
        "shardc.passes.memory.offload",
        "boxed program, values that live on the host",
        "boxed program",
        "m' = f m --> d = memory_move[device] m; e = f d; m' = memory_move[host] e",
        of="one program",
    ),
    Pass(
        "split_tasks",
        f"{_CUT}.split_tasks",
        "the boxed program of a stage",
        "a program for each task",
        "scan of forward and backward --> tasks F, B, W; update U",
        of="pipelines",
    ),
    Pass(
        "lower",
        "shardc.passes.lower.lower",
        "boxed program",
        "a JAX function in shard_map",
        "x' = box[S(0) B] x --> x' = all_gather x",
    ),
)
