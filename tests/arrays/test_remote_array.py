"""Arrays of another JAX runtime: what is known of them, and what reading them says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc.arrays.place import put_leaf
from shardc.arrays.placed import PlacedArray, StackedArray, leaf_aval
from shardc.arrays.remote_array import Arrival, RemoteArray, is_remote, is_small, put_remote
from shardc.machine.devices import RemoteDevice
from shardc.sbp.placement import Placement, S

MESH = Mesh(np.array([RemoteDevice(1, i, "cpu", "cpu") for i in range(2)]), ("data",))
AT = Placement({"data": S(0)})


def far(shape=(4, 3), dtype=np.float32, arriving=None):
    return RemoteArray(jax.ShapeDtypeStruct(shape, dtype), AT if shape else Placement(), MESH, arriving)


def test_it_is_described():
    x = far()
    assert isinstance(x, jax.Array) and (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == ((4, 3), np.float32, 2, 12, 48)
    assert leaf_aval(x).shape == (4, 3) and not x.is_deleted() and x.is_ready()
    assert not x.is_fully_addressable and not x.is_fully_replicated
    assert repr(x) == "RemoteArray(float32[4,3], {data: S(0)}, process 1)"
    assert jax.block_until_ready([x]) == [x]
    assert jax.tree.map(lambda leaf: leaf is x, {"a": x}) == {"a": True}


@pytest.mark.parametrize("read", [np.asarray, jnp.sum, lambda x: x + 1, float, lambda x: x.to_jax(), lambda x: x[0]])
def test_reading_says_where_it_is(read):
    with pytest.raises(shardc.ClusterError, match=r"lives in process 1 and cannot be read here; shardc\.fetch\(x\)"):
        read(far())


def test_what_arrives_is_read():
    asked = []
    x = far((), arriving=Arrival(lambda: asked.append(1) or np.float32(2.5), lambda: bool(asked)))
    assert not is_remote(x) and not x.is_ready() and asked == []
    assert float(x) == 2.5 and x.is_ready() and float(jnp.sin(x)) == float(jnp.sin(2.5))
    assert (x * 2).dtype == np.float32 and f"{x:.1f}" == "2.5"


def test_a_weak_type_is_kept():
    x = RemoteArray(
        jax.ShapeDtypeStruct((), np.float32, weak_type=True), Placement(), MESH, Arrival(lambda: np.float32(1))
    )
    assert x.weak_type and x.read().weak_type


def test_parts_that_are_elsewhere():
    here = shardc.make_mesh(data=2)
    near = put_leaf(np.ones((3, 2), np.float32), here, AT)
    assert isinstance(near, PlacedArray)
    both = StackedArray([near, far((5, 2))])
    assert is_remote(both) and not is_remote(StackedArray([near])) and not is_remote(near) and not is_remote(np.ones(2))
    assert both.shape == (8, 2) and not both.is_deleted() and len(both.parts) == 1
    with pytest.raises(shardc.ClusterError, match="process 1"):
        np.asarray(both)


def test_small():
    small, large = jax.ShapeDtypeStruct((256,), np.float32), jax.ShapeDtypeStruct((257,), np.float32)
    assert is_small(small) and not is_small(large)
    assert not is_small(jax.typeof(jax.random.key(0)))


def test_put_on_far_devices():
    x = np.arange(600, dtype=np.float32).reshape(300, 2)
    made = shardc.put({"w": x, "n": np.int32(3), "s": "text"}, MESH, {"w": {"data": S(0)}, "n": {}, "s": None})
    assert is_remote(made["w"]) and made["w"].placement == AT and made["s"] == "text"
    assert not is_remote(made["n"]) and int(made["n"]) == 3
    mixed = Mesh(np.array([jax.devices()[0], RemoteDevice(1, 0, "cpu", "cpu")]), ("data",))
    with pytest.raises(shardc.ClusterError, match="devices of several JAX runtimes"):
        put_remote(x, mixed, AT)
