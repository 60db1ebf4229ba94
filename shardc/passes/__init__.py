"""The passes, in their order: what each takes and gives, and an example. Data alone: this file imports no pass.

`python -m shardc passes` prints the list, `plan.explain(after="sink_constants")` the program after one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
      name: of the pass, and of its function.
      module: where the function is.
      takes, gives: what it reads and what it makes.
      example: before --> after.
      of: the plans that it makes: "all", "one program" or "pipelines".
    """

    name: str
    module: str
    takes: str
    gives: str
    example: str
    of: str = "all"


_TRACE, _PLACE, _RECOMPUTE = "shardc.passes.trace", "shardc.passes.place", "shardc.passes.recompute"
_CUT, _CUT_SEARCH = "shardc.pipeline.cut", "shardc.pipeline.cut_search"

PASSES: Final[tuple[Pass, ...]] = (
    Pass(
        "canonicalize",
        f"{_TRACE}.canonicalize",
        "what JAX traced",
        "one flat program",
        "y = jit[f] x --> the equations of f; z = dead(y) --> nothing",
    ),
    Pass(
        "batch_lookups",
        f"{_TRACE}.batch_lookups",
        "the equations of a jaxpr, while it is made canonical",
        "equations",
        "x[iota, i] --> gather whose dimension 0 is a batching dimension",
    ),
    Pass(
        "fold_transposes",
        f"{_TRACE}.fold_transposes",
        "a jaxpr, while it is made canonical",
        "a jaxpr",
        "y = h @ transpose w --> y = dot_general that contracts the last dimensions",
    ),
    Pass(
        "drop_zero_sums",
        f"{_TRACE}.drop_zero_sums",
        "program",
        "program",
        "scan c = c + 0 --> scan without c",
    ),
    Pass(
        "sink_constants",
        f"{_RECOMPUTE}.sink_constants",
        "program",
        "program",
        "m = broadcast v; scan ... m[i] --> scan ... broadcast v",
    ),
    Pass(
        "compose_windows",
        f"{_TRACE}.windows.compose_windows",
        "program",
        "program",
        "q = pad x (1, 1); y = q[2:] --> y = pad x (-1, 1); concatenate x[1:] x[:1] --> join_ranges x",
        of="one program",
    ),
    Pass(
        "chain_transforms",
        f"{_TRACE}.chain_transforms",
        "program, pins",
        "program",
        "fft of 3 dimensions --> fft along dimension 2, then 1, then 0",
        of="one program",
    ),
    Pass(
        "share_loops",
        f"{_TRACE}.share_loops",
        "program, pins, mesh",
        "program",
        "scan over 8 split rows --> shard_map: each device scans its own rows",
        of="one program",
    ),
    Pass(
        "precompute_state",
        f"{_CUT}.precompute_state",
        "program",
        "program",
        "a key split in each microbatch --> all keys before the loop, as rows",
        of="pipelines",
    ),
    Pass(
        "recompute_residuals",
        f"{_RECOMPUTE}.recompute_residuals",
        "program, mesh",
        "program",
        "scan stacks y = f x; scan reads y --> scan stacks x; scan reads f x",
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
        "pin_entries",
        "shardc.plan.borders",
        "program, what is known of its arguments",
        "program",
        "f x, where x arrives elsewhere than pinned --> f constrain[pin] x",
    ),
    Pass(
        "recompute",
        f"{_RECOMPUTE}.recompute",
        "program, a memory limit",
        "program",
        "y = f x; ...; z = g y --> y = f x; ...; z = g (f x)",
        of="one program",
    ),
    Pass(
        "insert_boxing",
        f"{_PLACE}.insert_boxing",
        "program, a placement for each value",
        "boxed program",
        "y = f x --> x' = box[src dst] x; y = f x'",
    ),
    Pass(
        "offload",
        f"{_RECOMPUTE}.offload",
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
