"""The supervisor with processes that are threads: losses and restarts in any order, without the cost of processes."""

import itertools
import json
import random
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue

import pytest

from shardc.arrays.buffers import allocate
from shardc.errors import ClusterError, DisagreementError, PeerLostError, RunEnds
from shardc.launch import failure as failure_module
from shardc.launch.activity import COMPUTES, STOPPED
from shardc.launch.agent import RemoteProcess
from shardc.launch.child import report_of
from shardc.launch.failure import Failure
from shardc.launch.job import Job
from shardc.launch.output import Screen
from shardc.launch.supervisor import Supervisor
from shardc.runtime.cluster import Cluster, RunConfig
from shardc.runtime.store import Store, StoreServer
from tests.runtime.peers import others, until
from tests.runtime.watchdog import within

SECRET = b"s" * 32
# The thread of a dead process may open a connection before it ends; a dead process does not.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class FakeProcess:
    """A process that is a thread with a Cluster. Its death closes its sockets, whose errors end the thread."""

    def __init__(self, number, script, events):
        self.number, self.script, self.events = number, script, events
        self.alive = None
        self.does = ""
        self.cluster = None
        self.threads = []
        self.changed = threading.RLock()
        self.is_here = True

    def start(self, job):
        self.alive = job
        thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, job):
        with self.changed:
            if self.alive is not job:
                return
            self.cluster = cluster = Cluster(job.config, allocate)
            cluster.on_orphaned = lambda: None
        code = 0
        try:
            cluster.store.report({"what": "joined", "start": job.start})
            cluster.adopt()
            saved = None
            try:
                self.script(cluster)
            except RunEnds as end:
                saved = end.step
            cluster.store.report({"what": "done", "start": job.start, "calls": cluster.calls(), "saved": saved})
            cluster.wait_to_leave()
        except BaseException as error:  # noqa: BLE001 - reported, as by a child
            text, code = f"{type(error).__name__}: {error}\n", getattr(error, "code", 1)
            with suppress(ClusterError):  # it is dead
                cluster.store.report({**report_of(error, text, code), "start": job.start}, 5.0)
        self.end(job, code)

    def end(self, job, code):
        with self.changed:
            if self.alive is not job:
                return
            self.alive, cluster, self.cluster = None, self.cluster, None
            if cluster is not None:
                cluster.store.close()  # first, so that nobody hears what its thread says of its end
                cluster._hear({"event": "over", "why": "it is dead"})
                cluster.close()
            self.events.put(("ended", self.number, job.start, code))

    def kill(self, why=""):
        if (job := self.alive) is not None:
            self.end(job, -9)

    interrupt = kill

    def wait(self, seconds):
        return True

    def replace(self):
        pass

    def tail(self):
        return []

    def activity(self):
        return self.does


class Run:
    def __init__(self, tmp_path, script, processes=2, islands=1, restarts=0, **config):
        self.events = SimpleQueue()
        self.server = StoreServer(
            f"unix:{tmp_path}/s", SECRET, on_report=lambda p, said: self.events.put(("report", p, said))
        )
        numbers = itertools.count()
        first = RunConfig(
            0, processes, islands, self.server.address, SECRET, "", 0, restarts, **{"deadline": 20.0, **config}
        )

        def job_of(job, place):
            return replace(job, config=replace(job.config, links=f"unix:{tmp_path}/{next(numbers)}"))

        self.processes = [FakeProcess(p, script, self.events) for p in range(processes)]
        self.supervisor = Supervisor(Job(first), self.processes, Screen(), job_of, self.server, self.events)

    def put_when_joined(self, *events, ready=lambda: True, pause=0.3):
        """Put the events, in this order, once all processes have joined and are ready, with a pause before each."""

        def put():
            until(lambda: (members := self.supervisor._members) and all(m.joined for m in members) and ready(), 20.0)
            for event in events:
                time.sleep(pause)
                self.events.put(event)

        threading.Thread(target=put, daemon=True).start()

    def __call__(self, seconds=30):
        try:
            return within(seconds, self.supervisor.run)
        finally:
            for process in self.processes:
                process.kill()
            self.server.close()
            for thread in (t for p in self.processes for t in p.threads):
                thread.join(10)
                assert not thread.is_alive(), "a process does not end"


def work(rejoins, steps=12):
    """A script: meets all others, and writes to its neighbours, again and again."""

    def script(cluster):
        while True:
            try:
                for i in range(steps):
                    assert cluster.gather("step", f"{i}") == [f"{i}"] * cluster.processes
                    for p in others(cluster):
                        cluster.link(p).send_tagged(f"{i}")
                    for p in others(cluster):
                        cluster.link(p).receive_tagged(f"{i}", 20.0)
                    time.sleep(0.003)
                return
            except PeerLostError:
                if not rejoins or (cluster.me % 2 and rejoins == "some"):
                    raise
                cluster.rejoin()

    return script


@pytest.mark.sampled(by=lambda processes, islands, rejoins: {(processes, islands), rejoins})
@pytest.mark.parametrize("rejoins", [True, False, "some"])
@pytest.mark.parametrize(("processes", "islands"), [(1, 1), (2, 1), (3, 3), (4, 2)])
def test_kills_at_random_times(tmp_path, capfd, processes, islands, rejoins):
    """Whatever is killed whenever, all scripts end well."""
    chance = random.Random(f"{processes} {islands} {rejoins}")
    for turn in range(3):
        folder = tmp_path / f"{turn}"
        folder.mkdir()
        kills = 4
        steps = 12 if turn else 200  # the first run outlives the kills
        run = Run(folder, work(rejoins, steps), processes, islands, 2 * kills)  # what a kill brings down may count too

        def kill(run=run, kills=kills):
            for _ in range(kills):
                time.sleep(chance.choice([0.0, 0.002, 0.01, 0.05, 0.2]))
                run.processes[chance.randrange(processes)].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        assert run() == 0 or run.supervisor._leaving  # killed after all scripts had ended well
        killer.join()
    assert "started again" in capfd.readouterr().err


def test_more_kills_than_restarts(tmp_path, capfd):
    run = Run(tmp_path, work(True, 10**6), 3, 3, 2)

    def kill():
        for p in (0, 1, 2):
            time.sleep(1.0)  # losses at the same time are mended by one restart
            run.processes[p].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert run() == 137
    killer.join()
    lines = capfd.readouterr().err.splitlines()
    assert lines[:3] == [
        "process 0 is lost (killed by SIGKILL); started again, 1 restart is left",
        "process 1 is lost (killed by SIGKILL); started again, 0 restarts are left",
        "process 2 is lost: killed by SIGKILL.",
    ]
    assert sorted(line.partition("| ")[0] for line in lines[3:]) == ["process 0", "process 1"]  # one line for each


def test_a_process_that_has_ended_is_started_again_with_a_lost_one(tmp_path, capfd):
    """Its partner could not go on without it."""
    starts = []

    def script(cluster):
        starts.append((cluster.me, cluster.epoch))
        cluster.gather("all", "")
        if cluster.me == 1 and cluster.epoch == 0:
            time.sleep(0.3)  # process 0 has ended
            raise OSError("no disk")

    assert Run(tmp_path, script, 2, 2, 1)() == 0
    assert sorted(starts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    err = capfd.readouterr().err
    assert err.endswith("process 1 is lost (OSError: no disk); started again, 0 restarts are left\n")
    assert "process 1| OSError: no disk\n" in err


def test_a_process_that_ends_after_a_restart_without_noticing_it_is_started_again(tmp_path, capfd):
    """It is past its last agreement when another one is lost: the one that is started again waits for it."""
    starts = []

    def script(cluster):
        starts.append((cluster.me, cluster.epoch))
        cluster.gather("all", "")
        if cluster.epoch == 0:
            if cluster.me == 1:
                raise OSError("no disk")
            until(lambda: cluster._next)

    assert Run(tmp_path, script, 2, 2, 1)() == 0
    assert sorted(starts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert capfd.readouterr().err.count("started again") == 1


def test_a_failure_that_no_other_caused_is_a_loss(tmp_path, capfd):
    """A link that breaks between two processes that live."""
    tries = itertools.count()

    def script(cluster):
        if cluster.me == 0 and next(tries) == 0:
            raise PeerLostError("process 1 is lost: the line is cut.", 1)
        cluster.gather("all", "")

    assert Run(tmp_path, script, 2, 2, 1)() == 0
    assert "process 0 is lost (PeerLostError: process 1 is lost: the line is cut.); started" in capfd.readouterr().err


def test_sys_exit_is_no_loss(tmp_path, capfd):
    def script(cluster):
        cluster.gather("all", "")
        if cluster.me:
            raise SystemExit(7)
        cluster.gather("never", "")

    assert Run(tmp_path, script, 2, 2, 5)() == 7
    assert "started again" not in capfd.readouterr().err


@pytest.mark.sampled(0)
def test_a_process_that_never_comes_is_named(tmp_path, capfd):
    run = Run(tmp_path, work(True), 3, 1, 0, deadline=1.0, judging=20.0)
    run.processes[1].start = lambda job: setattr(run.processes[1], "alive", job)
    assert run() == 75
    assert "process 1 is lost: it did not join the run within 1 s.\n" in capfd.readouterr().err


def test_a_silent_process_is_lost(tmp_path, capfd):
    def script(cluster):
        if cluster.me == 1 and cluster.epoch == 0:
            cluster.store.send = lambda frame: None  # no signs of life from now on
            cluster.wait_to_leave()
        work(True, 10)(cluster) if cluster.epoch else cluster.gather("never", "")

    def rejoining(cluster):
        try:
            script(cluster)
        except PeerLostError:
            cluster.rejoin()
            script(cluster)

    assert Run(tmp_path, rejoining, 2, 2, 1, silence=2.0)() == 0
    assert capfd.readouterr().err == "process 1 is lost (no sign of life for 2 s); started again, 0 restarts are left\n"


def mute(seconds):
    """A script whose process 1 gives no sign of life for so long."""

    def script(cluster):
        cluster.gather("all", "")
        if cluster.me == 1:
            links = [cluster.link(0), cluster.store]
            for c in links:
                c.send = lambda frame: None
            end = time.monotonic() + seconds
            while time.monotonic() < end and not cluster._closed:
                time.sleep(0.05)
            for c in links:
                del c.send
        cluster.gather("again", "")

    return script


def test_a_silent_process_that_computes_is_not_lost(tmp_path, capfd):
    """Nor is its link."""
    run = Run(tmp_path, mute(4.0), 2, 2, silence=1.5)
    run.processes[1].does = COMPUTES
    assert run() == 0
    assert capfd.readouterr().err == ""


def test_it_is_lost_at_the_deadline(tmp_path, capfd):
    run = Run(tmp_path, mute(20.0), 2, 2, silence=1.5, deadline=4.0)
    run.processes[1].does = COMPUTES
    begin = time.monotonic()
    assert run() in (1, 75)
    assert time.monotonic() - begin < 9
    err = capfd.readouterr().err
    assert "process 0 waited 4 s for process 1 at again" in err or "process 0| PeerLostError" in err
    assert "no sign of life for 4 s" in err


def test_it_is_lost_if_it_stops_computing(tmp_path, capfd):
    run = Run(tmp_path, mute(20.0), 2, 2, silence=1.5)
    run.processes[1].does = COMPUTES
    threading.Timer(3.0, setattr, [run.processes[1], "does", ""]).start()
    begin = time.monotonic()
    assert run() == 75
    assert 4 < time.monotonic() - begin < 8
    assert "process 1 is lost: no sign of life for 1.5 s.\n" in capfd.readouterr().err


def test_a_process_that_is_stopped_before_it_joins_is_lost(tmp_path, capfd):
    run = Run(tmp_path, work(True), 3, 1, 0, silence=1.5)
    run.processes[1].start = lambda job: setattr(run.processes[1], "alive", job)
    run.processes[1].does = STOPPED
    begin = time.monotonic()
    assert run() == 75
    assert time.monotonic() - begin < 1.5 + 1 + 4  # and three seconds of grace
    assert "process 1 is lost: it was stopped for 1.5 s before it had joined the run.\n" in capfd.readouterr().err


# -- processes that are alive and do not come


def late(cluster, shows="it sleeps"):
    """The first start of process 1 does not come to a call of all, and shows what it does."""
    if cluster.me == 1 and cluster.epoch == 0:
        cluster.on_show = lambda: shows
        cluster.gather("first", "")
        while not cluster._closed:
            time.sleep(0.02)
        raise RuntimeError("it is dead")  # it calls nobody any more, though its links may still be open
    try:
        for name in ("first", "second")[cluster.epoch :]:
            cluster.gather(name, "")
    except PeerLostError as error:
        assert error.process == 1
        cluster.rejoin()
        late(cluster)


def test_who_does_not_come_is_named_shown_and_started_again(tmp_path, capfd):
    """It is, not those that wait for it."""
    run = Run(tmp_path, late, 3, 3, 1, deadline=2.0, judging=20.0)
    assert run() == 0
    assert capfd.readouterr().err == (
        "after 2 s process 1 has not come: processes 0, 2 wait for it at second\n"
        "  processes 0,2: its last call: second\n"
        "  process 1: its last call: first\n"
        "process 1| it sleeps\n"
        "process 1 is lost (it has not come for 2 s; processes 0, 2 wait for it at second); started again, 0 restarts "
        "are left\n"
    )
    assert [len(p.threads) for p in run.processes] == [1, 2, 1]


def test_who_does_not_come_and_holds_the_lock_of_python_is_lost_too(tmp_path, capfd):

    def script(cluster):
        cluster.store.set = lambda key, text: None
        late(cluster)

    assert Run(tmp_path, script, 2, 2, 0, deadline=2.0, judging=20.0)() == 75
    err = capfd.readouterr().err
    assert "process 1| it does not say what it does: it is stopped, or holds Python's lock\n" in err
    assert "process 1 is lost: it has not come for 2 s; process 0 waits for it at second.\n" in err


def test_who_comes_while_it_is_asked_is_not_lost(tmp_path, capfd):
    come = threading.Event()

    def script(cluster):
        cluster.gather("first", "")
        if cluster.me == 1:
            cluster.store.set = lambda key, text: come.set()  # it is asked, and has no answer yet
            come.wait(20)
        cluster.gather("second", "")

    assert Run(tmp_path, script, 2, 2, 0, deadline=2.0, judging=20.0)() == 0
    assert come.is_set() and capfd.readouterr().err == ""


def test_processes_that_wait_for_one_another_end_the_run(tmp_path, capfd):

    def script(cluster):
        cluster.on_show = lambda: f"process {cluster.me} waits"
        cluster.published("never", 1 - cluster.me)

    assert Run(tmp_path, script, 2, 2, 3, deadline=2.0, judging=20.0)() == 76
    err = capfd.readouterr().err
    assert err.startswith("for 2 s processes 0, 1 wait for one another: to tell its never\n")
    assert "process 0| process 0 waits\n" in err and "process 1| process 1 waits\n" in err
    assert "started again" not in err and "DisagreementError: processes 0, 1 wait for one another" in err


def test_an_interrupt_ends_all(tmp_path):
    run = Run(tmp_path, work(True, 10**6))
    run.put_when_joined(("interrupt",))
    begin = time.monotonic()
    assert run() == 130
    assert time.monotonic() - begin < 5


# ---- runs that are asked to end


def loop_of(steps, ends, pause=0.01, saves=True, begun=None):
    """A script whose loop saves; it notes which processes have begun it, and at which step each of them ends."""

    def script(cluster):
        if saves:
            cluster.last_step.open("loop")
        if begun is not None:
            begun.append(cluster.me)
        for i in range(steps):
            if cluster.last_step.begins():
                cluster.gather("saved", f"{i}")
                cluster.last_step.saved("loop")
                ends.append(i)
                raise RunEnds(i)
            if i % 5 == 0:  # between two meetings they are some steps apart
                cluster.gather("step", f"{i}")
            time.sleep(pause * cluster.me)

    return script


def test_a_run_that_is_asked_to_end_saves_at_one_step(tmp_path, capfd):
    ends, begun = [], []
    run = Run(tmp_path, loop_of(10**6, ends, begun=begun), 3, 3)
    signals = ("terminate", 1), ("terminate",)  # a scheduler signals all launchers
    run.put_when_joined(*signals, ready=lambda: len(begun) == 3, pause=0.0)
    assert run() == 143
    assert len(ends) == 3 and len(set(ends)) == 1
    assert capfd.readouterr().err == (
        "the launcher of its host was asked to end: all processes save at their next step, within 25 s\n"
        f"all processes have saved step {ends[0]}, and ended\n"
    )


def test_scripts_that_end_before_their_next_step_end_well(tmp_path):
    run = Run(tmp_path, loop_of(1, [], pause=1.0), 2, 2)
    run.put_when_joined(("terminate",))
    assert run() == 0


def test_a_run_without_a_loop_that_saves_is_interrupted(tmp_path, capfd):
    run = Run(tmp_path, loop_of(10**6, [], saves=False))
    run.put_when_joined(("terminate",))
    assert run() == 143
    assert "processes 0, 1 have no loop that saves\n" in capfd.readouterr().err


@pytest.mark.parametrize(("again", "said"), [(False, "processes 0, 1 did not end within 1 s\n"), (True, "")])
def test_a_step_that_takes_too_long_is_killed(tmp_path, capfd, again, said):
    def script(cluster):
        cluster.last_step.open("loop")
        cluster.last_step.begins()
        cluster.published("never", 1 - cluster.me)

    run = Run(tmp_path, script, grace=20.0 if again else 1.0)
    run.put_when_joined(*[("terminate",)] * (1 + again))
    begin = time.monotonic()
    assert run() == 143
    assert time.monotonic() - begin < 10
    assert capfd.readouterr().err.endswith(said)


def test_a_loss_while_all_save_ends_the_run(tmp_path, capfd):
    def script(cluster):
        cluster.last_step.open("loop")
        while not cluster.last_step.begins():
            cluster.gather("step", "")
        if cluster.me == 1:
            raise OSError("no disk")
        cluster.gather("saved", "")

    run = Run(tmp_path, script, 2, 2, 3)
    run.put_when_joined(("terminate",))
    assert run() == 143
    err = capfd.readouterr().err
    assert "OSError: no disk" in err and "started again" not in err


def test_a_host_that_is_asked_to_end_is_left_out_of_a_run_that_may_shrink(tmp_path, capfd):
    """Nothing is lost: the others go on from the step that all have saved."""
    with hosts(tmp_path, 3, 3, least=2) as (supervisor, made, _events):
        for number in (1, 1):
            made[number].reported({"what": "terminate"})
        clients = [h.clients[-1] for h in made]
        until(lambda: supervisor._ending is not None)
        for p, client in enumerate(clients):
            client.set(f"0/begun/{p}", "7")
        until(lambda: supervisor._ending.after == 7)
        for client in clients:
            client.report({"what": "done", "start": 1, "calls": {}, "saved": 7})
        until(lambda: sizes(made[0])[-1] == (1, 0, 2, 2) and sizes(made[2])[-1] == (1, 1, 2, 2))
        assert len(made[1].configs) == 1 and made[1].is_here
        made[1].agents[0].close()  # another machine takes its place
        until(lambda: "the run takes it at its next checkpoint" in capfd.readouterr().err)


def test_a_host_that_is_asked_to_end_ends_a_run_that_may_not_shrink(tmp_path):
    with hosts(tmp_path, 2, 2) as (supervisor, made, _events):
        made[1].reported({"what": "terminate"})
        until(lambda: supervisor._ending is not None)
        assert supervisor._ending.is_final


# ---- scripts that have ended


def test_who_waits_for_a_script_that_has_ended_fails_at_once(tmp_path, capfd):
    def script(cluster):
        for i in range(3 - cluster.me):
            cluster.gather(f"call {i}", "")

    begin = time.monotonic()
    assert Run(tmp_path, script, 2, 2)() == 1
    assert time.monotonic() - begin < 5
    assert "process 1's script has ended; process 0 waits for it at call 2. Each process" in capfd.readouterr().err


def test_who_is_started_again_hears_of_scripts_that_have_ended(tmp_path, capfd):
    """Process 0 begins the second epoch and ends in it before process 1, late to see the loss, is started in it."""
    waits, begun = threading.Event(), threading.Event()

    def script(cluster):
        if cluster.me == 2:
            if cluster.epoch == 0:
                begun.wait(10)  # a process 0 that begins later would begin in the second epoch
                raise OSError("no disk")
        elif cluster.me == 1 and cluster.epoch == 0:
            waits.wait(10)
            cluster.check()
        elif cluster.me == 1:
            cluster.gather("never", "", [0, 1])
        else:
            begun.set()
            with pytest.raises(PeerLostError):
                cluster.gather("all", "")
            cluster.rejoin()
            threading.Timer(1.0, waits.set).start()

    assert Run(tmp_path, script, 3, 3, 1)() == 1
    assert "process 0's script has ended; process 1 waits for it at never of 0,1." in capfd.readouterr().err


def test_ends_are_told_together_and_to_those_that_still_run(tmp_path, monkeypatch):
    told, last = [], threading.Event()
    notify = StoreServer.notify
    monkeypatch.setattr(StoreServer, "notify", lambda s, p, event: (told.append((p, event)), notify(s, p, event))[1])

    def script(cluster):
        cluster.gather("all", "")
        if cluster.me == 3:
            last.wait(10)

    threading.Timer(2.5, last.set).start()
    assert Run(tmp_path, script, 8, 8)() == 0
    done = [(p, event["processes"]) for p, event in told if event["event"] == "done"]
    assert {p for p, _ in done} == {3} and len(done) <= 2
    assert sorted(p for _, processes in done for p in processes) == [0, 1, 2, 4, 5, 6, 7]


# ---- failures that wait for their cause


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("known", [True, False])
def test_what_processes_differ_in_is_the_cause_of_an_abort_of_gloo(tmp_path, capfd, monkeypatch, restarts, known):
    monkeypatch.setattr(failure_module, "_CAUSE_SECONDS", 1.0)

    def script(cluster):
        cluster.gather("all", "")
        if cluster.epoch == 0 and cluster.me == 0:
            run.processes[0].tail = lambda: ["terminate called after throwing an instance of 'gloo::EnforceNotMet'"]
            threading.Timer(0.1, lambda: run.processes[0].end(run.processes[0].alive, -6)).start()
            time.sleep(0.3)
        elif cluster.epoch == 0 and known:
            time.sleep(0.5)
            raise DisagreementError("step: the processes of this run differ in x")
        elif cluster.epoch == 0:
            cluster.gather("never", "")

    run = Run(tmp_path, script, 2, 1, restarts)
    code = run()
    errors = capfd.readouterr().err
    if known:
        assert code == 1 and "started again" not in errors
        assert errors.startswith("process 1| DisagreementError: step: the processes of this run differ in x\n")
    elif restarts:
        assert code == 0 and "process 0 is lost (killed by SIGABRT); started again" in errors
    else:
        assert code == 134 and "process 0 is lost: killed by SIGABRT." in errors


def test_a_failure_that_waits_for_its_cause_is_no_loss_once_its_process_is_started_again(tmp_path, capfd):
    """Processes 0 and 1 are an island: both fail for the loss of process 2, whose restart was told before."""
    run = Run(tmp_path, lambda cluster: cluster.wait_to_leave(), 4, 2, 3)
    supervisor, places = run.supervisor, run.supervisor._places
    supervisor._number(places)
    try:
        supervisor._start(range(4))
        follows = Failure(1, 1, "PeerLostError", when=time.monotonic(), follows=True)
        supervisor._lose(follows)
        assert supervisor._losses._failures == [follows]
        supervisor._epoch = 1
        supervisor._lose(replace(follows, process=0))  # it is behind: its island is started again
        assert [p.start for p in places] == [2, 2, 1, 1] and supervisor._losses._failures == []
        assert supervisor._restarts == 3
    finally:
        supervisor._kill(places)
        run.server.close()


# ---- agents


class Host(RemoteProcess):
    """A process on another host, whose agent is a connection to the store. As on Ray, a new agent comes if one is
    lost."""

    def __init__(self, number, events, address):
        super().__init__(number, self._obey, events)
        self.address, self.agents, self.configs, self.clients = address, [], [], []

    def come(self):
        self.agents.append(Store(self.address, SECRET, -1 - self.number, lambda event: None))
        self.agents[-1].report({"what": "here", "host": f"host {self.number}"})

    def replace(self):
        self.come()

    def start(self, job):
        super().start(job)
        self.configs.append(job.config)
        self.clients.append(Store(self.address, SECRET, job.config.me, lambda event: None))
        self.clients[-1].report({"what": "joined", "start": job.start})

    def _obey(self, event):
        if event["event"] == "kill" and self.is_here:
            self.reported({"what": "ended", "start": self._start, "code": -9, "tail": []})


@contextmanager
def hosts(tmp_path, processes, islands, restarts=3, silence=60.0, spares=0, **config):
    """A supervisor whose processes are on hosts of their own, running in a thread; each process does nothing."""
    events, made = SimpleQueue(), []

    def on_report(p, said):
        if p >= 0:
            events.put(("report", p, said))
        else:
            made[-1 - p].reported(said)

    def on_end(p):
        if p < 0:
            made[-1 - p].lost()

    server = StoreServer(f"unix:{tmp_path}/s", SECRET, on_end, on_report)
    for p in range(processes + spares):
        made.append(Host(p, events, server.address))
        made[p].come()
    config = RunConfig(
        0, processes, islands, server.address, SECRET, "", 0, restarts, silence=silence, **{"deadline": 60.0, **config}
    )
    supervisor = Supervisor(Job(config), made, Screen(), lambda job, place: job, server, events)
    running = threading.Thread(target=supervisor.run, daemon=True)
    running.start()
    try:
        until(lambda: len(supervisor._members) == processes and all(m.joined for m in supervisor._members))
        yield supervisor, made, events
    finally:
        events.put(("interrupt",))
        running.join(10)
        assert not running.is_alive()
        for store in (s for h in made for s in (*h.agents, *h.clients)):
            store.close()
        server.close()


def test_a_host_with_two_agents_is_lost_once(tmp_path, capfd):
    """Each process of its island is started again once, though both agents are lost."""
    with hosts(tmp_path, 2, 1) as (_, made, _events):
        for host in made:
            host.agents[0].close()
        until(lambda: all(len(h.configs) == 2 for h in made))
        time.sleep(0.5)
        assert [[s.epoch for s in h.configs] for h in made] == [[0, 1]] * 2
    assert capfd.readouterr().err.count("started again") == 1


def test_a_silent_agent_is_lost_once(tmp_path, capfd):
    with hosts(tmp_path, 2, 2, silence=2.0) as (_, made, _events):
        made[1].agents[0].send = lambda frame: None  # no sign of life from now on, and its connection stays
        until(lambda: len(made[1].configs) == 2, 10)
        time.sleep(2.5)
        assert [[s.epoch for s in h.configs] for h in made] == [[0], [0, 1]]
    assert capfd.readouterr().err.count("the launcher of its host is lost") == 1


def test_the_connection_of_an_earlier_start_condemns_no_new_one(tmp_path, capfd):
    """The host of a silent process is alive, but the connection of the process stays open when it is killed."""
    with hosts(tmp_path, 2, 2, silence=2.0) as (_, made, _events):
        made[1].clients[0].send = lambda frame: None
        start = made[1].start

        def late(job):  # the new process takes a while to come
            made[1].start = start
            RemoteProcess.start(made[1], job)
            made[1].configs.append(job.config)
            coming = threading.Timer(
                2.5, lambda: made[1].clients.append(Store(made[1].address, SECRET, 1, lambda event: None))
            )
            coming.start()

        made[1].start = late
        until(lambda: len(made[1].configs) == 2, 10)
        time.sleep(3.5)
        assert [s.epoch for s in made[1].configs] == [0, 1]
    assert capfd.readouterr().err.count("no sign of life for 2 s") == 1


# ---- hosts that come back, and runs that go on with fewer


def stays_lost(host):
    """Nothing starts another agent for this host."""
    host.replace = lambda: None
    return host


def sizes(host):
    return [(c.epoch, c.me, c.processes, c.islands) for c in host.configs]


def test_a_restart_waits_for_its_host(tmp_path, capfd):
    with hosts(tmp_path, 2, 2) as (_, made, _events):
        stays_lost(made[1]).agents[0].close()
        until(lambda: "waiting" in capfd.readouterr().err)
        time.sleep(0.5)
        assert sizes(made[1]) == [(0, 1, 2, 2)]
        made[1].come()
        until(lambda: sizes(made[1]) == [(0, 1, 2, 2), (1, 1, 2, 2)])
    assert sizes(made[0]) == [(0, 0, 2, 2)]
    assert "host host is there; 1 process started\n" in capfd.readouterr().err


@pytest.mark.sampled(0)
def test_a_run_ends_when_a_host_does_not_come_back(tmp_path, capfd):
    with hosts(tmp_path, 2, 2, deadline=2.0) as (supervisor, made, _events):
        stays_lost(made[1]).agents[0].close()
        until(lambda: supervisor._over_at is not None, 10)
        assert supervisor._failures[0].why == "the launcher of its host is lost, and its host does not come back"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("processes", "islands", "lost", "left"),
    [
        (3, 1, 1, {0: (0, 2, 1), 2: (1, 2, 1)}),
        (3, 3, 0, {1: (0, 2, 2), 2: (1, 2, 2)}),
        (6, 3, 3, {0: (0, 4, 2), 1: (1, 4, 2), 2: (2, 4, 2), 4: (3, 4, 2)}),  # islands of two: host 5 waits
    ],
)
def test_a_run_goes_on_with_fewer_and_grows_again(tmp_path, capfd, processes, islands, lost, left):
    with hosts(tmp_path, processes, islands, silence=2.0, least=2) as (_, made, _events):
        stays_lost(made[lost]).agents[0].close()
        until(lambda: all(len(made[p].configs) == 2 for p in left), 10)
        assert {p: sizes(made[p])[1][1:] for p in left} == left
        number = next(iter(left.values()))[1]
        err = capfd.readouterr().err
        assert f"process {lost} is lost (the launcher of its host is lost); waiting up to 2 s for its host" in err
        assert f"and its host does not come back; the run goes on with {number} processes" in err
        made[lost].come()
        until(lambda: "is there; the run takes it at its next checkpoint" in capfd.readouterr().err)
        first = made[next(iter(left))]
        first.clients[-1].status = lambda: f'{{"epoch": {first.configs[-1].epoch}, "step": 7, "saved": 5}}'
        until(lambda: all(len(h.configs) >= 2 and h.configs[-1].processes == processes for h in made), 10)
        assert [h.configs[-1].me for h in made] == list(range(processes))
        assert {h.configs[-1].islands for h in made} == {islands}
    assert f"the run goes on with {processes} processes from its last checkpoint" in capfd.readouterr().err


@pytest.mark.sampled(0)
def test_too_few_hosts_end_the_run(tmp_path, capfd):
    with hosts(tmp_path, 3, 1, silence=2.0, least=3 - 1) as (supervisor, made, _events):
        for host in made[1:]:
            stays_lost(host).agents[0].close()
        until(lambda: supervisor._over_at is not None, 10)
        assert "its host does not come back" in supervisor._failures[0].why


def test_a_process_that_fails_without_a_restart_is_left_out(tmp_path, capfd):
    """Its place is not taken again: the fault may be the place's."""

    def script(cluster):
        cluster.gather("all", "")
        if cluster.processes == 3 and cluster.me == 1:
            raise OSError("no disk")
        cluster.gather("rest", "")

    run = Run(tmp_path, script, 3, 1, 0, least=2)
    assert run() == 0
    assert [p.process for p in run.supervisor._places] == [0, -1, 1]
    err = capfd.readouterr().err
    assert "process 1 is lost (OSError: no disk), and no restart is left; the run goes on with 2 processes\n" in err


def test_a_spare_takes_the_place_of_a_lost_host(tmp_path, capfd):
    """Processes of other islands go on; the lost host is a spare when it comes again."""
    with hosts(tmp_path, 2, 2, spares=1) as (supervisor, made, _events):
        assert [len(h.configs) for h in made] == [1, 1, 0]
        for host in made:
            host.replace = lambda: None
        made[1].agents[0].close()
        until(lambda: made[2].configs and supervisor._members[1].joined)
        assert [(c.me, c.epoch) for c in made[2].configs] == [(1, 1)]
        assert [p.process for p in supervisor._places] == [0, -1, 1]
        assert len(made[0].configs) == 1
        made[1].come()
        until(lambda: supervisor._newcomers == {1})
        made[2].agents[0].close()
        until(lambda: len(made[1].configs) == 2 and supervisor._members[1].joined)
    err = capfd.readouterr().err
    assert err.count(" takes the place of ") == 2 and " is there, as a spare\n" in err
    assert "waiting up to" not in err


def test_restarts_within_a_time_pause(tmp_path, capfd):
    starts = []

    def script(cluster):
        starts.append(time.monotonic())
        cluster.gather("all", "")
        if len(starts) < 3:
            raise OSError("no disk")

    assert Run(tmp_path, script, 1, 1, 2, window=3600.0)() == 0
    assert starts[1] - starts[0] < 1.0 <= starts[2] - starts[1]
    err = capfd.readouterr().err
    assert "started again, 1 restart of 2 within 3600 s is left\n" in err
    assert "started again in 1 s, 0 restarts of 2 within 3600 s are left\n" in err


def test_several_losses_of_one_cause_are_one_restart(tmp_path, capfd):
    """Two hosts that are lost together, as by a switch."""
    with hosts(tmp_path, 3, 3, restarts=1) as (_, made, _events):
        for host in made[1:]:
            host.agents[0].close()
        until(lambda: all(len(h.configs) == 2 for h in made[1:]))
        assert [c.epoch for c in made[0].configs] == [0]
    assert capfd.readouterr().err.count("is lost (") == 1


def test_a_status_counts_in_the_epoch_in_which_it_was_said(tmp_path, monkeypatch):
    run = Run(tmp_path, work(True), 2, 2, 1)
    supervisor, statuses = run.supervisor, {}
    monkeypatch.setattr(run.server, "statuses", lambda: statuses)
    monkeypatch.setattr(run.server, "ages", lambda: {0: 0.0})
    seen = [(float(i), 0, i) for i in range(6)] + [(6.0, 0, 5)] + [(66.0 + k, 1, i) for k, i in enumerate(range(4, 10))]
    for now, epoch, step in seen:  # process 0 lives: at 6 s, after the loss, it still says what it said before
        if now == 6.0:
            supervisor._epoch = 1
            supervisor._tell_epoch()
        statuses[0] = json.dumps({"epoch": epoch, "steps": [[step, now]], "step": step, "saved": step})
        supervisor._look_at_progress(now)
    goodput = supervisor._health.goodput
    assert (goodput.losses, goodput.seconds()) == (1, 3.0 + 5.0)
    run.server.close()
