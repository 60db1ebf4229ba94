"""A compiled program held against one device: nothing is found where nothing is wrong, and a fault is named where it
is."""

import random
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import shardc
from shardc import S, compat
from shardc.execute.check.check import Checker
from shardc.execute.executable import Executable
from shardc.passes.lower import lower
from shardc.passes.lower.lower_borders import ReplayingLowering
from shardc.passes.lower.lower_boxing import MeshWire

R = np.random.default_rng(0)


def normal(*shape, dtype="f"):
    return R.normal(size=shape).astype(dtype)


def sgd(w, x):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    value, g = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, b: (a - 0.1 * b).astype(a.dtype), w, g), value


W = {"a": normal(12, 20), "b": normal(20, 6)}
TENSOR = {"x": {"data": S(0)}, "w": {"a": {"model": S(1)}, "b": {"model": S(0)}}}
FSDP = {"x": {"data": S(0)}, "w": {"a": {"data": S(0)}, "b": {"data": S(0)}}}


def layers(w, x):
    def layer(h, w):
        return jnp.tanh(h @ w) + h, (h**2).sum()

    y, sizes = lax.scan(layer, x, w)
    return y.sum(0), sizes


def rounds(a, x):
    return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.tanh(a @ s[1])), (0, x))


def backwards(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.max()), x, w, reverse=True)


def power(a, x):
    def more(state):
        i, x, _ = state
        return (i < 5) & (jnp.abs(x).max() > 1e-6)

    def step(state):
        i, x, _ = state
        y = a @ x
        size = jnp.sqrt((y**2).sum())
        return i + 1, y / size, size

    return lax.while_loop(more, step, (0, x, jnp.float32(0)))


def branches(flag, x):
    return lax.cond(flag, lambda x: (x @ x.T).sum(0), lambda x: jnp.cumsum(x, 0).sum(1), x).astype("f")


def moved(x):
    y = shardc.constrain(jnp.exp(x), {"data": S(1), "model": S(0)})
    return shardc.constrain(jnp.sort(y, 0), {"model": S(1), "data": S(0)}), jnp.argmax(x), (x > 0).sum()


def drawn(key, x):
    a, b = jax.random.split(key)
    keys = jax.random.split(a, 8)
    noise = jax.vmap(lambda k: jax.random.normal(k, (5,)))(keys)
    return x + jax.random.normal(b, x.shape), noise.sum(0), keys


def convolved(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME"), jnp.cumsum(x, 2), lax.top_k(x[0, 0, :, 0], 3)


def special(x):
    y = jnp.log(x)  # NaN and infinity
    return y.sum(0), y.max(), jnp.where(x > 0, y, 0).sum()


BOTH = {"x": {"data": S(0), "model": S(1)}}
UNEVEN = normal(13, 7)
CASES = {
    "tensor": (sgd, (W, normal(16, 12)), TENSOR),
    "fsdp": (sgd, (W, normal(16, 12)), FSDP),
    "bfloat16": (sgd, jax.tree.map(lambda x: x.astype(jnp.bfloat16), (W, normal(16, 12))), TENSOR),
    "uneven": (lambda x: (jnp.tanh(x @ x.T) @ x, x.sum(0), x.min()), (UNEVEN,), {"x": {"data": S(0), "model": S(1)}}),
    "scan": (layers, (normal(3, 12, 12), normal(8, 12)), {"w": {"model": S(2)}, "x": {"data": S(0)}}),
    "reverse": (backwards, (normal(3, 12, 12), normal(8, 12)), {"w": {"model": S(1)}, "x": {"data": S(0)}}),
    "while": (power, (normal(16, 16), normal(16)), {"a": {"data": S(0), "model": S(1)}}),
    "rounds": (rounds, (normal(16, 16), normal(16)), {"a": {"data": S(0), "model": S(1)}}),
    "cond": (branches, (True, normal(8, 8)), {"x": {"data": S(0), "model": S(1)}}),
    "other branch": (branches, (False, normal(8, 8)), {"x": {"data": S(0), "model": S(1)}}),
    "moved": (moved, (normal(16, 12),), {"x": {"data": S(0)}}),
    "keys": (drawn, (jax.random.key(3), normal(8, 5)), {"x": {"data": S(0)}}),
    "windows": (convolved, (normal(2, 1, 16, 4), normal(3, 1, 3, 3)), {"x": {"data": S(2)}}),
    "not finite": (special, (normal(16, 6),), {"x": {"data": S(0), "model": S(1)}}),
    "integers": (lambda x: (x.sum(0), x.max(1), x @ x.T), (R.integers(-9, 9, (16, 12)),), BOTH),
}  # fmt: skip


@pytest.fixture
def mesh():
    return shardc.make_mesh(data=4, model=2)


def function(case, mesh, **options):
    fn, args, pins = CASES[case]
    return shardc.function(fn, mesh=mesh, in_placements=pins, **options), args


@pytest.mark.sampled(12)
@pytest.mark.parametrize("axes", [{"data": 4, "model": 2}, {"data": 3, "model": 2}], ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_nothing_is_found_where_nothing_is_wrong(case, axes):
    f, args = function(case, shardc.make_mesh(**axes))
    compiled = f.compile(*args)
    report = compiled.check(*args)
    assert report.ok and report.first is None, str(report)
    assert str(report).startswith(f"check: as on one device ({report.borders} border")
    assert bool(report.borders) == bool(compiled.plan.collectives)


class Fault:
    """A collective that is compiled wrongly on one device: a flipped bit, a NaN, or a transfer that never comes."""

    KINDS = "flip", "drop", "nan"

    def __init__(self, monkeypatch):
        self.steps = {}
        self.target = None
        self.kind, self.device = "flip", 0
        right = lower.Lowering.step

        def step(low, eqn, step, x, shape):
            y = right(low, eqn, step, x, shape)
            if step.is_collective and 0 not in shape:
                self.steps[eqn, step] = shape
                if (eqn, step) == self.target:
                    y = self.wrong(low, x, y)
            return y

        monkeypatch.setattr(lower.Lowering, "step", step)

    def wrong(self, low, x, y):
        me = 0
        for axis, n in low.sizes.items():
            me = me * n + low.index(axis)
        first = (0,) * y.ndim
        if self.kind == "drop":
            bad = jnp.zeros_like(y)
        elif self.kind == "nan" and jnp.issubdtype(y.dtype, jnp.inexact):
            bad = y.at[first].set(jnp.nan)
        else:
            word = np.dtype(f"u{y.dtype.itemsize}")
            bits = y.astype(np.uint8) if y.dtype == bool else lax.bitcast_convert_type(y, word)
            bit = bits.dtype.type(1 << (8 * y.dtype.itemsize - 2) if y.dtype != bool else 1)
            bits = bits.at[first].set(bits[first] ^ bit)
            bad = bits.astype(bool) if y.dtype == bool else lax.bitcast_convert_type(bits, y.dtype)
        return jnp.where(me == self.device, bad, y)


FAULTY = ["tensor", "fsdp", "bfloat16", "scan", "reverse", "rounds", "moved", "integers"]
MESHES = [{"data": 4, "model": 2}, {"data": 2, "model": 2}, {"data": 2, "model": 4}]


@cache
def right(case, number):
    """A plan, the arguments, its collectives, and its pieces for one device, in which no fault is."""
    f, args = function(case, shardc.make_mesh(**MESHES[number]))
    plan = f.plan(*args)
    met = []
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(patch)
        checker = Checker(Executable(plan, f.mesh))
        _ = checker.executable.lowered
        met = list(fault.steps)
    return plan, jax.tree.leaves(args), met, checker.replay


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", list(range(100)))
def test_a_fault_is_found_and_named(seed, monkeypatch):
    draw = random.Random(seed)
    case, kind = FAULTY[seed % len(FAULTY)], Fault.KINDS[seed % 3]
    plan, leaves, met, replay = right(case, number := seed // len(FAULTY) % len(MESHES))
    fault = Fault(monkeypatch)
    fault.target = eqn, step = draw.choice(met)
    mesh = shardc.make_mesh(**MESHES[number])
    fault.kind, fault.device = kind, draw.randrange(mesh.size)
    checker = Checker(Executable(plan, mesh))
    vars(checker)["replay"] = replay
    executable = checker.executable
    report, _ = checker.check([*executable.entered(leaves), *executable.captured])
    first = report.first
    assert first is not None, (case, kind, step)
    assert first.after and first.kind == step.kind and (first.src, first.dst) == (str(step.src), str(step.dst))
    assert first.source == compat.source_line(eqn) and first.devices == (fault.device,)
    assert str(first) in str(report)


def test_what_is_computed_wrong_is_named_before_its_border(mesh, monkeypatch):
    f, args = function("tensor", mesh)
    right = lower.Lowering.operation

    def operation(low, eqn, operands):
        made = right(low, eqn, operands)
        if eqn.primitive.name == "tanh" and not isinstance(low, ReplayingLowering):
            return [jnp.where(lax.axis_index("data") == 1, x.at[0, 0].add(0.5), x) for x in made]
        return made

    monkeypatch.setattr(lower.Lowering, "operation", operation)
    report = f.compile(*args).check(*args)
    first = report.first
    assert not first.after and first.kind == "all_reduce" and "dot_general" in first.value
    assert first.devices == (2, 3) and 0 < first.count < first.of  # those at one place of "data"
    assert "before the all_reduce over data, model of " in str(report) and "(test_check.py:" in str(report)
    assert "elements on devices 2, 3 differ, by up to " in str(report) and "where rounding explains" in str(report)
    assert "XLA_FLAGS=" in str(report)


@pytest.mark.parametrize("kind", ["all_gather", "permute"])
def test_collectives_inside_operations_are_borders(kind, monkeypatch):
    fn = (lambda x: x[1:] - x[:-1]) if kind == "permute" else lambda x: jnp.cumsum(x)
    rows, x = {"data": S(0)}, normal(64)
    f = shardc.function(fn, mesh=shardc.make_mesh(data=4), in_placements=rows, out_placements=rows)
    right = getattr(MeshWire, kind)

    def wrong(wire, x, axes, *rest):
        y = right(wire, x, axes, *rest)
        return jnp.where(lax.axis_index("data") == 2, jnp.zeros_like(y) - 1, y)

    monkeypatch.setattr(MeshWire, kind, wrong)
    first = f.compile(x).check(x).first
    assert first.after and first.kind == kind and first.devices == (2,) and first.value.startswith("the pieces of ")


def test_a_fault_that_the_program_with_borders_lacks(mesh, monkeypatch):
    f, args = function("tensor", mesh)
    with monkeypatch.context() as patch:
        fault = Fault(patch)
        _ = f.compile(*args)
        fault.target, fault.kind = next(iter(fault.steps)), "nan"
        f._executables.clear()
        compiled = f.compile(*args)
    report = compiled.check(*args)
    assert not report.ok and report.unlike_alone and report.first.kind == "result"
    assert "no border is off in the program that also returns the values at its borders" in str(report)


def test_arguments_are_kept_by_a_check_and_taken_by_a_first_call(mesh):
    f, (w, x) = function("tensor", mesh, donate_argnames="w", check="first")
    w = shardc.put(w, mesh, TENSOR["w"])
    assert f.compile(w, x).check(w, x).ok and not w["a"].is_deleted()
    new, value = f(w, x)
    assert w["a"].is_deleted()
    want, right = jax.jit(sgd)(W, x)
    np.testing.assert_allclose(new["a"], want["a"], rtol=1e-5)
    np.testing.assert_allclose(value, right, rtol=1e-5)
    f(new, x)
    assert new["a"].is_deleted()


def test_a_first_call_with_a_fault_is_an_error_and_takes_nothing(mesh, monkeypatch):
    f, (w, x) = function("tensor", mesh, donate_argnames="w", check="first")
    w, fault = shardc.put(w, mesh, TENSOR["w"]), Fault(monkeypatch)
    _ = f.compile(w, x)
    fault.target = next(iter(fault.steps))
    f._executables.clear()
    for _ in range(2):  # it is not taken for checked
        with pytest.raises(shardc.errors.CheckError) as info:
            f(w, x)
    assert "sgd on data=4, model=2 on cpu: the numbers of its first call are wrong.\ncheck: " in str(info.value)
    assert info.value.report.first.after and not w["a"].is_deleted()


def test_callbacks_and_a_users_shard_map_are_taken_as_they_are(mesh):
    unit = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )

    def fn(x):
        y = jax.pure_callback(lambda x: np.sin(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return unit(y * 2) @ y.T, y.sum()

    x = normal(8, 6)
    report = shardc.function(fn, mesh=mesh, in_placements={"x": {"data": S(0)}}).compile(x).check(x)
    assert report.ok, str(report)
    texts = [text.partition(" at ")[0] for text in report.open]
    assert texts[:2] == ["what pure_callback", "the inside of the shard_map"] and "callbacks may give other" in texts[2]
    assert "\n  not compared: what pure_callback at test_check.py:" in str(report)


def pipelined(**options):
    def loss(w, x):
        h = shardc.stage_boundary(jnp.tanh(x @ w["a"]))
        return jnp.mean((h @ w["b"]) ** 2)

    def step(w, x):
        value, g = shardc.accumulate(jax.value_and_grad(loss), microbatches=2, in_axes={"x": 0})(w, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value

    return shardc.function(
        step, mesh=shardc.make_mesh(pipe=2, data=2), pipeline=shardc.Pipeline(axis="pipe"),
        in_placements={"x": {"data": S(0)}}, donate_argnames="w", **options,
    )  # fmt: skip


def test_each_task_of_a_pipeline_is_checked(monkeypatch):
    f, x = pipelined(check="first"), normal(8, 12)
    compiled = f.compile(W, x)
    report = compiled.check(W, x)
    assert report.ok and report.borders and report.results > 3, str(report)
    w = jax.tree.map(jnp.asarray, W)
    _, value = f(w, x)
    np.testing.assert_allclose(value, sgd(W, x)[1], rtol=1e-5)
    fault = Fault(monkeypatch)
    g = pipelined()
    _ = [e.lowered for e in g.compile(W, x).executable._task_executables()]
    fault.target = next(iter(fault.steps))
    g._executables.clear()
    report = g.compile(W, x).check(W, x)
    assert not report.ok and report.first.after and report.where and f"check of {report.where}: " in str(report)


def test_other_words_for_check_are_refused(mesh):
    with pytest.raises(shardc.ArgumentError, match=r"check='always': write \"first\", which holds the first call"):
        shardc.function(sgd, mesh=mesh, check="always")
