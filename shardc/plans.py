"""Plans as people see them, with what they print and save. Reports are loaded when the first one is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, cast

import jax

from shardc import compat
from shardc.errors import ArgumentError, PipelineError, ShardcError, writing
from shardc.passes.estimate.flops import flops_by_type
from shardc.plan.digest import digest_of
from shardc.plan.make import DoesNotFit
from shardc.plan.plan import SpmdPlan, copied
from shardc.plan.saved_plan import record, to_json
from shardc.sbp.placement import Placement

if TYPE_CHECKING:
    from shardc.pipeline.plan import PlanView
    from shardc.plan.counterfactual import Counterfactual


class PlanFace:
    """The attributes and texts of a plan of any kind. It cannot change, so it is its own copy."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        """A plan holds its program, and JAX cannot pickle programs.

        Raises:
          ArgumentError: always.
        """
        raise ArgumentError(
            f"{self!r} cannot be pickled, as it holds the traced program; write plan.save('plan.json'), and pickle "
            "shardc.load_plan('plan.json')."
        )

    @classmethod
    def of(cls, plan: PlanView) -> Self:
        """The public form of a plan that was found."""
        return copied(plan, cls)

    @property
    def _plan(self) -> PlanView:
        return cast("PlanView", self)

    @property
    def in_placements(self) -> Any:
        """A placement for each leaf of the arguments: an attribute, and an item, for each argument."""
        tree = self._plan.request.tree
        return None if tree is None else tree.unflatten(self._plan.whole_inputs)

    @property
    def out_placements(self) -> Any:
        """A placement for each leaf of the result; None for one that is no array."""
        placements = jax.tree.unflatten(self._plan.program.out_tree, self._plan.whole_outputs)
        return jax.tree.map(lambda p: p if isinstance(p, Placement) else None, placements)  # of no array

    @cached_property
    def flops(self) -> Counter[str]:
        """Floating-point operations of one call on all devices together, by the type that they compute in: those of
        products, convolutions and the like of the program as it is written. What the plan recomputes counts once."""
        return flops_by_type(self._plan.request.program.jaxpr)

    @cached_property
    def counterfactuals(self) -> tuple[Counterfactual, ...]:
        """The placement problem of each part, to be solved again under other conditions."""
        from shardc.plan.counterfactual import Counterfactual

        return tuple(Counterfactual(part) for _, part in self._plan.parts)

    @compat.api_boundary
    def diff(self, other: PlanView, *, width: int | None = None) -> str:
        """The differences to another plan of the same function, as text: placements of arguments and results,
        collectives, time, memory. Plans of different functions are compared by paths; `width` is as in `explain`."""
        from shardc.report.diff import diff

        if not hasattr(other, "program"):
            raise ArgumentError(f"plan.diff wants a plan of step.plan(...), got {other!r}.")
        return diff(self._plan, other, width)

    @compat.api_boundary
    def explain(
        self, why: str | None = None, *, pins: bool = False, after: str | None = None, width: int | None = None
    ) -> str:
        """A report of the plan: its largest costs with what would change them, placements, collectives with their
        reason, bytes and source line, time and memory; of a pipeline also its stages, their schedule and its bubbles.

        Args:
          why: asks for one value: why it lies where it does, who makes and reads it with which boxings between, and
            what the whole plan would cost if it lay elsewhere. Any name that a report or an error prints is understood:
            the path of an argument or result (`params/blocks_0/attn/q/kernel`, `result 1`); the modules and the
            primitive of the operation that makes it (`GPT2/blocks_0/attn/q/dot_general`, in a backward pass with
            `backward/` in front). Modules are flax's and `jax.named_scope`s; without them it is the function's name
            (`loss/tanh`). The end or a part of such a name is enough, or a line (`model.py:41`); `*` matches any text.
            A name of several values explains those that move most. The placement is solved again up to three times for
            each of the first three, in a third to a half of the planning time; each stage that has it is solved for
            itself.
          pins: adds what each pin costs against leaving its values AUTO, for each stage. Solves once for each.
          after: gives the program after this pass instead, as JAX prints it, of each stage if stages are cut;
            `python -m shardc passes` lists the passes.
          width: folds tables and long lines to so many characters; None: as wide as they are.

        Raises:
          ArgumentError: `why` is the name of nothing; `after` names no pass that ran.
        """
        from shardc.report.explain import sections_of
        from shardc.report.explain_why import pins_sections, why_sections
        from shardc.report.passes import programs_after
        from shardc.report.tables import folded, report_text

        if after is not None:
            return folded(programs_after(self._plan, after), width)
        if why is not None:
            return report_text(why_sections(self.counterfactuals, why), width)
        more = pins_sections(self.counterfactuals) if pins else ()
        return report_text([*sections_of(self._plan, width), *more], width)

    def report(self, path: str | PathLike[str]) -> None:
        """Writes the plan as one HTML page that needs no network: warnings, figures, the largest costs and what would
        change them, the mesh and where each array lives, the program by module with what moves there and why, bytes and
        seconds by axis, memory over the call; of a pipeline also its schedule and timeline.

        Args:
          path: an `.html` file.

        Raises:
          ArgumentError: another ending, or jinja2 is not installed (`pip install "shardc[report]"`).
        """
        from shardc.report.page.page import page_of, write_page

        write_page(page_of(self._plan), path)

    def _repr_html_(self) -> str | None:
        from shardc.report.page.small import plan_html

        return plan_html(self._plan)


class Plan(PlanFace, SpmdPlan):
    """A program placed on a mesh, its collectives, and what it costs. Needs no devices.

    Attributes:
      program, mesh: what is placed, and on what.
      gap: an upper bound on (seconds - least seconds) / seconds. 0.0: proved optimal. None: nothing is proved, as for a
        saved plan under other costs. Where collectives overlap with computing the bound is loose: the computing alone,
        or half of the sum of both.
      unlimited: where memory decided, `.seconds` and `.peak` of the cheapest plan without the limit; else None.
      recomputed: where memory decided, the recomputed values: `.count`, `.bytes` that they would take, `.seconds`,
        `.sources`; None: nothing.
      recomputed_for_speed: the same for values of loops that are faster to recompute than to keep; `.bytes` does not
        count what is kept instead.
    """

    @cached_property
    def digest(self) -> str:
        """A digest of the program, the placement of every value and all boxings, the same in every process."""
        return digest_of([self])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON: where every value lies, and what is boxed, the same text in every process.

        `shardc.function(plan=path)` lowers it as it is, without a search; `shardc.load_plan(path)` reads it. Numbers in
        the program may change until then; its operations, shapes and mesh may not.
        """
        with writing(path):
            Path(path).write_text(to_json(record(self)), "utf-8")

    def draw(self, path: str | PathLike[str]) -> None:
        """Draws a call into an `.svg` or `.png` file: what its time goes to, and the bytes in memory, along the call.

        Raises:
          ArgumentError: another ending, or matplotlib is not installed (`pip install "shardc[report]"`).
        """
        from shardc.report.page.program_picture import draw_program

        draw_program(self, path)

    def __getattr__(self, name: str) -> NoReturn:
        no_attribute(self, name, lambda: self.program.name)

    def __repr__(self) -> str:
        from shardc.report.tables import bytes_text

        return (
            f"Plan({self.program.name} on {self.mesh}: {len(self.collectives)} collectives, "
            f"{bytes_text(self.bytes_per_device)} per device, {self.seconds:.3g} s)"
        )


_OF_PIPELINES: Final = frozenset(("measure", "timeline", "draw", "trace", "simulate", "with_schedule"))


def no_attribute(of: object, name: str, program: Callable[[], str]) -> NoReturn:
    """Raise for an attribute that a plan of one program, or what is compiled from it, does not have.

    Raises:
      PipelineError: pipelines have it.
      AttributeError: nothing has it.
    """
    if name in _OF_PIPELINES:
        raise PipelineError(
            f"{program()} is one program, no pipeline: there are no actors to show; jax.profiler.trace(...) shows what "
            "is in it."
        )
    lacks(of, name)


_OF_COMPILED: Final = frozenset(("audit", "hlo", "memory_stats", "check", "measure"))


def lacks(of: object, name: str) -> NoReturn:
    """Raise for an attribute that an object does not have, and say which of a function, its plan and what is compiled
    from it has it.

    Raises:
      AttributeError: always.
    """
    is_plan, is_function, hint = isinstance(of, PlanFace), hasattr(type(of), "compile"), ""
    if name in _OF_COMPILED and (is_plan or is_function):
        hint = f"; what is compiled has it: step.compile(...).{name}"
    elif not is_plan and not name.startswith("_") and (hasattr(Plan, name) or name in Plan.__dataclass_fields__):
        hint = f"; the plan has it: {'step.plan(...)' if is_function else 'compiled.plan'}.{name}"
    elif is_function and name in ("lower", "trace"):
        hint = "; step.plan(...) traces and plans, step.compile(...) compiles, and its .hlo() is the compiled program"
    raise AttributeError(f"{type(of).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=of)


class MemoryLimitError(ShardcError, ValueError):
    """No placement was found with which a program fits the memory of a device. Raised before anything is compiled.

    Attributes:
      plan: the cheapest plan, which takes too much.
    """

    def __init__(self, found: DoesNotFit) -> None:
        from shardc.report.refused.memory_error import memory_error_text

        super().__init__(memory_error_text(found))
        self.plan = Plan.of(found.plan)
