"""Networks for tests: built by name, or at random."""

from shardc.runtime.actor import Channel, Network, Step


def build(actors, channels, **options):
    """`actors`: for each a list of (label, "messages taken", "messages given"[, round]), a message being `channel.key`.

    `channels`: name -> (source, target[, registers[, bytes[, delay]]]).
    """
    numbers = {name: i for i, name in enumerate(channels)}

    def messages(text):
        return tuple((numbers[m.split(".")[0]], m.split(".")[1]) for m in text.split())

    return Network(
        tuple(tuple(Step(label, messages(t), messages(g), *at) for label, t, g, *at in steps) for steps in actors),
        tuple(Channel(name, *ends) for name, ends in channels.items()),
        **options,
    )


def looped(delay, registers=None):
    """Two actors: `a` takes what `b` made some rounds ago."""
    registers = delay + 1 if registers is None else registers
    return build(
        [[("a", "c.0", "d.0")], [("b", "d.0", "c.0")]], {"c": (1, 0, registers, 0, delay), "d": (0, 1, 1)},
        names=("actor", "learner"), kind="flow",
    )  # fmt: skip


def two_rates(delay):
    """A period of 6 rounds: `g` runs in each second one, `t` in each third one, and takes what `g` gave so
    many rounds ago, if it ran then."""
    gives = {(r - delay) % 6: f"c.{r}" for r in (0, 3)}
    return build(
        [
            [(f"g{r}", "", gives.get(r, ""), r) for r in (0, 2, 4)],
            [(f"t{r}", f"c.{r}" * ((r - delay) % 2 == 0), "", r) for r in (0, 3)],
        ],
        {"c": (0, 1, 2, 0, delay)},
        period=6,
    )


def random_network(rng, actors=4, steps=9):
    """Up to `actors` actors with up to `steps` steps in all; about half of these networks deadlock."""
    count = rng.randint(1, actors)
    total = rng.randint(1, steps)
    where = [rng.randrange(count) for _ in range(total)]  # of each step its actor; the number is a global order
    takes, gives = [[] for _ in where], [[] for _ in where]
    channels, number = [], {}
    for key in range(rng.randint(0, 2 * total)):
        giver, taker = rng.randrange(total), rng.randrange(total)
        if giver > taker and rng.random() < 0.95:
            giver, taker = taker, giver
        if giver == taker and rng.random() < 0.97:
            continue
        pair = where[giver], where[taker], rng.randrange(2)
        if pair not in number:
            number[pair] = len(channels)
            registers = rng.choice([None, 1, 1, 2, 2, 3])
            channels.append(Channel(f"c{len(channels)}", *pair[:2], registers, rng.randint(0, 3)))
        gives[giver].append((number[pair], key))
        takes[taker].append((number[pair], key))
    for side in (*takes, *gives):
        rng.shuffle(side)
    order = list(range(total))
    if rng.random() < 0.3:  # also orders that nobody thought about
        i, j = rng.randrange(total), rng.randrange(total)
        order[i], order[j] = order[j], order[i]
    rows = [
        tuple(Step(f"s{i}", tuple(takes[i]), tuple(gives[i])) for i in order if where[i] == a) for a in range(count)
    ]
    return Network(tuple(rows), tuple(channels))


def where_it_stops(net):
    """All final states, by brute force over all interleavings, from the definition.

    A state is for each actor how many steps it has done.
    """

    def can_fire(state, a):
        if state[a] == len(net.actors[a]):
            return False
        given = [m for b, n in enumerate(state) for s in net.actors[b][:n] for m in s.gives]
        taken = [m for b, n in enumerate(state) for s in net.actors[b][:n] for m in s.takes]
        step = net.actors[a][state[a]]
        used = [m[0] for m in given if m not in taken] + [m[0] for m in step.gives]
        room = all(c.registers is None or used.count(i) <= c.registers or c.source != a
                   for i, c in enumerate(net.channels))  # fmt: skip
        return set(step.takes) <= set(given) and room

    ends, seen, todo = set(), set(), [(0,) * len(net.actors)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        further = [(*state[:a], state[a] + 1, *state[a + 1 :]) for a in range(len(state)) if can_fire(state, a)]
        todo += further
        if not further:
            ends.add(state)
    return ends


# ---- rounds


def late_by(net, message):
    """How many of a message are there when a run begins: those that are taken in the first rounds."""
    delay = net.channels[message[0]].delay
    at = next(s.round for steps in net.actors for s in steps if message in s.takes)
    return len(range(at, delay, net.period))


def unrolled(net, rounds):
    """For each actor the steps of a run: labels are (label, round), messages (channel, (key, number)).

    The messages of one channel and key are numbered from the first ones on, which are there when the run begins.
    """
    first = {m: late_by(net, m) for steps in net.actors for s in steps for m in s.takes}
    return [
        [
            Step(
                (s.label, k * net.period + s.round),
                tuple((c, (key, k)) for c, key in s.takes),
                tuple((c, (key, k + first[c, key])) for c, key in s.gives),
            )
            for k in range(rounds // net.period + 1)
            for s in steps
            if k * net.period + s.round < rounds
        ]
        for steps in net.actors
    ]


def first_of(net):
    """The messages of the unrolled network that are there when a run begins."""
    return [(c, (key, k)) for c, key in set(net.first_messages()) for k in range(late_by(net, (c, key)))]


def runs_until(net, rounds):
    """How many steps each actor runs, by the definition. It does not depend on the order: any that can runs."""
    rows, there = unrolled(net, rounds), set(first_of(net))
    used = [sum(m[0] == c for m in there) for c in range(len(net.channels))]
    done = [0] * len(rows)

    def fire(step):
        wanted = [m[0] for m in step.gives]
        room = all(net.channels[c].registers is None or used[c] + wanted.count(c) <= net.channels[c].registers
                   for c in wanted)  # fmt: skip
        if not room or not there.issuperset(step.takes):
            return False
        there.difference_update(step.takes)
        there.update(step.gives)
        for c in wanted:
            used[c] += 1
        for c, _ in step.takes:
            used[c] -= 1
        return True

    going = True
    while going:
        going = False
        for a, row in enumerate(rows):
            while done[a] < len(row) and fire(row[done[a]]):
                done[a] += 1
                going = True
    return done


def random_periodic(rng, nodes=5, actors=3):
    """Up to `nodes` nodes on up to `actors` actors; each runs every so many rounds, and takes what others gave up to 3
    rounds ago. Registers are too few, enough or plenty."""
    period, count = rng.choice((1, 2, 3, 4, 6)), rng.randint(1, actors)
    every = [rng.choice([n for n in range(1, period + 1) if period % n == 0]) for _ in range(rng.randint(1, nodes))]
    where, offset = [rng.randrange(count) for _ in every], [rng.randrange(n) for n in every]
    takes, gives = {}, {}  # by node and round
    channels, number = [], {}

    def runs(node, at):
        return at % every[node] == offset[node]

    for edge in range(rng.randint(0, 2 * len(every))):
        giver, taker, delay = rng.randrange(len(every)), rng.randrange(len(every)), rng.choice((0, 0, 1, 1, 2, 3))
        if not delay and (giver == taker or (giver > taker and rng.random() < 0.95)):
            giver, taker = min(giver, taker), max(giver, taker)
            if giver == taker:
                continue
        both = [t for t in range(period) if runs(taker, t) and runs(giver, (t - delay) % period)]
        if not both:
            continue
        pair = where[giver], where[taker], delay, rng.randrange(2)
        if pair not in number:
            number[pair] = len(channels)
            registers = rng.choice((None, 0, 0, 1, 1, 2, 3))
            channels.append(Channel(f"c{len(channels)}", *pair[:2], registers, rng.randint(0, 3), delay))
        for t in both:
            key = edge * 100 + t
            takes.setdefault((taker, t), []).append((number[pair], key))
            gives.setdefault((giver, (t - delay) % period), []).append((number[pair], key))
    order = [(t, node) for t in range(period) for node in range(len(every)) if runs(node, t)]
    if rng.random() < 0.3:  # also orders that nobody thought about
        i, j = rng.randrange(len(every)), rng.randrange(len(every))
        order = sorted(order, key=lambda at: (at[0], {i: j, j: i}.get(at[1], at[1])))
    rows = [
        tuple(
            Step(f"n{node}r{t}", tuple(takes.get((node, t), ())), tuple(gives.get((node, t), ())), t)
            for t, node in order
            if where[node] == a
        )
        for a in range(count)
    ]
    net = Network(tuple(rows), tuple(channels), period)
    least = 0 if rng.random() < 0.2 else 1
    most = [max(least, least * most_between_rounds(net, c)) for c in range(len(channels))]
    return net.with_registers(
        [None if c.registers is None else c.registers + n for c, n in zip(channels, most, strict=True)]
    )


def most_between_rounds(net, channel):
    """The most messages of a channel that are in it between two rounds."""
    delay = net.channels[channel].delay
    rounds = [s.round + k * net.period for k in range(delay + 1) for steps in net.actors for s in steps
              for m in s.takes if m[0] == channel]  # fmt: skip
    return max(sum(r <= t < r + delay for t in rounds) for r in range(net.period))


def interpret(net, rounds, work, first=()):
    """The results of all steps of a run in plain Python, round after round, and what is left.

    `work(label, round, values)` gives a result; the k-th message has k times of it. The first messages have
    `first[message]`, a list.
    """
    late = {m: list(values) for m, values in dict(first).items()}
    now, results = {}, {}
    for at in range(rounds):
        todo = [s for steps in net.actors for s in steps if s.round == at % net.period]
        while todo:
            step = next(s for s in todo if all(m in now or net.channels[m[0]].delay for m in s.takes))
            todo.remove(step)
            values = [late[m].pop(0) if net.channels[m[0]].delay else now.pop(m) for m in step.takes]
            results[step.label, at] = given = work(step.label, at, values)
            for k, m in enumerate(step.gives):
                if net.channels[m[0]].delay:
                    late.setdefault(m, []).append(given * (k + 1))
                else:
                    now[m] = given * (k + 1)
        assert not now
    return results, {m: values for m, values in late.items() if values}
