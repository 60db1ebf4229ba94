"""Strangers at all listening sockets of a run: garbage, lengths, half-open connections, replays, second numbers, a man
in the middle. The run does not notice, and needs no memory for them."""

import inspect
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax
import pytest

from shardc.errors import ClusterError
from shardc.runtime.transport import wire
from tests.launch.backends.test_under_a_cluster import Tasks, slurm
from tests.launch.launching import environment, named, script, text_of, wait_for
from tests.runtime.peers import together

SECONDS = 5.0
SECRET = b"0123456789abcdef" * 2
STEPS = """
import os, sys, time
from shardc.runtime.cluster import current
import jax, numpy as np
from jax.experimental.multihost_utils import process_allgather
c, folder, n = current(), sys.argv[1], 0
print("coordinator", c.store.texts.get("0/coordinator/0"), flush=True)
while n < 5 or "go on" in c.gather("on", "go on" if not os.path.exists(f"{folder}/stop") else ""):
    assert process_allgather(np.float32(n + c.me)).tolist() == [n, n + 1]
    n += 1
    print("step", n, flush=True)
    time.sleep(0.02)
"""


def of_run(path):
    """The processes of a run: launchers and children."""
    return [p for p in named(str(path)) if p != os.getpid()]


def listening(processes):
    """The TCP addresses at which processes listen, each with its process."""
    found = {}
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found[f"socket:[{words[9]}]"] = int(words[1].rpartition(":")[2], 16)
    ports = {}
    for p in processes:
        for handle in Path(f"/proc/{p}/fd").iterdir():
            with suppress(OSError):
                if (port := found.get(os.readlink(handle))) is not None:
                    ports[port] = p
    return ports


def memory(process, kind):
    """MiB of a process: `VmRSS` now, `VmHWM` at most."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[1]) / 1024


class Strangers:
    """Attacks at random, on ports of this machine. Each method is one."""

    def __init__(self, ports, rng):
        self.ports, self.rng = ports, rng
        self.kept = []
        self.recorded = self.record()

    def connect(self, port=None):
        sock = socket.create_connection(("127.0.0.1", port or self.rng.choice(self.ports)), 2)
        sock.settimeout(0.3)
        return sock

    def say(self, data, port=None):
        with suppress(OSError), self.connect(port) as sock:
            sock.sendall(data)
            sock.recv(1 << 16)

    def record(self):
        """What a process with the secret sends to a port, from its first byte on."""
        said = {}
        for port in self.ports:
            found = bytearray()
            with suppress(ClusterError), self.middle(port, lambda data, found=found: found.extend(data) or data) as at:
                wire.dial(at, SECRET, wire.Hello(1 << 40), 0.5).close()
            said[port] = bytes(found)
        return said

    @contextmanager
    def middle(self, port, change):
        """An address that leads to a port, past a man who changes what is sent to it."""
        threads = []

        def carry(source, to, change):
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    to.sendall(change(data))
            for sock in (source, to):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        def accept():
            with suppress(OSError):
                while True:
                    came, there = listener.accept()[0], socket.create_connection(("127.0.0.1", port), 2)
                    for sock in (came, there):
                        sock.settimeout(2)
                        sockets.callback(sock.close)
                    for ends in ((came, there, change), (there, came, lambda data: data)):
                        threads.append(threading.Thread(target=carry, args=ends))
                        threads[-1].start()

        with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as sockets:
            accepting = threading.Thread(target=accept)
            accepting.start()
            try:
                yield wire.address_of(listener)
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                accepting.join()
                for t in threads:
                    t.join()

    # -- the attacks

    def garbage(self):
        self.say(self.rng.randbytes(self.rng.choice([1, 5, 24, 300, 5000])))

    def another_protocol(self):
        self.say(self.rng.choice([b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"{}", b"[]\n", b"\0" * 64]))

    def length(self):
        """Much is announced, and does not come."""
        tls_record = b"\x16\x03\x01\xff\xff\x01\xff\xff\xff"
        frame = struct.pack("<BxHIQqqq", 0, 0xFFFF, 0xFFFFFFFF, 0, 0, 0, 0)
        sizes = [struct.pack(f, (1 << 8 * struct.calcsize(f)) - 1) for f in ("<I", "<Q", "!I", "!Q")]
        self.say(self.rng.choice([tls_record + self.rng.randbytes(1000), frame, *sizes]))

    def half_open(self):
        with suppress(OSError):
            self.kept.append(self.connect())
            self.kept[-1].sendall(self.rng.choice([b"", b"\x16", b"\x16\x03\x01\x02\0\x01"]))
        if len(self.kept) > 30:
            self.kept.pop(0).close()

    def replay(self):
        port = self.rng.choice(self.ports)
        self.say(self.recorded[port], port)

    def part_of_a_handshake(self):
        port = self.rng.choice(self.ports)
        self.say(self.recorded[port][: self.rng.randrange(2000)], port)

    def wrong_secret(self):
        with suppress(ClusterError):
            wire.dial(f"127.0.0.1:{self.rng.choice(self.ports)}", self.rng.randbytes(32), wire.Hello(0), 0.3).close()

    def man_in_the_middle(self):
        at = self.rng.randrange(3000)

        def flip(data):
            changed = bytearray(data)
            if at < len(data):
                changed[at] ^= 1 << self.rng.randrange(8)
            return changed

        with suppress(ClusterError, OSError), self.middle(self.rng.choice(self.ports), flip) as address:
            wire.dial(address, SECRET, wire.Hello(1 << 40), 0.3).close()

    def second_number(self):
        """This one holds the secret, and even so takes nobody's place."""
        hello = wire.Hello(self.rng.choice([-2, -1, 0, 1, 2, 1 << 60]), self.rng.choice([0, 0, 1]))
        address = f"127.0.0.1:{self.rng.choice(self.ports)}"
        with suppress(ClusterError, OSError), wire.dial(address, SECRET, hello, 0.3) as sock:
            sock.settimeout(0.3)
            if hello.process > 2:  # the store lets it in
                wire.write_all(sock, memoryview(struct.pack("<BxHIQqqq", 0, 0, 0xFFFFFFFF, 0, 0, 0, 0)))
                sock.recv_into(bytearray(100))

    ATTACKS = (garbage, another_protocol, length, half_open, replay, part_of_a_handshake, wrong_secret,
               man_in_the_middle, second_number)  # fmt: skip

    def attack(self):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            self.rng.choice(self.ATTACKS)(self)

    def close(self):
        for sock in self.kept:
            sock.close()


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_does_not_notice_strangers(tmp_path, seed):
    path, secret, logs = script(tmp_path, STEPS, head=""), tmp_path / "secret", tmp_path / "logs"
    secret.write_bytes(SECRET)
    options = ["--devices", 1, "--secret", secret, "--log", logs]
    with Tasks(slurm, tmp_path, path, *options, arguments=[tmp_path]) as tasks:
        wait_for(lambda: "step 5\n" in text_of(logs / "process-1.log"), 60)
        processes = of_run(path)
        assert len(processes) == 4  # two launchers, two children
        ports = listening(processes)
        assert len(ports) == 6, ports  # the store, two for links, JAX's coordination service, two of Gloo
        before = {p: memory(p, "VmRSS") for p in processes}
        strangers = [Strangers(sorted(ports), random.Random(10 * seed + i)) for i in range(8)]
        together(*(s.attack for s in strangers))
        steps = text_of(logs / "process-1.log").count("step")
        wait_for(lambda: text_of(logs / "process-1.log").count("step") > steps + 5)
        more = {p: memory(p, "VmHWM") - before[p] for p in processes}
        (tmp_path / "stop").touch()
        (code, _, err), other = tasks.ends()
        for s in strangers:
            s.close()
    assert (code, other) == (0, (0, "", "")), err
    assert max(more.values()) < 50, more
    assert "Traceback" not in err + text_of(logs / "process-0.log") + text_of(logs / "process-1.log")


MTLS = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
NODE = """
import os, sys, jax
os.environ["no_grpc_proxy"] = "127.0.0.1"
jax.config.update("jax_check_proxy_envs", False)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=1, cluster_detection_method="deactivate",
                           initialization_timeout=3)
print("let in", flush=True)
"""


@pytest.mark.sampled(0)
@pytest.mark.skipif(not MTLS, reason="this release of JAX takes no certificates")
def test_a_stranger_is_no_node_of_jax(tmp_path):
    """It says that it is node 1 of the coordination service: without certificates that killed process 0."""
    path, logs = script(tmp_path, STEPS, head=""), tmp_path / "logs"
    with Tasks(slurm, tmp_path, path, "--devices", 1, "--log", logs, arguments=[tmp_path]) as tasks:
        wait_for(lambda: "step 5\n" in text_of(logs / "process-1.log"), 60)
        address = re.search(r"coordinator (\S+)", text_of(logs / "process-1.log"))[1]
        node = script(tmp_path, NODE, "node.py", head="")
        stranger = subprocess.run(
            [sys.executable, node, address], env=environment(JAX_PLATFORMS="cpu"), capture_output=True, timeout=60
        )
        assert stranger.returncode != 0 and b"let in" not in stranger.stdout
        steps = text_of(logs / "process-0.log").count("step")
        wait_for(lambda: text_of(logs / "process-0.log").count("step") > steps + 5)
        (tmp_path / "stop").touch()
        assert [code for code, _, _ in tasks.ends()] == [0, 0]
