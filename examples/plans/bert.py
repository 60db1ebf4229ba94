"""Plans of BERT: its weights name their dimensions, and a plan says over which axis of the mesh a name is split."""

import jax

from examples import bert
from shardc import Pipeline, S, rules
from shardc.flax import placements

EVERYWHERE = rules({"*": {}})
DONATE = ("params", "opt_state")


def named(*names: tuple[str, str]):
    """Placements of the parameters and of the optimizer's state: names without an axis are not split."""
    state = jax.eval_shape(bert.make_step(bert.CONFIGS["test"])[0], jax.random.key(0))
    return dict(zip(DONATE, placements(state, rules=names), strict=True))


def data():
    """Every device holds the model and sees a part of the rows."""
    places = {"params": EVERYWHERE, "opt_state": EVERYWHERE, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def tensor():
    """Megatron (Shoeybi et al. 2019): heads and hidden units are split; attention and MLP each sum once."""
    places = named(("heads", "model"), ("mlp", "model")) | {"batch": EVERYWHERE}
    return {"in_placements": places, "donate_argnames": DONATE}


def data_tensor():
    """Rows split over one axis of the mesh, heads and hidden units over the other."""
    places = tensor()["in_placements"] | {"batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def zero1():
    """ZeRO stage 1 (Rajbhandari et al. 2019): each device keeps, and updates, its part of the optimizer's state."""
    places = fsdp()["in_placements"] | {"params": EVERYWHERE}
    return {"in_placements": places, "donate_argnames": DONATE}


def fsdp():
    """ZeRO stage 3, or fully sharded data parallel: the weights are split as well, and gathered where they are used."""
    places = named(("embed", "data")) | {"batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def vocab():
    """The tied embedding is split by token: no device holds the table, nor the logits of the whole vocabulary."""
    places = named(("vocab", "model")) | {"batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def pipeline():
    """The scan over layers in stages along the axis `pipe`, cut by cost; each is placed as in data."""
    return data() | {"pipeline": Pipeline(axis="pipe", schedule="1f1b", stages="auto")}


PLANS = {plan.__name__: plan for plan in (data, tensor, data_tensor, zero1, fsdp, vocab, pipeline)}
