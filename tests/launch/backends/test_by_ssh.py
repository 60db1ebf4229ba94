"""Runs on hosts that ssh reaches. An `ssh` of the tests runs its command here, with an environment of its own."""

import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shardc.launch.backends import by_ssh as module
from tests.launch.backends.test_on_this_machine import PSUM, RESTARTED
from tests.launch.launching import command, environment, logged, named, script, started, text_of, wait_for

SSH = """\
#!/bin/sh
for word; do host=$command; command=$word; done
echo "$@" >> {folder}/commands
case $host in
    denied) echo "banner\nuser@denied: Permission denied (publickey)." >&2; exit 255 ;;
    bare) command=$(echo "$command" | sed 's# [^ ]*python[^ ]* # /nowhere/python #') ;;
    strange) command=$(echo "$command" | sed 's#-m shardc.launch.backends.by_ssh#-m no_such_package.hosts#') ;;
    elsewhere) command="cd /nowhere && true" ;;
    old) command=$(echo "$command" | sed 's#-m shardc.launch.backends.by_ssh#{folder}/old.py#') ;;
esac
exec env -i HOME={folder}/$host PATH=/usr/bin:/bin SSH_TTY=$host sh -c "$command"
"""
OLD = (
    "import shardc.versions\nshardc.versions.VERSION = '0.0.9'\nfrom shardc.launch.backends.by_ssh import main\nmain()"
)
SHOW = "print(c.gather('all', os.environ['SSH_TTY'] + os.environ.get('COLOUR', '-')), sys.argv[1:])"


@pytest.fixture
def by_ssh(tmp_path):
    """`by_ssh(path, *options)`: a launcher that finds this `ssh`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "old.py").write_text(OLD)

    def call(path, *options, arguments=()):
        more = environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", COLOUR="blue", SSH_TTY="here")
        return started(command(path, *options, arguments=arguments), str(path), env=more)

    return call


def ends(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.sampled(0)
def test_a_script_on_two_hosts(by_ssh, tmp_path):
    with by_ssh(script(tmp_path, SHOW), "--hosts", "far,near", "--islands", 2, arguments=["--lr", 1]) as run:
        assert ends(run) == (0, "['farblue', 'nearblue'] ['--lr', '1']\n", "")
    words = text_of(tmp_path / "commands")
    assert "-o BatchMode=yes" in words and "blue" not in words  # neither the environment nor the secret is shown


def test_this_machine_and_another_one(by_ssh, tmp_path):
    with by_ssh(script(tmp_path, SHOW), "--hosts", "localhost,far", "--islands", 4, "--processes", 4) as run:
        assert ends(run) == (0, "['hereblue', 'hereblue', 'farblue', 'farblue'] []\n", "")


@pytest.mark.sampled(0)
def test_a_sum_over_two_hosts(by_ssh, tmp_path):
    with by_ssh(script(tmp_path, PSUM, head=""), "--hosts", "far,near", "--devices", 2) as run:
        assert ends(run) == (0, "sum 6.0 2 2\n", "")


def test_hosts_that_cannot_take_part(by_ssh, tmp_path):
    begin = time.monotonic()
    with by_ssh(script(tmp_path, ""), "--hosts", "denied,bare,strange,far,elsewhere,old", "--processes", 12) as run:
        code, out, err = ends(run)
    assert (code, out) == (2, "") and time.monotonic() - begin < 15
    head, *lines = err.splitlines()
    assert head == "python -m shardc run: these hosts cannot take part:"
    said = dict(line.strip().split(": ", 1) for line in lines)
    assert list(said) == ["denied", "bare", "strange", "elsewhere", "old"]
    assert said["denied"] == "user@denied: Permission denied (publickey)."
    assert "/nowhere/python" in said["bare"]
    assert "No module named 'no_such_package'" in said["strange"]
    assert "/nowhere" in said["elsewhere"]
    assert said["old"].startswith("it has shardc 0.0.9 with jax") and said["old"].endswith("is needed")


def test_a_script_that_is_not_there(by_ssh, tmp_path, monkeypatch):
    path = script(tmp_path, "")
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec env", f"mv {path} {path}.gone\nexec env"))
    with by_ssh(path, "--hosts", "far") as run:
        assert f"far: it has no script {path} in {Path.cwd()}\n" in ends(run)[2]


def test_failures_and_logs(by_ssh, tmp_path):
    path = script(tmp_path, "print('x', c.me)\nc.gather('all', '')\nif c.me: sys.exit(7)\nc.gather('never', '')")
    with by_ssh(path, "--hosts", "far,near", "--islands", 2, "--log", tmp_path / "logs") as run:
        code, out, err = ends(run)
    assert (code, out) == (7, "x 0\n") and "process 1 ended with exit code 7." in err
    assert logged(tmp_path / "logs" / "process-1.log").startswith("x 1\n")


@pytest.mark.sampled(0)
def test_a_lost_process_is_started_again(by_ssh, tmp_path):
    path = script(tmp_path, RESTARTED.format(signal=9, rejoins=True))
    with by_ssh(path, "--hosts", "far,near", "--islands", 2, "--restarts", 1) as run:
        code, out, err = ends(run)
    assert (code, out.splitlines()[-2:]) == (0, ["rejoined 1 0", "end"])
    assert err == "process 1 is lost (killed by SIGKILL); started again, 0 restarts are left\n"


@pytest.mark.sampled(0)
def test_a_lost_agent_is_started_again_by_a_new_ssh(by_ssh, tmp_path):
    path = script(tmp_path, RESTARTED.format(signal=9, rejoins=True).replace("os.getpid()", "os.getppid()"))
    with by_ssh(path, "--hosts", "far,near", "--islands", 2, "--restarts", 1) as run:
        code, out, err = ends(run)
    assert (code, out.splitlines()[-1]) == (0, "end"), err
    first, second = err.splitlines()
    assert first.startswith("process 1 is lost (the launcher of its host is lost); waiting up to ")
    assert second.endswith(" is there; 1 process started")
    assert text_of(tmp_path / "commands").count("near cd") == 2


@contextmanager
def sleeping(by_ssh, tmp_path):
    path = script(tmp_path, f"open(f'{tmp_path}/{{c.me}}', 'w').close()\ntime.sleep(1000)")
    with by_ssh(path, "--hosts", "localhost,far") as run:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        yield run, time.monotonic()
        wait_for(lambda: named(str(path)) == [], 5)
        wait_for(lambda: not any(f"HOME={tmp_path}" in environ(pid) for pid in named("shardc.launch")), 20)


def environ(pid):
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return ""


def test_ctrl_c(by_ssh, tmp_path):
    with sleeping(by_ssh, tmp_path) as (run, begin):
        run.send_signal(signal.SIGINT)
        assert ends(run)[0] == 130 and time.monotonic() - begin < 6


def test_all_end_when_the_launcher_is_killed(by_ssh, tmp_path):
    with sleeping(by_ssh, tmp_path) as (run, _):
        run.kill()


# -- names


def test_names_of_this_machine():
    assert module._is_here(module._address("localhost")) and module._is_here("127.0.1.1")
    assert not module._is_here("192.0.2.1") and not module._is_here("")
    assert module._address("somebody@localhost") == "127.0.0.1"


def test_names_of_ssh(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho user me\necho hostname 192.0.2.7\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert module._address("alias.invalid") == "192.0.2.7"
