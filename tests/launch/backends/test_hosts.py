"""Runs on plain hosts with one command line for each; the hosts are homes of this machine."""

import re
import signal
import socket
import time
from contextlib import ExitStack

import pytest

from shardc.launch.prepare import free_port
from tests.launch.backends.test_by_ssh import SHOW, ends
from tests.launch.launching import command, environment, script, started, text_of, wait_for
from tests.launch.test_options import refused


class ByHand:
    """A launcher on each host, with a home of its own."""

    def __init__(self, path, *options, hosts=2, homes=None, port=None, arguments=()):
        self.stack = ExitStack()
        self.starts = []
        at = f"127.0.0.1:{port or free_port('127.0.0.1')}"
        for i in range(hosts):
            home = path.parent / (homes[i] if homes else "home")
            home.mkdir(exist_ok=True)
            words = command(path, "--hosts", hosts, "--host", i, "--at", at, *options, arguments=arguments)
            env = environment(HOME=str(home), SSH_TTY=f"{i}", COLOUR="")
            self.starts.append(lambda words=words, env=env: started(words, str(path), env=env))
            setattr(self, f"host{i}", self.stack.enter_context(self.starts[i]()))
            self.all = [*getattr(self, "all", []), getattr(self, f"host{i}")]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.__exit__(*error)


def test_one_line_on_each_host(tmp_path):
    with ByHand(script(tmp_path, SHOW), "--islands", 4, "--processes", 4) as by_hand:
        assert [ends(run) for run in by_hand.all] == [(0, "['0', '0', '1', '1'] []\n", ""), (0, "", "")]
    made = tmp_path / "home" / ".shardc" / "secret"
    assert made.stat().st_mode & 0o777 == 0o600 and len(made.read_text()) == 64
    assert list(made.parent.iterdir()) == [made]


def test_hosts_without_a_shared_home_wait_for_a_copy_of_the_secret(tmp_path):
    with ByHand(script(tmp_path, SHOW), "--islands", 2, homes=["a", "b"]) as by_hand:
        assert by_hand.host0.stderr.readline() == "waiting for other hosts; there, in the same directory, run:\n"
        assert "shardc run --hosts 2 --host 1 --at 127.0.0.1:" in by_hand.host0.stderr.readline()
        assert by_hand.host1.stderr.readline() == (
            f"there is no {tmp_path}/b/.shardc/secret yet. Hosts without a shared home directory need a copy of this "
            "file of host 0, once: scp 127.0.0.1:.shardc/secret ~/.shardc/secret. Or give all hosts the same --secret "
            "FILE.\n"
        )
        (tmp_path / "b/.shardc/secret").write_text(text_of(tmp_path / "a/.shardc/secret"))
        assert [ends(run) for run in by_hand.all] == [(0, "['0', '1'] []\n", ""), (0, "", "")]


def test_another_secret(tmp_path):
    (tmp_path / "b/.shardc").mkdir(parents=True)
    (tmp_path / "b/.shardc/secret").write_text("b" * 64)
    with ByHand(script(tmp_path, SHOW), "--deadline", 6, homes=["a", "b"]) as by_hand:
        code, _, err = ends(by_hand.host1)
        assert code == 2 and "it does not hold this run's secret" in err
        assert "need a copy of this file of host 0, once: scp 127.0.0.1:.shardc/secret ~/.shardc/secret." in err
        assert ends(by_hand.host0)[0] == 2


@pytest.mark.sampled(0)
def test_ctrl_c_on_another_host_than_0(tmp_path):
    path = script(tmp_path, f"open(f'{tmp_path}/{{c.me}}', 'w').close()\ntime.sleep(1000)")
    with ByHand(path, "--processes", 4, "--islands", 4) as by_hand:
        wait_for(lambda: all((tmp_path / f"{p}").exists() for p in range(4)))
        by_hand.host1.send_signal(signal.SIGINT)
        assert [ends(run)[0] != 0 for run in by_hand.all] == [True, True]


SAVES = """
import numpy as np, shardc
with shardc.checkpoints(sys.argv[1], every=10**6) as saved:
    for i in range(10**6):
        saved.step(i, {"n": np.full(3, i)})
        open(f"{sys.argv[1]}-{c.me}", "w").close()
        time.sleep(0.02)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked", [[1], [0], [0, 1], [1, 0]])
def test_sigterm_on_any_host_lets_all_processes_save(tmp_path, asked):
    """A cloud that takes one machine, and Slurm, which asks all."""
    folder = tmp_path / "saved"
    path = script(tmp_path, SAVES.replace("sys.argv[1]", repr(str(folder))))
    with ByHand(path, "--processes", 2, "--islands", 2, "--devices", 1) as by_hand:
        wait_for(lambda: all((tmp_path / f"saved-{p}").exists() for p in range(2)), 60)
        for i in asked:
            by_hand.all[i].send_signal(signal.SIGTERM)
        (code, _, err), other = [ends(run) for run in by_hand.all]
    assert (code, other[0]) == (143, 143), err
    (step,) = [p.name for p in folder.iterdir()]
    assert re.fullmatch(
        r"(this run was|the launcher of host 1 \(.*\) was) asked to end: all processes save at their next step, within "
        rf"25 s\nall processes have saved step {step}, and ended\n",
        err,
    ), err


ANEW = """
import jax.numpy as jnp, shardc
with shardc.checkpoints(f"{sys.argv[1]}/saved", every=2) as saved:
    n, start = saved.last(or_else=lambda: jnp.zeros(3))
    for i in range(start, 6 if start else 10**6):
        n = n + 1
        saved.step(i, n)
        open(f"{sys.argv[1]}/{c.me}-{i}", "w").close()
        time.sleep(0.02)
if c.me == 0:
    print(start, int(n[0]))
"""


@pytest.mark.sampled(0)
def test_host_0_is_started_anew(tmp_path):
    """The others kill their processes and wait; the run goes on from its last checkpoint."""
    path = script(tmp_path, ANEW)
    words = ["--islands", 2, "--devices", 1, "--host-0-deadline", 60]
    with ByHand(path, *words, arguments=[tmp_path]) as by_hand:
        wait_for(lambda: (tmp_path / "saved" / "3").exists() and (tmp_path / "1-4").exists(), 60)
        by_hand.host0.kill()
        assert "trying again, for 60 s, in case host 0 is started anew" in by_hand.host1.stderr.readline()
        with by_hand.starts[0]() as again:
            code, out, err = ends(again)
            assert code == 0, err
        assert ends(by_hand.host1)[0] == 0
    start, steps = map(int, out.split())
    assert start >= 4 and steps == max(6, start)


def test_the_launcher_of_host_0_is_interrupted_while_it_waits(tmp_path):
    with ByHand(script(tmp_path, ""), homes=["a", "b"]) as by_hand:
        by_hand.host0.stderr.readline()
        by_hand.host0.send_signal(signal.SIGINT)
        assert ends(by_hand.host0)[0] == 130
        by_hand.host1.send_signal(signal.SIGINT)
        assert ends(by_hand.host1)[0] == 130


def test_another_host_is_interrupted_while_host_0_does_not_come(tmp_path):
    path = script(tmp_path, "")
    (tmp_path / "secret").write_text("s" * 64)
    words = ["--hosts", 2, "--host", 1, "--at", f"127.0.0.1:{free_port('127.0.0.1')}", "--secret", tmp_path / "secret"]
    with started(command(path, *words), str(path)) as run:
        time.sleep(3.0)
        run.send_signal(signal.SIGINT)
        assert ends(run)[0] == 130


# -- options


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--hosts", "a,b", "--processes", 3], "--processes 3 cannot be divided evenly over --hosts a,b."),
        (["--hosts", 2], "--hosts 2 needs --host I, the number of this host (0 to 1), and --at ADDRESS:PORT, an"),
        (["--hosts", 2, "--host", 2, "--at", "a:1"], "--hosts 2 needs --host I, the number of this host (0 to 1)"),
        (["--hosts", "a,b", "--host", 1], "--host and --at need the number of hosts: --hosts N."),
        (["--host", 1], "--host and --at need the number of hosts: --hosts N."),
        (["--hosts", "a,a"], '--hosts a,a: "a" is no name of a host, or stands there twice; --processes sets how many'),
        (["--hosts", "a,-oProxyCommand=x"], '--hosts a,-oProxyCommand=x: "-oProxyCommand=x" is no name of a host'),
        (["--hosts", "a,b", "--ray"], "--hosts and --ray exclude each other."),
        (
            ["--hosts", 2, "--host", 0, "--at", "a"],
            "Invalid value for '--at': \"a\" is not an address with a port, such as a:4711",
        ),
    ],
)
def test_options_that_do_not_fit(capsys, tmp_path, words, error):
    assert refused(capsys, *words, script(tmp_path, "")).startswith(error)


def test_a_name_that_other_hosts_cannot_reach(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    words = ["--hosts", 2, "--host", 0, "--at", "mine:4711"]
    assert refused(capsys, *words, script(tmp_path, "")).startswith("--at: this host knows mine as 127.0.1.1, which")
