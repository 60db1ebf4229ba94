"""Plans of the mixer. A Linear of equinox has its results in the first dimension."""

import shardc
from shardc import Pipeline, S, rules

EVERYWHERE = rules({"*": {}})
SPLIT = shardc.fsdp("data", min_size=2**9)  # these models are small: weights of 512 numbers are worth splitting here
DONATE = ("params", "opt_state")


def data():
    """Every device holds the model and sees a part of the rows."""
    places = {"params": EVERYWHERE, "opt_state": EVERYWHERE, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def tensor():
    """Megatron (Shoeybi et al. 2019): hidden units are split, so each MLP sums once."""
    weights = rules({"*/up/weight": {"model": S(-2)}, "*/down/weight": {"model": S(-1)}})
    places = {"params": weights, "opt_state": weights, "batch": EVERYWHERE}
    return {"in_placements": places, "donate_argnames": DONATE}


def data_tensor():
    """Rows split over one axis of the mesh, hidden units over the other."""
    places = tensor()["in_placements"] | {"batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def zero1():
    """ZeRO stage 1 (Rajbhandari et al. 2019): each device keeps, and updates, its part of the optimizer's state."""
    places = {"params": EVERYWHERE, "opt_state": SPLIT, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def fsdp():
    """ZeRO stage 3, or fully sharded data parallel: the weights are split as well, and gathered where they are used."""
    places = zero1()["in_placements"] | {"params": SPLIT}
    return {"in_placements": places, "donate_argnames": DONATE}


def pipeline():
    """The model in stages, one after the other along the axis `pipe`; each is placed as in data_tensor."""
    return data_tensor() | {"pipeline": Pipeline(axis="pipe", schedule="1f1b")}


PLANS = {plan.__name__: plan for plan in (data, tensor, data_tensor, zero1, fsdp, pipeline)}
