"""Plans of GPT-2, for unrolled and for scanned layers."""

import shardc
from shardc import Pipeline, S, rules

EVERYWHERE = rules({"*": {}})
SPLIT = shardc.fsdp("data", min_size=2**12)  # neither biases nor norms
DONATE = ("params", "opt_state")

COLUMN, ROW = {"model": S(-1)}, {"model": S(-2)}
MEGATRON = {
    "*/q/kernel": COLUMN,  # whole heads, as long as the axis divides their number
    "*/k/kernel": COLUMN,
    "*/v/kernel": COLUMN,
    "*/out/kernel": ROW,
    "*/up/kernel": COLUMN,
    "*/down/kernel": ROW,
}


def data():
    """Every device holds the model and sees a part of the rows."""
    places = {"params": EVERYWHERE, "opt_state": EVERYWHERE, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def tensor():
    """Megatron (Shoeybi et al. 2019): heads and hidden units are split; attention and MLP each sum once."""
    weights = rules(MEGATRON)
    places = {"params": weights, "opt_state": weights, "batch": EVERYWHERE}
    return {"in_placements": places, "donate_argnames": DONATE}


def data_tensor():
    """Rows split over one axis of the mesh, heads and hidden units over the other."""
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


def vocab():
    """The tied embedding is split by token: no device holds the table, nor the logits of the whole vocabulary."""
    table = rules({"*wte/embedding": {"model": S(0)}})
    places = {"params": table, "opt_state": table, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def pipeline():
    """The model in stages, one after the other along the axis `pipe`; each is placed as in data_tensor."""
    return data_tensor() | {"pipeline": Pipeline(axis="pipe", schedule="1f1b")}


PLANS = {plan.__name__: plan for plan in (data, tensor, data_tensor, zero1, fsdp, vocab, pipeline)}
