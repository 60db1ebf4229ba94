"""Random programs at random placements equal one device, and what they move is what was planned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import shardc
from shardc import AUTO, B, ForbiddenMoveError, P, PlacedArray, S
from shardc.ir.collective import Collective
from shardc.sbp.cost import COLLECTIVES
from shardc.sbp.placement import REDUCE_OPS

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESHES = {
    "8": shardc.make_mesh(data=8),
    "4x2": shardc.make_mesh(data=4, model=2),
    "2x2x2": shardc.make_mesh(data=2, model=2, other=2),
}


QUICKLY = {"suppress_health_check": list(HealthCheck), "phases": (Phase.generate,)}  # shrinking takes minutes


class Program:
    """Straight-line code: each step is (text, function, numbers of the values that it reads)."""

    def __init__(self, inputs):
        self.inputs, self.steps = inputs, []

    def __call__(self, *values):
        values = list(values)
        for _, fn, operands in self.steps:
            values.append(fn(*(values[i] for i in operands)))
        return tuple(values[len(self.inputs) :])

    def __repr__(self):
        lines = enumerate(self.steps, len(self.inputs))
        return "; ".join(f"v{k} = {text}{operands}" for k, (text, _, operands) in lines)


ELEMENTWISE = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum,
    "where": lambda x, y: jnp.where(x > y, x, 2 * y), "less": lambda x, y: jnp.where(x < 0, y, x),
}  # fmt: skip
UNARY = {
    "neg": jnp.negative, "abs": jnp.abs, "double": lambda x: x + x, "clip": lambda x: jnp.clip(x, -1, 2),
    "square": lambda x: x * x % 7, "relu": jax.nn.relu,
}  # fmt: skip
REDUCTIONS = {
    "sum": jnp.sum,
    "maximum": lambda x, axis: jnp.max(x, axis, initial=-5),
    "any": lambda x, axis: (x > 0).any(axis) * 1,
}


def broadcastable(a, b):
    return all(m == n or m == 1 or n == 1 for m, n in zip(a[::-1], b[::-1], strict=False))


@st.composite
def programs(draw, mesh):
    """A program of 5 to 30 operations, pins of values among them; and the shapes of its arguments."""
    dims = st.integers(0, 13)
    shapes = draw(st.lists(st.lists(dims, max_size=3).map(tuple), min_size=1, max_size=3))
    program = Program(list(shapes))
    shapes = list(shapes)
    operations = draw(st.integers(5, 30))
    while len(program.steps) < operations:
        step = draw(steps(shapes, mesh))
        shape = jax.eval_shape(step[1], *(jax.ShapeDtypeStruct(shapes[i], np.float32) for i in step[2])).shape
        if len(shape) <= 5 and np.prod(shape) <= 2000:
            program.steps.append(step)
            shapes.append(shape)
    return program


@st.composite
def steps(draw, shapes, mesh):
    i = draw(st.integers(0, len(shapes) - 1))
    shape = shapes[i]
    kinds = ["unary", "broadcast", "elementwise", "pin"]
    if shape:
        kinds += ["reduce", "reshape", "transpose", "slice", "concatenate", "cumsum", "reverse", "pad", "dot"]
        kinds += ["gather"] if shape[0] else []
        kinds += ["roll", "dynamic_slice", "update", "running", "sort", "window"] if 0 not in shape else []
        kinds += ["smooth", "first", "top"] if 0 not in shape else []
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    match kind:
        case "unary":
            name = draw(st.sampled_from(sorted(UNARY)))
            return name, UNARY[name], (i,)
        case "broadcast":
            new = draw(st.integers(0, 4))
            return f"broadcast{new}", lambda x: jnp.broadcast_to(x, (new, *x.shape)), (i,)
        case "pin":
            op = draw(st.sampled_from(REDUCE_OPS))
            sbps = st.sampled_from([B, P(op), *map(S, range(len(shape)))])
            pin = {axis: draw(sbps) for axis in mesh.axis_names}
            return f"pin{shardc.Placement(pin)}", lambda x: shardc.constrain(x, pin), (i,)
        case "elementwise":
            j = draw(st.sampled_from([k for k, s in enumerate(shapes) if broadcastable(s, shape)]))
            name = draw(st.sampled_from(sorted(ELEMENTWISE)))
            return name, ELEMENTWISE[name], (i, j)
        case "reduce":
            name = draw(st.sampled_from(sorted(REDUCTIONS)))
            return f"{name}@{dim}", lambda x: REDUCTIONS[name](x, axis=dim), (i,)
        case "reshape":
            to = draw(st.sampled_from([(-1,), (1, *shape), (*shape[::-1],), (*shape, 1)]))
            to = (int(np.prod(shape)),) if to == (-1,) else to
            return f"reshape{to}", lambda x: x.reshape(to), (i,)
        case "transpose":
            order = tuple(draw(st.permutations(range(len(shape)))))
            return f"transpose{order}", lambda x: x.transpose(order), (i,)
        case "slice":
            start = draw(st.integers(0, shape[dim]))
            stop, stride = draw(st.integers(start, shape[dim])), draw(st.integers(1, 3))
            limits = (start, stop, stride, dim)
            return f"slice{limits}", lambda x: jax.lax.slice_in_dim(x, *limits), (i,)
        case "concatenate":
            rest = (len(shape), shape[:dim], shape[dim + 1 :])
            fitting = [k for k, s in enumerate(shapes) if (len(s), s[:dim], s[dim + 1 :]) == rest]
            j = draw(st.sampled_from(fitting))
            return f"concatenate@{dim}", lambda x, y: jnp.concatenate([x, y], dim), (i, j)
        case "cumsum":
            return f"cumsum@{dim}", lambda x: jnp.cumsum(x, dim), (i,)
        case "reverse":
            return f"reverse@{dim}", lambda x: jnp.flip(x, dim), (i,)
        case "pad":
            low, high, inside = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 1))
            config = [(low, high, inside) if d == dim else (0, 0, 0) for d in range(len(shape))]
            return f"pad{config}", lambda x: jax.lax.pad(x, jnp.ones((), x.dtype), config), (i,)
        case "roll":
            by = draw(st.integers(-4, 4))
            return f"roll{by}@{dim}", lambda x: jnp.roll(x, by, dim), (i,)
        case "dynamic_slice":
            start, size = draw(st.integers(-1, shape[dim])), draw(st.integers(1, shape[dim]))
            at = jnp.int32(start)
            return f"range{start, size, dim}", lambda x: jax.lax.dynamic_slice_in_dim(x, at, size, dim), (i,)
        case "update":
            start, size = draw(st.integers(-1, shape[dim])), draw(st.integers(1, shape[dim]))
            at = jnp.int32(start)
            return f"update{start, size, dim}", lambda x: _update(x, at, size, dim), (i,)
        case "running":
            name = draw(st.sampled_from(["cummax", "cummin"]))
            turned = draw(st.booleans())
            return f"{name}{turned}@{dim}", lambda x: getattr(jax.lax, name)(x, dim, turned), (i,)
        case "sort":
            return f"sort@{dim}", lambda x: jnp.sort(x, dim), (i,)
        case "window":
            size, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            return f"window{size, stride, dim}", lambda x: _largest_of(x, size, stride, dim), (i,)
        case "smooth":
            return f"smooth@{dim}", lambda x: _smooth(x, dim), (i,)
        case "first":
            return f"first@{dim}", lambda x: jnp.argmax(x > 0, dim).astype(x.dtype), (i,)
        case "top":
            k = draw(st.integers(1, shape[-1]))
            return f"top{k}", lambda x: jax.lax.top_k(x, k)[0], (i,)
        case "gather":
            rows = draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=9))
            return f"rows{rows}", lambda x: x[jnp.asarray(rows)], (i,)
        case _:
            return f"dot@{dim}", lambda x: jnp.tensordot(x, x, (dim, dim)) if x.ndim == 1 else _gram(x, dim), (i,)


def _gram(x, dim):
    """Rows times columns, for values of any rank: `x_ik, x_jk -> y_ij` over dimension `dim`."""
    rows = int(np.prod(x.shape)) // max(x.shape[dim], 1)
    flat = jnp.moveaxis(x, dim, -1).reshape(rows, x.shape[dim]) if x.size else jnp.zeros((2, x.shape[dim]), x.dtype)
    return (flat[:9] @ flat[:9].T) % 5


def _update(x, at, size, dim):
    """Not with parts of `x` itself: XLA:CPU then reads what it has just written (jax issue 39103)."""
    shape = [size if d == dim else n for d, n in enumerate(x.shape)]
    return jax.lax.dynamic_update_slice_in_dim(x, jnp.full(shape, 7, x.dtype), at, dim)


def _largest_of(x, size, stride, dim):
    """The largest of each window along `dim`."""
    least = -np.inf if jnp.issubdtype(x.dtype, np.floating) else jnp.iinfo(x.dtype).min
    lengths, strides = ([n if d == dim else 1 for d in range(x.ndim)] for n in (size, stride))
    return jax.lax.reduce_window(x, x.dtype.type(least), jax.lax.max, lengths, strides, "SAME")


def _smooth(x, dim):
    """Each element with twice the one before it along `dim`."""
    rows = jnp.moveaxis(x, dim, -1).reshape(-1, 1, x.shape[dim])
    out = jax.lax.conv_general_dilated(rows, jnp.asarray([[[2, 1]]], x.dtype), (1,), [(1, 0)])
    return jnp.moveaxis(out.reshape(jnp.moveaxis(x, dim, -1).shape), -1, dim)


@st.composite
def placements(draw, shape, mesh, floats):
    """A pin, or AUTO."""
    if draw(st.booleans()):
        return AUTO
    sbps = [B, *map(S, range(len(shape)))] + ([P] if floats else [])
    return {axis: draw(st.sampled_from(sbps)) for axis in mesh.axis_names}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", [np.float64, np.int32], ids=["float64", "int32"])
@settings(max_examples=12, deadline=None, derandomize=True, **QUICKLY)
@given(data=st.data())
def test_random_programs(mesh, dtype, data):
    mesh, floats = MESHES[mesh], dtype == np.float64
    program = data.draw(programs(mesh), label="program")
    with jax.enable_x64(True):
        values = [np.random.default_rng(k).integers(-3, 4, s).astype(dtype) for k, s in enumerate(program.inputs)]
        if floats:
            values = [v + np.random.default_rng(9).random(v.shape) for v in values]
        want = jax.jit(program)(*values)
        ins = tuple(data.draw(placements(v.shape, mesh, floats)) for v in values)
        outs = tuple(data.draw(placements(w.shape, mesh, floats and w.dtype == dtype)) for w in want)

        def run(*args):
            return program(*args)

        make = lambda: shardc.function(run, mesh=mesh, in_placements={"args": ins}, out_placements=outs)  # noqa: E731
        f = make()
        plan = f.plan(*values)
        for got, w in zip(f(*values), want, strict=True):
            assert (got.shape, got.dtype) == (w.shape, w.dtype)
            compare(np.asarray(got), np.asarray(w), floats)
        for pin, placement in zip((*ins, *outs), (*plan.inputs[: len(ins)], *plan.outputs), strict=True):
            assert pin is AUTO or all(placement[a] == (P() if s is P else s) for a, s in pin.items())
        audit = f.compile(*values).audit()
        assert audit.ok, str(audit)
        again = make().plan(*values)
        assert list(map(str, again.collectives)) == list(map(str, plan.collectives))
        assert (again.inputs, again.outputs) == (plan.inputs, plan.outputs)
        assert list(map(str, again.boxed.placements.values())) == list(map(str, plan.boxed.placements.values()))


@st.composite
def forbids(draw, mesh):
    axes = draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, max_size=2, unique=True))
    kinds = st.lists(st.sampled_from(COLLECTIVES), min_size=1, max_size=3, unique=True)
    return draw(st.one_of(st.just(set(axes)), st.just({a: tuple(draw(kinds)) for a in axes})))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["4x2", "2x2x2"])
@pytest.mark.parametrize("pinned", [False, True])
@settings(max_examples=10, deadline=None, derandomize=True, **QUICKLY)
@given(data=st.data())
def test_random_programs_without_what_is_forbidden(mesh, pinned, data):
    """Nothing of it is in the compiled program, or there is an error; and there is none where nothing is pinned."""
    mesh = MESHES[mesh]
    program = data.draw(programs(mesh), label="program")
    forbid = data.draw(forbids(mesh), label="forbid")
    if not pinned:
        program.steps = [(text, (lambda x: x) if text.startswith("pin") else fn, i) for text, fn, i in program.steps]
    values = [np.random.default_rng(k).integers(-3, 4, s).astype(np.int32) for k, s in enumerate(program.inputs)]
    ins = tuple(data.draw(placements(v.shape, mesh, False)) if pinned else AUTO for v in values)
    f = shardc.function(lambda *args: program(*args), mesh=mesh, in_placements={"args": ins}, forbid=forbid)
    try:
        audit = f.compile(*values).audit()
    except ForbiddenMoveError:
        assert pinned
        return
    banned = {(kind, axis) for axis in forbid for kind in (forbid[axis] if isinstance(forbid, dict) else COLLECTIVES)}
    for c in (*audit.planned, *audit.found):
        over = c.axes if isinstance(c, Collective) else c.crosses
        assert not c.bytes or banned.isdisjoint((c.kind, axis) for axis in over), (c, forbid)
    for got, w in zip(f(*values), jax.jit(program)(*values), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(w))


def compare(got, want, floats):
    if floats:
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    else:
        np.testing.assert_array_equal(got, want)


def test_a_result_is_a_jax_array_or_a_placed_one():
    f = shardc.function(lambda x: (x, x), mesh=MESHES["8"], out_placements=({"data": S(0)}, AUTO))
    uneven, plain = f(np.arange(5.0, dtype=np.float32))
    assert isinstance(uneven, PlacedArray)
    assert isinstance(plain, jax.Array)
