"""Networks for tests: built by name, or at random."""

from shardc.runtime.actor import Channel, Network, Step


def build(actors, channels):
    """`actors`: for each a list of (label, "messages taken", "messages given"), a message being `channel.key`.

    `channels`: name -> (source, target[, registers[, bytes]]).
    """
    numbers = {name: i for i, name in enumerate(channels)}

    def messages(text):
        return tuple((numbers[m.split(".")[0]], m.split(".")[1]) for m in text.split())

    return Network(
        tuple(tuple(Step(label, messages(t), messages(g)) for label, t, g in steps) for steps in actors),
        tuple(Channel(name, *ends) for name, ends in channels.items()),
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
