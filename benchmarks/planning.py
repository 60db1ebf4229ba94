"""What planning and compiling cost, once, in a fresh process: `python -m benchmarks.planning gpt2/fsdp/data=8`.

Started by run.py, several times. Before the clock starts, the step is traced once, so that what JAX keeps of
earlier traces serves both sides alike.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.extend
import jax.numpy as jnp

import shardc
from benchmarks.cases import Case
from benchmarks.measure import report, seconds
from benchmarks.peer import jitted
from shardc.passes import after_trace
from shardc.passes.trace.trace import Arguments, trace


def measure(case: Case, peer_first: bool) -> None:
    cfg, zoo = case.config, case.zoo
    init_fn, step_fn = zoo.make_step(cfg)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    batch = next(zoo.batches(cfg, case.rows, 0))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)), (*state, batch))
    mesh = shardc.make_mesh(**dict(case.mesh))
    jax.make_jaxpr(partial(step_fn))(*args)

    arguments = Arguments(step_fn, ())
    traced, program = seconds(lambda: after_trace(trace(arguments, arguments.bind(args, {}))))
    ours = shardc.function(mesh=mesh, **case.options)(step_fn)
    total, plan = seconds(lambda: ours.plan(*args))
    peer = jitted(step_fn, plan, mesh, case.options)

    def compile_peer() -> tuple[float, float]:
        tracing, tracer = seconds(lambda: peer.trace(*args))
        return tracing, seconds(lambda: tracer.lower().compile())[0]

    if peer_first:
        peer_trace, peer_compile = compile_peer()
        compiling, _ = seconds(lambda: ours.compile(*args))
    else:
        compiling, _ = seconds(lambda: ours.compile(*args))
        peer_trace, peer_compile = compile_peer()
    report(
        case=str(case),
        equations=count(program.jaxpr),
        trace=traced,
        plan=total - traced,
        compile=compiling,
        peer_trace=peer_trace,
        peer_compile=peer_compile,
        gap=plan.gap,
    )


def count(jaxpr: jax.extend.core.Jaxpr) -> int:
    return sum(1 + sum(map(count, jax.extend.core.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=Case.parse)
    parser.add_argument("--peer-first", action="store_true")
    options = parser.parse_args()
    measure(options.case, options.peer_first)
