"""What is kept for the successor of a process: in any order of arrivals and deaths each message counts once."""

import random
from collections import deque

import pytest

from shardc.runtime.actor import Actor, Channel, Network, Step
from shardc.runtime.replaced.replay import ChannelRounds, Replay, replaceable

UP, DOWN, ITEMS = range(3)
PLACES = [(0,), (1,), (2,)]


def network(period=1):
    """A server, a worker that is replaced, and inputs."""
    server, worker, inputs = [], [], []
    for r in range(period):
        server.append(Step(("server", r), ((UP, r),), ((DOWN, (r + 1) % period),), r))
        worker.append(Step(("worker", r), ((ITEMS, r), (DOWN, r)), ((UP, r),), r))
        inputs.append(Step(("inputs", r), (), ((ITEMS, r),), r))
    channels = Channel("up", 1, 0, 2), Channel("down", 0, 1, 2, delay=1), Channel("items", 2, 1)
    return Network((tuple(server), tuple(worker), tuple(inputs)), channels, period)


class World:
    """The three actors, and the frames on their way. Values of messages are rounds."""

    def __init__(self, rng, period, rounds):
        self.rng, self.net, self.rounds = rng, network(period), rounds
        self.others = {a: Actor(self.net, a, None, rounds) for a in (0, 2)}
        self.replays = {a: Replay(self.net, PLACES, 1, a, ()) for a in (0, 2)}
        self.at_server, self.deaths = [], 0
        self.start(0)
        self.worker.deliver((DOWN, 0), -1)

    def start(self, first):
        self.worker = Actor(self.net, 1, None, self.rounds, first)
        self.ways = {(a, to): deque() for a in (0, 2) for to in (True, False)}

    def kill(self):
        """The worker dies; what is on its way to it is lost, what it has sent may have come."""
        self.deaths += 1
        for a, replay in self.replays.items():
            while self.ways[a, False] and self.rng.random() < 0.5:
                self.arrive(a, False)
            replay.present = False
        for _ in range(self.rng.randrange(8)):
            self.fire_others()
        first = min(r for replay in self.replays.values() for r in replay.first_missing)
        self.start(first)
        if not first:
            self.worker.deliver((DOWN, 0), -1)
        for a, replay in self.replays.items():
            again, credits = replay.begin(first)
            for channel in credits.elements():
                self.free(a, channel)
            for one in again:
                one.send(self)
            for _ in range(self.rng.randrange(4)):
                self.fire_others()

    def send(self, a, frame):
        self.ways[a, True].append(frame)

    def fire_others(self):
        for a, actor in self.others.items():
            step, round = actor.step, actor.round
            if not actor.ready():
                continue
            values, _ = actor.fire()
            replay = self.replays[a]
            if a == 0:
                assert values == [round]
                self.at_server.append(round)
                if replay.takes(UP) and replay.present:
                    self.send(0, ("credit", UP))
            for message in step.gives:
                self.post(a, message, round)

    def post(self, a, message, value):
        replay = self.replays[a]
        replay.keep(message[0], lambda world: world.send(a, (message, value)))
        if replay.present:
            self.send(a, (message, value))

    def arrive(self, a, to_worker):
        frame = self.ways[a, to_worker].popleft()
        replay = self.replays[a]
        if to_worker and frame[0] == "credit":
            self.worker.credit(UP, None)
            assert len(self.worker.free_registers()) + len(self.worker.held_registers()) <= 2
        elif to_worker:
            self.worker.deliver(*frame)
        elif frame[0] == "credit":
            if replay.frees(frame[1]):
                self.free(a, frame[1])
        elif replay.comes(UP):
            self.others[0].deliver(*frame)
        elif replay.was_taken(UP):
            self.send(0, ("credit", UP))

    def free(self, a, channel):
        if self.net.channels[channel].registers is not None:
            self.others[a].credit(channel, None)

    def fire_worker(self):
        if not self.worker.ready():
            return
        round = self.worker.round
        (item, down), _ = self.worker.fire()
        assert (item, down) == (round, round - 1)
        self.ways[0, False].append(((UP, round % self.net.period), round))
        self.ways[0, False].append(("credit", DOWN))
        self.ways[2, False].append(("credit", ITEMS))

    def run(self, deaths):
        for _ in range(100_000):
            ways = [way for way, frames in self.ways.items() if frames]
            choice = self.rng.random()
            if deaths and choice < 0.02:
                deaths -= 1
                self.kill()
            elif ways and choice < 0.6:
                self.arrive(*self.rng.choice(ways))
            elif choice < 0.8:
                self.fire_worker()
            else:
                self.fire_others()
            if not deaths and len(self.at_server) == self.rounds:
                return


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("seed", list(range(20)))
def test_each_message_counts_once_and_little_is_kept(seed, period):
    world = World(random.Random(seed), period, rounds=40)
    world.run(deaths=seed % 6)
    assert world.at_server == list(range(40))
    kept = [len(k) for k in world.replays[0]._kept.values()]
    assert max(kept) <= 2


def test_rounds_of_a_channel():
    steps = tuple(Step(r, ((0, r),) if r in (1, 3) else (), (), r) for r in range(4))
    net = Network(((), steps), (Channel("c", 0, 1),), 4)
    rounds = ChannelRounds(net, 0)
    assert [rounds.of(n) for n in range(5)] == [1, 3, 5, 7, 9]
    assert [rounds.before(r) for r in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_messages_without_values_are_made_again_and_others_are_not():
    for empty in ((), (UP, DOWN, ITEMS)):
        replay = Replay(network(), PLACES, 1, 2, empty)
        replay.begin_here(5)
        replay.keep(ITEMS, lambda link: None)
        if empty:
            assert [(a.round, a.send is None) for a in replay.begin(3)[0]] == [(3, True), (4, True), (5, False)]
        else:
            with pytest.raises(LookupError, match="message 3"):
                replay.begin(3)


def test_who_may_be_replaced():
    net = network()
    assert replaceable(net, PLACES, {0, 2}, ()).processes == {1}
    assert replaceable(net, PLACES, {0, 1, 2}, ()).processes == set()
    assert replaceable(net, [(0,), (1, 3), (2,)], {0, 2}, ()).processes == set()  # an actor of two processes
    assert replaceable(net, PLACES, {1, 2}, ()).processes == set()  # what the server gives is late
    assert replaceable(net, [(0,), (1,), (1,)], {0}, ()).processes == set()  # the rounds of its inputs are not known
    both = Network(net.actors, (*net.channels[:2], Channel("items", 2, 1, 2)))
    assert replaceable(both, [(0,), (1,), (1,)], {0}, ()).processes == {1}
    assert replaceable(both, PLACES, {0}, ()).processes == {1}  # the other one exchanges values with it
    assert replaceable(both, PLACES, {0}, (ITEMS,)).processes == {1, 2}
