"""Dataflows as people write them: `flow`, `host`, `late`, `every`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardc import compat
from shardc.api import function
from shardc.arrays.frozen import frozen
from shardc.arrays.gone import refuse_gone
from shardc.arrays.place import Place
from shardc.calls.watch import notify_called, notify_made
from shardc.dataflow.beginning import LateValues
from shardc.dataflow.chart import flow_chart
from shardc.dataflow.explain import flow_sections, flow_why_sections
from shardc.dataflow.host import Host, checked_host
from shardc.dataflow.page import flow_page
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.remote import refuse_absent
from shardc.dataflow.results import Rounds
from shardc.dataflow.round import Round, aval_of, traced_round
from shardc.dataflow.run import ENDLESS, FlowRun
from shardc.dataflow.shared import Shared
from shardc.dataflow.value import LateOrigin, RoundValue
from shardc.dataflow.work import HostWork, is_like
from shardc.errors import ArgumentError, FlowError, MeshError, all_offenders
from shardc.execute.call_cache import has_tracers
from shardc.machine.mesh import AnyMesh
from shardc.passes.trace.constants import is_foreign_array, key_of, why_no_constant
from shardc.passes.trace.trace import is_array, leaves_by_path, path_text, settings, where_of
from shardc.report.chart import Chart
from shardc.report.drawn import Drawn
from shardc.report.page.page import write_page
from shardc.report.page.small import sections_html
from shardc.report.tables import WIDTH, report_text


class FlowPlan(PlannedFlow):
    """The plan of a flow: its nodes, what moves between them, and what a round takes. Needs no devices."""

    def explain(self, why: str | None = None, *, width: int | None = None) -> str:
        """A report: nodes, what is handed over with its bytes and registers, time and memory.

        Args:
          why: asks for one value of the functions, as `explain(why=)` of their own plans does.
          width: folds to so many characters.

        Raises:
          ArgumentError: `why` is the name of nothing.
        """
        return report_text(flow_sections(self) if why is None else flow_why_sections(self, why), width)

    def timeline(self, width: int = WIDTH, *, rounds: int = 8, seconds: Mapping[str, Any] | None = None) -> str:
        """Some simulated rounds as text: a row for each actor, `width` characters to a line.

        Args:
          width: characters of a line.
          rounds, seconds: as in `simulate`.
        """
        return _Simulated(flow_chart(self, rounds, seconds)).timeline(width)

    def draw(self, path: str | Path, *, rounds: int = 8, seconds: Mapping[str, Any] | None = None) -> None:
        """Draws some simulated rounds, and how full their channels are, into an `.svg` or `.png` file.

        Args:
          path: the file.
          rounds, seconds: as in `simulate`.

        Raises:
          PipelineError: another ending, or matplotlib is not installed (`pip install "shardc[report]"`).
        """
        _Simulated(flow_chart(self, rounds, seconds)).draw(path)

    def report(self, path: str | Path, *, rounds: int = 8, seconds: Mapping[str, Any] | None = None) -> None:
        """Writes some simulated rounds, what is handed over and the functions' programs as one HTML page.

        Args:
          path: an `.html` file.
          rounds, seconds: as in `simulate`.

        Raises:
          ArgumentError: another ending, or jinja2 is not installed (`pip install "shardc[report]"`).
        """
        write_page(flow_page(self, flow_chart(self, rounds, seconds)), path)

    def _repr_html_(self) -> str | None:
        return sections_html(flow_sections(self))

    @property
    def pending(self) -> dict[str, list[jax.ShapeDtypeStruct]]:
        """Shapes of the values that a run leaves in its `.pending`: with the state, all that a later run needs to go
        on. Empty if nothing is late. For `saved.last(or_else=(state, plan.pending))`."""
        return LateValues(self.built).shapes()

    def trace(self, path: str | Path, *, rounds: int = 8, seconds: Mapping[str, Any] | None = None) -> None:
        """Writes some simulated rounds as a trace in JSON, for https://ui.perfetto.dev or chrome://tracing.

        Args:
          path: the file.
          rounds, seconds: as in `simulate`.
        """
        _Simulated(flow_chart(self, rounds, seconds)).trace(path)


class _Simulated(Drawn):
    """Simulated rounds that can be drawn."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart

    @property
    def chart(self) -> Chart:
        return self._chart


class Flow:
    """A function of one round, run for many. Made by `shardc.flow`."""

    def __init__(self, fn: Callable[..., Any], credits: int) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._credits, self.where = fn, credits, where_of(fn)
        self.name = getattr(fn, "__name__", type(fn).__name__)
        parameters = list(inspect.signature(fn).parameters.values())
        kinds = {p.kind for p in parameters}
        if len(parameters) not in (1, 2) or not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
            raise ArgumentError(
                f"shardc.flow, {self.where}: a round takes its state, and the item that each round gets: "
                f"`def {self.name}(state, item):`, not {inspect.signature(fn)}."
            )
        self._has_item = len(parameters) == 2
        self._plans: dict[Any, FlowPlan] = {}
        self._runs: dict[int, FlowRun] = {}
        notify_made(self)

    def __repr__(self) -> str:
        return f"Flow({self.where})"

    # -- plan

    @compat.api_boundary
    def plan(self, state: Any, item: Any = None) -> FlowPlan:
        """The plan of a flow. Takes arrays or `jax.ShapeDtypeStruct`s; needs no devices.

        Args:
          state: pytree of what rounds hand on.
          item: what one round gets.

        Raises:
          FlowError: a round that cannot run: a value that is used before it is made, a deadlock, too little memory.
        """
        if not self._has_item and item is not None:
            raise ArgumentError(
                f"{self.where} takes no item; give the state alone, or write `def {self.name}(state, item):`."
            )
        self._check_arrays("state", state)
        self._check_arrays("item", item)
        notify_called(self, state, item)
        return self.plan_of(state, item)

    def plan_of(self, state: Any, item: Any) -> FlowPlan:
        """The plan of a flow; the known one if state and item have the types of earlier ones."""
        key = _key(state), _key(item), settings()
        if key not in self._plans:
            self._plans[key] = self._planned(state, item)
        return self._plans[key]

    def _check_arrays(self, what: str, tree: Any) -> None:
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
        if any(isinstance(x, RoundValue) for _, x in pairs):
            raise ArgumentError(
                f"{self.where} is run in a round, where arrays do not exist yet; call it, and its nodes become a part "
                f"of that round: state, given = {self.name}(state{', item' if self._has_item else ''})."
            )
        wrong = [
            f"{'/'.join(filter(None, (what, path_text(path))))} is {x!r}{_AS_ARRAY * is_foreign_array(x)}."
            for path, x in pairs
            if not is_array(x) and (what == "item" or why_no_constant(what, path_text(path), x))
        ]
        if wrong:
            kinds = "no arrays" if what == "item" else "neither arrays nor constants"
            raise ArgumentError(all_offenders(f"{self.where}: leaves that are {kinds}:", wrong))
        if has_tracers([x for _, x in pairs]):
            raise ArgumentError(
                f"{self.where}: a flow runs programs of its own, and cannot be part of a jax.jit, jax.grad or "
                "jax.vmap; call it outside, or let the function that it calls be transformed."
            )

    def _planned(self, state: Any, item: Any) -> FlowPlan:
        round = Round(self.name, self.where)
        leaves, tree = jax.tree.flatten(item)
        source = _Inputs(self.where, [aval_of(x) for x in leaves], tree)
        node = round.add("inputs", source, [None], source.results, called=self)
        round.trace(self._fn, state, node if self._has_item else None, tree)
        return FlowPlan(round, self._credits)

    # -- runs

    @compat.interruptible
    @compat.api_boundary
    def __call__(self, state: Any, item: Any = None) -> tuple[Any, Any]:
        """One round: the new state, and what the round gave. In another flow's round it is a part of that one."""
        if traced_round() is not None:
            return self._fn(*((state, item) if self._has_item else (state,)))
        state, given = self.run(state, [item] if self._has_item else None, rounds=1)
        return state, given[0]

    @compat.interruptible
    @compat.api_boundary
    def run(
        self, state: Any, inputs: Iterable[Any] | None = None, *, rounds: int | None = None,
        pending: Mapping[str, Any] | None = None, record: bool = False,
    ) -> tuple[Any, Rounds]:  # fmt: skip
        """Run many rounds.

        Args:
          state: pytree of arrays. Where a function donates it, its buffers are taken.
          inputs: the item of each round; read ahead by as many as there are credits. NumPy arrays are copied. In
            several processes those of process 0 are read; the others give as many, or an iterator without length, of
            items of the same types.
          rounds: the most rounds; None: until the inputs or a host function have no more.
          pending: what rounds before the first one made that late values are, as `.pending` of the run before has it.
            None, or shapes as `plan.pending` has them: what the state is, or `first=` of `shardc.late`.
          record: whether to wait for every node and keep its times, for `.seconds`, `.spans` and the pictures of what
            comes back. Slower than a plain run: nothing is launched ahead.

        Returns:
          the last state, and a list of what each round gave. A node that did not run in a round has None in it.

        Raises:
          ArgumentError: the state was donated to a call or another run; or `process=` names no process of this run.
          DisagreementError: processes give another state, other pending values or another number of rounds.
          MeshError: a mesh has no devices; or this process runs none of the nodes, as another one runs all.
          RoundFailedError: a node failed; the error has the state of the last complete round.
        """
        items = None
        refuse_gone(f"{self.where}: state that is gone", _named(state))
        if self._has_item:
            if inputs is None:
                raise ArgumentError(f"{self.where} takes an item in each round; give them: run(state, inputs).")
            if not hasattr(inputs, "__iter__"):
                raise ArgumentError(
                    f"{self.where}: inputs are an item for each round, in a list or an iterator; got {inputs!r}."
                )
            try:
                iterator = iter(inputs)
                first = next(iterator)
            except StopIteration:
                return state, Rounds([], pending or {})
            plan = self.plan(state, first)
            items = _Items(self.where, first, iterator, len(inputs) if isinstance(inputs, Sized) else None)
        elif inputs is not None:
            raise ArgumentError(
                f"{self.where} takes no item; write `def {self.name}(state, item):`, or give no inputs."
            )
        else:
            plan = self.plan(state)
            if rounds is None and len(plan.built.ends) < 2:
                raise ArgumentError(f"{self.where}: nothing ends the run; say how many: run(state, rounds=1000).")
        if rounds is not None and (type(rounds) is not int or rounds < 0):
            raise ArgumentError(f"{self.where}: rounds={rounds!r} is no whole number of 0 or more.")
        if rounds == 0:
            return state, Rounds([], pending or {})
        leaves = [x for x in jax.tree.leaves(state) if is_array(x)]
        last, given = self._run_of(plan).run(leaves, items, ENDLESS if rounds is None else rounds, pending, record)
        return plan.round.state_of(last), given

    @property
    def latest(self) -> FlowRun | None:
        """The run, with its plan, that was begun last; None before the first one."""
        return next(reversed(self._runs.values()), None)

    def _run_of(self, plan: FlowPlan) -> FlowRun:
        if id(plan) not in self._runs:
            bare = [n.name for n in plan.nodes if not all(isinstance(m, Mesh) for m in n.work.meshes)]
            if bare:
                raise MeshError(
                    f"{self.where} can be planned and not run: {', '.join(bare)} is on a mesh without devices; make "
                    "the mesh without `topology=`."
                )
            refuse_absent(plan)
            self._runs[id(plan)] = FlowRun(plan)
        return self._runs[id(plan)]

    def close(self) -> None:
        """End the threads, and the processes of host functions. The next run starts them again."""
        for run in self._runs.values():
            run.close()


_AS_ARRAY: Final = ", an array of another library; pass np.asarray of it"


class _Inputs(HostWork):
    """The inputs of a run as a node: it gives the item of each round."""

    def __init__(self, where: str, results: Sequence[Any], tree: Any) -> None:
        super().__init__(self._never, None, [None], [], f"{where}: inputs", seconds=0.0)
        self.results, self.out_tree = list(results), tree
        self.gives = [Place(a) for a in results]

    @staticmethod
    def _never() -> None:
        raise AssertionError("an item is taken from the inputs")

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        items = given[0]
        return [] if items is None else items.next(self, round)


class _Items:
    """The items of one run, the first of them seen already.

    Attributes:
      count: how many there are; None if the inputs do not say it.
    """

    def __init__(self, where: str, first: Any, rest: Iterator[Any], count: int | None) -> None:
        self._where, self._first, self._rest, self.count = where, [first], rest, count

    @property
    def first(self) -> list[Any]:
        """The leaves of the first item, until it is taken."""
        return jax.tree.leaves(self._first)

    def next(self, work: _Inputs, round: int) -> list[Any]:
        item = self._first.pop() if self._first else next(self._rest)
        leaves, tree = jax.tree.flatten(item)
        refuse_gone(f"item {round}: arrays that are gone", _named(item))
        if tree != work.out_tree:
            raise FlowError(
                f"item {round} has another structure than the first one:\n  first {work.out_tree}\n  now   {tree}"
            )
        arrays = [
            x if isinstance(x, jax.Array) else frozen(x, None if hasattr(x, "dtype") else a.dtype)
            for x, a in zip(leaves, work.results, strict=True)
        ]
        wrong = [
            f"leaf {i}: {_short(x)} after {_short(a)}."
            for i, (x, a) in enumerate(zip(arrays, work.results, strict=True))
            if not is_like(x, a)
        ]
        if wrong:
            raise FlowError(all_offenders(f"item {round} differs from the first one; give all the same shapes:", wrong))
        return arrays


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(path_text(path), x) for path, x in leaves_by_path(tree)]


def _short(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}"


def _key(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(_key_of_leaf(x) for x in leaves)


def _key_of_leaf(x: Any) -> Any:
    return ((a := aval_of(x)).shape, a.dtype) if is_array(x) else key_of(x)


@compat.api_boundary
def flow(fn: Callable[..., Any] | None = None, *, credits: int = 2) -> Any:
    """Make a dataflow of a function of one round.

    The function is traced once. The calls in it are nodes: of `shardc.function`s and pipelines, each on its own mesh,
    and of `shardc.host` functions. Calls on one mesh run in the order in which they are written; calls on different
    meshes and on the host run as soon as their values are there. Between two nodes lies a channel of few
    registers: who is ahead by so many rounds waits.

    Args:
      fn: `fn(state, item)`, or `fn(state)`: gives the new state, and what the round gives besides. State and results
        are pytrees; their leaves are only handed on. Anything else is done inside a function that the round calls.
      credits: registers of each channel, beside those that a delay needs: 1: a value is made when the one before is
        used up; 2: while it is used.

    Returns:
      A `Flow`, with `.plan(state, item)`, `.run(state, inputs, rounds=)`, and itself callable for one round.

    Raises:
      ArgumentError: it takes other arguments; credits below 1.

    Examples:
      >>> import shardc, jax.numpy as jnp
      >>> add = shardc.function(lambda total, x: total + x, mesh=shardc.make_mesh(data=1))
      >>> @shardc.flow
      ... def train(total, x):
      ...     total = add(total, x)
      ...     return total, {"total": total}
      >>> total, given = train.run(jnp.zeros(()), [1.0, 2.0, 3.0])
      >>> float(total), [float(g["total"]) for g in given]
      (6.0, [1.0, 3.0, 6.0])
    """
    if type(credits) is not int or credits < 1:
        raise ArgumentError(f"shardc.flow: credits={credits!r}; a channel needs a whole number of 1 or more.")
    if fn is not None and not callable(fn):
        raise ArgumentError(f"shardc.flow wants a function of one round, got {fn!r}.")
    return functools.partial(Flow, credits=credits) if fn is None else Flow(fn, credits)


@compat.api_boundary
def host(  # noqa: PLR0913  # a public face
    fn: Callable[..., Any] | None = None, *, gives: Any = None, copies: int | None = None, where: str = "thread",
    process: int | None = None, credits: int | None = None, deadline: float | None = None,
    seconds: float | tuple[float, float] | None = None,
) -> Any:  # fmt: skip
    """Make plain Python a node of rounds: a reader, a simulator, an evaluation, a log.

    Each call in a round runs in a thread of its own, once a round, in the order of rounds. It is given NumPy arrays
    that are read-only: others read them too. What it returns is copied, unless it is read-only, so it may fill the same
    array in each round. A function that raises StopIteration ends the run after the round before, if the new state
    needs its result and nothing has changed the state in that round before.

    Args:
      fn: the function.
      gives: pytree of `jax.ShapeDtypeStruct`s (or of arrays like them): what it returns. None: nothing.
      copies: makes it a fleet: so many run beside each other, each called with its number before the arguments, and the
        results are stacked along a new first dimension.
      where: "thread"; "process": each has a process of its own, which is started again if it dies, and asked again.
        The function has to be importable there: one of a module, under `if __name__ == "__main__":` in a script.
        "ray": an actor of Ray each, placed on its cluster.
      process: of a run of several processes the one that calls it; None: that of what reads its results.
      credits: results that may lie ready: how far a reader reads ahead. None: as the flow says.
      deadline: seconds after which a call that has not returned is an error. The start of a process has two minutes. A
        process that is late shows on standard error where it is.
      seconds: of one call, for plans and simulations. A call in a thread is taken to hold Python's interpreter all the
        time, so that calls take turns, as those of pure Python do. A pair says how much of it that is:
        `seconds=(0.02, 0.005)` for a call of 20 ms that computes 5 ms in Python, and sleeps, waits for the network or
        computes in C without the interpreter for the rest. `run(..., record=True)` measures both.

    Returns:
      The function. Outside a round it runs as it is.

    Raises:
      ArgumentError: an option that does not fit.
    """
    if fn is None:
        return functools.partial(
            host,
            gives=gives,
            copies=copies,
            where=where,
            process=process,
            credits=credits,
            deadline=deadline,
            seconds=seconds,
        )
    return checked_host(fn, gives, copies, where, process, credits, deadline, seconds)


@compat.api_boundary
def shared(state: Any, *, on: AnyMesh) -> Shared:
    """A state at one place that the calls of a round change as they come, each change exactly once: a parameter server.

    Args:
      state: pytree of arrays, which are copied; of shapes and dtypes for a plan alone.
      on: the mesh that it lives on.

    Returns:
      A `Shared`: in a round, `.change(fn, *args, stale=)` and `.read(stale=)`; outside, `.value`.

    Raises:
      ArgumentError: `on` is no mesh, or the state is empty.
    """
    if not isinstance(on, Mesh | AbstractMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"shardc.shared: on={on!r} is no mesh; write on=shardc.make_mesh(data=2).")
    if not jax.tree.leaves(state):
        raise ArgumentError("shardc.shared: the state has no arrays.")

    def wrapped(fn: Callable[..., Any], *, changes: bool) -> Any:
        names = list(inspect.signature(fn).parameters)
        return function(fn, mesh=on, donate_argnames=names[:1] if changes else ())

    return Shared(state, on, wrapped)


@compat.api_boundary
def late(x: Any, rounds: int, *, first: Any = None) -> Any:
    """The values of some rounds ago: what a bound on staleness is, always the same.

    Args:
      x: pytree of values of a round.
      rounds: 0 or more. In the first rounds the values are those that the run began with.
      first: for what no state begins: the arrays that stand for it in the first rounds, a pytree like `x`.

    Returns:
      A pytree like `x`.

    Raises:
      ArgumentError: rounds below 0, or something that is no value of a round.
    """
    if type(rounds) is not int or rounds < 0:
        raise ArgumentError(f"shardc.late: {rounds!r} rounds; it takes a whole number of 0 or more.")
    leaves, tree = jax.tree.flatten(x)
    firsts = [None] * len(leaves) if first is None else jax.tree.leaves(first)
    if first is not None and jax.tree.structure(first) != tree:
        raise ArgumentError(
            f"shardc.late: first= has the structure {jax.tree.structure(first)}, the values have {tree}."
        )
    strange = [x for x in leaves if not isinstance(x, RoundValue)]
    if strange:
        raise ArgumentError(f"shardc.late is for values of a flow's round; got {strange[0]!r}.")
    unlike = [
        f"{v.name} is {_short(v)}, and first= has {_short(aval_of(f))}."
        for v, f in zip(leaves, firsts, strict=True)
        if f is not None and not is_like(aval_of(f), v)
    ]
    if unlike:
        raise ArgumentError(all_offenders("shardc.late: first= stands for values of another shape or dtype:", unlike))
    if not rounds:
        return x
    firsts = [frozen(f) if isinstance(f, np.ndarray) else f for f in firsts]  # as they are now
    made = [
        RoundValue(v.aval, LateOrigin(v, rounds, f), v.round, f"late({v.name}, {rounds})")
        for v, f in zip(leaves, firsts, strict=True)
    ]
    return tree.unflatten(made)


@compat.api_boundary
def every(rounds: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a flow calls only in every so many rounds: in the last of each so many, counted from the first
    round of a run.

    Args:
      rounds: 1 or more.
      fn: a `shardc.function` or a `shardc.host` function. Its result may be read by what runs as seldom, and be
        returned by the round, which has None in the other rounds.

    Returns:
      The function, for calls in a round.

    Raises:
      ArgumentError: rounds below 1, or another function.
    """
    if type(rounds) is not int or rounds < 1:
        raise ArgumentError(f"shardc.every: {rounds!r} rounds; it takes a whole number of 1 or more.")
    call = getattr(fn, "call_every", None)
    if isinstance(fn, Host):
        call = fn.call
    if call is None:
        raise ArgumentError(f"shardc.every wants a shardc.function or a shardc.host function, got {fn!r}.")

    def rated(*args: Any, **kwargs: Any) -> Any:
        if traced_round() is None:
            return fn(*args, **kwargs)
        return call(args, kwargs, rounds)

    return rated
