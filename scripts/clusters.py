"""Runs under real Slurm, Open MPI and Ray, on hosts that Linux namespaces make. As root: `make clusters`.

Each host has its own network, process numbers and host name; disks are shared. A host is lost by cutting its cable and
killing all that runs there. All of it, daemons too, runs in a namespace that ends with this program.

`python -m scripts.clusters mpi ray` runs these alone; all together write their log into docs/design/clusters.md.

Needs: apt-get install slurm-wlm munge openmpi-bin iproute2; pip install ray. What is missing is left out, and said.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LOG: Final = ROOT / "docs" / "design" / "clusters.md"
"""The page whose last block is the log."""
AT: Final = Path("/tmp/clusters")
"""Files of the runs; /tmp is empty inside of the namespace."""
END: Final = "step 39 on .*: 0.1364381"
"""The last step of a run that has lost none."""
SECONDS: Final = 400.0
"""The longest time of a run: Slurm lets a job that is put back wait for two minutes."""
NAMES: Final = ("n0", "n1", "n2")
HIDDEN: Final = re.compile(r"step (?!0 |12|39)|[\s-]|$|Traceback|W\d{4}|\x1b")
"""Lines that are not shown: most steps, frames of tracebacks, frames of Open MPI, warnings, Ray's own."""
WIDTH: Final = 150
UNSHARE: Final = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]

TRAIN: Final = """
import os, signal, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import shardc
from shardc import S

folder, kill, me = Path(sys.argv[1]), sys.argv[2], jax.process_index()
killed = folder.with_suffix(".killed")

def step(w, x):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x[:, :4]) ** 2))(w)
    return w - 0.1 * grads, loss

train = shardc.function(step, mesh=shardc.make_mesh(data=2), in_placements={"x": {"data": S(0)}})
with shardc.checkpoints(folder, every=5) as saved:
    w, start = saved.last(or_else=lambda: jnp.zeros((16, 4)))
    for i in range(start, 40):
        w, loss = train(w, np.random.default_rng(i).normal(size=(8, 16)).astype("float32"))
        saved.step(i, w, loss=loss)
        if me == 0:
            print(f"step {i} on {os.uname().nodename}: {float(loss):.7f}", flush=True)
        what, _, who = kill.partition("-")
        if i == 12 and who == str(me) and not killed.exists():
            killed.touch()
            number = signal.SIGSTOP if what == "stop" else signal.SIGKILL
            os.kill(os.getppid() if what == "launcher" else os.getpid(), number)
        time.sleep(0.1)
"""

SLURM: Final = f"""
ClusterName=shardc
SlurmctldHost=ctl
SlurmUser=root
AuthInfo=socket={AT}/munge/socket
StateSaveLocation={AT}/ctl
SlurmctldPidFile={AT}/ctl.pid
SlurmctldLogFile={AT}/ctl.log
SlurmdSpoolDir={AT}/spool-%n
SlurmdPidFile={AT}/%n.pid
SlurmdLogFile={AT}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=20
NodeName=n[0-2] CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""


# -- hosts


class Host:
    """A host in namespaces of its own, with a cable to the switch."""

    def __init__(self, number: int) -> None:
        self.name, self.address = NAMES[number], f"10.77.0.{number + 1}"
        self.boot()

    def boot(self) -> None:
        up = (
            f"hostname {self.name}; ip link set lo up; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; "
            "mount -t tmpfs tmpfs /dev/shm; echo up; exec sleep infinity"
        )
        self.held = subprocess.Popen([*UNSHARE, "sh", "-c", up], stdout=subprocess.PIPE, text=True)
        assert self.held.stdout is not None and self.held.stdout.readline() == "up\n"
        self.init = Path(f"/proc/{self.held.pid}/task/{self.held.pid}/children").read_text().strip()
        on = AT / self.name
        on.write_text(f'#!/bin/sh\nexec nsenter -t {self.init} --mount --net --pid --uts --ipc sh -c "cd {AT}; $*"\n')
        on.chmod(0o755)
        do(f"ip link add v{self.name} type veth peer name eth0 netns {self.init}")
        do(f"ip link set v{self.name} master switch up")
        do(f"{on} 'ip address add {self.address}/24 dev eth0; ip link set eth0 up'")

    def lose(self) -> None:
        """Cut the cable, then the current."""
        subprocess.run(["ip", "link", "set", f"v{self.name}", "down"], check=False, capture_output=True)
        self.held.kill()
        self.held.wait()
        subprocess.run(["ip", "link", "delete", f"v{self.name}"], check=False, capture_output=True)

    def anew(self) -> None:
        self.lose()
        self.boot()

    def on(self, line: str) -> str:
        """A command line that runs one on this host."""
        return f"{AT}/{self.name} '{line}'"


def do(line: str) -> str:
    done = subprocess.run(line, shell=True, text=True, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"{line}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


def make_switch() -> None:
    """Begin a world of its own: a network, names of hosts, empty /tmp, /run and home."""
    do("mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /run; hostname ctl; ip link set lo up")
    (AT / "home").mkdir(parents=True)
    names = [f"10.77.0.{i + 1} {name}" for i, name in enumerate(NAMES)]
    (AT / "hosts").write_text("\n".join(["127.0.0.1 localhost", "10.77.0.100 ctl", *names]) + "\n")
    do(f"mount --bind {AT}/hosts /etc/hosts")
    do("ip link add switch type bridge; ip address add 10.77.0.100/24 dev switch; ip link set switch up")
    (AT / "train.py").write_text(TRAIN)
    os.environ.update(HOME=str(AT / "home"), PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")


# -- runs


@dataclass
class Case:
    """A run.

    Attributes:
      what: happens in it, in words.
      line: the command.
      code: the exit code that it has to have.
      says: what stands in its output, as patterns.
      act: what is done when `step 12` is shown.
      output: a file that the output goes to, if not to standard output.
    """

    what: str
    line: str
    code: int = 0
    says: Sequence[str] = (END,)
    act: Callable[[], object] | None = None
    output: str = ""


def run(case: Case, say: Callable[[str], object]) -> bool:
    """Run a case, and say how it went."""
    begin, act, first = time.monotonic(), case.act, AT / "out"
    with first.open("w") as file:
        process = subprocess.Popen(case.line, shell=True, stdout=file, stderr=subprocess.STDOUT, cwd=AT)
        while time.monotonic() < begin + SECONDS and process.poll() is None:
            time.sleep(0.2)
            if act and "step 12" in _text(case.output) + _text(first):
                act()
                act = None
    code, seconds = process.poll(), time.monotonic() - begin
    if code is None:
        process.kill()
    text = _text(case.output) + _text(first)
    missing = [pattern for pattern in case.says if not re.search(pattern, text)]
    say(f"{'ok ' if (code, missing, act) == (case.code, [], None) else 'BAD'} {case.what}: {code}, {seconds:.0f} s")
    say(f"    $ {case.line.replace(sys.executable, 'python').replace(f'{AT}/', '')}")
    for line in text.splitlines():
        if not HIDDEN.match(line):
            say(f"    {line[:WIDTH]}")
    for pattern in missing:
        say(f"    there is no {pattern}")
    return (code, missing, act) == (case.code, [], None)


def _text(path: str | Path) -> str:
    return Path(path).read_text(errors="replace") if path and Path(path).exists() else ""


def shardc(folder: str, options: str = "", kill: str = "-") -> str:
    """The command of a run with its checkpoints in a folder of its own."""
    words = f"{sys.executable} -m shardc run --devices 1 --silence 5 --deadline 60 {options}"
    return f"{words.rstrip()} train.py {AT}/{folder} {kill}"


# -- clusters


def slurm(hosts: Sequence[Host]) -> list[Case]:
    (AT / "slurm.conf").write_text(SLURM)
    os.environ["SLURM_CONF"] = f"{AT}/slurm.conf"
    (AT / "munge").mkdir(mode=0o755)
    key = AT / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    names = " ".join(f"--{name}-file={AT}/munge/{name}" for name in ("key", "pid", "log", "seed"))
    do(f"munged --force --socket={AT}/munge/socket {names}; slurmctld")
    for host in hosts:
        do(host.on("slurmd"))
    until = time.monotonic() + 60
    while do("sinfo --noheader --Node --format %t").split() != ["idle"] * len(hosts):
        if time.monotonic() > until:
            raise TimeoutError(do("sinfo --Node --long"))
        time.sleep(0.5)
    srun = "srun --nodes 2 --ntasks 2 --kill-on-bad-exit=0"
    spare = "srun --nodes 3 --ntasks 3 --kill-on-bad-exit=0 --no-kill"
    batch = "sbatch --wait --requeue --open-mode=append --nodes 2 --ntasks 2 --output"
    put_back = "|| [ $? -ne 75 ] || scontrol requeue $SLURM_JOB_ID"

    def lose_n0() -> None:
        hosts[0].lose()
        hosts[1].boot()  # which was lost before
        do(hosts[1].on("slurmd"))

    return [
        Case("two tasks", f"{srun} {shardc('s0')}"),
        Case("process 1 is killed, a restart is left", f"{srun} {shardc('s1', '--restarts 1', 'process-1')}", 0,
             [r"process 1 is lost \(killed by SIGKILL\); started again", END]),
        Case("process 1 stops, no restart is left", f"{srun} {shardc('s2', '', 'stop-1')}", 75, ["process 1 is lost"]),
        Case("the launcher of process 1 is killed", f"{srun} {shardc('s3', '', 'launcher-1')}", 137,
             ["process 1 is lost: the launcher of its host is lost", "task 0: Exited with exit code 75"]),
        Case("the launcher of process 0 is killed", f"{srun} {shardc('s4', '', 'launcher-0')}", 137,
             ["task 1: Exited with exit code 75"]),
        Case("scancel: all save", f"{srun} {shardc('s5', '--grace 15 --log s5.log')}", 143,
             ["asked to end: all processes save at their next step", "all processes have saved step"],
             lambda: do("scancel --user root"), f"{AT}/s5.log/launcher.log"),
        Case("host n1 is lost, a spare takes its place", f"{spare} {shardc('s6', '--spares 1 --restarts 1')}", 0,
             ["host n2 takes the place of host n1", END], hosts[1].lose),
        Case("process 1 stops, and the script of the job puts it back into the queue",
             f"{batch} {AT}/s7.out --wrap '{srun} {shardc('s7', '', 'stop-1')} {put_back}'", 0,
             ["process 1 is lost", END], None, f"{AT}/s7.out"),
        Case("host n0 is lost, and Slurm puts the job back into the queue",
             f"{batch} {AT}/s8.out --wrap '{srun} {shardc('s8')}'", 0,
             ["step 12 on n0", "step 39 on n1"], lose_n0, f"{AT}/s8.out"),
    ]  # fmt: skip


def mpi(hosts: Sequence[Host]) -> list[Case]:
    (AT / "rsh").write_text(f'#!/bin/sh\nhost=$1; shift; exec {AT}/$host "$*"\n')
    (AT / "rsh").chmod(0o755)
    net = "--mca oob_tcp_if_include 10.77.0.0/24 --mca plm rsh --mca plm_rsh_agent ./rsh"
    on_n0 = f"nsenter -t {hosts[0].init} --net --uts"  # and with the processes of all hosts, which rsh finds
    mpirun = f"{on_n0} mpirun --allow-run-as-root {net} --host n0,n1 -n 2"
    return [
        Case("two tasks", f"{mpirun} {shardc('m0')}"),
        Case("process 1 is killed, a restart is left",
             f"{mpirun} {shardc('m1', '--restarts 1', 'process-1')}", 0,
             [r"process 1 is lost \(killed by SIGKILL\); started again", END]),
        Case("process 1 stops, no restart is left", f"{mpirun} {shardc('m2', '', 'stop-1')}", 75,
             ["process 1 is lost"]),
        Case("the launcher of process 1 is killed", f"{mpirun} {shardc('m3', '', 'launcher-1')}", 137, []),
    ]  # fmt: skip


def ray(hosts: Sequence[Host]) -> list[Case]:
    binary = Path(sys.executable).parent / "ray"
    node = "--num-cpus 1 --object-store-memory 100000000 --disable-usage-stats --node-ip-address"
    do(hosts[0].on(f"{binary} start --head --port 6379 --include-dashboard false {node} {hosts[0].address}"))
    for host in hosts[1:]:
        do(host.on(f"{binary} start --address {hosts[0].address}:6379 {node} {host.address}"))
    os.environ["RAY_ADDRESS"] = f"{hosts[0].address}:6379"
    on_ray = "--ray --processes 2"
    return [
        Case("two actors", hosts[0].on(shardc("r0", on_ray))),
        Case("process 1 is killed, a restart is left",
             hosts[0].on(shardc("r1", f"{on_ray} --restarts 1", "process-1")), 0,
             [r"process 1 is lost \(killed by SIGKILL\); started again", END]),
        Case("the actor of process 1 is killed", hosts[0].on(shardc("r2", on_ray, "launcher-1")), 75,
             ["process 1 is lost: the launcher of its host is lost"]),
        Case("host n1 is lost, Ray starts its actor elsewhere",
             hosts[0].on(shardc("r3", f"{on_ray} --restarts 1 --deadline 200")), 0,
             ["waiting up to .* for its host", "host .* is there; ", END], hosts[1].lose),
    ]  # fmt: skip


def by_hand(hosts: Sequence[Host]) -> list[Case]:
    def line(host: int) -> str:
        options = f"--hosts 2 --at {hosts[0].address}:4711 --host-0-deadline 120 --host {host}"
        return hosts[host].on(shardc("h0", options))

    def host_0() -> None:
        subprocess.Popen(f"{line(0)} >> {AT}/h0.out 2>&1", shell=True)

    def anew() -> None:
        hosts[0].anew()
        host_0()

    host_0()
    return [
        Case("host n0 is lost and started anew", line(1), 0,
             ["in case host 0 is started anew", END], anew, f"{AT}/h0.out"),
    ]  # fmt: skip


CLUSTERS: Final[Mapping[str, Callable[[Sequence[Host]], list[Case]]]] = {
    "slurm": slurm, "mpi": mpi, "ray": ray, "by_hand": by_hand,
}  # fmt: skip
NEEDS: Final = {"slurm": "srun", "mpi": "mpirun", "ray": str(Path(sys.executable).parent / "ray"), "by_hand": "ip"}


def versions() -> str:
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")]
    for words in ("slurmd -V", "mpirun --version", f"{NEEDS['ray']} --version"):
        if shutil.which(words.split()[0]):
            found.append(do(words).splitlines()[0])
    return f"shardc {do('git rev-parse --short HEAD').strip()}, Python {platform.python_version()}, {', '.join(found)}"


def main() -> int:
    if "--inside" not in sys.argv:
        os.execvp("unshare", [*UNSHARE, sys.executable, "-m", "scripts.clusters", "--inside", *sys.argv[1:]])
    chosen = sys.argv[sys.argv.index("--inside") + 1 :] or list(CLUSTERS)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    say(f"{versions()}; Linux {platform.release()}, {time.strftime('%Y-%m-%d')}")
    make_switch()
    hosts, good = [Host(i) for i in range(len(NAMES))], True
    for name in chosen:
        say(f"\n{name}")
        if shutil.which(NEEDS[name]) is None:
            say(f"    left out: there is no {NEEDS[name]}")
            continue
        for case in CLUSTERS[name](hosts):
            good &= run(case, say)
        for host in hosts:
            host.anew()
    if chosen == list(CLUSTERS):
        head = LOG.read_text().partition("```text\n")[0]
        LOG.write_text("\n".join([f"{head}```text", *lines, "```\n"]))
    return not good


if __name__ == "__main__":
    sys.exit(main())
