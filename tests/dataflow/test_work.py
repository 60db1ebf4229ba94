"""Works of nodes: where their arguments and results are, and what a host function may return."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import P, S
from shardc.dataflow.work import FunctionWork, HostWork, is_like, stacked_gives
from shardc.errors import FlowError

TREE = jax.tree.structure(((0,), {}))
GIVES = {"n": jax.ShapeDtypeStruct((), jnp.int32), "x": jax.ShapeDtypeStruct((3,), jnp.float32)}


def host(call, gives=GIVES):
    return HostWork(call, TREE, [None], gives, "sample")


def test_python_numbers_and_64_bits_become_what_is_declared():
    n, x = host(lambda _: {"n": 3, "x": np.arange(3.0)}).run([0], 5)
    assert (n.dtype, x.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            {"n": np.ones(2, np.int32), "x": np.ones(3, complex)},
            "sample did not return what gives= says, in round 5:\n  n: int32[] is declared, int32[2] came.\n"
            "  x: float32[3] is declared, complex128[3] came.",
        ),
        (
            (1, 2),
            "sample returned another structure than gives= says, in round 5:\n  says    PyTreeDef({'n': *, 'x': *})\n"
            "  returns PyTreeDef((*, *))",
        ),
        (
            None,
            "sample returned another structure than gives= says, in round 5:\n  says    PyTreeDef({'n': *, 'x': *})\n"
            "  returns PyTreeDef(None)",
        ),
    ],
)
def test_a_result_unlike_what_is_declared(made, text):
    with pytest.raises(FlowError) as caught:
        host(lambda _: made).run([0], 5)
    assert str(caught.value) == text


def test_a_random_key_is_like_itself_alone():
    key, raw = jax.random.key(0), jax.random.PRNGKey(0)
    assert is_like(key, key)
    assert not is_like(key, jnp.zeros(()))
    assert not is_like(raw, key)


def test_results_of_a_fleet_are_stacked_leaf_by_leaf():
    assert [(a.shape, a.dtype.name) for a in stacked_gives(GIVES, 4)] == [((4,), "int32"), ((4, 3), "float32")]


def test_a_function_says_where_it_takes_and_gives_its_leaves():
    mesh = shardc.make_mesh(data=4)
    f = shardc.function(
        lambda w, x, scale: (w * x.sum() * scale, x.sum(0)), mesh=mesh, in_placements={"x": {"data": S(0)}},
        out_placements=(None, {"data": P}), donate_argnames="w",
    )  # fmt: skip
    leaves, tree = jax.tree.flatten(((jnp.ones(2),), {"scale": 2.0, "x": jax.ShapeDtypeStruct((7, 3), jnp.float32)}))
    work = FunctionWork(f, leaves, tree)
    w, scale, x = work.takes
    assert (str(w), str(x)) == ("{}", "{data: S(0)}")
    assert work.donated == {0}
    assert str(work.gives[1]) == "{data: P(sum)}"
    assert work.meshes == (mesh,)
    assert scale.mesh is mesh
    assert x.bytes == 2 * 3 * 4  # 7 rows over 4 devices: at most 2 on each
    assert x.plain_sharding is None
    assert work.gives[1].plain_sharding is None
    assert w.plain_sharding.spec == jax.sharding.PartitionSpec()
