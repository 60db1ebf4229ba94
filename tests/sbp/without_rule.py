"""Rules taken away one by one: the signatures found in their place must move the same bytes and give the same values.

    python -m tests.sbp.without_rule            # all primitives that are element by element, or can be batched
    python -m tests.sbp.without_rule sin sort   # some

Prints a table of those whose plans move more, and ends with 1 if a value is wrong or more than a tenth moves more.
tests/sbp/without_rule.md has the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("NPROC", "16")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import S
from shardc.sbp import rules, signature
from shardc.sbp.signature import find_rule
from tests.sbp.cases import CASES
from tests.sbp.harness import equation_of, on_device

assert rules  # imported for what it registers

DEVICES = 2
ENOUGH = 0.88
"""Share of the primitives that move the same bytes without their rule."""


@dataclass(frozen=True)
class Case:
    """A call of one primitive, and the dimension of each operand along which its rule splits it."""

    name: str
    primitive: str
    split: tuple[int | None, ...]


@dataclass(frozen=True)
class Outcome:
    """Bytes that a step sends with and without the rule, errors in its values, and the error of XLA if it fails: some
    rules work around a fault of XLA."""

    case: Case
    ours: int
    without: int
    wrong: str
    failed: str

    @property
    def same(self) -> bool:
        return self.without <= self.ours and not self.failed


def cases() -> list[Case]:
    """Every case whose rule reduces no factor and whose pieces do not communicate, once for each factor."""
    found: list[Case] = []
    with jax.enable_x64(True):
        for name, (fn, args, primitive) in CASES.items():
            op = equation_of(fn, *args, primitive=primitive).op
            rule = find_rule(op)
            if op.name == "user_operation" or not op.operands or rule.reduced or rule.crossing or 0 in _sizes(op):
                continue
            sizes = rule.sizes(op)
            for factor in rule.factors():
                split = tuple(fs.index(factor) if factor in fs else None for fs in rule.operands)
                splits_results = all(factor in fs for fs in rule.results)
                if sizes[factor] > 1 and splits_results and split != (None,) * len(split):
                    found.append(Case(name, op.name, split))
    return found


def _sizes(op: Any) -> list[int]:
    return [n for a in (*op.operands, *op.results) for n in a.shape]


def step_of(case: Case) -> tuple[Any, list[Any]]:
    """A step of the operation and sums of its results, and its arguments."""
    fn, args, primitive = CASES[case.name]
    eqn = equation_of(fn, *args, primitive=primitive)

    def step(*xs: Any) -> Any:
        made = eqn.bind(*xs)
        return [jnp.sum(_number(y)) for y in made], made

    return step, list(map(on_device, eqn.inputs))


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _number(y: Any) -> Any:
    y = jax.random.key_data(y) if _is_key(y) else y
    return jnp.abs(y) if jnp.issubdtype(y.dtype, np.complexfloating) else y.astype(np.float32)


def compare(case: Case) -> Outcome:
    """The step with the rule of the primitive, and with it taken away."""
    with jax.enable_x64(True):
        step, args = step_of(case)
        mesh = shardc.make_mesh(x=DEVICES)
        pins = tuple({} if d is None else {"x": S(d)} for d in case.split)

        def planned() -> Any:
            return shardc.function(lambda xs: step(*xs), mesh=mesh, in_placements=(pins,))

        f = planned()
        ours, runs = f.plan(args).bytes_per_device, _runs(f, args)
        rule = signature._RULES.pop(case.primitive)
        try:
            f = planned()
            plan, wrong, failed = f.plan(args), "", ""
            if runs:
                wrong = _difference(f(args), jax.jit(step)(*args))
        except jax.errors.JaxRuntimeError as error:
            failed = str(error).partition("\n")[0]
        finally:
            signature._RULES[case.primitive] = rule
    return Outcome(case, ours, plan.bytes_per_device, wrong, failed)


def _runs(f: Any, args: Sequence[Any]) -> bool:
    """Whether XLA compiles the operation on a mesh: it has no mulhi in a shard_map on CPU, with or without a rule."""
    try:
        f(args)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _difference(got: Any, want: Any) -> str:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in (a, b))
        floats = b.dtype.kind in "fc"
        close = np.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True) if floats else np.array_equal(a, b)
        if not close:
            return f"{a.ravel()[:4]} for {b.ravel()[:4]}"
    return ""


def run(names: Sequence[str]) -> Iterator[Outcome]:
    for case in cases():
        if not names or case.primitive in names:
            yield compare(case)


def main(names: Sequence[str]) -> int:
    outcomes = list(run(names))
    by_primitive: dict[str, list[Outcome]] = {}
    for o in outcomes:
        by_primitive.setdefault(o.case.primitive, []).append(o)
    same = [p for p, os_ in by_primitive.items() if all(o.same for o in os_)]
    for p, mine in by_primitive.items():
        for o in mine:
            if o.wrong or not o.same:
                print(f"{p:28} {o.case.name:36} with rule {o.ours:6} bytes, without {o.without:6}  {o.wrong}{o.failed}")
    wrong = [o for o in outcomes if o.wrong]
    print(f"jax {jax.__version__}: {len(same)} of {len(by_primitive)} primitives move the same bytes in all of "
          f"{len(outcomes)} cases; {len(wrong)} wrong")  # fmt: skip
    return int(bool(wrong) or len(same) < ENOUGH * len(by_primitive))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
