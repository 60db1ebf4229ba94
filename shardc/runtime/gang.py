"""Turns of several clients on shared devices: programs begin one after the other, by fair shares.

Each program is launched inside a turn, and there is one turn at a time: all devices get the programs in one order.

Stride scheduling (Waldspurger and Weihl, 1995): a program advances the virtual time of its client by its price divided
by the client's weight. Of the clients that wait, the one with the least virtual time goes next. A client that was idle
begins at the virtual time of the others, so it saves nothing up.

Anticipation (Iyer and Druschel, 2001): a client is away for a moment between two calls. If others always began a
program then, a large weight would count for little. So the next call of a client that came back at once before is
waited for: as long as its last program costs, but 1 ms at least and 5 ms at most.

In several processes, process 0 decides the order of the programs that run in more than one: it sends the others a
ticket for each, and they launch in the order of the tickets.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Final, Self

from shardc.errors import ArgumentError
from shardc.runtime.tickets import Tickets

_LEAST: Final = 1e-6
"""The least price of a program in seconds: one that costs nothing would always go next."""
_PATIENCE: Final = 1e-3, 5e-3
"""The least and the most seconds for which the next call of a client is waited for. Python may keep a thread away for 5
ms while another one computes."""
_LOG: Final = 10_000
"""The most entries of `Scheduler.log`."""


class _Thread(threading.local):
    """The state of a thread: the client whose calls it makes, and whether it is in a turn."""

    client: Client | None = None
    in_turn = False


_thread: Final = _Thread()


def calling_client() -> Client | None:
    """The client whose calls this thread makes outside of a turn; None: launches need no turn."""
    return None if _thread.in_turn else _thread.client


class Client:
    """A client of a gang; `Scheduler.client` makes it.

    Attributes:
      name: its name.
      weight: its part of the devices' time, relative to the weights of the others.
      price: seconds of each of its programs; None: told with each turn, or measured.
      programs: the number of its programs that began.
      seconds: their price in seconds.
      ran: their measured time in seconds, of those that have finished.
      passed: its virtual time.
    """

    def __init__(self, gang: Scheduler, name: str, weight: float, price: float | None) -> None:
        self.gang, self.name, self.weight, self.price = gang, name, weight, price
        self.programs = 0
        self.seconds = self.ran = self.passed = 0.0
        self.watched: deque[Turn] = deque()
        """Its programs that are not known to have finished, in their order; the last one may be in its turn."""
        self.has_watcher = False
        self.left = -math.inf
        """When its last turn ended, or its last program, if that was later."""
        self.patience = _PATIENCE[0]
        """Seconds for which its next call is waited for: the price of its last program, within limits."""
        self.returns = False
        """Whether its last call came within this time."""

    @contextmanager
    def calling(self) -> Generator[None, None, None]:
        """Make the launches of this thread wait for turns of this client; inside a turn they are part of that turn."""
        before, _thread.client = _thread.client, self
        try:
            yield
        finally:
            _thread.client = before

    def charge(self, seconds: float) -> None:
        self.seconds += seconds
        self.passed += seconds / self.weight
        self.patience = min(max(_PATIENCE[0], seconds), _PATIENCE[1])


class Turn:
    """The right to launch one program: a context manager around the launch.

    The program has finished when the block ends; after `launched`, when the function that it was given returns. A turn
    inside another one is part of that one.
    """

    def __init__(self, client: Client, seconds: float | None, members: Sequence[int]) -> None:
        self.client, self.seconds, self.members = client, seconds, members
        self.wait: Callable[[], bool] | None = None
        self.began = self.floor = 0.0
        """When the launch began, and the earliest time at which the program can have begun on the devices."""
        self._is_nested = False

    def launched(self, wait: Callable[[], bool]) -> None:
        """Let the program run on after the turn.

        Args:
          wait: waits until it has finished. Called in another thread. False: that cannot be known, as a later program
            of the client has taken its results; it then counts as finished with that one.
        """
        self.wait = wait

    def __enter__(self) -> Self:
        self._is_nested = _thread.in_turn
        if not self._is_nested:
            self.client.gang.begin(self)
            _thread.in_turn = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._is_nested:
            _thread.in_turn = False
            self.client.gang.end(self, kind is not None)


class Scheduler:
    """The turns of a gang's clients.

    Args:
      in_flight: the most programs that are launched and not finished.

    Attributes:
      clients: by name.
      log: the names of the clients whose programs began, in order; the last 10,000.

    Raises:
      ArgumentError: `in_flight` is no positive integer.
    """

    def __init__(self, in_flight: int = 2) -> None:
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"Gang: in_flight={in_flight!r}; write a number of programs, 1 or more: in_flight=2.")
        self.in_flight = in_flight
        self.clients: dict[str, Client] = {}
        self.log: deque[str] = deque(maxlen=_LOG)
        self._changed = threading.Condition()
        self._waiting: list[Turn] = []
        self._unfinished: list[Turn] = []
        """The programs that hold a place, in the order of their turns; one in its turn is the last."""
        self._launching: Turn | None = None
        self._now = 0.0
        """The virtual time of the last client that was chosen."""
        self._tickets = Tickets()
        self._ticket = ""
        """The ticket that no program has taken yet; empty if there is none."""
        self._takes_ticket = False

    def client(self, name: str, weight: float = 1, seconds: float | None = None) -> Client:
        """Add a client.

        Args:
          name: its name, the same in all processes.
          weight: its part of the devices' time, relative to the weights of the others.
          seconds: the price of each of its programs, instead of what its turns say.

        Raises:
          ArgumentError: there is a client of this name; a number is not positive.
        """
        for what, number in (("weight", weight), ("seconds", seconds)):
            if number is not None and not _is_positive(number):
                raise ArgumentError(f"Gang: {name}: {what}={number!r}; write a positive number.")
        with self._changed:
            if name in self.clients:
                raise ArgumentError(
                    f"Gang: there is a client {name!r} already; give this one a name of its own, as name='{name}_2'."
                )
            made = self.clients[name] = Client(self, name, weight, seconds)
            return made

    def turn(self, client: Client, seconds: float | None = None, members: Sequence[int] = ()) -> Turn:
        """The next turn of a client, for what `share` does not wrap: `with gang.turn(client) as turn: out = launch()`.

        The program has finished when the block ends, or, after `turn.launched(wait)`, when `wait()` returns, which
        another thread calls.

        Args:
          client: of this gang.
          seconds: the price of the program; None: what it is measured to take.
          members: the processes that run the program, if they are several; this one is among them.

        Raises, when it is entered:
          ClusterError: process 0 does not run the program, or the processes have no links.
          PeerLostError: a process died.
        """
        return Turn(client, seconds if client.price is None else client.price, members)

    # -- a turn begins

    def begin(self, turn: Turn) -> None:
        """Wait until it is this turn."""
        if len(turn.members) < 2:
            self._wait_for_share(turn)
            return
        self._tickets.check(turn.client.name, turn.members)
        if not self._tickets.are_given_here:
            self._wait_for_ticket(turn)
            return
        self._wait_for_share(turn)
        try:
            self._tickets.give(turn.client.name, turn.members)
        except BaseException:
            self.end(turn, failed=True)
            raise

    def _wait_for_share(self, turn: Turn) -> None:
        client = turn.client
        with self._changed:
            if not any(t.client is client for t in (*self._waiting, *self._unfinished)):
                client.passed = max(client.passed, self._now)
            client.returns = perf_counter() - client.left < client.patience
            self._waiting.append(turn)
            try:
                while (pause := self._pause(turn)) != 0:
                    self._changed.wait(pause)
            except BaseException:  # an interrupt: the next one may be another now
                self._changed.notify_all()
                raise
            finally:
                self._waiting.remove(turn)
            self._now = client.passed
            self._start(turn)

    def _pause(self, turn: Turn) -> float | None:
        """Seconds until a turn may begin, unless another client calls before; None: something has to change first."""
        if self._launching is not None or len(self._unfinished) >= self.in_flight:
            return None
        if turn is not min(self._waiting, key=lambda t: t.client.passed):  # of equal ones the first
            return None
        waiting = {t.client for t in self._waiting}
        until = [
            c.left + c.patience
            for c in self.clients.values()
            if c.returns and c.passed < turn.client.passed and c not in waiting
        ]
        return max(0.0, max(until, default=0.0) - perf_counter())

    def _start(self, turn: Turn) -> None:
        turn.began = turn.floor = perf_counter()
        self._launching = turn
        self._unfinished.append(turn)
        turn.client.watched.append(turn)

    def _wait_for_ticket(self, turn: Turn) -> None:
        """Wait until process 0 says that it is this turn. One of the waiting threads takes the next ticket for all."""

        def ready() -> bool:
            if not self._ticket:
                return not self._takes_ticket  # this thread takes the next one
            return self._ticket == turn.client.name and self._launching is None

        while True:
            with self._changed:
                self._changed.wait_for(ready)
                if self._ticket:
                    self._ticket = ""
                    self._start(turn)
                    self._changed.notify_all()  # another thread takes the next ticket
                    return
                self._takes_ticket = True
            ticket = ""
            try:
                ticket = self._tickets.take()
            finally:
                with self._changed:
                    self._ticket, self._takes_ticket = ticket, False
                    self._changed.notify_all()

    # -- and ends

    def end(self, turn: Turn, failed: bool) -> None:
        """End a turn. A program that failed is charged the time that its launch took, and gives its place back."""
        client = turn.client
        with self._changed:
            self._launching = None
            client.left = perf_counter()
            if failed:
                turn.seconds = client.left - turn.began
            else:
                client.programs += 1
                self.log.append(client.name)
            if turn.seconds is not None:
                client.charge(max(turn.seconds, _LEAST))
            if failed or turn.wait is None:
                client.watched.pop()
                self._finish([turn])
            starts = bool(client.watched) and not client.has_watcher
            client.has_watcher |= starts
            self._changed.notify_all()
        if starts:  # no daemon: a thread that waits for a device must not outlive the interpreter
            threading.Thread(target=self._watch, args=(client,), name=f"shardc gang: {client.name}").start()

    def _watch(self, client: Client) -> None:
        """Wait for the programs of a client, one after the other, until there are none."""
        taken: list[Turn] = []  # programs whose results later ones have taken
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not client.watched or client.watched[0] is not self._launching)
                if not client.watched:
                    client.has_watcher = False
                    self._finish(taken)
                    return
                turn = client.watched.popleft()
            assert turn.wait is not None
            taken.append(turn)
            try:
                known = turn.wait()
            except Exception:  # noqa: BLE001 - it reaches who reads the results
                known = True
            if known:
                with self._changed:
                    self._finish(taken)
                taken = []

    def _finish(self, turns: Sequence[Turn]) -> None:
        """Give back the places of programs that have finished."""
        at = perf_counter()
        for turn in turns:
            i = self._unfinished.index(turn)
            del self._unfinished[i]
            for later in self._unfinished[i:]:
                later.floor = max(later.floor, at)
            ran = at - turn.floor
            turn.client.ran += ran
            turn.client.left = at
            if turn.seconds is None:
                turn.client.charge(max(ran, _LEAST))
        self._changed.notify_all()


def _is_positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf
