"""A round: the calls that a flow's function makes, traced once, as nodes and the values between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from shardc.arrays.frozen import frozen
from shardc.dataflow.value import INSIDE, Held, LateOrigin, Made, Nothing, RoundValue
from shardc.errors import ArgumentError, FlowError, TracingError, all_offenders
from shardc.passes.trace.constants import key_of
from shardc.passes.trace.trace import is_array, path_text

if TYPE_CHECKING:
    from shardc.dataflow.work import Work

_TRACED: Final[ContextVar[Round | None]] = ContextVar("the round that is traced", default=None)


@dataclass(eq=False)
class FlowNode:
    """One call of a round.

    Attributes:
      number: in the order of calls; it tells nodes apart.
      name, function: for people, of the call and of what is called: `grad[1]` and `grad`. No other node has this name,
        and no other function of the round: a second one that is called `grad` is `grad#2`.
      work: what runs.
      given: the flat arguments: Values, arrays and constants.
      results: shape and dtype of each result leaf.
      every: it runs in every so many rounds, in the last one of each.
      source: the user's line.
    """

    number: int
    name: str
    function: str
    work: Work
    given: list[Any]
    results: Sequence[Any]
    every: int = 1
    source: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False)
class Origin:
    """The rounds of a value: in round r it is what `node` makes in round r - delay.

    Attributes:
      node, index: the node and its result leaf; node is None for a leaf of the state that never changes.
      delay: in rounds.
      first: what stands for it in the first `delay` rounds: numbers of state leaves, or arrays in a `Fixed`.
    """

    node: FlowNode | None
    index: int
    delay: int
    first: list[int | Fixed] = field(default_factory=list["int | Fixed"])


@dataclass(frozen=True, eq=False)
class Fixed:
    """An array that is known when the round is traced."""

    array: Any


class Round:
    """The nodes of one round, and what it returns.

    Attributes:
      name, where: of the flow, and with its line.
      nodes: in the order of calls. The first one gives the inputs.
      state: the arrays among the state's leaves, as the round begins.
      constants: the other leaves of the state, with their names.
      held: each state leaf as the round ends.
      outs, out_tree: what the round gives besides.
    """

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where
        self.nodes: list[FlowNode] = []
        self.state: list[RoundValue] = []
        self.constants: list[tuple[str, Any]] = []
        self.held: list[RoundValue] = []
        self.outs: list[Any] = []
        self._leaves: list[Any] = []
        """All leaves of the state: the arrays as Values, and constants."""
        self._tree: Any = None
        self.out_tree: Any = None
        self.on_end: list[Callable[[Round], None]] = []
        """What is to be done when all calls are known."""
        self._names: set[str] = set()
        self._functions: dict[tuple[str, object], str] = {}

    # -- tracing

    def trace(self, fn: Callable[..., Any], state: Any, inputs: FlowNode | None, item_tree: Any) -> None:
        """Calls the flow's function with Values.

        Args:
          fn: the function of one round.
          state: pytree of arrays, or of shapes and dtypes.
          inputs: the node that gives the item of each round; None if the function takes none.
          item_tree: the structure of the item.

        Raises:
          FlowError: what it returns is no new state with what the round gives.
        """
        pairs, self._tree = jax.tree_util.tree_flatten_with_path(state)
        for path, x in pairs:
            name = "/".join(filter(None, ("state", path_text(path))))
            if is_array(x):
                self.state.append(RoundValue(_aval(x), Held(len(self.state)), self, name))
            else:
                self.constants.append((name, x))
            self._leaves.append(self.state[-1] if is_array(x) else x)
        args = [self._tree.unflatten(self._leaves)]
        if inputs is not None:
            args.append(item_tree.unflatten(self.values_of(inputs)))
        token = _TRACED.set(self)
        try:
            given = fn(*args)
        except TypeError as error:  # of JAX, whose operations refuse a RoundValue
            if "Value(" not in str(error):
                raise
            raise TracingError(f"{self.where}: {error} {INSIDE}") from error
        finally:
            _TRACED.reset(token)
        if not (isinstance(given, tuple) and len(given) == 2):
            raise FlowError(
                f"{self.where} returned {_kind(given)}; a round returns two things, its new state and what it gives: "
                "`return state, {'loss': loss}`."
            )
        self._end(*given)
        for then in self.on_end:
            then(self)

    def _end(self, state: Any, outs: Any) -> None:
        pairs, tree = jax.tree_util.tree_flatten_with_path(state)
        if tree != self._tree:
            raise FlowError(
                f"{self.where}: the state that the round returns has another structure than the one that it takes:\n"
                f"  takes   {self._tree}\n  returns {tree}"
            )
        wrong: list[str] = []
        self.refuse_nothing("the state", [x for _, x in pairs])
        for (path, x), was in zip(pairs, self._leaves, strict=True):
            name = "/".join(filter(None, ("state", path_text(path))))
            if not isinstance(was, RoundValue):
                if isinstance(x, RoundValue) or key_of(x) != key_of(was):
                    wrong.append(f"{name} was the constant {was!r} and is {x!r}; a constant stays what it is.")
            elif not isinstance(x, RoundValue):
                wrong.append(f"{name} is {_kind(x)}; let it be a part of the state that the round takes, or a result.")
            elif (x.shape, x.dtype) != (was.shape, was.dtype):
                wrong.append(f"{name} was {was.dtype.name}{list(was.shape)} and is {x.dtype.name}{list(x.shape)}.")
            elif isinstance(x.origin, Made) and (n := self.nodes[x.origin.node]).every > 1:
                wrong.append(
                    f"{name} is made by {n}, which runs every {n.every} rounds, and has no value in the others; let it "
                    "run every round, or decide inside it."
                )
        if wrong:
            raise FlowError(all_offenders(f"{self.where}: a state that cannot be carried to the next round:", wrong))
        self.held = [x for _, x in pairs if isinstance(x, RoundValue)]
        self._check(self.held)
        outs = jax.tree.map(lambda x: None if isinstance(x, Nothing) else x, outs)
        self.outs, self.out_tree = jax.tree.flatten(outs)
        self._check([x for x in self.outs if isinstance(x, RoundValue)])

    def _check(self, values: Sequence[RoundValue]) -> None:
        for v in values:
            if v.round is not self:
                raise FlowError(
                    f"{self.where}: {v!r} is a value of another round, {v.round.where}, and is gone with it."
                )

    def _unused(self, names: Iterator[str]) -> str:
        found = next(n for n in names if n not in self._names)
        self._names.add(found)
        return found

    def refuse_nothing(self, taker: str, leaves: Sequence[Any]) -> None:
        """Raise FlowError if a call takes the result of a host function that gives nothing."""
        wrong = [f"{x.text(f'{taker} takes it')}." for x in leaves if isinstance(x, Nothing)]
        if wrong:
            raise FlowError(all_offenders(f"{self.where}: results that are not there:", wrong))

    def add(  # noqa: PLR0913  # what a call is
        self, name: str, work: Work, given: Sequence[Any], results: Sequence[Any], every: int = 1, source: str = "",
        called: object = None,
    ) -> FlowNode:  # fmt: skip
        """Add a node.

        Args:
          name: of what is called, which others may have too.
          work, given, results, every, source: as in `FlowNode`.
          called: what is called, to tell it from others of this name.

        Raises:
          FlowError: a value comes from another round, or from a node that runs in other rounds.
        """
        values = [x for x in given if isinstance(x, RoundValue)]
        self._check(values)
        known = [frozen(x) if isinstance(x, np.ndarray) else x for x in given]  # as they are now
        key = name, (type(work), _code_of(called))
        if key in self._functions:
            function = self._functions[key]
            called_as = self._unused(f"{function}[{i}]" for i in count(1))
        else:
            function = called_as = self._unused(name if i == 1 else f"{name}#{i}" for i in count(1))
            self._functions[key] = function
        node = FlowNode(len(self.nodes), called_as, function, work, known, results, every, source)
        wrong = [line for v in values for line in self._wrong_rate(node, v)]
        if wrong:
            raise FlowError(
                all_offenders(f"{self.where}: {node} ({source}) is called in rounds without its values:", wrong)
            )
        self.nodes.append(node)
        return node

    def _wrong_rate(self, node: FlowNode, v: RoundValue) -> Iterator[str]:
        delay = 0
        while isinstance(v.origin, LateOrigin):
            delay, v = delay + v.origin.rounds, v.origin.value
        if isinstance(v.origin, Made):
            giver = self.nodes[v.origin.node]
            if node.every % giver.every or delay % giver.every:
                rate = "in each round" if node.every == 1 else f"every {node.every} rounds"
                late = f", {delay} rounds late" if delay else ""
                yield (
                    f"{v.name} is there every {giver.every} rounds, and {node} runs {rate}{late}: call it in "
                    f"shardc.every({giver.every}, ...) too, and let delays be multiples of {giver.every}."
                )

    def values_of(self, node: FlowNode) -> list[RoundValue]:
        """The results of a node."""
        return [
            RoundValue(aval, Made(node.number, i), self, f"{node}/{i}" if len(node.results) > 1 else str(node))
            for i, aval in enumerate(node.results)
        ]

    def state_of(self, arrays: Sequence[Any]) -> Any:
        """The state with these arrays."""
        left = iter(arrays)
        return self._tree.unflatten([next(left) if isinstance(x, RoundValue) else x for x in self._leaves])

    # -- what it says

    def origin(self, v: RoundValue) -> Origin:
        """The node that a value comes from, and by how many rounds it is late.

        Raises:
          FlowError: state leaves that only change places.
        """
        return self._origin(v, ())

    def _origin(self, v: RoundValue, through: tuple[int, ...]) -> Origin:
        match v.origin:
            case Made(node=node, index=index):
                return Origin(self.nodes[node], index, 0)
            case Held(index=i):
                after = self.held[i]
                if isinstance(after.origin, Held) and after.origin.index == i:
                    return Origin(None, i, 0, [i])
                if i in through:
                    raise FlowError(f"{self.where}: {v.name} only changes places with other leaves of the state.")
                found = self._origin(after, (*through, i))
                if found.node is None:
                    raise FlowError(f"{self.where}: {v.name} becomes {after.name}, which never changes.")
                return Origin(found.node, found.index, found.delay + 1, [i, *found.first])
            case LateOrigin(value=value, rounds=n, first=first):
                found = self._origin(value, through)
                if found.node is None:
                    return found
                if first is None and not found.first:
                    raise FlowError(
                        f"{self.where}: shardc.late({value.name}, {n}): there is no value of {n} rounds ago in the "
                        f"first round; give it, as first={_zeros(value)}."
                    )
                begin = found.first[0] if first is None else Fixed(first)
                return Origin(found.node, found.index, found.delay + n, [begin] * n + found.first)
        raise AssertionError(v.origin)


def _code_of(called: object) -> object:
    """What functions share that one definition makes, such as a `shardc.function` for each of several meshes."""
    for inside in ("__wrapped__", "fn", "func"):
        called = getattr(called, inside, called)
    return getattr(called, "__code__", called)


def _aval(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.result_type(x) if not hasattr(x, "dtype") else x.dtype)


def aval_of(x: Any) -> Any:
    """Shape and dtype of an array, a number, or what says them already, without where it lives."""
    aval = _aval(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _zeros(v: RoundValue) -> str:
    return f"jnp.zeros({v.shape}, {v.dtype.name!r})"


def _kind(x: Any) -> str:
    if isinstance(x, RoundValue):
        return f"one value, {x.name}"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return "an array that is the same in all rounds"
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else "None" if x is None else f"a {type(x).__name__}"


def traced_round() -> Round | None:
    """The round that this thread traces; None if there is none."""
    return _TRACED.get()


def refuse_lost_modules(name: str, held: Sequence[str]) -> None:
    """Raises if a round calls a function with modules that no round hands on: what is written to them is lost.

    Args:
      name: the function and its line.
      held: the names of its arguments with modules that hold arrays, and not values of the round.

    Raises:
      ArgumentError: there are some.
    """
    if held and (round := traced_round()) is not None:
        raise ArgumentError(
            f"{round.where}: {name} is called with the module {', '.join(held)}, which is not a part of the state, and "
            "what is written to it would be lost: carry nnx.split(module)[1] in the state, and in the round make the "
            "module of it, with nnx.merge(graphdef, state); return nnx.state(module)."
        )


@contextmanager
def outside() -> Generator[None]:
    """A context in which calls are plain calls, though a round is traced."""
    token = _TRACED.set(None)
    try:
        yield
    finally:
        _TRACED.reset(token)
