"""Options of `shardc.function` and of its like for flax and equinox: read and checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from itertools import combinations
from os import PathLike
from typing import Any, Final

from jax.sharding import AbstractMesh, Mesh

from shardc import compat
from shardc.calls.openers import OpenArguments
from shardc.errors import ArgumentError, MeshError, PipelineError, all_offenders, did_you_mean
from shardc.machine.mesh import AnyMesh, MeshView, auto_mesh, meshes_along
from shardc.passes import IMBALANCE
from shardc.passes.trace.pins import is_leaf_spec, says_names
from shardc.passes.trace.trace import Arguments
from shardc.pipeline.options import Pipeline
from shardc.plan.data_parallel import DataParallel
from shardc.plan.forbid import Forbid
from shardc.plan.request import Offload
from shardc.plan.saved_plan import SavedPlan, load_plan
from shardc.sbp.placement import AUTO


class Unsaid(Enum):
    """The type of `UNSAID`."""

    UNSAID = "the default of `mesh=`"


UNSAID: Final = Unsaid.UNSAID
"""The value of `mesh=` where nobody has said one."""
GRAIN: Final = 8
"""`deterministic=True`: devices that may share a dimension, at most."""


@dataclass(frozen=True)
class Options:
    """The arguments of `shardc.function` besides the function, checked as far as they can be without it.

    The last ones are said by the name of a face: `all_constant` of equinox's, that Python's numbers are constants
    everywhere; `states` of flax's, that states of nnx are written to.
    """

    mesh: AnyMesh | Unsaid | None = UNSAID
    in_placements: Any = AUTO
    out_placements: Any = AUTO
    donate_argnames: Any = ()
    static_argnames: Any = ()
    pipeline: Pipeline | None = None
    plan: str | PathLike[str] | SavedPlan | None = None
    replicate: Any = ()
    forbid: Forbid = ()
    offload: Any = "never"
    check: Any = "never"
    deterministic: bool | int = False
    imbalance: float = IMBALANCE
    donate_argnums: Any = ()
    static_argnums: Any = ()
    all_constant: bool = False
    states: bool = False

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        if pipeline is not None and not isinstance(pipeline, Pipeline):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f'pipeline={pipeline!r} is no Pipeline; write pipeline=shardc.Pipeline(schedule="1f1b").'
            )
        if self.on_host != "never" and pipeline is not None:
            raise PipelineError(
                f"offload={self.offload!r}: the stages of a pipeline keep all values on their devices. Leave offload= "
                'out; Pipeline(recompute="full") keeps less.'
            )
        if self.check not in ("never", "first"):
            raise ArgumentError(
                f'check={self.check!r}: write "first", which holds the first call against one device, or "never".'
            )
        self._check_deterministic()
        self._check_imbalance()
        saved = self.saved
        lines = [
            f"{option}={getattr(self, option)!r}: write names, as {option}=('w',)"
            + (f", or {option.replace('names', 'nums')} for numbers." if "names" in option else ".")
            for option in ("donate_argnames", "static_argnames", "replicate")
            if not all(isinstance(n, str) for n in words(getattr(self, option)))
        ]
        if lines:
            raise ArgumentError(all_offenders("shardc.function: options that are no names", lines))
        if saved is not None and pipeline is not None:
            raise PipelineError(
                f"plan={saved.name!r}: a pipeline is always planned anew. Pin the borders that were saved, with "
                "in_placements=shardc.load_plan(...).in_placements and "
                "out_placements=shardc.load_plan(...).out_placements."
            )

    def _check_deterministic(self) -> None:
        said = f"deterministic={self.deterministic!r}"
        if type(self.deterministic) is not bool and not _is_power_of_two(self.deterministic):
            raise ArgumentError(
                f"{said}: write True, which is {GRAIN}, or the most devices that may share a dimension of a product: "
                "a power of two, as deterministic=16."
            )
        if self.deterministic and self.pipeline is not None:
            raise PipelineError(
                f"{said}: a pipeline adds up over its stages and microbatches in the order of its schedule. Leave "
                "pipeline= or deterministic= out."
            )
        if self.deterministic and isinstance(self.in_placements, DataParallel):
            raise ArgumentError(
                f"{said}: {self.in_placements} sums each gradient in an all-reduce, which adds in an order of its own. "
                'Pin the batch instead, with in_placements={"batch": {"data": S(0)}}.'
            )

    def _check_imbalance(self) -> None:
        said: Any = self.imbalance
        is_number = isinstance(said, int | float) and not isinstance(said, bool)
        if not (is_number and 1 <= said < math.inf):
            raise ArgumentError(
                f"imbalance={said!r}: write the rows of the busiest device over the mean, for which experts have room: "
                f"a number of 1 or more, as imbalance={IMBALANCE}."
            )

    @cached_property
    def saved(self) -> SavedPlan | None:
        """The plan to lower as it is."""
        return self.plan if self.plan is None or isinstance(self.plan, SavedPlan) else load_plan(self.plan)

    @property
    def on_host(self) -> Offload:
        """The values that may live in the memory of the hosts: "never", "auto", or patterns of paths of arguments."""
        said = self.offload
        if said == "never" or said == "auto":
            return said
        found = tuple(said) if isinstance(said, list | tuple) else ()
        if not found or not all(isinstance(p, str) for p in found):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f'offload={said!r}: write "never", "auto", or a list of patterns of paths, ["opt_state/*"].'
            )
        return found

    @property
    def grain(self) -> int:
        """Chunks of a dimension whose sums have a fixed order, at most; 0: no order is asked for."""
        return GRAIN if self.deterministic is True else int(self.deterministic)

    @property
    def is_one_device(self) -> bool:
        """Whether `mesh=None` is said, and no pipeline has meshes of its own."""
        return self.mesh is None and not (self.pipeline is not None and self.pipeline.meshes)

    def arguments(self, fn: Callable[..., Any]) -> OpenArguments:
        """The arguments of a function."""
        return OpenArguments(fn, self.static_argnames, self.all_constant, self.states)

    def named(self, fn: Callable[..., Any]) -> Options:
        """Options with names in tuples, among them those of the arguments of `fn` that are given by number."""
        donate = (*words(self.donate_argnames), *_names_at(self.donate_argnums, fn, "donate_argnums"))
        static = (*words(self.static_argnames), *_names_at(self.static_argnums, fn, "static_argnums"))
        return replace(
            self, donate_argnames=donate, static_argnames=static, donate_argnums=(), static_argnums=(),
            replicate=words(self.replicate), plan=self.saved,
        )  # fmt: skip

    def mesh_to_use(self, where: str) -> AnyMesh | None:
        """The mesh of a function, or the first one of its pipeline; None: one device."""
        pipeline = self.pipeline
        if (self.mesh is None or self.mesh is UNSAID) and pipeline is not None and pipeline.meshes:
            return pipeline.meshes[0]
        if self.mesh is UNSAID:
            raise MeshError(
                f"{where}: no mesh is given; write mesh=shardc.make_mesh(data=8), or mesh=None for one device."
            )
        if self.mesh is None and self.deterministic:
            raise MeshError(
                f"{where}: mesh=None runs the function as it is, and deterministic= adds in an order of its own; write "
                "a mesh of one device, as mesh=shardc.make_mesh(data=1)."
            )
        if self.mesh is None and (pipeline is not None or self.saved is not None):
            what = "pipeline" if pipeline is not None else "plan"
            raise MeshError(
                f"{where}: mesh=None is one device, and {what}= is for several; write {what}=None, or a mesh, as "
                f"mesh=shardc.make_mesh({'pipe=2, data=4' if pipeline is not None else 'data=8'})."
            )
        return self.mesh


def options_of(keywords: Mapping[str, Any], **said: Any) -> tuple[Options, dict[str, Any]]:
    """The options that keywords of `shardc.function` and the name of its face say, and the keywords that are none."""
    known = {f.name for f in fields(Options)} - said.keys()
    given = {n: v for n, v in keywords.items() if n in known}
    return Options(**given, **said), {n: v for n, v in keywords.items() if n not in known}


def checked_placements(arguments: Arguments, options: Options, view: MeshView | None) -> Any:
    """`in_placements`, with those of a strategy by argument name. Without a view, nothing is known of axes.

    Raises:
      ArgumentError: options name what is no argument.
    """
    spec = options.in_placements
    if isinstance(spec, DataParallel):
        spec = spec.placements(arguments.names, options.static_argnames, arguments.where)
    by_name = says_names(spec, arguments.names, view) if view else isinstance(spec, dict) and not is_leaf_spec(spec)
    named = list(map(str, spec)) if by_name else []
    wrong = arguments.check(options.donate_argnames, "donate_argnames")
    wrong += arguments.check(options.static_argnames, "static_argnames")
    wrong += arguments.check(named, "in_placements")
    wrong += [
        f"{what} names {n!r}, which is static: a constant lives nowhere; leave it out."
        for what, names in (("donate_argnames", options.donate_argnames), ("in_placements", named))
        for n in names
        if n in options.static_argnames
    ]
    if wrong:
        raise ArgumentError(all_offenders(f"{arguments.where}: names that do not fit", wrong))
    return spec


_OF_JIT: Final = {"in_shardings": "in_placements", "out_shardings": "out_placements"}
"""Keywords of jax.jit, and those that say the same here."""


def decorated(
    face: Callable[..., Any],
    given: Sequence[Any],
    unknown: Mapping[str, Any],
    options: Options,
    make: Callable[[Any, Options], Any],
) -> Any:
    """The result of a face such as `shardc.function`: `make(fn, options)`, or without a function a decorator.

    Raises:
      ArgumentError: something that is no function is given by position, or a keyword is unknown.
    """
    what = f"{face.__module__}.{face.__name__}".replace(".api", "")

    if len(given) > 1:
        raise ArgumentError(
            f"{what} takes the function alone by position; write the other arguments by name, as {what}(step, "
            "mesh=mesh, in_placements=...)."
        )
    known = [n for n, p in inspect.signature(face).parameters.items() if p.kind is p.KEYWORD_ONLY]
    lines = [
        f"{n}: write {_OF_JIT[n]}=, which takes PartitionSpecs and NamedShardings too." if n in _OF_JIT
        else f"{n}: it takes {', '.join(known)}.{did_you_mean(n, known)}"
        for n in unknown
    ]  # fmt: skip
    if lines:
        raise ArgumentError(all_offenders(f"{what}: keywords that it does not take", lines))

    @compat.api_boundary
    def decorate(fn: Callable[..., Any]) -> Any:
        if not callable(fn) or isinstance(fn, Mesh | AbstractMesh):  # meshes can be called
            said = fn if isinstance(fn, str) and fn.isidentifier() else "step"
            got = repr(fn) if len(repr(fn)) < 200 else f"a {type(fn).__name__}"
            raise ArgumentError(
                f"{what} wants a function, got {got}; write {what}({said}, mesh=mesh), or @{what}(mesh=mesh) above it."
            )
        made = make(fn, options)
        return fn if options.is_one_device else made

    return decorate if given[0] is None else decorate(given[0])


def _is_power_of_two(n: Any) -> bool:
    return type(n) is int and n > 1 and n & (n - 1) == 0


def words(x: Any) -> tuple[Any, ...]:
    """The values of an argument that takes one or several."""
    return tuple(x) if isinstance(x, Iterable) and not isinstance(x, str) else (x,)


def _names_at(numbers: Any, fn: Callable[..., Any], what: str) -> list[str]:
    arguments = Arguments(fn, ())
    names = arguments.names
    if strange := [i for i in words(numbers) if type(i) is not int]:
        raise ArgumentError(
            f"{arguments.where}: {what}={numbers!r}: {strange[0]!r} is no number of an argument; for names write "
            f"{what.replace('nums', 'names')}=."
        )
    wrong = [f"{what} names argument {i}." for i in words(numbers) if not -len(names) <= i < len(names)]
    if wrong:
        has = f"{arguments.where} has {len(names)} arguments, numbered from 0: {', '.join(names)}"
        raise ArgumentError(all_offenders(has, wrong))
    return [names[i] for i in words(numbers)]


def meshes_of(pipeline: Pipeline, mesh: AnyMesh, where: str) -> list[AnyMesh]:
    """The mesh of each rank of a pipeline."""
    if pipeline.meshes is None:
        return meshes_along(mesh, pipeline.axis)
    given = list(pipeline.meshes)
    strange = [f"meshes[{r}] is {m!r}" for r, m in enumerate(given) if not isinstance(m, Mesh | AbstractMesh)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if strange or not given:
        raise MeshError(
            f"{where}: Pipeline(meshes=...) wants a mesh for each rank, {'; '.join(strange) or 'got none'}; write "
            "meshes=[jax.sharding.Mesh(devices[:4], ('data',)), jax.sharding.Mesh(devices[4:6], ('data',))]."
        )
    axes = [", ".join(map(str, m.axis_names)) for m in given]
    if len(set(axes)) > 1:
        raise MeshError(
            f"{where}: the meshes of a pipeline's ranks have the same axes, of whatever size, as one placement is for "
            f"all of them; these have {'; '.join(axes)}. Add axes of size 1."
        )
    for a, b in combinations(range(len(given)), 2):
        both = _devices(given[a]) & _devices(given[b])
        if both and given[a].size + given[b].size > 2:
            raise MeshError(
                f"{where}: ranks {a} and {b} of the pipeline share {', '.join(sorted(map(str, both)))}; collectives "
                "of two ranks on one device can wait for each other for ever; give each rank devices of its own."
            )
    return [auto_mesh(m) for m in given]


def _devices(mesh: AnyMesh) -> set[Any]:
    return set(mesh.devices.flat) if isinstance(mesh, Mesh) else set()
