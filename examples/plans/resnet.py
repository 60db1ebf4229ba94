"""Plans of ResNet.

Batch statistics are means over all rows, whoever holds them: with the rows split they are partial sums, and the plan
shows what it costs to finish them.
"""

import shardc
from shardc import S, rules

EVERYWHERE = rules({"*": {}})
SPLIT = shardc.fsdp("data", min_size=2**8)  # these models are small: weights of 256 numbers are worth splitting here
DONATE = ("params", "batch_stats", "opt_state")


def data():
    """Every device holds the model and sees a part of the images."""
    model = dict.fromkeys(DONATE, EVERYWHERE)
    return {"in_placements": {**model, "batch": {"data": S(0)}}, "donate_argnames": DONATE}


def zero1():
    """ZeRO stage 1: each device keeps, and updates, its part of the optimizer's state."""
    places = data()["in_placements"] | {"opt_state": SPLIT}
    return {"in_placements": places, "donate_argnames": DONATE}


def fsdp():
    """The weights are split by output channel as well, and gathered where they are used."""
    places = zero1()["in_placements"] | {"params": SPLIT}
    return {"in_placements": places, "donate_argnames": DONATE}


def spatial():
    """Few large images: the batch over one axis, the rows of each image over the other. Convolutions and pooling read
    the border of their neighbours' pieces."""
    model = dict.fromkeys(DONATE, EVERYWHERE)
    batch = rules({"image": {"data": S(0), "model": S(1)}, "label": {"data": S(0)}})
    return {"in_placements": {**model, "batch": batch}, "donate_argnames": DONATE}


PLANS = {plan.__name__: plan for plan in (data, zero1, fsdp, spatial)}
