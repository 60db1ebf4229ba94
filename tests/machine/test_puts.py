"""Transfers between processes: which there are, their tickets, and their order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shardc.errors import ClusterError
from shardc.machine import puts
from shardc.machine.devices import RemoteDevice
from shardc.machine.puts import Outgoing, Puts, Ticket, carrier_between
from shardc.runtime.cluster import RunConfig
from shardc.runtime.transport.connection import Frame, FrameKind


@dataclass
class Link:
    """A link that keeps what is sent and delivered."""

    sent: list = field(default_factory=list)
    delivered: list = field(default_factory=list)

    def add(self, network, receiver):
        pass

    def send(self, frame):
        self.sent.append(frame)

    def deliver(self, frame):
        self.delivered.append(frame)


class Run:
    """A process of three in one JAX runtime."""

    def __init__(self, me):
        self.me, self.epoch = me, 0
        self.config = RunConfig(me, 3, 1, "", b"", "")
        self.links = {p: Link() for p in range(3) if p != me}

    def link(self, peer):
        return self.links[peer]


@pytest.fixture
def idle(monkeypatch):
    """Tickets are not taken by a thread."""
    monkeypatch.setattr(puts.threading, "Thread", lambda **kwargs: SimpleNamespace(start=lambda: None))


def opened(me):
    run, made = Run(me), Puts()
    made.attend(run)
    return run, made


def message(*arrays, key=0):
    return Frame(FrameKind.MESSAGE, 9, 1, 2, key, b"[]", [Outgoing(x, jax.devices()[5]) for x in arrays])


def arrays(count=2):
    devices = jax.devices()
    return [jax.device_put(np.full(3, i, np.float32), devices[i // 2]) for i in range(count)]


@pytest.mark.parametrize(
    ("asked", "backend", "carrier"),
    [("", False, "links"), ("", True, "put"), ("put", False, "put"), ("links", True, "links")],
)
def test_what_carries_values(monkeypatch, asked, backend, carrier):
    run = Run(0)
    run.config = replace(run.config, carrier=asked)
    monkeypatch.setattr(puts, "current", lambda: run)
    monkeypatch.setattr(puts, "_by_backend", lambda: backend)
    assert carrier_between(jax.devices()) == carrier
    assert carrier_between([*jax.devices(), RemoteDevice(1, 0, "gpu", "H100")]) == "links"


def test_the_first_process_gives_tickets_in_one_order(idle):
    run, made = opened(0)
    asked = Ticket(1, 2, 0, [(4, 6, [((3,), "float32")])], (9, 1, 2, 0, "[]"))
    made.receive(1, asked.to_frame(-1))
    made.send(2, message(*arrays(4)))
    tickets = [Ticket(**json.loads(f.about)) for f in run.links[1].sent]
    assert [(t.giver, t.taker, t.at, len(t.calls)) for t in tickets] == [(1, 2, 0, 1), (0, 2, 1, 2)]
    assert tickets[1].calls == [[d, 5, [[[3], "float32"]] * 2] for d in (0, 1)]
    assert run.links[1].sent == run.links[2].sent
    assert [made._tickets.get().at for _ in range(2)] == [0, 1]


def test_another_process_asks_for_a_ticket(idle):
    run, made = opened(1)
    made.send(2, message(*arrays()))
    (frame,) = run.links[0].sent
    ticket = Ticket(**json.loads(frame.about))
    assert (frame.key, ticket.giver, ticket.taker, ticket.frame) == (-1, 1, 2, [9, 1, 2, 0, "[]"])
    assert not run.links[2].sent and made._tickets.empty()


def test_what_has_come_goes_to_its_network(idle, monkeypatch):
    run, made = opened(2)
    monkeypatch.setattr(puts, "_put_onto", lambda *_: lambda xs: [("put", x.shape) for x in xs])
    monkeypatch.setattr(puts, "_absent", lambda device, shape, dtype: np.zeros(shape, dtype))
    made._issue(Ticket(0, 1, 0, [(0, 5, [((3,), "float32")])], (9, 1, 2, 0, "[]"), 0))  # others' values: counted
    made._issue(Ticket(1, 2, 0, [(0, 5, [((3,), "float32"), ((2, 2), "bool")])], (9, 1, 2, 4, "[]"), 1))
    assert made.made == 2 and not run.links[0].delivered
    (frame,) = run.links[1].delivered
    assert frame == Frame(FrameKind.MESSAGE, 9, 1, 2, 4, b"[]", [("put", (3,)), ("put", (2, 2))])


def test_a_transfer_that_would_be_taken_for_another_stops_the_run(idle, caplog):
    run, made = opened(2)
    ticket = Ticket(1, 2, 0, [(0, 5, [((3,), "float32")])], (9, 1, 2, 4, "[]"), 3)
    with pytest.raises(ClusterError, match="made 0 transfers in this process, and 3 come before this one") as raised:
        made._issue(ticket)
    made._fail(ticket, raised.value)
    (frame,) = run.links[1].delivered
    assert (frame.kind, frame.network, frame.run) == (FrameKind.STOP, 9, 1)
    assert json.loads(frame.about)["process"] == 2
    made._fail(replace(ticket, taker=0), raised.value)
    assert len(run.links[1].delivered) == 1
