import pytest

from shardc.errors import PipelineError
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.runtime.actor import Channel, check_network
from tests.pipeline.schedule import orders


def ends(net):
    """For each action the names of the channels with the microbatches that it takes and gives."""
    name = [c.name for c in net.channels]
    return {
        str(s.label): ([f"{name[c]}.{key}" for c, key in s.takes], [f"{name[c]}.{key}" for c, key in s.gives])
        for steps in net.actors
        for s in steps
    }


def test_a_chain_of_two_stages():
    net = network(
        Schedule.parse("0F0 0B0\n1F0 1I0 1W0"),
        bytes={"activation": 8, "stash": [100, 50], "weight_stash": 7},
        registers={"stash": [2, None], "gradient": 3},
    )
    assert net.channels == (
        Channel("activation 0->1", 0, 1, None, 8),
        Channel("stash 0", 0, 0, 2, 100),
        Channel("stash 1", 1, 1, None, 50),
        Channel("weight_stash 1", 1, 1, None, 7),
        Channel("gradient 1->0", 1, 0, 3, 0),
    )
    assert ends(net) == {
        "0F0": ([], ["activation 0->1.0", "stash 0.0"]),
        "0B0": (["stash 0.0", "gradient 1->0.0"], []),
        "1F0": (["activation 0->1.0"], ["stash 1.0"]),
        "1I0": (["stash 1.0"], ["gradient 1->0.0", "weight_stash 1.0"]),
        "1W0": (["weight_stash 1.0"], []),
    }


def test_neighbours_on_one_rank_pass_to_themselves():
    """A V of two ranks: stages 1 and 2 are both on rank 1."""
    net = network(Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"))
    assert {c.name: (c.source, c.target) for c in net.channels if "->" in c.name} == {
        "activation 0->1": (0, 1), "activation 1->2": (1, 1), "activation 2->3": (1, 0),
        "gradient 1->0": (1, 0), "gradient 2->1": (1, 1), "gradient 3->2": (0, 1),
    }  # fmt: skip


def test_a_stage_without_backward():
    """Frozen layers below: nobody wants their gradient."""
    net = network(Schedule.parse("0F0\n1F0 1B0"))
    assert [c.name for c in net.channels] == ["activation 0->1", "stash 1"]
    assert check_network(net) == []


def test_forward_only():
    net = network(Schedule.parse("0F0 0F1\n1F1 1F0"))
    assert [c.name for c in net.channels] == ["activation 0->1"]


@pytest.mark.parametrize(
    "schedule",
    [orders.gpipe(3, 4), orders.one_f_one_b(4, 2), orders.interleaved(2, 4, 3), orders.breadth_first(2, 3, 2),
     orders.zb_h1(4, 6)],
    ids=lambda s: s.name,
)  # fmt: skip
def test_every_message_has_two_ends(schedule):
    assert check_network(network(schedule)) == []


def test_errors():
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    with pytest.raises(PipelineError) as error:
        network(schedule, registers={"activations": 2})
    assert str(error.value) == (
        'network: registers has "activations"; the channels are activation, gradient, stash, weight_stash. '
        'Did you mean "activation"?'
    )
    with pytest.raises(PipelineError) as error:
        network(schedule, bytes={"stash": [1, 2, 3]})
    assert str(error.value) == 'network: bytes["stash"] has 3 entries; there are 2 stages.'
