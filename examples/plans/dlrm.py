"""Plans of DLRM: where the rows of its tables are. The MLPs are small, and whole on every device."""

from shardc import S, rules

EVERYWHERE = rules({"*": {}})
DONATE = ("params", "opt_state")


def data():
    """Every device holds the model and sees a part of the rows of the batch."""
    places = {"params": EVERYWHERE, "opt_state": EVERYWHERE, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def tables():
    """Tables split by row over one axis, the batch over the other: what a device does not find there is zero."""
    rows = rules({"*tables/*": {"model": S(0)}, "*": {}})
    places = {"params": rows, "opt_state": rows, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def hybrid():
    """As in the paper: tables and batch split over one axis; indices travel to the tables, what is found there back."""
    rows = rules({"*tables/*": {"data": S(0)}, "*": {}})
    places = {"params": rows, "opt_state": rows, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


def columns():
    """Tables split by column: each device looks up its part of every vector."""
    width = rules({"*tables/*": {"model": S(1)}, "*": {}})
    places = {"params": width, "opt_state": width, "batch": {"data": S(0)}}
    return {"in_placements": places, "donate_argnames": DONATE}


PLANS = {plan.__name__: plan for plan in (data, tables, hybrid, columns)}
