"""Runs that a cluster has started: Slurm and Open MPI by the variables that they set, with a launcher for each task."""

import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from jax._src.clusters import ClusterEnv

from shardc.compat import DetectedProcess, detect_process
from shardc.errors import ClusterError
from shardc.launch.backends.under_a_cluster import (
    default_secret,
    job_name,
    read_secret,
    wait_for_secret,
)
from shardc.launch.prepare import free_port
from tests.launch.backends.test_on_this_machine import PSUM, RESTARTED
from tests.launch.launching import command, environment, logged, script, started, wait_for

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
OMPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1,10.0.0.1:34911", "OMPI_VERSION": "4.1.6"}


def slurm(me, n):
    return {**SLURM, "SLURM_NTASKS": str(n), "SLURM_PROCID": str(me), "SLURM_LOCALID": str(me)}


def ompi(me, n):
    return {
        **OMPI, "OMPI_COMM_WORLD_SIZE": str(n), "OMPI_COMM_WORLD_RANK": str(me), "OMPI_COMM_WORLD_LOCAL_RANK": str(me),
    }  # fmt: skip


class Tasks:
    """What a cluster starts: the same command for each task, with its variables."""

    def __init__(self, kind, home, path, *options, n=2, arguments=()):
        self.stack = ExitStack()
        self.home = home
        port = {"JAX_COORDINATOR_PORT": str(free_port("127.0.0.1")), "HOME": str(home)}
        words = command(path, *options, arguments=arguments)
        self.tasks = [
            self.stack.enter_context(started(words, str(path), env=environment(**port, **kind(i, n)))) for i in range(n)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.__exit__(*error)

    def ends(self):
        """(code, out, err) of each task."""
        return [(t.returncode, *ends) for t, ends in ((t, t.communicate(timeout=60)) for t in self.tasks)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [slurm, ompi])
def test_the_same_script(tmp_path, kind):
    path = script(tmp_path, PSUM + "import sys; print(sys.argv[1:])", head="")
    with Tasks(kind, tmp_path, path, "--devices", 2, arguments=["--lr", "1"]) as tasks:
        assert tasks.ends() == [(0, "sum 6.0 2 2\n['--lr', '1']\n", ""), (0, "", "")]
    assert list((tmp_path / ".shardc").iterdir()) == []  # the secret is removed


@pytest.mark.sampled(0)
def test_a_lost_process_is_started_again_by_its_own_launcher(tmp_path):
    path = script(tmp_path, RESTARTED.format(signal=9, rejoins=True))
    logs = tmp_path / "logs"
    with Tasks(slurm, tmp_path, path, "--islands", 2, "--restarts", 1, "--log", logs) as tasks:
        (code, out, err), other = tasks.ends()
    assert (code, out.splitlines()[-2:], other) == (0, ["rejoined 1 0", "end"], (0, "", ""))
    assert err == "process 1 is lost (killed by SIGKILL); started again, 0 restarts are left\n"
    assert logged(logs / "process-1.log") == "start 0 1\n== process 1, start 2\nstart 1 0\nend\n"
    assert (tmp_path / ".shardc").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "how", ["raise ValueError('on fire')", pytest.param("os.kill(os.getppid(), 9)", marks=pytest.mark.sampled(0))]
)
def test_the_failure_of_a_process_is_told_by_process_0(tmp_path, how):
    """Also if its launcher dies with it."""
    path = script(tmp_path, f"c.gather('all', '')\nif c.me == 1:\n    {how}\nc.gather('never', '')")
    with Tasks(slurm, tmp_path, path, "--islands", 2) as tasks:
        (code, out, err), other = tasks.ends()
    if "raise" in how:
        assert (code, out, other) == (1, "", (1, "", ""))
        assert (
            "process 1| ValueError: on fire\nprocess 0| PeerLostError: process 1 is lost: ValueError: on fire.\n" in err
        )
    else:
        assert (code, out, other) == (75, "", (-9, "", ""))
        assert err.startswith("process 1 is lost: the launcher of its host is lost.\n")


def test_all_end_when_process_0s_launcher_is_killed(tmp_path):
    path = script(tmp_path, "open(f'{sys.argv[1]}/{c.me}', 'w').close()\ntime.sleep(1000)")
    with Tasks(slurm, tmp_path, path, arguments=[tmp_path]) as tasks:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        tasks.tasks[0].kill()
        assert tasks.tasks[1].wait(30) == 75  # it tries for 8 s to connect again


def test_a_port_in_use(tmp_path):
    path = script(tmp_path, "")
    port = free_port("127.0.0.1")
    more = environment(JAX_COORDINATOR_PORT=str(port), HOME=str(tmp_path), **slurm(0, 4))
    with socket.create_server(("127.0.0.1", port)), started(command(path), str(path), env=more) as task:
        _, err = task.communicate(timeout=60)
        assert task.returncode == 2
        assert f"cannot listen at localhost:{port}: the address is in use; choose another port" in err
        assert "JAX_COORDINATOR_PORT sets the port" in err
    assert list((tmp_path / ".shardc").iterdir()) == []  # no secret is left


def test_a_wrong_secret_is_refused_and_who_does_not_come_is_named(tmp_path):
    path = script(tmp_path, "print('runs')")
    port = str(free_port("127.0.0.1"))
    with ExitStack() as stack:
        tasks = []
        for me in (0, 1):
            (tmp_path / f"secret{me}").write_text(f"{me}" * 64)
            words = command(path, "--deadline", 6, "--secret", tmp_path / f"secret{me}")
            more = environment(JAX_COORDINATOR_PORT=port, **slurm(me, 2))
            tasks.append(stack.enter_context(started(words, str(path), env=more)))
        (_, mine), (_, theirs) = (t.communicate(timeout=60) for t in tasks)
        assert [t.returncode for t in tasks] == [2, 2]
    assert "it does not hold this run's secret" in theirs
    assert "process 1 did not come within 6 s." in mine
    assert "dropped a connection of ('127.0.0.1', " in mine


@pytest.mark.sampled(0)
def test_ctrl_c_to_all_tasks(tmp_path):
    path = script(tmp_path, "open(f'{sys.argv[1]}/{c.me}', 'w').close()\ntime.sleep(1000)")
    with Tasks(slurm, tmp_path, path, arguments=[tmp_path]) as tasks:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        begin = time.monotonic()
        for task in tasks.tasks:
            task.send_signal(signal.SIGINT)
        ends = tasks.ends()
        assert time.monotonic() - begin < 5
    assert [code for code, _, _ in ends] == [130, 130]
    assert "shardc/launch" not in ends[0][2] + ends[1][2]


# -- in one process


class Kubernetes:
    """A ClusterEnv as JAX's for Kubernetes is one, which needs a cluster and the package `kubernetes`."""

    name = "k8s"
    opt_in_only_method = False

    @classmethod
    def is_env_present(cls):
        return True

    @classmethod
    def get_coordinator_address(cls, timeout_secs, override_coordinator_port):
        return f"fd00::1:{override_coordinator_port or 55527}"

    @classmethod
    def get_process_count(cls):
        return 8

    @classmethod
    def get_process_id(cls):
        return 3

    @classmethod
    def get_local_process_id(cls):
        return None


def test_detection_under_kubernetes(monkeypatch):
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [Kubernetes])
    found = detect_process(1.0)
    assert found == DetectedProcess("k8s", "[fd00::1]:55527", 8, 3, None)
    with pytest.raises(ClusterError, match=r"hosts of a run under k8s share no home directory; .*--secret FILE"):
        default_secret(found)


def test_detection_without_a_cluster(monkeypatch):
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [])
    assert detect_process(1.0) is None


def test_the_name_of_a_job():
    found = DetectedProcess("slurm", "node1:62000", 2, 0, 0)
    assert job_name(found, slurm(0, 2)) == job_name(found, slurm(1, 2)) == "slurm-4711-0"
    assert job_name(found, {**slurm(0, 2), "SLURM_RESTART_COUNT": "1"}) == "slurm-4711-0-1"
    assert job_name(found, ompi(0, 2)) == "slurm-1531576320-0"
    assert job_name(found, {}) == "slurm-node1-62000"


def test_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    found = DetectedProcess("slurm", "node1:62000", 2, 1, 0)
    with pytest.raises(
        ClusterError, match=r"process 1 waited 0\.3 s for .*, which process 0 makes\. If the hosts of this run"
    ):
        wait_for_secret(found, 0.3)
    path = tmp_path / "short"
    path.write_text("abc\n")
    with pytest.raises(ClusterError, match=r"short: it has 3 bytes, and at least 16 are needed"):
        read_secret(path)
