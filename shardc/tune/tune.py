"""`shardc.tune`: chooses the mesh, stages, microbatches and schedule for a function of one device.

Every candidate is planned as `shardc.function` plans it, and ranked by what its plan says; nothing else prices
anything. Which are planned, if not all, is decided best first: a mesh of more axes can do all that the one can in which
two of them are merged, and takes longer to plan, so it is looked at once the other has turned out well. See
docs/design/tune.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax

from shardc.api import function
from shardc.calls.leaves import abstract
from shardc.errors import (
    ArgumentError,
    MeshError,
    PipelineError,
    PlacementError,
    ShardcError,
    TracingError,
    did_you_mean,
)
from shardc.machine.mesh import AnyMesh, MeshView, make_mesh, view
from shardc.passes.trace.trace import Arguments
from shardc.pipeline.schedule.methods import METHODS
from shardc.plans import MemoryLimitError
from shardc.sbp.placement import AUTO
from shardc.tune.meshes import NAMES, Sizes, slice_of
from shardc.tune.search import PIPE, Choice, Search, Step, meshes, pipelines
from shardc.tune.tuning import Candidate, Tuning

log = logging.getLogger("shardc")

RANKS: Final = 16
"""Ranks of a pipeline, at most, if nobody says how many."""
NO_PIPELINES: Final = "No pipelines: these want a function with one loop of shardc.accumulate."
SCHEDULES: Final = ("1f1b", "interleaved", "zb-h1")


def tune(
    fn: Callable[..., Any],
    *args: Any,
    devices: int | None = None,
    topology: str | None = None,
    calibration: str | None = None,
    hbm: str | int | None = None,
    axes: Sequence[str] = NAMES,
    pipe: Sequence[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
    microbatches: Sequence[int] | None = None,
    tries: int = 12,
    in_placements: Any = AUTO,
    out_placements: Any = AUTO,
    donate_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
) -> Tuning:
    """Chooses the mesh for a function of one device: plans it on the meshes that there are, and ranks the plans.

    Meshes are the ways to write the number of devices as a product of the sizes of `axes`, as far as each axis lies
    along whole parts of the machine's dimensions; what differs in nothing but the names of axes is planned once. A
    function with one loop of `shardc.accumulate` is also planned as a pipeline, cut at its `stage_boundary`s or, if it
    has none, by cost.

    Args:
      fn: plain JAX, for one device. With `microbatches`: a function of one of these numbers that gives it.
      *args: of `fn`: arrays or `jax.ShapeDtypeStruct`s. Where arrays live now does not matter.
      devices: how many. Without a topology the first of `jax.devices()`, all if nobody says.
      topology: as for `make_mesh`, to plan without devices. Without a shape, as in `"v5p"`, the most compact slice.
      calibration, hbm: as for `make_mesh`.
      axes: names of axes, outermost first; the last one lies along neighbours. Every mesh has all of them, those that
        it does not use with size 1, so a placement may name any of them.
      pipe: numbers of ranks to try; `()`: no pipelines; None: all up to 16 that divide the devices.
      schedules: names of schedules to try, or "auto"; where there are several, the others once the first has done well.
      microbatches: to try; the loop of `accumulate` is the function's own, so `fn` makes it.
      tries: candidates that are planned, at most. The search is limited by this alone, and gives the same on each run.
      in_placements, out_placements, donate_argnames, donate_argnums, static_argnames, static_argnums: as for
        `shardc.function`. What is not pinned is chosen for each mesh anew.

    Returns:
      A `Tuning`: prints as a table; `.best.function` is the function on the best mesh, `.best.axes` and
      `.best.pipeline` are what `make_mesh` and `function` want.

    Raises:
      MeshError: there is no such topology, or it has too few devices.
      ArgumentError, PlacementError, TracingError: as for `shardc.function`.
      PipelineError: `pipe` asks for pipelines of a function that cannot be one, or there is no such schedule.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
      >>> found = tune(lambda x: jnp.tanh(x @ x.T).sum(), x, devices=4, topology="v5p", tries=4)
      >>> len(found.candidates), found.best.plan.mesh.size
      (4, 4)
    """
    if tries < 1:
        raise ArgumentError(f"tune: tries={tries}; it has to be 1 or more.")
    axes, devices = _checked_axes(axes), _checked_devices(devices, topology)
    _check_schedules(schedules)
    if topology is not None:
        topology, devices = slice_of(topology, devices)

    def mesh_of(sizes: Sizes) -> AnyMesh:
        return make_mesh(topology=topology, calibration=calibration, hbm=hbm, **dict(sizes))

    whole = mesh_of(((axes[0], devices), *((a, 1) for a in axes[1:])))
    placed = partial(
        function, mesh=whole, in_placements=in_placements, out_placements=out_placements,
        donate_argnames=donate_argnames, donate_argnums=donate_argnums, static_argnames=static_argnames,
        static_argnums=static_argnums,
    )  # fmt: skip
    args = jax.tree.map(abstract, args)
    made = {None: fn} if microbatches is None else {m: _step_of(fn, m) for m in microbatches}
    steps = [Step(m, placed(f), args) for m, f in made.items()]
    choices, whole_only = list[Choice](), list[PipelineError]()
    ranks = _checked_ranks(pipe, devices)
    for step in steps:
        choices += meshes(step, axes, devices)
        try:
            choices += pipelines(step, axes, devices, ranks, schedules) if ranks else []
        except PipelineError as error:
            whole_only.append(error)
    if len(whole_only) == len(steps) and pipe is not None:
        raise whole_only[0]
    notes = (NO_PIPELINES,) if len(whole_only) == len(steps) else ()
    search = Search(choices, mesh_of, axes)
    if not search.distinct:
        raise MeshError(
            f"tune: no mesh of {devices} devices lies along whole parts of topology {topology}; take devices that do, "
            "or a topology of so many."
        )
    candidates: list[Candidate] = []

    def plan(choice: Choice) -> float:
        candidates.append(_planned(choice, mesh_of))
        log.info("tune: %s: %s", choice.text, candidates[-1].problem or f"{candidates[-1].seconds:.3e} s")
        return candidates[-1].seconds

    search.run(tries, plan)
    first = steps[0]
    return Tuning(
        first.function.__name__, _where(view(whole)), tuple(sorted(candidates, key=_rank)),
        len(search.distinct) - len(candidates), min(s.ideal for s in steps), notes,
    )  # fmt: skip


def _checked_axes(axes: Sequence[str]) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if not axes or len(set(axes)) < len(axes) or not all(isinstance(a, str) and a.isidentifier() for a in axes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f'tune: axes={axes!r}; write names that differ, as axes=("data", "model").')
    if PIPE in axes:
        raise ArgumentError(f'tune: axes={axes!r}: "{PIPE}" is the axis of pipelines; say pipe=(2, 4) for its sizes.')
    return axes


def _checked_devices(devices: int | None, topology: str | None) -> int:
    if devices is None and topology is None:
        return len(jax.devices())
    if devices is not None and (isinstance(devices, bool) or devices < 1):
        raise ArgumentError(f"tune: devices={devices!r}; it has to be 1 or more.")
    return devices or slice_of(topology or "", None)[1]


def _checked_ranks(pipe: Sequence[int] | None, devices: int) -> list[int]:
    """How many a pipeline may have."""
    ranks = [p for p in range(2, min(devices, RANKS) + 1) if devices % p == 0] if pipe is None else list(pipe)
    wrong = [p for p in ranks if p < 2 or devices % p]
    if wrong:
        raise PipelineError(
            f"tune: pipe={tuple(ranks)}: {wrong[0]} ranks; there have to be 2 or more, and divide {devices} devices."
        )
    return ranks


def _check_schedules(schedules: Sequence[str]) -> None:
    names = [*METHODS, "auto"]
    for name in schedules:
        if name not in names:
            raise PipelineError(
                f'tune: unknown schedule "{name}"; there are {", ".join(names)}.{did_you_mean(str(name), names)}'
            )


def _step_of(fn: Callable[..., Any], microbatches: int) -> Callable[..., Any]:
    arguments = Arguments(fn, ())
    try:
        arguments.signature.bind(microbatches)
    except TypeError as error:
        wrong = f"cannot be called with a number alone: {error}"
    else:
        made = fn(microbatches)
        if callable(made):
            return made
        wrong = f"gives a {type(made).__name__}"
    raise ArgumentError(
        f"tune: {arguments.where} {wrong}. With microbatches={microbatches} and others it is a function of their "
        "number that gives the step: lambda m: make_step(shardc.accumulate(grad, microbatches=m))."
    )


def _where(mesh: MeshView) -> str:
    shape = f" ({'x'.join(map(str, mesh.topology.shape))})" if mesh.topology.shape else ""
    return f"{mesh.size} {mesh.topology.kind} device{'s' * (mesh.size > 1)}{shape}"


def _rank(c: Candidate) -> tuple[float, ...]:
    """What fits by time, what does not by memory; of what takes as long, to three digits, the mesh of fewer axes."""
    if c.plan is None:
        return (2,)
    axes = sum(n > 1 for n in c.axes.values())
    return (0, float(f"{c.seconds:.3g}"), axes, c.seconds) if c.fits else (1, c.memory, axes, c.seconds)


def _planned(choice: Choice, mesh_of: Callable[[Sizes], AnyMesh]) -> Candidate:
    mesh, step = mesh_of(choice.sizes), choice.step
    made = step.function.on(mesh, choice.pipeline)
    bare = Candidate(dict(choice.sizes), mesh, choice.pipeline, choice.loop, made, capacity=view(mesh).topology.hbm)
    try:
        plan = made.plan(*step.args)
    except (ArgumentError, PlacementError, TracingError):
        raise
    except MemoryLimitError as error:  # meshes of more axes may fit, and are looked at by what this would take
        plan = error.plan
    except ShardcError as error:  # what this mesh cannot do, others may
        return replace(bare, problem=str(error))
    memory = plan.memory.peak
    return replace(bare, plan=plan, seconds=plan.seconds, memory=memory, bytes=plan.bytes_per_device, gap=plan.gap)
