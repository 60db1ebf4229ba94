"""`shardc.host`: plain Python as a node of a round: a reader, a simulator, an evaluation."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import jax
import numpy as np

from shardc import compat
from shardc.arrays.frozen import read_only
from shardc.dataflow.round import Round, aval_of, traced_round
from shardc.dataflow.value import Nothing, RoundValue
from shardc.dataflow.work import HostWork, seconds_of_call, stacked_gives
from shardc.errors import ArgumentError, FlowError
from shardc.passes.trace.trace import where_of

WHERE: Final = ("thread", "process", "ray")


class Host:
    """A function of Python as a node of rounds; made by `shardc.host`. Outside a round it is the function itself."""

    def __init__(  # noqa: PLR0913  # the options of a public face
        self, fn: Callable[..., Any], gives: Any, copies: int | None, where: str, process: int | None,
        credits: int | None, deadline: float | None, seconds: float | tuple[float, float] | None,
    ) -> None:  # fmt: skip
        self.fn, self.copies, self.where, self.process = fn, copies, where, process
        self.gives = jax.tree.map(aval_of, gives)
        self.credits, self.deadline = credits, deadline
        self.seconds = None if seconds is None else seconds_of_call(seconds)
        self.name = getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)
        self.__name__ = self.name

    def __repr__(self) -> str:
        copies = "" if self.copies is None else f", copies={self.copies}"
        return f"Host({where_of(self.fn)}{copies}, where={self.where!r})"

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(args, kwargs, 1)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], every: int) -> Any:
        """A call, every so many rounds."""
        round = traced_round()
        if round is None:
            return self.fn(*args, **kwargs)
        source = compat.users_line()
        self._refuse_call(round, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        round.refuse_nothing(self.name, leaves)
        if self.copies is None:
            work = self._work(self.fn, tree, leaves)
            made = round.values_of(round.add(self.name, work, leaves, work.results, every, source, self))
            return Nothing(self.name, round) if self.gives is None else work.out_tree.unflatten(made)
        made: list[Any] = []
        for copy in range(self.copies):
            work = self._work(partial(self.fn, copy), tree, leaves)
            made += round.values_of(round.add(self.name, work, leaves, work.results, every, source, self))
        if self.gives is None:
            return Nothing(self.name, round)
        count = len(jax.tree.leaves(self.gives))
        one_by_one = jax.tree.structure((tuple(made), {}))
        stack = StackWork(
            partial(_stacked, count), one_by_one, _avals(made),
            tuple(jax.tree.leaves(stacked_gives(self.gives, self.copies))),
            f"{self.name} together", seconds=0.0,
        )  # fmt: skip
        leaves = round.values_of(round.add(stack.name, stack, made, stack.results, every, source, self))
        return jax.tree.unflatten(jax.tree.structure(self.gives), leaves)

    def _refuse_call(self, round: Round, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ArgumentError for arguments that the function does not take."""
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):  # of C
            return
        number = () if self.copies is None else (0,)
        try:
            signature.bind(*number, *args, **kwargs)
        except TypeError as error:
            first = "" if self.copies is None else "; with copies= the first argument is the number of the copy"
            raise ArgumentError(
                f"{round.where} calls {where_of(self.fn)}, which takes {signature}: {error}{first}."
            ) from None

    def _work(self, call: Callable[..., Any], tree: Any, leaves: Sequence[Any]) -> HostWork:
        keywords: Any = {
            "credits": self.credits, "seconds": self.seconds, "process": self.process, "where": self.where
        }  # fmt: skip
        if self.where == "thread" and self.deadline is None:
            return HostWork(call, tree, _avals(leaves), self.gives, self.name, **keywords)
        make = {"thread": _CallThread, "process": _Process, "ray": _RayActor}[self.where]
        return _ElsewhereWork(make, call, self.deadline, tree, _avals(leaves), self.gives, self.name, **keywords)


def _avals(leaves: Sequence[Any]) -> list[Any]:
    """The types of the leaves that rounds make."""
    return [x.aval if isinstance(x, RoundValue) else None for x in leaves]


def _stacked(count: int, *made: Any) -> Any:
    """Results of `count` leaves each, stacked leaf by leaf."""
    return tuple(_stack(made[i::count]) for i in range(count)) if count else ()


def _stack(made: Sequence[Any]) -> Any:
    whole = np.stack(made)
    whole.flags.writeable = False  # nobody else has it: no copy is needed
    return whole


class StackWork(HostWork):
    """The results of a fleet, put together."""


class _ElsewhereWork(HostWork):
    """Python that runs in a thread or a process of its own, started again if it is lost."""

    def __init__(
        self,
        make: type[_Helper],
        call: Callable[..., Any],
        deadline: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(call, *args, **kwargs)
        self._make, self._deadline = make, deadline
        self._helper: _Helper | None = None
        self.restarts = 0
        """How often it was started again."""

    def end(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def run(self, given: list[Any], round: int) -> list[Any]:
        args, kwargs = self._tree.unflatten(given)
        lost = 0
        while True:
            helper = self._helper
            if helper is None:
                helper = self._helper = self._make(self._call, self.name)
            answer = helper.ask((args, kwargs), self._deadline)
            if answer is not None:
                made, error = answer
                if error is not None:
                    raise error
                return self.checked(made, round)
            alive = helper.alive
            self.end()
            if alive:
                raise FlowError(f"{self.name} {helper.late}, in round {round}.")
            lost += 1
            self.restarts += 1
            if lost == _TRIES:
                raise FlowError(f"{self.name}: its process has died {_TRIES} times in round {round}: {helper.death}.")


_LATE: Final = "has not returned within its deadline of {:g} s"
START: Final = 120.0
"""Seconds that the process of a function with a deadline has to start: it imports JAX, and the function's module."""
_SHOWING: Final = 0.5
"""Seconds beyond a deadline in which a process shows what its threads do."""
_TRIES: Final = 3
"""So often a call is made again whose process dies."""


class _Helper(Protocol):
    """The caller of a function elsewhere.

    Attributes:
      alive: whether it can be asked again.
      death: how it ended.
      late: what has not come in time.
    """

    late: str

    def __init__(self, call: Callable[..., Any], name: str) -> None: ...
    @property
    def alive(self) -> bool: ...
    @property
    def death(self) -> str: ...
    def ask(self, given: Any, deadline: float | None) -> tuple[Any, BaseException | None] | None:
        """The result, or the error that the function raised; None if none came in time, or if it is lost."""
        ...

    def close(self) -> None: ...


class _CallThread:
    """A thread that calls a function. One that never returns is left alone."""

    alive = True
    death = late = ""

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_serve, args=(call, self._asked, self._answers), name=name, daemon=True).start()

    def ask(self, given: Any, deadline: float | None) -> tuple[Any, BaseException | None] | None:
        self._asked.put(given)
        try:
            return self._answers.get(timeout=deadline)
        except Empty:
            self.late = _LATE.format(deadline)
            return None

    def close(self) -> None:
        self._asked.put(None)


def _serve(call: Callable[..., Any], asked: SimpleQueue[Any], answers: SimpleQueue[Any]) -> None:
    while (given := asked.get()) is not None:
        answers.put(_answer(call, given))


def _answer(call: Callable[..., Any], given: Any) -> tuple[Any, BaseException | None]:
    try:
        args, kwargs = jax.tree.map(read_only, given)  # in a process of its own as in this one
        return call(*args, **kwargs), None
    except BaseException as error:  # noqa: BLE001 - it is raised where the answer is read
        return None, error


class _Process:
    """A process that calls a function, which pickle must be able to find by name."""

    late = ""

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        try:
            pickled = bytes(ForkingPickler.dumps(call))  # it is unpickled when the process can show what it does
            self._process = context.Process(target=_serve_process, args=(there, pickled, START), name=name, daemon=True)
            self._process.start()
        except Exception as error:
            raise FlowError(
                f"{name} cannot be sent to a process of its own: {type(error).__name__}: {error}. Let it be a function "
                'of a module, or write where="thread".'
            ) from error
        there.close()
        self._is_ready = False
        # at its end Python asks children to end, and waits for them; one that is stopped never does
        self._killer = Finalize(self, self._process.kill, exitpriority=0)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def death(self) -> str:
        return f"exit status {self._process.exitcode}"

    def ask(self, given: Any, deadline: float | None) -> tuple[Any, BaseException | None] | None:
        try:
            if not self._is_ready:  # a deadline is for a call, not for the start
                self.late = f"has no process yet: it has not started within {START:g} s"
                if deadline is not None and not self._here.poll(START + _SHOWING):
                    return None
                self._here.recv()
                self._is_ready = True
            self._here.send((given, deadline))
            if self._here.poll(None if deadline is None else deadline + _SHOWING):
                return self._here.recv()
            self.late = _LATE.format(deadline)
        except (EOFError, OSError):
            self._process.join()
        return None

    def close(self) -> None:
        self._killer()
        self._process.join()
        self._here.close()


class _RayActor:
    """An actor of Ray that calls a function. Ray finds it a place on its cluster, and takes values there and back."""

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise FlowError(f"{name}: where=\"ray\": Ray is not installed; pip install 'shardc[ray]'.") from error
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0)(_RayCallee).remote(call)
        self.alive = True
        self.death = self.late = ""

    def ask(self, given: Any, deadline: float | None) -> tuple[Any, BaseException | None] | None:
        asked = self._actor.ask.remote(given)
        try:
            return self._ray.get(asked, timeout=deadline)
        except self._ray.exceptions.GetTimeoutError:
            self.late = _LATE.format(deadline)
            return None
        except self._ray.exceptions.RayActorError as error:
            self.alive, self.death = False, str(error).partition("\n")[0]
            return None

    def close(self) -> None:
        self._ray.kill(self._actor)


class _RayCallee:
    """The body of an actor of Ray."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def ask(self, given: Any) -> tuple[Any, BaseException | None]:
        made, error = _answer(self._call, given)
        return jax.tree.map(np.asarray, made), error


def _serve_process(there: Connection, pickled: bytes, start: float) -> None:
    """The body of a simulator's process. It computes on the CPU: the devices are the flow's. If it is late, it shows
    what its threads do."""
    jax.config.update("jax_platforms", "cpu")
    with _shown_after(start):
        call = pickle.loads(pickled)
    there.send(None)
    while True:
        try:
            given, deadline = there.recv()
        except EOFError:
            return
        with _shown_after(deadline):
            made, error = _answer(call, given)
        try:
            there.send((jax.tree.map(np.asarray, made), error))
        except Exception as failed:  # noqa: BLE001 - an error that pickle cannot take is told as text
            there.send((None, FlowError(f"{type(error or failed).__name__}: {error or failed}")))


@contextmanager
def _shown_after(seconds: float | None) -> Generator[None]:
    """A context that shows on standard error where the threads of this process are, if it takes longer."""
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _is_number(x: object) -> bool:
    return isinstance(x, int | float)


def checked_host(  # noqa: PLR0913  # the options of a public face
    fn: Callable[..., Any], gives: Any, copies: int | None, where: str, process: int | None, credits: int | None,
    deadline: float | None, seconds: float | tuple[float, float] | None,
) -> Host:  # fmt: skip
    """A host function, its options checked."""
    said = where_of(fn) if callable(fn) else repr(fn)
    wrong: list[str] = []
    if not callable(fn):
        wrong.append(f"{fn!r} is no function")
    if copies is not None and (type(copies) is not int or copies < 1):
        wrong.append(f"copies={copies!r} is no whole number of 1 or more")
    if where not in WHERE:
        wrong.append(f"where={where!r} is none of {', '.join(map(repr, WHERE))}")
    if process is not None and (type(process) is not int or process < 0):
        wrong.append(f"process={process!r} is no number of a process")
    if credits is not None and (type(credits) is not int or credits < 1):
        wrong.append(f"credits={credits!r} is no whole number of 1 or more")
    if deadline is not None and not (_is_number(deadline) and deadline > 0):
        wrong.append(f"deadline={deadline!r} is no number of seconds above 0")
    pair = seconds if isinstance(seconds, tuple) else (seconds or 0, 0)
    if not (len(pair) == 2 and all(map(_is_number, pair)) and 0 <= pair[1] <= pair[0]):
        wrong.append(
            f"seconds={seconds!r} is neither seconds of a call nor (seconds of a call, those of them in Python)"
        )
    wrong += [
        f"gives= has {x!r}, which has no shape and dtype; write jax.ShapeDtypeStruct(shape, dtype)"
        for x in jax.tree.leaves(gives)
        if not (hasattr(x, "shape") and hasattr(x, "dtype"))
    ]
    if wrong:
        raise ArgumentError(f"shardc.host, {said}: {'; '.join(wrong)}.")
    return Host(fn, gives, copies, where, process, credits, deadline, seconds)
