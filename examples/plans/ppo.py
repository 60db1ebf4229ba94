"""Plans of PPO: carts are the rows. Each device plays with its own; policies are small, and learn from all."""

import shardc
from shardc import S, rules

EVERYWHERE = rules({"*": {}})
SPLIT = shardc.fsdp("data", min_size=2**8)  # these models are small: weights of 256 numbers are worth splitting here
DONATE = ("params", "opt_state", "carts")


def data():
    """Carts are split: playing sends nothing, learning sums gradients."""
    carts = {"data": S(0)}
    places = {"params": EVERYWHERE, "opt_state": EVERYWHERE, "carts": carts, "batch": carts}
    return {"in_placements": places, "donate_argnames": DONATE}


def zero1():
    """ZeRO stage 1 (Rajbhandari et al. 2019): each device keeps, and updates, its part of the optimizer's state."""
    places = data()["in_placements"] | {"opt_state": SPLIT}
    return {"in_placements": places, "donate_argnames": DONATE}


PLANS = {plan.__name__: plan for plan in (data, zero1)}
