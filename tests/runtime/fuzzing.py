"""Random networks over several processes: who runs what, and tasks that log what they do."""

import random
import time

import numpy as np

from shardc.runtime.distributed_network import DistributedNetwork
from shardc.runtime.executor import Executor, ProcessShare, Task, Threads
from tests.runtime.codec import Codec
from tests.runtime.networks import random_network


class Same(Codec):
    """A codec for actors of several processes, which all make the same values."""

    def unpack(self, channel, parts):
        found = [super(Same, self).unpack(channel, {p: part}) for p, part in parts.items()]
        assert all((x == found[0]).all() for x in found)
        return found[0]


def case_of(seed, processes):
    """A network, and the processes of each of its actors: each in one, or the first processes together as an island."""
    rng = random.Random(seed)
    net = random_network(rng, actors=5, steps=12)
    groups = [[p] for p in range(processes)]
    if processes > 2 and rng.random() < 0.3:
        groups = [list(range(processes - 1)), [processes - 1]]
    return net, [rng.choice(groups) for _ in net.actors]


class FuzzSide:
    """What one process does of a case. It logs each step with its result."""

    def __init__(self, case, number, links, delays):
        self.log = []
        net, places = case
        self.spread = DistributedNetwork(net, number, places, links, Same(ready=delays.random() < 0.5))
        steps = {s.label: (i, s) for steps in net.actors for i, s in enumerate(steps)}

        def task(label):
            position, step = steps[label]

            def run(values):
                time.sleep(delays.choice((0, 0, 0.0003, 0.001)))
                result = sum(values, np.zeros(2)) + position
                self.log.append((label, result))
                return [result * (k + 1) for k in range(len(step.gives))]

            return Task(run)

        share = ProcessShare(self.spread.mine, self.spread.ports)
        self.executor = Executor(net, task, threads=Threads(delays.choice((None, 1, 2))), share=share)

    def open(self):
        self.spread.open(self.executor.mailboxes, 20.0)

    def close(self):
        self.executor.close()
        self.spread.close()
