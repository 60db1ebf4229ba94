"""Agents: how a supervisor meets them, and what it takes from them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from shardc.errors import ClusterError
from shardc.launch import agent
from shardc.launch.agent import Agents, Post, RemoteProcess, host_id, serve
from shardc.launch.job import Job, Script
from shardc.launch.options import RunOptions
from shardc.launch.prepare import free_port
from shardc.runtime.cluster import RunConfig
from shardc.runtime.store import Store
from tests.runtime.peers import until
from tests.runtime.watchdog import within

SECRET = b"s" * 32
JOB = Job(RunConfig(1, 2, 2, "127.0.0.1:1", SECRET, "", deadline=1.0))


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
    assert (start["event"], JOB.config.secret.hex() in start["job"]) == ("start", False)
    assert not remote.wait(0)
    remote.kill()
    remote.reported({"what": "ended", "start": 1, "code": -9, "tail": ["last"]})
    assert remote.wait(0)
    assert (remote.tail(), remote.events.get(timeout=1)) == (["last"], ("host here", 1))
    assert remote.events.get(timeout=1) == ("ended", 1, 1, -9)
    assert [event["event"] for event in remote.told] == ["start", "kill"]


def test_a_process_of_a_lost_agent_is_not_started_again(remote):
    remote.reported({"what": "here", "host": "h"})
    remote.lost()
    assert [remote.events.get(timeout=1) for _ in range(2)] == [("host here", 1), ("host lost", 1, 0)]
    with pytest.raises(ClusterError, match="the launcher of its host is lost"):
        remote.start(Job(JOB.config, 2))


@pytest.mark.parametrize(
    ("given", "said", "name"),
    [("", "", "vm"), ("", "2 (vm)", "2 (vm)"), ("b", "", "b")],  # its own, by `--host 2`, by `--hosts a,b`
)
def test_hosts_of_one_name_are_told_apart(remote, given, said, name):
    remote.host_name = given
    for _ in range(2):
        remote.reported({"what": "here", "host": "vm boot net", "name": said})
        assert remote.host_name == name
    remote.reported({"what": "here", "host": "other boot net", "name": said})  # Ray takes another machine
    assert remote.host_name == (name if given or said else "other")


def test_meeting(tmp_path):
    events = SimpleQueue()
    agents = Agents(f"unix:{tmp_path / 's'}", SECRET, events)
    agents.add(RemoteProcess(1, agents.notifier(1), events))
    with pytest.raises(ClusterError, match=rf"process 1 did not come within 0\.2 s\. .* at unix:{tmp_path}"):
        within(5, agents.meet, 0.2)
    told = SimpleQueue()
    store = Store(agents.server.address, SECRET, -2, told.put)
    threading.Timer(0.1, store.report, [{"what": "here", "host": "h"}]).start()
    assert within(5, agents.meet, 5.0) is True and agents.remotes[1].host == "h"
    assert agents.remotes[1].host_name == "h"
    agents.end(3)
    assert told.get(timeout=5) == {"event": "end", "code": 3}
    store.close()
    until(lambda: not agents.remotes[1].is_here)
    while (event := events.get(timeout=5))[0] == "host here":
        pass
    assert event == ("host lost", 1, 0)
    events.put(("interrupt",))
    assert within(5, agents.meet, 5.0) is False
    agents.server.close()


@pytest.mark.parametrize(("anew", "code"), [(None, 75), (20.0, 3)])
def test_an_agent_waits_for_a_new_supervisor_if_it_is_told_to(monkeypatch, anew, code):
    """What has happened to the process of the old one is not told to the new one."""
    post = Post(f"127.0.0.1:{free_port('127.0.0.1')}", SECRET, 1)
    monkeypatch.setattr(agent, "_TRY_SECONDS", 0.2)
    theirs, events = SimpleQueue(), SimpleQueue()
    options = RunOptions(Script("none.py"), silence=2.0, host_0_deadline=anew)

    def lead():
        agents = Agents(post.address, SECRET, theirs)
        agents.add(RemoteProcess(1, agents.notifier(1), theirs))
        return agents

    with ThreadPoolExecutor(1) as pool:
        first = lead()
        end = pool.submit(serve, post, options, events)
        assert within(10, first.meet, 10.0)
        first.server.close()
        if anew is not None:
            while not theirs.empty():
                theirs.get()
            events.put(("ended", 1, 1, -9))
            second = lead()
            assert within(10, second.meet, 10.0)
            second.end(3)
        assert end.result(20) == code
    if anew is not None:
        second.server.close()
        assert "ended" not in [theirs.get()[0] for _ in range(theirs.qsize())]


def test_reports_of_processes_are_events_and_strangers_are_ignored(tmp_path):
    events = SimpleQueue()
    agents = Agents(f"unix:{tmp_path / 's'}", SECRET, events)
    process, stranger = (Store(agents.server.address, SECRET, p, lambda event: None) for p in (4, -8))
    assert stranger.report({"what": "here", "host": "h"}) and process.report({"what": "joined"})
    assert events.get(timeout=5) == ("report", 4, {"what": "joined"}) and events.empty()
    for end in (process, stranger, agents.server):
        end.close()


def test_a_host_has_one_name():
    assert host_id() == host_id()
