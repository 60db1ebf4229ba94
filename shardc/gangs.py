"""`shardc.Gang`: several functions, pipelines and callables take turns on the same devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from shardc import compat
from shardc.errors import ArgumentError, ClusterError, number_text
from shardc.execute.in_turn import wait_for
from shardc.machine.devices import processes_of
from shardc.machine.launch_order import all_ordered_devices, in_launch_order
from shardc.report.tables import Section, percent_text, report_text, seconds_text
from shardc.runtime.calls import processes_text
from shardc.runtime.gang import Client, Scheduler


class SharedCallable:
    """A callable whose programs take turns. Made by `Gang.share`, and called like the callable.

    Attributes:
      client: its name, weight, and what it had so far: `programs`, `seconds`.
    """

    def __init__(self, fn: Callable[..., Any], client: Client) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn: Any = fn
        self.client = client

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self._fn, "plan"):  # each of its programs takes a turn as it is launched, once it is compiled
            with self.client.calling():
                return self._fn(*args, **kwargs)
        members = _processes_of((args, kwargs))
        with self.client.gang.turn(self.client, members=members) as turn:
            out = in_launch_order(all_ordered_devices(), lambda: self._fn(*args, **kwargs))
            turn.launched(functools.partial(wait_for, out))
        if len(ran := _processes_of(out)) > len(members):
            raise ClusterError(
                f"Gang: {self.client.name} has run in {processes_text(ran)}, which its arguments do not say, so its "
                "turns have no order there. Put its arguments on the mesh before the call (shardc.put), or share a "
                "shardc.function."
            )
        return out

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a flow: each of its programs takes a turn. As the flow's own `run`."""
        with self.client.calling():
            return self._fn.run(*args, **kwargs)

    @property
    def plan(self) -> Any:
        """The callable's own `plan`: of a function, the method that plans a call."""
        return self._fn.plan

    @property
    def latest(self) -> Any:
        """The callable's own `latest`, with the plan of its last call, for `shardc.progress`."""
        return getattr(self._fn, "latest", None)

    def __repr__(self) -> str:
        return f"SharedCallable({self.client.name}, weight={self.client.weight:g})"


class Gang(Scheduler):
    """Clients whose programs begin in one order on all devices, and which share the time of the devices by weight.

    The client that has had least of its share goes next (stride scheduling). A client that is idle saves nothing up;
    one that stops calling holds nobody up. A client that waits for each result before its next call is not there when
    the next program is chosen: it reads results one call later, or `in_flight` is 1. Planning and compiling take no
    turn. Inside another transformation, and inside another turn, a call takes no turn of its own.

    In several processes each makes the same calls of each client, from as many threads. Process 0 decides the order of
    the programs that run in several processes, so it has to run each of them; programs of one process wait for no other
    process. Nothing else that all processes run, such as `fetch` of an array that lies in several, may run beside a
    gang's threads, unless it is shared too. On CPUs of several processes, programs of different clients do not run at
    the same time, whatever `in_flight` is.

    Args:
      in_flight: the most programs that are launched and not finished, on all meshes together. 1: a program begins when
        the one before it has finished. 2: the devices find the next one in their queue.

    Attributes:
      clients: by name.
      log: the names of the clients whose programs began, in order; the last 10,000.

    Raises:
      ArgumentError: `in_flight` is no positive integer.

    Examples:
      >>> import shardc
      >>> gang = shardc.Gang(in_flight=2)
      >>> step = shardc.function(lambda x: x + 1, mesh=shardc.make_mesh(data=1))
      >>> train = gang.share(step, weight=3, name="train")
      >>> float(train(1.0)), list(gang.log)
      (2.0, ['train'])
    """

    @compat.api_boundary
    def share(
        self, fn: Callable[..., Any], weight: float = 1, *, name: str | None = None, seconds: float | None = None
    ) -> SharedCallable:
        """Make a callable a client of the gang.

        Each client is called from a thread of its own. A call returns as soon as its program is launched. A client gets
        its share if its next call waits before its last program has finished; so read results one call later.

        Args:
          fn: a `shardc.function`, a pipeline, a flow, what `compile` gives, or a callable without a plan, as of
            `jax.jit`: a call of it is one program.
          weight: its part of the devices' time, relative to the weights of the others.
          name: its name in the log and in errors; by default that of `fn`.
          seconds: the price of one of its programs. By default the seconds of the plan that the call uses; without a
            plan, the seconds that the program is measured to take, compilation included.

        Raises:
          ArgumentError: `fn` cannot be called; `weight` or `seconds` is not positive; the name is taken.
        """
        if not callable(fn) or isinstance(fn, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"Gang.share wants a callable, as a shardc.function; got {fn!r}.")
        if isinstance(fn, SharedCallable) and fn.client.gang is self:
            raise ArgumentError(f"Gang.share: {fn.client.name} is a client of this gang already.")
        return SharedCallable(fn, self.client(_name_of(fn) if name is None else name, weight, seconds))

    def __repr__(self) -> str:
        clients = ", ".join(f"{c.name} (weight {c.weight:g})" for c in self.clients.values())
        return f"Gang({clients or 'no clients'}, in_flight={self.in_flight})"

    def explain(self) -> str:
        """A table of the clients: weight, programs that began, their seconds by price and as measured, and the shares
        of the priced seconds that they wanted and had."""
        clients = list(self.clients.values())
        weights, total = sum(c.weight for c in clients), sum(c.seconds for c in clients)
        rows = [
            (
                c.name, f"{c.weight:g}", str(c.programs), seconds_text(c.seconds), seconds_text(c.ran),
                percent_text(c.weight / weights), percent_text(c.seconds / total) if total else "-",
            )
            for c in clients
        ]  # fmt: skip
        title = (
            f"Gang: {number_text(len(clients), 'client')}, at most {number_text(self.in_flight, 'program')} in flight"
        )
        columns = ("client", ">weight", ">programs", ">priced", ">measured", ">share wanted", ">had")
        return report_text([Section(title, columns, rows)])


def _processes_of(tree: Any) -> list[int]:
    """The processes that hold pieces of a tree's arrays, if an array has pieces in other processes; else none."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, compat.Tracer)]
    return processes_of({d for x in leaves if not x.is_fully_addressable for d in x.sharding.device_set})


def _name_of(fn: Callable[..., Any]) -> str:
    """The name of a function, of a method, or of the program that was compiled."""
    program = getattr(getattr(fn, "plan", None), "program", None)
    return str(getattr(getattr(fn, "__func__", fn), "__name__", "") or getattr(program, "name", type(fn).__name__))
