"""Mistakes of newcomers that once ended in an error of Python's, in frames of shardc, or in nothing at all."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import ArgumentError, MeshError, PipelineError, PlacementError, S

OURS = str(Path(shardc.__file__).parent)
X = np.ones((16, 8), np.float32)
W = np.ones((8, 8), np.float32)
MESH = shardc.make_mesh(data=4, model=2)


def step(w, x):
    return (x @ w).mean()


SHAPE = jax.ShapeDtypeStruct((8, 8), np.float32)


def without_devices():
    node = shardc.function(step, mesh=shardc.make_mesh(topology="v5p:2x2x2", data=8))

    @shardc.flow
    def round(state, item):
        return state, node(state, item)

    return round


def signature_called(**keywords):
    return shardc.signature("b d, d f -> b f", **keywords)(lambda x, w: x @ w)


MISTAKES = {
    "rules in a list": (
        lambda: shardc.rules([("kernel", {"model": S(1)})]), PlacementError,
        "shardc.rules wants a dict from pattern to placement, got [('kernel', {'model': S(1)})]; write "
        'shardc.rules({"*/kernel": {"model": S(1)}}).',
    ),
    "a number for an axis": (
        lambda: shardc.data_parallel(8), ArgumentError,
        'shardc.data_parallel: axis=8; write the name of an axis of the mesh, as shardc.data_parallel("data"), or '
        'several, as ("replica", "data").',
    ),
    "numbers for axes": (
        lambda: shardc.fsdp([0]), ArgumentError,
        'shardc.fsdp: axis=[0]; write the name of an axis of the mesh, as shardc.fsdp("data"), or several, as '
        '("replica", "data").',
    ),
    "names for numbers": (
        lambda: shardc.function(step, mesh=MESH, donate_argnums="w"), ArgumentError,
        f"step (test_mistakes.py:{step.__code__.co_firstlineno}): donate_argnums='w': 'w' is no number of an argument; "
        "for names write donate_argnames=.",
    ),
    "numbers for names": (
        lambda: shardc.function(step, mesh=MESH, donate_argnames=(0,), static_argnames=1, replicate=2), ArgumentError,
        "shardc.function: options that are no names\n"
        "  donate_argnames=(0,): write names, as donate_argnames=('w',), or donate_argnums for numbers.\n"
        "  static_argnames=1: write names, as static_argnames=('w',), or static_argnums for numbers.\n"
        "  replicate=2: write names, as replicate=('w',).",
    ),
    "the mesh by position": (
        lambda: shardc.function(step, MESH), ArgumentError,
        "shardc.function takes the function alone by position; write the other arguments by name, as "
        "shardc.function(step, mesh=mesh, in_placements=...).",
    ),
    "a decorator of nothing": (
        lambda: shardc.function(mesh=MESH)(None), ArgumentError,
        "shardc.function wants a function, got None; write shardc.function(step, mesh=mesh), or "
        "@shardc.function(mesh=mesh) above it.",
    ),
    "a decorator of a result": (
        lambda: shardc.function(mesh=MESH)((X, X)), ArgumentError,
        "shardc.function wants a function, got a tuple; write shardc.function(step, mesh=mesh), or "
        "@shardc.function(mesh=mesh) above it.",
    ),
    "a number for a topology": (
        lambda: shardc.make_mesh(topology=8, data=8), MeshError,
        'topology=8 is no text; write a machine and its shape, as topology="v5p:4x4x2".',
    ),
    "texts as an argument": (
        lambda: shardc.function(lambda x: x, mesh=MESH)({"words": np.array(["a", "b"])}), ArgumentError,
        "<lambda> (test_mistakes.py:LINE): invalid arguments\n  x/words: JAX has no arrays of <U1; pass numbers.",
    ),
    "one mesh for the ranks": (
        lambda: shardc.Pipeline(meshes=MESH), PipelineError,
        "Pipeline(meshes=...) wants a mesh for each rank, in a list, and got one mesh; give one mesh with an axis for "
        'the ranks as shardc.function(mesh=..., pipeline=shardc.Pipeline(axis="pipe")).',
    ),
    "a number for the axis of a pipeline": (
        lambda: shardc.Pipeline(axis=0), PipelineError,
        'Pipeline(axis=0): write the name of an axis of the mesh, as axis="pipe".',
    ),
    "put with the mesh first": (
        lambda: shardc.put(MESH, X, {"data": S(0)}), ArgumentError,
        "shardc.put: the second argument is a ndarray and no mesh; write shardc.put(tree, mesh, placements).",
    ),
    "put with the placements of all arguments": (
        lambda: shardc.put(X, MESH, shardc.function(step, mesh=MESH).plan(W, X).in_placements), PlacementError,
        "shardc.put, mesh data=4, model=2 on cpu:\n"
        "  placements: f32[16,8]: these are placements of 2 values; give that of this one, as .w.",
    ),
    "a plan that is not saved": (
        lambda: shardc.function(step, mesh=MESH, plan=3), ArgumentError,
        "3 is no saved plan; write plan.save('plan.json'), and plan='plan.json'.",
    ),
    "tune along a number": (
        lambda: shardc.tune(step, W, X, axes=4), ArgumentError,
        'tune: axes=(4,); write names that differ, as axes=("data", "model").',
    ),
    "tune on text": (
        lambda: shardc.tune(step, W, X, devices="8"), ArgumentError, "tune: devices='8'; it has to be 1 or more.",
    ),
    "a signature of an operand that is not there": (
        lambda: signature_called(linear=(0, (1, 5))), PlacementError,
        "shardc.signature('b d, d f -> b f'): linear=(0, (1, 5)) names operand 5; there are 2, numbered from 0.",
    ),
    "a signature that reduces by a mean": (
        lambda: signature_called(reduce="mean"), PlacementError,
        "shardc.signature('b d, d f -> b f'): reduce='mean'; what is reduced away is a sum, max or min. For a mean, "
        "divide the sum after the call.",
    ),
    "a signature without its text": (
        lambda: shardc.signature(len), PlacementError,
        "shardc.signature wants the factors of its operands and results, got <built-in function len>; write "
        '@shardc.signature("b d, d f -> b f") above the function.',
    ),
    "a signature called by name": (
        lambda: signature_called()(x=X, w=W), PlacementError,
        "shardc.signature('b d, d f -> b f'): operands are given by position, got x, w by name.",
    ),
    "discover without a function": (
        lambda: shardc.discover("x"), ArgumentError, "shardc.discover wants a function and its arguments, got 'x'.",
    ),
    "a function without names": (
        lambda: shardc.function(max, mesh=MESH), ArgumentError,
        "max: Python knows no names of its arguments; write a function around it, as lambda x: max(x).",
    ),
    "a call with shapes": (
        lambda: shardc.function(step, mesh=MESH)(SHAPE, X), ArgumentError,
        f"step (test_mistakes.py:{step.__code__.co_firstlineno}): .plan(...) and .compile(...) take shapes, a call "
        "arrays\n  w is a jax.ShapeDtypeStruct, which has no values.",
    ),
    "a compiled call with shapes": (
        lambda: shardc.function(step, mesh=MESH).compile(SHAPE, X)(SHAPE, X), ArgumentError,
        f"step (test_mistakes.py:{step.__code__.co_firstlineno}): .plan(...) and .compile(...) take shapes, a call "
        "arrays\n  w is a jax.ShapeDtypeStruct, which has no values.",
    ),
    "a difference to no plan": (
        lambda: shardc.function(step, mesh=MESH).plan(W, X).diff(3), ArgumentError,
        "plan.diff wants a plan of step.plan(...), got 3.",
    ),
    "rows on no mesh": (
        lambda: shardc.rows_here((8,), None, {}), ArgumentError,
        "shardc.rows_here: mesh=None is no mesh with devices, as shardc.make_mesh makes it.",
    ),
    "rows along another mesh's axis": (
        lambda: shardc.rows_here((8,), MESH, {"dta": S(0)}), PlacementError,
        "shardc.rows_here: the mesh has no axis 'dta'; its axes are data, model. Did you mean \"data\"?",
    ),
    "checkpoints in nothing": (
        lambda: shardc.checkpoints(None), ArgumentError,
        "shardc.checkpoints: None is no path; give the directory of the checkpoints.",
    ),
    "checkpoints of no plan": (
        lambda: shardc.checkpoints("nowhere", plan=3), ArgumentError,
        "shardc.checkpoints: plan=3 is no plan; write plan=step.plan(...).",
    ),
    "a run of a flow on a mesh without devices": (
        lambda: without_devices().run(W, [X]), MeshError,
        "round (test_mistakes.py:FLOW) can be planned and not run: step is on a mesh without devices; make the mesh "
        "without `topology=`.",
    ),
    # these had their text: only the frames of shardc were there too
    "microbatches": (
        lambda: shardc.accumulate(step, microbatches=2.0), ArgumentError,
        "accumulate: microbatches=2.0; it has to be a whole number of 1 or more.",
    ),
    "tune without arguments": (
        lambda: shardc.tune(step, devices=8), ArgumentError,
        f"step (test_mistakes.py:{step.__code__.co_firstlineno}): missing a required argument: 'w'; call step(w, x).",
    ),
    "checkpoints outside of their context": (
        lambda: shardc.checkpoints("nowhere").last(or_else={}), ArgumentError,
        "shardc.checkpoints: use it inside of `with shardc.checkpoints(...) as saved:`.",
    ),
    "credits": (
        lambda: shardc.flow(lambda state: (state, None), credits=0), ArgumentError,
        "shardc.flow: credits=0; a channel needs a whole number of 1 or more.",
    ),
    "every": (
        lambda: shardc.every(0, step), ArgumentError, "shardc.every: 0 rounds; it takes a whole number of 1 or more.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_of_shardc_in_the_users_frames_alone(name):
    call, kind, text = MISTAKES[name]
    with pytest.raises(kind) as error:
        call()
    flow = without_devices.__code__.co_firstlineno + 3
    assert str(error.value) == text.replace("LINE", str(call.__code__.co_firstlineno)).replace("FLOW", str(flow))
    frames = traceback.extract_tb(error.value.__traceback__)
    files = [f.filename for f in frames if f.filename.startswith(OURS) and not f.name.startswith("__")]
    assert files == []


def test_placement_of_text():
    with pytest.raises(PlacementError, match=r"Placement\('data'\): write a dict, as Placement\({'data': S\(0\)}\)"):
        shardc.Placement("data")


def test_arrays_that_are_gone_are_not_written(tmp_path):
    w = jnp.ones(3)
    with shardc.checkpoints(tmp_path) as saved:
        saved.last(or_else={"w": w})
        with pytest.raises(ArgumentError, match="a step has a number, got a dict; write saved"):
            saved.step({"w": w}, 0)
        w.delete()
        with pytest.raises(ArgumentError) as error:
            saved.step(0, {"w": w})
    assert str(error.value) == (
        "saved.step(0): arrays that are gone\n  w: an earlier call took its buffer; pass that call's result instead."
    )


@pytest.mark.parametrize("name", ["flax", "equinox"])
def test_functions_of_modules_refuse_what_is_no_function(name):
    pytest.importorskip(name)
    face = __import__(f"shardc.{name}", fromlist=["function"])
    with pytest.raises(ArgumentError, match=rf"shardc.{name}.function wants a function, got None; write"):
        face.function(mesh=MESH)(None)
    with pytest.raises(ArgumentError, match=rf"shardc.{name}.function takes the function alone by position; write"):
        face.function(step, MESH)
    with pytest.raises(ArgumentError, match="in_shardings: write in_placements="):
        face.function(step, mesh=MESH, in_shardings=None)


def test_writes_to_nnx_modules_are_not_lost_in_a_function_of_equinox_modules():
    nnx = pytest.importorskip("flax.nnx")
    import shardc.equinox  # noqa: PLC0415

    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    mean = norm.mean[...]
    shardc.equinox.function(lambda m, x: m(x).sum(), mesh=MESH)(norm, X)
    assert not (norm.mean[...] == mean).all()


@pytest.mark.parametrize("fn", [lambda x: jax.lax.psum(x.sum(), "data"), lambda x: x * jax.lax.axis_index("data")])
def test_collectives_by_hand(fn):
    with pytest.raises(NameError, match="unbound axis name: data") as error:
        shardc.function(fn, mesh=MESH)(X)
    assert error.value.__notes__[0] == (
        "shardc: the function is written for one device, and sees whole arrays: leave psum, pmean and axis_index out, "
        "as in x.mean(). The collectives follow from the placements."
    )


def test_lists_of_numbers_are_named_where_the_function_fails():
    f = shardc.function(jax.grad(step), mesh=MESH)
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs") as error:
        f.plan((8, 8), W)
    note = (
        "shardc: w is a tuple, and each of its numbers an argument of its own; for an array write np.asarray(w), for a "
        "shape jax.ShapeDtypeStruct(w, np.float32)."
    )
    assert note in error.value.__notes__
    with pytest.raises(AttributeError, match="'list' object has no attribute 'sum'") as error:
        shardc.function(lambda x: x.sum(), mesh=MESH)([[1.0, 2.0], [3.0, 4.0]])
    assert any("x is a list, and each" in n for n in error.value.__notes__)
    with pytest.raises(ZeroDivisionError) as error:
        shardc.function(lambda x, n: 1 / 0, mesh=MESH)(X, [W, 2])
    assert not any("shardc" in n for n in getattr(error.value, "__notes__", ()))


def test_attributes_that_another_object_has():
    f = shardc.function(step, mesh=MESH)
    plan, compiled = f.plan(W, X), f.compile(W, X)
    for of, name, says in (
        (f, "lower", "; step.plan(...) traces and plans, step.compile(...) compiles, and its .hlo() is the compiled"),
        (f, "audit", "; what is compiled has it: step.compile(...).audit"),
        (f, "explain", "; the plan has it: step.plan(...).explain"),
        (plan, "hlo", "; what is compiled has it: step.compile(...).hlo"),
        (compiled, "collectives", "; the plan has it: compiled.plan.collectives"),
    ):
        with pytest.raises(AttributeError) as error:
            getattr(of, name)
        assert f"object has no attribute '{name}'{says}" in str(error.value)
    assert not hasattr(f, "shape") and not hasattr(f, "_nothing")
    with pytest.raises(AttributeError, match=r"'Function' object has no attribute 'plann'$"):
        f.plann  # noqa: B018


def test_attributes_of_pipelines():
    def train(w, x):
        def loss(w, x):
            return (shardc.stage_boundary(jnp.tanh(x @ w)) @ w).mean()

        return jax.grad(shardc.accumulate(loss, microbatches=2))(w, x)

    f = shardc.function(train, mesh=shardc.make_mesh(pipe=2, data=4), pipeline=shardc.Pipeline())
    with pytest.raises(AttributeError, match=r"what is compiled has it: step\.compile\(\.\.\.\)\.measure"):
        f.plan(W, X).measure  # noqa: B018
    with pytest.raises(AttributeError, match=r"the plan has it: compiled\.plan\.explain"):
        f.compile(W, X).explain  # noqa: B018


@pytest.mark.parametrize(("name", "says"), [("flaxx", "'flaxx'$"), ("flx", "'flx'$")])
def test_names_that_shardc_does_not_have(name, says):
    with pytest.raises(AttributeError, match=f"module 'shardc' has no attribute {says}") as error:
        getattr(shardc, name)
    assert (error.value.name, error.value.obj) == (name, shardc)


def test_lists_of_numbers_inside_of_an_argument_are_named_if_the_error_is_about_one():
    def mean(batch):
        return batch["x"].mean() + batch["scales"][0]

    f = shardc.function(mean, mesh=MESH)
    with pytest.raises(AttributeError, match="'list' object has no attribute 'mean'") as error:
        f({"x": [[1.0, 2.0], [3.0, 4.0]], "scales": (1.0, 2.0)})
    notes = [n for n in error.value.__notes__ if n.startswith("shardc: ")]
    assert notes == [
        "shardc: batch['x'] is a list, and each of its numbers an argument of its own; for an array write "
        "np.asarray(batch['x']), for a shape jax.ShapeDtypeStruct(batch['x'], np.float32)."
    ]
    run = shardc.flow(lambda w, x: (shardc.function(lambda w, x: w + x.T, mesh=MESH)(w, x), None)).run
    with pytest.raises(AttributeError, match="'list' object has no attribute 'T'") as error:
        run(W, [[[1.0, 2.0], [3.0, 4.0]]])
    assert any("shardc: x is a list, and each" in n for n in error.value.__notes__)


class Tensor:
    """An array of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.ones(4, dtype)

    def __repr__(self):
        return "tensor"


def test_arrays_of_other_libraries_are_to_be_made_arrays():
    def scaled(x, more):
        return x

    with pytest.raises(shardc.ArgumentError) as error:
        shardc.function(scaled, mesh=MESH)(Tensor(), {"y": Tensor()})
    assert str(error.value) == (
        f"scaled (test_mistakes.py:{scaled.__code__.co_firstlineno}): invalid arguments\n"
        "  x: a Tensor is an array of another library; pass np.asarray(x).\n"
        "  more/y: a Tensor is an array of another library; pass np.asarray(y)."
    )
    flow = shardc.flow(lambda w, x: (w, x))
    for call, what, kinds in (
        (lambda: flow.run(W, [Tensor()]), "item", "no arrays"),
        (lambda: flow.run(Tensor(), [W]), "state", "neither arrays nor constants"),
    ):
        with pytest.raises(shardc.ArgumentError) as error:
            call()
        assert str(error.value) == (
            f"{flow.where}: leaves that are {kinds}:\n"
            f"  {what} is tensor, an array of another library; pass np.asarray of it."
        )
