"""Makes one task of a stage read and replace the state of a microbatch loop, microbatch after microbatch.

    task p: x' = f(s, x); s' = g(s, x)        task q: ... h(s)
        -->  task p: seen = copy s; x' = f(s, x); s' = g(s, x)       task q: ... h(seen)

The buffer of the state belongs to the stage, and the task overwrites it. Other tasks of the same microbatch read a copy
that is kept for the microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc import compat
from shardc.compat import Eqn, Var
from shardc.errors import PipelineError, all_offenders
from shardc.ir.eqns import copy_eqn
from shardc.ir.walk import with_atoms
from shardc.pipeline.cut.cut_loop import PlacedBody
from shardc.pipeline.schedule.action import TaskId


def keep_state(body: PlacedBody, where: str) -> PlacedBody:
    """The body in which one task reads and replaces each state, and other tasks read copies.

    Raises:
      PipelineError: a task before the one that replaces a state reads it: the next microbatch would have to wait.
    """
    states = [c for c in body.carries if c.state]
    if not states:
        return body
    eqns, front, back = list(body.eqns), list[tuple[TaskId, Eqn]](), list[tuple[TaskId, Eqn]]()
    wrong: list[str] = []
    carries = list(body.carries)
    results = [y for y, _ in body.ys]
    for c in states:
        at = c.task
        readers = [(p, e) for p, e in eqns if c.before in e.invars]
        early = [(p, e) for p, e in readers if p < at]
        if early:
            made = next(e for _, e in eqns if c.after in e.outvars)
            wrong.append(_too_early(early, at, made))
            continue
        if any(p != at for p, _ in readers):
            seen = compat.fresh_var(c.before.aval)
            front.append((at, copy_eqn(c.before, seen)))
            eqns = [(p, e if p == at else with_atoms(e, {c.before: seen})) for p, e in eqns]
        if c.after in results or any(p != at and c.after in e.invars for p, e in eqns) or _shared(c.after, body):
            after = compat.fresh_var(c.after.aval)
            back.append((at, copy_eqn(c.after, after)))
            carries[carries.index(c)] = replace(c, after=after)
    if wrong:
        raise PipelineError(
            all_offenders(
                f"{where}: state that microbatches pass on has to be read and replaced by one task of one stage", wrong
            )
        )
    return replace(body, eqns=(*front, *eqns, *back), carries=tuple(carries))


def _shared(after: Var, body: PlacedBody) -> bool:
    return sum(c.after is after for c in body.carries) > 1


def _too_early(early: Sequence[tuple[TaskId, Eqn]], at: TaskId, made: Eqn) -> str:
    first, reader = min(early, key=lambda pair: pair[0])
    return (
        f"{compat.source_line(reader)}, in the {_text(first)}, reads state that {compat.source_line(made)} "
        f"replaces in the {_text(at)}: each microbatch would wait until the previous one has reached that task. "
        "Keep state where it is used (one for each stage), or sum it over the microbatches and use it after the loop."
    )


def _text(task: TaskId) -> str:
    return f"{'forward' if task.kind == 'F' else 'backward'} of stage {task.stage}"
