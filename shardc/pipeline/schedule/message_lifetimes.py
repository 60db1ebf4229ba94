"""The earliest time at which a message can be at its receiver, for every timing.

An actor may be late, and the others run ahead of it as far as messages and registers allow. The only certain fact is
that a step waits for some number of steps of every other actor. So a message can be at its receiver as soon as the
receiver has ended as many steps as the sending step waits for. These numbers are a vector clock (Fidge 1988, Mattern
1989).
"""

from __future__ import annotations

from shardc.pipeline.schedule.simulate import Timeline
from shardc.runtime.actor import Message


def earliest_arrivals(timeline: Timeline) -> list[list[list[Message]]]:
    """For each actor and step, the messages of other actors that can be there during this step, but not before it.

    Args:
      timeline: a run of a network with its registers; only its order matters.

    Example: with one register for two messages, the second is not sent before the first is received.
      >>> from shardc.pipeline.schedule.simulate import simulate
      >>> from shardc.runtime.actor import Channel, Network, Step
      >>> give = tuple(Step(f"give {j}", (), ((0, j),)) for j in range(2))
      >>> take = tuple(Step(f"take {j}", ((0, j),)) for j in range(2))
      >>> for registers in (1, 2):
      ...     net = Network((give, take), (Channel("c", 0, 1, registers),))
      ...     earliest_arrivals(simulate(net, lambda label: 1.0))[1]
      [[(0, 0)], [(0, 1)]]
      [[(0, 0), (0, 1)], []]
    """
    net = timeline.network
    count = len(net.actors)
    registers = [c.registers for c in net.channels]
    given = [0] * len(net.channels)  # messages so far, by channel
    released: list[list[tuple[int, int]]] = [[] for _ in net.channels]  # the steps that received them
    waits: list[list[list[int]]] = [[] for _ in net.actors]  # by actor and step: ended steps of each actor before it
    giver: dict[Message, tuple[int, int]] = {}
    found: list[list[list[Message]]] = [[[] for _ in steps] for steps in net.actors]
    order = sorted((number, a, i) for a, row in enumerate(timeline.sequence) for i, number in enumerate(row))
    for _, a, i in order:
        step = net.actors[a][i]
        before = [giver[m] for m in step.takes]
        for channel, _ in step.gives:
            bound = registers[channel]
            if bound is not None and given[channel] >= bound:
                before.append(released[channel][given[channel] - bound])
            given[channel] += 1
        clock = list(waits[a][-1]) if i else [0] * count
        for b, j in before:
            if b != a:
                clock = list(map(max, clock, waits[b][j]))
                clock[b] = max(clock[b], j + 1)
        clock[a] = i
        waits[a].append(clock)
        for channel, _ in step.takes:
            released[channel].append((a, i))
        for message in step.gives:
            giver[message] = a, i
            target = net.channels[message[0]].target
            if target != a:
                found[target][clock[target]].append(message)
    return found
