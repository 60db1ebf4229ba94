"""`shardc.tune`: chooses the mesh, stages, microbatches and schedule for a function of one device.

Every candidate is planned as `shardc.function` plans it, and ranked by its plan; there is no other cost model.
Candidates are planned best first, up to a number of tries. A mesh of more axes can do all that a mesh with two of these
axes merged can, but takes longer to plan: so it is planned after the merged one, and early if that one is fast. See
docs/design/tune.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax

from shardc import compat
from shardc.api import function
from shardc.calls.leaves import abstract
from shardc.errors import (
    ArgumentError,
    ForbiddenMoveError,
    MeshError,
    PipelineError,
    PlacementError,
    ShardcError,
    TracingError,
    did_you_mean,
)
from shardc.machine.mesh import AnyMesh, make_mesh, view
from shardc.passes.trace.trace import Arguments
from shardc.pipeline.schedule.methods import METHODS
from shardc.plan.forbid import Forbid
from shardc.plans import MemoryLimitError
from shardc.report.tables import devices_text, seconds_text
from shardc.sbp.placement import AUTO
from shardc.tuning.choices import PIPE, MeshChoice, MeshSearch, TunedStep, meshes, pipelines
from shardc.tuning.meshes import NAMES, Sizes, slice_of
from shardc.tuning.tuning import Candidate, Tuning, mesh_text

log = logging.getLogger("shardc")

RANKS: Final = 16
"""The most ranks of a pipeline that are tried by default."""
NO_PIPELINES: Final = "No pipelines: they need a function with one loop of shardc.accumulate."
SCHEDULES: Final = ("1f1b", "interleaved", "zb-h1")


@compat.api_boundary
def tune(  # noqa: PLR0913  # a public face
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
    forbid: Forbid = (),
) -> Tuning:
    """Choose the mesh for a function of one device: plan it on all meshes, and rank the plans.

    The meshes are the ways to write the number of devices as a product of the sizes of `axes`, as far as each axis lies
    along whole parts of the machine's dimensions. Meshes that differ only in the names of axes are planned once. A
    function with one loop of `shardc.accumulate` is also planned as a pipeline, cut at its `stage_boundary`s or, if it
    has none, by cost.

    Args:
      fn: plain JAX, for one device. With `microbatches`: a function from the number of microbatches to such a function.
      *args: arguments of `fn`: arrays or `jax.ShapeDtypeStruct`s. The placement of arrays does not matter.
      devices: number of devices. Without a topology these are the first of `jax.devices()`, by default all.
      topology: as for `make_mesh`, to plan without devices. Without a shape, as in `"v5p"`, the most compact slice.
      calibration, hbm: as for `make_mesh`.
      axes: names of axes, outermost first; the last one lies along neighbours. Every mesh has all of them, unused ones
        with size 1, so a placement may name any of them.
      pipe: numbers of ranks to try; `()`: no pipelines; None: all up to 16 that divide the devices.
      schedules: names of schedules to try, or "auto". The first one is tried first, the others after it has done well.
      microbatches: numbers of microbatches to try; the loop of `accumulate` is the function's own, so `fn` makes it.
      tries: the most candidates that are planned. This is the only limit of the search, so each run gives the same.
      in_placements, out_placements, donate_argnames, donate_argnums, static_argnames, static_argnums, forbid: as for
        `shardc.function`. Placements that are not pinned are chosen for each mesh.

    Returns:
      A `Tuning`: prints as a table. `.best.function` is the function on the best mesh; `.best.axes` and
      `.best.pipeline` are arguments for `make_mesh` and `function`.

    Raises:
      MeshError: there is no such topology, or it has too few devices.
      ArgumentError, PlacementError, TracingError: as for `shardc.function`.
      PipelineError: `pipe` asks for pipelines of a function that cannot be one, or there is no such schedule.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
      >>> found = tune(lambda x: jnp.tanh(x @ x.T).sum(), x, devices=4, topology="v5p", tries=4)
      >>> found.best.fits, found.best.plan.mesh.size
      (True, 4)
    """
    if tries < 1:
        raise ArgumentError(f"tune: tries={tries}; it has to be 1 or more.")
    axes, devices = _checked_axes(axes), _checked_devices(devices, topology)
    _check_schedules(schedules)
    if topology is not None:
        topology, devices = slice_of(topology, devices)

    def mesh_of(sizes: Sizes) -> AnyMesh:
        return make_mesh(topology=topology, calibration=calibration, hbm=hbm, devices=None, **dict(sizes))

    whole = mesh_of(((axes[0], devices), *((a, 1) for a in axes[1:])))
    placed = partial(
        function, mesh=whole, in_placements=in_placements, out_placements=out_placements,
        donate_argnames=donate_argnames, donate_argnums=donate_argnums, static_argnames=static_argnames,
        static_argnums=static_argnums, forbid=forbid,
    )  # fmt: skip
    args = jax.tree.map(abstract, args)
    made = {None: fn} if microbatches is None else {m: _step_of(fn, m) for m in microbatches}
    steps = [TunedStep(m, placed(f), args) for m, f in made.items()]
    choices, whole_only = list[MeshChoice](), list[PipelineError]()
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
    search = MeshSearch(choices, mesh_of, axes)
    if not search.distinct:
        raise MeshError(
            f"tune: no mesh of {devices} devices lies along whole parts of topology {topology}; use a number of "
            f"devices that fits its dimensions, or a topology of {devices} devices."
        )
    candidates: list[Candidate] = []

    def plan(choice: MeshChoice) -> float:
        candidates.append(made := _planned(choice, mesh_of))
        log.info("tune: %s: %s", mesh_text(made, schedule=True), made.problem or seconds_text(made.seconds))
        return made.seconds

    search.run(tries, plan)
    first = steps[0]
    return Tuning(
        first.function.__name__, devices_text(view(whole).topology, devices), tuple(sorted(candidates, key=_rank)),
        len(search.distinct) - len(candidates), min(s.ideal for s in steps), notes,
    )  # fmt: skip


def _checked_axes(axes: Sequence[str]) -> tuple[str, ...]:
    axes = tuple(axes) if isinstance(axes, Iterable) and not isinstance(axes, str) else (axes,)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not axes or len(set(axes)) < len(axes) or not all(isinstance(a, str) and a.isidentifier() for a in axes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f'tune: axes={axes!r}; write names that differ, as axes=("data", "model").')
    if PIPE in axes:
        raise ArgumentError(f'tune: axes={axes!r}: "{PIPE}" is the axis of pipelines; set its sizes with pipe=(2, 4).')
    return axes


def _checked_devices(devices: int | None, topology: str | None) -> int:
    if devices is None and topology is None:
        return len(jax.devices())
    if devices is not None and (type(devices) is not int or devices < 1):
        raise ArgumentError(f"tune: devices={devices!r}; it has to be 1 or more.")
    return devices or slice_of(topology or "", None)[1]


def _checked_ranks(pipe: Sequence[int] | None, devices: int) -> list[int]:
    """The numbers of ranks that a pipeline may have."""
    ranks = [p for p in range(2, min(devices, RANKS) + 1) if devices % p == 0] if pipe is None else list(pipe)
    wrong = [p for p in ranks if p < 2 or devices % p]
    if wrong:
        raise PipelineError(
            f"tune: pipe={tuple(ranks)}: {wrong[0]} ranks; a number of ranks has to be 2 or more and divide the "
            f"{devices} devices."
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
        wrong = f"cannot be called with one number: {error}"
    else:
        made = fn(microbatches)
        if callable(made):
            return made
        wrong = f"returns a {type(made).__name__}"
    raise ArgumentError(
        f"tune: {arguments.where} {wrong}. With the option microbatches it has to be a function that takes the number "
        f"of microbatches, here {microbatches}, and returns the step: "
        "lambda m: make_step(shardc.accumulate(grad, microbatches=m))."
    )


def _rank(c: Candidate) -> tuple[float, ...]:
    """The sort key of candidates.

    Those that fit come first, by time, then those that do not, by memory. Of times equal to three digits, the mesh of
    fewer axes comes first.
    """
    if c.plan is None:
        return (2,)
    axes = sum(n > 1 for n in c.axes.values())
    return (0, float(f"{c.seconds:.3g}"), axes, c.seconds) if c.fits else (1, c.memory, axes, c.seconds)


def _planned(choice: MeshChoice, mesh_of: Callable[[Sizes], AnyMesh]) -> Candidate:
    mesh, step = mesh_of(choice.sizes), choice.step
    made = step.function.on(mesh, choice.pipeline)
    bare = Candidate(dict(choice.sizes), mesh, choice.pipeline, choice.loop, made, capacity=view(mesh).topology.hbm)
    try:
        plan = made.plan(*step.args)
    except ForbiddenMoveError as error:
        return replace(bare, problem=str(error))
    except (ArgumentError, PlacementError, TracingError):
        raise
    except MemoryLimitError as error:  # meshes of more axes may fit; the time of this plan decides their order
        plan = error.plan
    except ShardcError as error:  # other meshes may have a plan
        return replace(bare, problem=str(error))
    memory = plan.memory.peak
    return replace(bare, plan=plan, seconds=plan.seconds, memory=memory, bytes=plan.bytes_per_device, gap=plan.gap)
