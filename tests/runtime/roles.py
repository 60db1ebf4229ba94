"""What the processes of tests do (`tests.runtime.processes`). They import no JAX."""

import faulthandler
import json
import os
import random
import sys
import threading
import time
from contextlib import suppress

import numpy as np

from shardc.errors import PeerLostError, ShardcError
from shardc.runtime import executor
from shardc.runtime.actor import Channel, Network, Step
from shardc.runtime.cluster import Cluster, RunConfig
from shardc.runtime.distributed_network import DistributedNetwork
from shardc.runtime.executor import Executor, ProcessShare, Task
from shardc.runtime.store import Store, StoreServer
from shardc.runtime.transport.link import Link
from shardc.runtime.transport.wire import Hello, dial
from tests.runtime.codec import Codec, allocate
from tests.runtime.fuzzing import FuzzSide, case_of
from tests.runtime.peers import others

_saying = threading.Lock()


def play(role, *args):
    faulthandler.dump_traceback_later(120, exit=True)  # the watchdog, if the test itself is killed
    globals()[role](*args)
    sys.stdout.flush()
    os._exit(0)


def say(**what):
    with _saying:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def hear():
    return json.loads(sys.stdin.readline())


# ---- a link


def peer(address, secret, silence, clear):
    """The other end of a link. Does what it is told."""
    sock = dial(address, bytes.fromhex(secret), Hello(1), 10.0)
    if clear:
        sock.clear = True
    link = Link(sock, 1, 0, silence, allocate)
    say(ready=True)
    while True:
        what, *args = hear()
        try:
            if what == "post":
                tag, size = args
                link.send_tagged(tag, (b"", [memoryview(np.full(size, 7, np.uint8))]))
                say(posted=tag)
            elif what == "collect":
                _, buffers = link.receive_tagged(args[0], args[1])
                say(sizes=[b.nbytes for b in buffers], right=all(set(bytes(b[::4096])) <= {7} for b in buffers))
            elif what == "lost":
                while link.lost is None:
                    time.sleep(0.001)
                say(at=time.monotonic(), text=str(link.lost))
            elif what == "close":
                link.close()
                say(closed=True)
                return
        except ShardcError as error:
            say(error=type(error).__name__, text=str(error))


# ---- a store


def server(address, secret):
    """A store's server."""
    say(address=StoreServer(address, bytes.fromhex(secret)).address)
    hear()


def client(address, secret, process):
    """A process that gives signs of life to a store."""
    Store(address, bytes.fromhex(secret), process, lambda event: say(**event)).status = lambda: f"step {process}"
    say(ready=True)
    hear()


# ---- a network


def chain(processes, microbatches):
    """Forward through one actor a process and back again, with few registers; each message is an array."""
    channels, forward, back = [], {}, {}
    for p in range(processes - 1):
        forward[p] = len(channels)
        channels.append(Channel(f"forward {p}->{p + 1}", p, p + 1, 2))
        back[p] = len(channels)
        channels.append(Channel(f"back {p + 1}->{p}", p + 1, p, 2))
    rows = []
    for p in range(processes):
        first, last = p == 0, p == processes - 1

        def f(j, p=p, first=first, last=last):
            takes = () if first else ((forward[p - 1], j),)
            gives = ((back[p - 1], j),) if last and not first else ((forward[p], j),)
            return Step(f"{p}F{j}", takes, gives)

        def b(j, p=p, first=first):
            return Step(f"{p}B{j}", ((back[p], j),), () if first else ((back[p - 1], j),))

        if last:
            rows.append(tuple(f(j) for j in range(microbatches)))
            continue
        ahead = min(2, microbatches)
        row = [f(j) for j in range(ahead)]
        for j in range(microbatches):
            row.append(b(j))
            row += [f(j + ahead)] if j + ahead < microbatches else []
        rows.append(tuple(row))
    return Network(tuple(rows), tuple(channels))


def member(config, options):
    """A process of a run: makes steps until it is told to end, or until a process is lost."""
    config = RunConfig(**{**config, "secret": bytes.fromhex(config["secret"])})
    cluster = Cluster(config, allocate)
    cluster.on_orphaned = lambda: os._exit(3)
    rng = random.Random(options["seed"] * 100 + config.me)
    net = chain(config.processes, options["microbatches"])
    while True:
        try:
            say(done=_member_runs(cluster, net, rng, options), epoch=cluster.epoch)
            break
        except ShardcError as error:
            lost = error.process if isinstance(error, PeerLostError) else None
            say(error=type(error).__name__, text=str(error), lost=lost, at=time.monotonic())
            if lost is None or not options.get("rejoin"):
                break
        cluster.rejoin()
    if options.get("meet"):
        cluster.gather("the end", "")
    cluster.close()
    say(closed=True, threads=[t.name for t in threading.enumerate() if t.name.startswith("shardc ")])


def _member_runs(cluster, net, rng, options):
    me, size = cluster.me, options.get("size", 256)
    neighbours = [p for p in others(cluster) if not options.get("neighbours") or abs(p - me) == 1]
    links = {p: cluster.link(p) for p in neighbours}
    places = [[p] for p in range(cluster.processes)]
    spread = DistributedNetwork(net, cluster.epoch + 1, places, links, Codec(ready=rng.random() < 0.5))
    run = [0]

    def task(label):
        j = int(label[2:])
        gives = len(next(s for s in net.actors[me] if s.label == label).gives)

        def go(values):
            time.sleep(rng.choice(options.get("delays", (0, 0.0005, 0.002))))
            if options.get("fails") == [label, run[0]]:
                raise ValueError("broken")
            x = values[0] if values else np.full(size, 1000.0 * run[0] + j)
            if label[0] == "0" and label[1] == "B":
                right = 1000.0 * run[0] + j + 2 * (cluster.processes - 1)
                assert (x == right).all(), (x, right)
            return [x + 1] * gives

        return Task(go)

    share = ProcessShare(spread.mine, spread.ports, options.get("patience", 60.0))
    with Executor(net, task, share=share) as steps:
        spread.open(steps.mailboxes, cluster.config.deadline)
        say(open=True)
        try:
            while run[0] < options["runs"]:
                run[0] += 1
                try:
                    steps.run()
                except PeerLostError:
                    raise
                except ShardcError as error:
                    if not options.get("fails"):
                        raise
                    say(failed=run[0], error=type(error).__name__, text=str(error))
                spread.forget(run[0])
                if run[0] in (1, options["runs"]) or options.get("speak"):
                    say(run=run[0])
        finally:
            spread.close()
    return run[0]


# ---- random networks


def fuzz(config):
    """A process of random networks: opens, runs and closes its side of those that it is told."""
    config = RunConfig(**{**config, "secret": bytes.fromhex(config["secret"])})
    cluster = Cluster(config, allocate)
    links = {p: cluster.link(p) for p in others(cluster)}
    say(ready=True)
    side, running, number = None, None, 0
    real = executor.find_deadlock
    while True:
        what, *args = hear()
        if what == "open":
            seed, checked = args
            number += 1
            executor.find_deadlock = real if checked else lambda net: None
            error = None
            try:
                side = FuzzSide(case_of(seed, config.processes), number, links, random.Random(seed * 10 + config.me))
                side.open()
            except ShardcError as refused:
                error = str(refused)
            say(error=error)
        elif what == "run":
            error = None
            try:
                for _ in range(args[0]):
                    side.executor.run()
            except ShardcError as failed:
                error = str(failed)
            say(error=error, log=[(label, result.tolist()) for label, result in side.log])
        elif what == "begin":
            running = threading.Thread(target=_run_until_closed, args=(side.executor,), daemon=True)
            running.start()
            say(begun=True)
        elif what == "labels":
            say(labels=[label for label, _ in side.log])
        elif what == "close":
            side.close()
            if running is not None:
                running.join()
            running = None
            say(closed=True)
        else:
            cluster.close()
            return


def _run_until_closed(steps):
    with suppress(ShardcError):
        steps.run()
