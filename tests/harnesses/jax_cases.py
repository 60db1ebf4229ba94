"""The only file that imports JAX's private test harnesses. JAX 0.10.2 defines 7,526 with x64 on, of which some do not
run on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax

from tests.harnesses.cases import Case
from tests.harnesses.undefined import UNDEFINED


def harnesses() -> list[Any]:
    """All of JAX's harnesses; which there are depends on x64 when they are first imported."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax._src.internal_test_util import test_harnesses  # noqa: PLC0415

    return test_harnesses.all_harnesses


def cases() -> Iterator[Case]:
    for h in harnesses():
        yield Case(h.group_name, h.fullname, h.dyn_fun, h.dyn_args_maker, UNDEFINED.get(h.fullname, ""))
