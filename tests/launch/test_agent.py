"""Agents: how a supervisor meets them, and what it takes from them."""

import threading
from queue import SimpleQueue

import pytest

from shardc.errors import ClusterError
from shardc.launch.agent import RemoteProcess, host_id, meet
from shardc.launch.job import Job
from shardc.runtime.cluster import Seat
from tests.runtime.watchdog import within

JOB = Job(Seat(1, 2, 2, "127.0.0.1:1", b"s" * 32, "", deadline=1.0))


@pytest.fixture
def remote():
    told, events = [], SimpleQueue()
    process = RemoteProcess(1, told.append, events)
    process.told = told
    process.events = events
    return process


def test_a_process_is_started_by_its_agent(remote):
    remote.reported({"what": "here", "host": "h"})
    remote.start(JOB)
    (start,) = remote.told
    assert (start["event"], JOB.seat.secret.hex() in start["job"]) == ("start", False)
    assert not remote.wait(0)
    remote.kill()
    remote.reported({"what": "ended", "start": 1, "code": -9, "tail": ["last"]})
    assert remote.wait(0)
    assert (remote.tail(), remote.events.get(timeout=1)) == (["last"], ("ended", 1, 1, -9))
    assert [event["event"] for event in remote.told] == ["start", "kill"]


def test_a_process_of_a_lost_agent_is_not_started_again(remote):
    remote.reported({"what": "here", "host": "h"})
    remote.lost()
    assert remote.events.get(timeout=1) == ("host lost", 1, 0)
    with pytest.raises(ClusterError, match="the launcher of its host is lost"):
        remote.start(Job(JOB.seat, 2))


def test_meeting(remote):
    events = SimpleQueue()
    with pytest.raises(ClusterError, match=r"process 1 did not come within 0\.2 s\. Process 0 waits at h:1: "):
        within(5, meet, [remote], 0.2, "h:1", events)
    threading.Timer(0.1, remote.reported, [{"what": "here", "host": "h"}]).start()
    assert within(5, meet, [remote], 5.0, "h:1", events) is True
    remote.lost()
    events.put(("interrupt",))
    assert within(5, meet, [remote], 5.0, "h:1", events) is False


def test_a_host_has_one_name():
    assert host_id() == host_id()
