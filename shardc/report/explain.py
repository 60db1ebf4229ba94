"""`plan.explain()`."""


def explain(plan) -> str:
    return repr(plan)
