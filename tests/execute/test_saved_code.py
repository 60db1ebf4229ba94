"""A compiled program in a file: another function loads it, and XLA compiles nothing; or an error says what differs."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from shardc.execute import saved_code

ROOT = Path(__file__).parents[2]
W, X = np.arange(256, dtype=np.float32).reshape(16, 16) / 256, np.ones((8, 16), np.float32)
PLACES = {"w": {"model": S(1)}, "x": {"data": S(0)}}
SCALE = np.full(16, 1e-3, np.float32)


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def step(w, x):
    value, grad = jax.value_and_grad(lambda w: (jax.nn.relu(x @ w) ** 2).sum())(w)
    return w - SCALE * grad, value


def compilations(monkeypatch):
    """What XLA compiles from now on."""
    found = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, **k: found.append(self) or compile_(self, **k))
    return found


@pytest.fixture
def saved(mesh, tmp_path):
    made = shardc.function(step, mesh=mesh, in_placements=PLACES, donate_argnames="w")
    made.compile(W, X).save(tmp_path / "step.compiled")
    return made, tmp_path / "step.compiled"


def test_a_loaded_program_is_the_one_that_was_saved(mesh, saved, monkeypatch):
    made, path = saved
    found = compilations(monkeypatch)
    again = shardc.function(step, mesh=mesh, plan=path, donate_argnames="w")
    compiled = again.compile(W, X)
    assert not found
    assert compiled.audit().ok
    for f in (again, compiled):
        expected, there = made(W, X)[0], jax.device_put(W, made.compile(W, X).executable.in_shardings[0])
        new, value = f(there, X)
        assert there.is_deleted(), "it is donated"
        assert new.sharding == expected.sharding
        np.testing.assert_array_equal(new, expected)
        np.testing.assert_array_equal(f(new, X)[1], made(expected, X)[1])
        np.testing.assert_allclose(value, step(W, X)[1], rtol=1e-6)
    assert not found


def test_arrays_that_the_function_closes_over_are_those_of_the_process(mesh, saved, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2 * SCALE)
    again = shardc.function(step, mesh=mesh, plan=saved[1], donate_argnames="w")
    np.testing.assert_allclose(again(W, X)[0], step(W, X)[0], rtol=1e-6)


def test_uneven_results(mesh, tmp_path):
    w, x = W[:, :7], X[:5]

    def fn(w, x):
        return x @ w, x

    places = {"in_placements": {"w": {}, "x": {"data": S(0)}}, "out_placements": ({"data": S(0)}, {"data": S(0)})}
    shardc.function(fn, mesh=mesh, **places).compile(w, x).save(tmp_path / "f.compiled")
    product, same = shardc.function(fn, mesh=mesh, plan=tmp_path / "f.compiled")(w, x)
    assert str(product.placement) == "{data: S(0)}"
    np.testing.assert_allclose(product, x @ w, rtol=1e-6)
    np.testing.assert_array_equal(same, x)


def test_a_program_that_jax_has_in_its_cache(mesh, tmp_path, monkeypatch):
    """XLA:CPU writes such a one without its code: it is compiled once more."""
    for n in range(2):
        shardc.function(step, mesh=mesh, in_placements=PLACES).compile(W, X).save(tmp_path / str(n))
    found = compilations(monkeypatch)
    again = shardc.function(step, mesh=mesh, plan=tmp_path / "1").compile(W, X)
    again.save(tmp_path / "2")
    value = shardc.function(step, mesh=mesh, plan=tmp_path / "2")(W, X)[1]
    assert not found
    np.testing.assert_allclose(value, step(W, X)[1], rtol=1e-6)


def test_it_is_a_plan_too(mesh, saved):
    plan = shardc.load_plan(saved[1])
    assert repr(plan) == "SavedPlan(step.compiled: step on data=4, model=2, 2 arguments, 15 operations, compiled)"
    assert str(plan.in_placements["w"]) == "{model: S(1)}"
    assert shardc.function(step, mesh=mesh, plan=plan, donate_argnames="w").plan(W, X).bytes_per_device > 0


KERNEL = {"scale": 1.0}


@shardc.signature("b f -> b f")
def kernel(x):
    return x * KERNEL["scale"]


def test_what_differs(mesh, tmp_path, monkeypatch):
    path = tmp_path / "f.compiled"

    def fn(x):
        return kernel(x) + 1.0

    def load(fn=fn, mesh=mesh):
        return shardc.function(fn, mesh=mesh, plan=path).compile(X)

    shardc.function(fn, mesh=mesh).compile(X).save(path)
    with pytest.raises(shardc.ArgumentError, match=r"add f32.* is not in the plan"):
        load(lambda x: kernel(x) + x)
    with pytest.raises(shardc.ArgumentError, match="the plan is for the mesh data=4, model=2, this is data=8"):
        load(mesh=shardc.make_mesh(data=8))
    with pytest.raises(shardc.ArgumentError, match=r"the program and its plan: digest .* when it was saved, .* here"):
        load(lambda x: kernel(x) + 2.0)  # no plan depends on it, the code does
    monkeypatch.setattr(saved_code, "_processor", lambda: "another CPU")
    with pytest.raises(
        shardc.ArgumentError, match=r"the machine: 8 devices of .* saved, 8 devices of another CPU here"
    ):
        load()
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=true --xla_dump_to=/x")
    with pytest.raises(
        shardc.ArgumentError, match="XLA_FLAGS:  when it was saved, --xla_cpu_enable_fast_math=true here"
    ):
        load()
    monkeypatch.undo()
    monkeypatch.setattr(jax, "__version__", "0.99")
    with pytest.raises(shardc.ArgumentError, match=r"jax: .* when it was saved, 0.99 here"):
        load(lambda x: kernel(x) + x)  # the releases first: other ones may trace another program
    monkeypatch.undo()
    monkeypatch.setitem(KERNEL, "scale", 3.0)
    with pytest.raises(shardc.ArgumentError, match="the program and its plan"):
        load()
    monkeypatch.undo()
    load()


def test_a_program_for_devices_that_are_not_first(mesh, tmp_path):
    """JAX writes the numbers of devices."""
    path = tmp_path / "f.compiled"
    four = [jax.sharding.Mesh(np.array(jax.devices()[i : i + 4]), ("data",)) for i in (0, 4)]
    made = [shardc.function(lambda x: x.sum(), mesh=m, in_placements={"x": {"data": S(0)}}) for m in four]
    made[1].compile(X).save(path)
    again = [shardc.function(lambda x: x.sum(), mesh=m, plan=path) for m in four]
    assert again[1](X) == 128
    with pytest.raises(shardc.ArgumentError, match=r"the devices: 4 to 7, in 1 process when .* saved, 0 to 3, in 1"):
        again[0](X)


def test_what_cannot_be_saved(mesh, tmp_path):
    def shows(x):
        jax.debug.print("{}", x.sum())
        return x

    with pytest.raises(shardc.ArgumentError, match=r"shows calls Python, .* compiled.plan.save\(path\) can"):
        shardc.function(shows, mesh=mesh).compile(X).save(tmp_path / "f")
    with pytest.raises(shardc.ArgumentError, match="less than a byte"):
        shardc.function(lambda x: x, mesh=mesh).compile(jnp.ones(8, jnp.int4)).save(tmp_path / "f")
    with pytest.raises(shardc.ArgumentError, match="cannot be written: there is no folder"):
        shardc.function(lambda x: x, mesh=mesh).compile(X).save(tmp_path / "no" / "f")
    assert not list(tmp_path.iterdir())


def test_files_that_are_none(mesh, saved, tmp_path):
    other = tmp_path / "other"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("plan.json", "{}")
    with pytest.raises(shardc.ArgumentError, match="other is no compiled program that shardc saved, or was changed"):
        shardc.load_plan(other)
    with zipfile.ZipFile(saved[1]) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    about = json.loads(parts["compiled.json"])
    for wrong in ({**about, "facts": 3}, [], {"facts": {}}):
        with zipfile.ZipFile(other, "w") as archive:
            for name, data in {**parts, "compiled.json": json.dumps(wrong).encode()}.items():
                archive.writestr(name, data)
        with pytest.raises(shardc.ArgumentError, match="or was changed"):
            shardc.load_plan(other)


PROGRAM = """
import os, sys
import jax, numpy as np, shardc
from tests.execute.test_saved_code import PLACES, W, X, step
path = sys.argv[1]
known = {"plan": path} if os.path.exists(path) else {"in_placements": PLACES}
f = shardc.function(step, mesh=shardc.make_mesh(data=2, model=2), donate_argnames="w", **known)
compiled, times = jax.stages.Lowered.compile, []
jax.stages.Lowered.compile = lambda self, **k: times.append(1) or compiled(self, **k)
c = f.compile(W, X)
print("compiled", len(times), "value", float(c(W, X)[1]))
if "plan" not in known:
    c.save(path)
"""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("processes", [1, 2])
def test_other_processes(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "shardc", "run", "--processes", str(processes), "--devices", str(4 // processes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for times in (1, 0):
        done = subprocess.run(
            [*command, script, tmp_path / "f"], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
        )
        assert f"compiled {times} value {float(step(W, X)[1])}" in done.stdout
