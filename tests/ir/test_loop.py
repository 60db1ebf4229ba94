"""Scans by roles: the scan of unchanged roles is the scan that was read, and nothing else counts operands."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun

import shardc
from shardc import compat
from shardc.ir.loop import Loop
from shardc.ir.nested import parted

PACKAGE = Path(shardc.__file__).parent
ROLES = {"consts", "carries", "rows", "rows_at", "stacks", "cond_consts", "body_consts"}

GIVEN = np.full(4, 0.5, np.float32), np.ones(4, np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)


def scanned(w, c, xs):
    def step(carry, x):
        c, n = carry
        return (c * w + x, n + 1), (jnp.sin(c), jnp.cos(x * w))

    return lax.scan(step, (c, 0), xs, reverse=True)


@pytest.fixture
def program():
    return jax.make_jaxpr(scanned)(*GIVEN).jaxpr


def loop_in(jaxpr):
    return Loop.of(next(e for e in jaxpr.eqns if e.primitive.name == "scan"))


def run(jaxpr, loop):
    """The results of the program with a scan of these roles, which are the scan's."""
    made = loop.equation()
    jaxpr = compat.new_jaxpr(jaxpr.invars, made.outvars, [made if e is loop.eqn else e for e in jaxpr.eqns], jaxpr)
    check_jaxpr(jaxpr)
    return jaxpr_as_fun(compat.close(jaxpr))(*GIVEN)


def test_roles(program):
    loop = loop_in(program)
    assert [len(loop.consts), len(loop.carries), len(loop.rows), len(loop.stacks), loop.length] == [1, 2, 1, 2, 3]
    assert [*loop.operands.items()] == [*zip(loop.body.invars, loop.eqn.invars, strict=True)]
    assert [*loop.results.items()] == [*zip(loop.eqn.outvars, loop.body.outvars, strict=True)]
    assert parted("abcde", loop.consts, loop.carries, loop.rows) == (["a"], ["b", "c"], ["d"])
    for got, want in zip(run(program, loop), jax.tree.leaves(scanned(*GIVEN)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_less_of_a_loop(program):
    loop = loop_in(program)
    _, cosines = loop.stacks
    no_carry = replace(loop, carries=[], stacks={cosines: loop.stacks[cosines]}).live()
    assert {e.primitive.name for e in no_carry.eqns} == {"mul", "cos"}
    less = no_carry.reading(no_carry.eqns)
    assert less.consts == loop.consts and less.rows == loop.rows and not less.reading([]).rows
    np.testing.assert_array_equal(*run(program, less), scanned(*GIVEN)[1][1])
    more = {loop.stack_of(c.before): c.before for c in loop.carries}
    assert run(program, replace(loop, stacks=more))[2].shape == GIVEN[2].shape


def test_nothing_else_counts_operands():
    """No slice names constants, carries or rows outside of the files that read scans and while loops."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in ("ir/loop.py", "ir/nested.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice | ast.BinOp)
        if any(isinstance(n, ast.Attribute) and n.attr in ROLES for n in ast.walk(node.slice))
    ]
    assert not wrong, "Take them from a Loop (ir/loop.py):\n" + "\n".join(wrong)
