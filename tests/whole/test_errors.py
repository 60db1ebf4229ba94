"""Bad input: each mistake by the full text of its error, and what a failed call leaves as it was."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from shardc import AUTO, ArgumentError, B, MeshError, P, PlacementError, S, rules
from shardc.machine.topology import TOPOLOGIES

MESH = "mesh data=4, model=2 on cpu"
ROWS = np.ones(8, np.float32)
PARAMS = {"b": np.ones(8, np.float32), "w": np.ones((4, 8), np.float32)}


@pytest.fixture(scope="module")
def mesh():
    return shardc.make_mesh(data=4, model=2)


def step(params, batch):
    return params["w"] * batch.sum()


def same(x):
    return x


def line(fn, offset=0):
    return f"{fn.__name__} (test_errors.py:{fn.__code__.co_firstlineno + offset})"


def text_of(kind, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value)


def lines(head, *offenders):
    return "\n".join([head, *(f"  {o}" for o in offenders)])


# in_placements


LEAVES = {
    "unknown axis": (
        {"params": {"w": {"modle": S(0)}, "b": {"dat": S(0), "model": P}}},
        "in_placements: params/w f32[4,8]: {'modle': S(0)}: the mesh has no axis 'modle'. "
        "Did you mean {'model': S(0)}?",
        "in_placements: params/b f32[8]: {'dat': S(0), 'model': P}: the mesh has no axis 'dat'. "
        "Did you mean {'data': S(0), 'model': P}?",
    ),
    "unknown axis, unlike any": (
        {"params": {"b": {"x": S(0)}}, "batch": {"pipe": AUTO}},
        "in_placements: params/b f32[8]: {'x': S(0)}: the mesh has no axis 'x'; its axes are 'data', 'model'.",
        "in_placements: batch f32[8]: {'pipe': AUTO}: the mesh has no axis 'pipe'; its axes are 'data', 'model'.",
    ),
    "wrong rank": (
        {"params": {"w": {"data": S(2)}, "b": {"model": S(-2), "data": S(0)}}, "batch": PartitionSpec(None, "data")},
        "in_placements: params/w f32[4,8]: {'data': S(2)}: the value has 2 dimensions, numbered from 0; "
        "write {'data': S(1)}.",
        "in_placements: params/b f32[8]: {'model': S(-2), 'data': S(0)}: the value has 1 dimension, numbered from 0; "
        "write {'model': S(0), 'data': S(0)}.",
        "in_placements: batch f32[8]: {'data': S(1)}: the value has 1 dimension, numbered from 0; "
        "write {'data': S(0)}.",
    ),
    "one mistake for many leaves": (
        {"params": {"dta": S(0)}},
        "in_placements: params/b f32[8], params/w f32[4,8]: {'dta': S(0)}: the mesh has no axis 'dta'. "
        "Did you mean {'data': S(0)}?",
    ),
    "tuple of wrong length": (
        {"params": {"w": (S(0),)}, "batch": (S(0), B, P)},
        "in_placements: params/w f32[4,8]: (S(0),) has 1 sbp, but the mesh has 2 axes; "
        "write one for each, as (S(0), B).",
        "in_placements: batch f32[8]: (S(0), B, P) has 3 sbps, but the mesh has 2 axes; "
        "write one for each, as (S(0), B).",
    ),
    "P(max) at the border": (
        {"batch": {"data": P("max")}},
        "in_placements: batch f32[8]: {'data': P('max')}: P('max') is allowed only inside a function; write "
        "{'data': B}.",
    ),
    "two partial ops": (
        {"batch": {"data": P("max"), "model": P}},
        "in_placements: batch f32[8]: One placement has one partial op, got data: P(max), model: P(sum); a sum "
        "and a max over different axes do not commute.",
    ),
    "an axis twice": (
        {"batch": PartitionSpec(("data", "data"))},
        "in_placements: batch f32[8]: A placement names each axis once, got ['data', 'data'].",
    ),
    "the rest at something": (
        {"batch": {"data": S(0), ...: S(0)}},
        "in_placements: batch f32[8]: `...: S(0)` is not possible; `...: AUTO` leaves the other axes to the compiler.",
    ),
    "no placement": (
        {"params": {"w": 3, "b": "data"}, "batch": {"data": "S0"}},
        "in_placements: params/w f32[4,8]: 3 is no placement; "
        "write a dict from axis to sbp, as {'data': S(0)}, or AUTO.",
        "in_placements: params/b f32[8]: 'data' is no placement; "
        "write a dict from axis to sbp, as {'data': S(0)}, or AUTO.",
        "in_placements: batch f32[8]: 'S0' is not an sbp; write S(dim), B or P(op).",
    ),
    "no placement for all": (
        "data",
        "in_placements: 'data' is no placement; write a dict from axis to sbp, as {'data': S(0)}, or AUTO.",
    ),
    "a prefix that does not match": (
        {"params": {"w": {}, "bb": {}, "kernel": {"data": S(0)}}},
        "in_placements: params: the placements name 'bb', but the value has b, w. Did you mean \"b\"?",
        "in_placements: params: the placements name 'kernel', but the value has b, w.",
    ),
    "a list for a dict": (
        {"params": [{}]},
        "in_placements: params: the placements name '0', but the value has b, w.",
    ),
    "too many by position": (
        ({}, {"dta": S(0)}, {}),
        "in_placements: 3 for 2 arguments (params, batch); write one for each argument, or a dict by name.",
        "in_placements: batch f32[8]: {'dta': S(0)}: the mesh has no axis 'dta'. Did you mean {'data': S(0)}?",
    ),
    "rules that match nothing": (
        {"params": rules({"*/ww": {}, "kernel*": {}, "w": {}}), "batch": rules({"x*": {"data": S(0)}})},
        "in_placements: params: the pattern '*/ww' matches no leaf. Did you mean \"w\"?",
        "in_placements: params: the pattern 'kernel*' matches no leaf. Leaves are b, w. If it need not match: "
        "rules(..., optional='kernel*').",
        "in_placements: batch: the pattern 'x*' matches no leaf. The argument is one array, whose path is empty: "
        "give it {'data': S(0)} itself, or use '*'.",
    ),
    "rules with a wrong placement": (
        {"params": rules({"*": {"model": S(1)}})},
        "in_placements: params/b f32[8]: {'model': S(1)}: the value has 1 dimension, numbered from 0; "
        "write {'model': S(0)}.",
    ),
}


@pytest.mark.parametrize(("in_placements", "offenders"), [(c[0], c[1:]) for c in LEAVES.values()], ids=list(LEAVES))
def test_in_placements(mesh, in_placements, offenders):
    f = shardc.function(step, mesh=mesh, in_placements=in_placements)
    assert text_of(PlacementError, f.plan, PARAMS, ROWS) == lines(f"{line(step)}, {MESH}:", *offenders)


def test_what_cannot_be_partial_or_split(mesh):
    def four(x, key, scalar, integers):
        return x, integers

    places = {"x": {"data": P}, "key": {"model": P}, "scalar": {"data": S(0), "model": P}, "integers": {"data": P}}
    f = shardc.function(four, mesh=mesh, in_placements=places)
    found = text_of(PlacementError, f.plan, np.ones(8, bool), jax.random.key(0), np.float32(1), np.ones(8, np.int32))
    assert found == lines(
        f"{line(four)}, {MESH}:",
        "in_placements: x bool[8]: {'data': P('sum')}: bool values cannot be a partial sum; write {'data': B}.",
        "in_placements: key key<fry>[]: {'model': P('sum')}: key<fry> values cannot be a partial sum; "
        "write {'model': B}.",
        "in_placements: scalar f32[]: {'data': S(0), 'model': P('sum')}: a scalar cannot be split; "
        "write {'data': B, 'model': P('sum')}.",
    )


def test_a_sharding_over_another_mesh(mesh):
    sharding = NamedSharding(shardc.make_mesh(a=8), PartitionSpec("a"))
    f = shardc.function(same, mesh=mesh, in_placements={"x": sharding})
    assert text_of(PlacementError, f.plan, ROWS) == lines(
        f"{line(same)}, {MESH}:",
        "in_placements: x f32[8]: the NamedSharding is over another mesh (a=8); write a dict from axis to sbp, as "
        "{'data': S(0)}.",
    )


def test_p_of_an_axis():
    assert text_of(PlacementError, P, "data") == (
        "P('data'): a partial value is reduced by sum, max or min. Did you mean jax.sharding.PartitionSpec('data')?"
    )


def test_several_patterns_that_match_are_no_error(mesh):
    f = shardc.function(step, mesh=mesh, in_placements={"params": rules({"w": {"model": S(1)}, "*": {}})})
    plan = f.plan(PARAMS, ROWS)
    assert str(plan.in_placements.params["w"]) == "{model: S(1)}"
    assert "\nNotes\n  params/w: 'w' decides, also matched by '*'\n" in plan.explain()


# out_placements, and pins inside


def test_out_placements(mesh):
    def three(x):
        return {"a": x, "b": x > 0, "c": x.sum()}

    places = {"a": {"data": S(1)}, "b": {"data": P}, "d": {}}
    f = shardc.function(three, mesh=mesh, out_placements=places)
    assert text_of(PlacementError, f.plan, ROWS) == lines(
        f"{line(three)}, {MESH}:",
        "out_placements: result a f32[8]: {'data': S(1)}: the value has 1 dimension, numbered from 0; "
        "write {'data': S(0)}.",
        "out_placements: result b bool[8]: {'data': P('sum')}: bool values cannot be a partial sum; write {'data': B}.",
        "out_placements: the placements name 'd', but the value has a, b, c.",
    )


def test_out_placements_of_one_result(mesh):
    f = shardc.function(same, mesh=mesh, out_placements=({}, {}))
    assert text_of(PlacementError, f.plan, ROWS) == lines(
        f"{line(same)}, {MESH}:", "out_placements: result f32[8]: {} is not an sbp; write S(dim), B or P(op)."
    )


def test_constraints_are_named_with_their_lines_and_all_at_once(mesh):
    other = NamedSharding(shardc.make_mesh(a=8), PartitionSpec("a"))

    def constraining(x):
        y = shardc.constrain(x, {"modle": S(0)})
        y = shardc.constrain(y, {"data": S(1)})
        y = jax.lax.with_sharding_constraint(y, other)

        def body(carry, _):
            return shardc.constrain(carry, {"data": S(-2)}), shardc.constrain(carry > 0, {"data": P})

        return jax.lax.scan(body, y, None, 3)

    places = {"in_placements": {"x": {"data": S(3)}}, "out_placements": ({"a": S(0)}, AUTO)}
    f = shardc.function(constraining, mesh=mesh, **places)
    at = [line(constraining, i).replace("constraining (", "").rstrip(")") + " (constraining)" for i in range(4)]
    inside = f"test_errors.py:{constraining.__code__.co_firstlineno + 6} (body)"
    assert text_of(PlacementError, f.plan, ROWS) == lines(
        f"{line(constraining)}, {MESH}:",
        "in_placements: x f32[8]: {'data': S(3)}: the value has 1 dimension, numbered from 0; write {'data': S(0)}.",
        "out_placements: result 0 f32[8]: {'a': S(0)}: the mesh has no axis 'a'; its axes are 'data', 'model'.",
        f"shardc.constrain of f32[8] at {at[1]}: {{'modle': S(0)}}: the mesh has no axis 'modle'. "
        "Did you mean {'model': S(0)}?",
        f"shardc.constrain of f32[8] at {at[2]}: {{'data': S(1)}}: the value has 1 dimension, numbered from 0; "
        "write {'data': S(0)}.",
        f"jax.lax.with_sharding_constraint of f32[8] at {at[3]}: the NamedSharding is over another mesh (a=8); "
        "write a dict from axis to sbp, as {'data': S(0)}.",
        f"shardc.constrain of f32[8] at {inside}: {{'data': S(-2)}}: the value has 1 dimension, numbered from 0; "
        "write {'data': S(0)}.",
        f"shardc.constrain of bool[8] at {inside}: {{'data': P('sum')}}: bool values cannot be a partial sum; "
        "write {'data': B}.",
    )


def test_constraints_inside_an_outer_jit(mesh):
    def inner(x):
        return shardc.constrain(x, {"dat": S(0)})

    f = shardc.function(inner, mesh=mesh)
    found = text_of(PlacementError, jax.jit(f), ROWS)
    assert found.splitlines()[1].endswith("{'dat': S(0)}: the mesh has no axis 'dat'. Did you mean {'data': S(0)}?")


@pytest.mark.parametrize("placement", ["data", (S(0), B), AUTO, {"data": S(0), ...: B}])
def test_constrain_to_no_placement(placement):
    shown = repr(placement).replace("Ellipsis", "...")
    assert text_of(PlacementError, shardc.constrain, ROWS, placement) == (
        f"shardc.constrain: {shown} is no placement; write a dict from axis to sbp, as {{'data': S(0)}}, "
        "with ...: AUTO in it for axes that are to be chosen."
    )


def test_a_complex_maximum(mesh):
    def largest(x):
        return shardc.constrain(x, {"data": P("max")})

    f = shardc.function(largest, mesh=mesh)
    assert text_of(PlacementError, f.plan, ROWS.astype(np.complex64)) == lines(
        f"{line(largest)}, {MESH}:",
        f"shardc.constrain of c64[8] at test_errors.py:{largest.__code__.co_firstlineno + 1} (largest): "
        "{'data': P('max')}: complex64 values cannot be a partial max or min; write {'data': B}.",
    )


def test_a_result_pinned_elsewhere_than_the_argument_it_replaces_is_no_conflict(mesh):
    f = shardc.function(
        same, mesh=mesh, in_placements={"x": {"data": S(0)}}, out_placements={"model": S(0)}, donate_argnames="x"
    )
    plan = f.plan(ROWS)
    assert (str(plan.in_placements.x), str(plan.out_placements)) == ("{data: S(0)}", "{model: S(0)}")
    assert f(ROWS).tolist() == ROWS.tolist()


# names


def test_misspelt_names_all_at_once(mesh):
    found = text_of(
        ArgumentError, shardc.function, step, mesh=mesh,
        in_placements={"parms": {}}, donate_argnames=("params", "x"), static_argnames="bath",
    )  # fmt: skip
    assert found == lines(
        f"{line(step)}: names that do not fit",
        "donate_argnames names 'x', which is no argument of step(params, batch).",
        "static_argnames names 'bath', which is no argument of step(params, batch). Did you mean \"batch\"?",
        "in_placements names 'parms', which is no argument of step(params, batch). Did you mean \"params\"?",
    )


def test_static_arguments_live_nowhere(mesh):
    found = text_of(
        ArgumentError, shardc.function, step, mesh=mesh,
        in_placements={"batch": {}}, donate_argnames="batch", static_argnames="batch",
    )  # fmt: skip
    assert found == lines(
        f"{line(step)}: names that do not fit",
        "donate_argnames names 'batch', which is static: a constant lives nowhere; leave it out.",
        "in_placements names 'batch', which is static: a constant lives nowhere; leave it out.",
    )


def test_argument_numbers(mesh):
    assert text_of(ArgumentError, shardc.function, step, mesh=mesh, donate_argnums=(0, 2, 5)) == lines(
        f"{line(step)} has 2 arguments, numbered from 0: params, batch",
        "donate_argnums names argument 2.",
        "donate_argnums names argument 5.",
    )


def test_names_of_keywords(mesh):
    def keywords(**parts):
        return parts["a"]

    f = shardc.function(keywords, mesh=mesh, in_placements={"a": {"data": S(0)}, "bb": {}})
    assert text_of(PlacementError, f.plan, a=ROWS, b=ROWS) == lines(
        f"{line(keywords)}, {MESH}:",
        "in_placements: parts: the placements name 'bb', but the value has a, b. Did you mean \"b\"?",
    )
    f = shardc.function(keywords, mesh=mesh, in_placements={"a": {"data": S(0)}})
    assert str(f.plan(a=ROWS).in_placements.parts["a"]) == "{data: S(0)}"


def test_auto_by_name_is_not_a_placement_on_axes(mesh):
    f = shardc.function(step, mesh=mesh, in_placements={"params": AUTO, "batch": AUTO})
    free = shardc.function(step, mesh=mesh)
    assert f.plan(PARAMS, ROWS).in_placements == free.plan(PARAMS, ROWS).in_placements


def test_positions_are_those_of_the_signature(mesh):
    def swapped(z, a):
        return z.sum() + a.sum()

    f = shardc.function(swapped, mesh=mesh, in_placements=({"data": S(0)}, {"model": S(0)}))
    z, a = f.plan(ROWS, ROWS).in_placements
    assert (str(z), str(a)) == ("{data: S(0)}", "{model: S(0)}")


# calls


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((PARAMS,), {}, "missing a required argument: 'batch'; call step(params, batch)."),
        ((PARAMS, ROWS, 1), {}, "too many positional arguments; call step(params, batch)."),
        (
            (PARAMS,),
            {"bach": ROWS},
            "missing a required argument: 'batch'; call step(params, batch). Did you mean \"batch\"?",
        ),
    ],
)
def test_wrong_arguments(mesh, args, kwargs, said):
    assert text_of(ArgumentError, shardc.function(step, mesh=mesh), *args, **kwargs) == f"{line(step)}: {said}"


def test_arguments_without_a_hash(mesh):
    def scaled(x, sizes, names):
        return x

    f = shardc.function(scaled, mesh=mesh, static_argnames="sizes")
    assert text_of(ArgumentError, f, ROWS, [1, 2], {"a"}) == lines(
        f"{line(scaled)}: invalid arguments",
        "sizes: a static argument has to be hashable, and a list is not; pass a tuple, or another immutable value.",
        "names: a set is neither an array nor a hashable constant; pass an array.",
    )


def test_arguments_that_can_change(mesh):
    """The fix is valid code; a leaf inside of an argument needs one of its own."""

    class Config:
        scale = 2.0

    @dataclass
    class Sizes:
        width: int = 8

    def scaled(x, config, options):
        return x

    f = shardc.function(scaled, mesh=mesh)
    given = (ROWS, Config(), {"sizes": Sizes(), "rng": np.random.default_rng(0)})
    wants = lines(
        f"{line(scaled)}: invalid arguments",
        "config: a Config can change, and a compiled program would not see it; mark it static, with "
        'static_argnames="config", or pass its numbers.',
        "options/rng: a Generator can change, and a compiled program would not see it; give it an argument of its own, "
        'rng, and mark it static, with static_argnames="rng", or pass its numbers.',
        "options/sizes: a Sizes is neither an array nor a hashable constant; write @dataclass(frozen=True) above "
        "Sizes, with hashable fields.",
    )
    for call in (f, f.plan, f.compile):
        assert text_of(ArgumentError, call, *given) == wants
    microbatched = shardc.accumulate(scaled, microbatches=2)
    assert text_of(ArgumentError, microbatched, ROWS, Config(), {}) == lines(
        f"accumulate: {line(scaled)}: invalid arguments",
        "config: a Config can change, and one trace is for all microbatches; close over it, as functools.partial does, "
        "or pass its numbers.",
    )


def test_arrays_that_live_elsewhere(mesh):
    def many(*xs):
        return xs[0]

    small = shardc.make_mesh(data=3)
    elsewhere = [
        jax.device_put(ROWS, NamedSharding(shardc.make_mesh(a=8), PartitionSpec("a"))),
        jax.device_put(ROWS, jax.devices()[3]),
        shardc.put(ROWS, small, shardc.Placement({"data": S(0)})),
        ROWS,
    ]
    assert text_of(ArgumentError, shardc.function(many, mesh=mesh), *elsewhere) == lines(
        f"{line(many)}, {MESH}: 3 arrays live on other devices, or on another mesh. Move the arguments to this "
        "mesh with xs = shardc.put(xs, mesh, {}), which replicates them (instead of {}, placements as in in_placements "
        "may stand there), or to the host with xs = shardc.fetch(xs).",
        "xs/*  x3 f32[8]: a=8 on devices 0-7; …; data=3 on devices 0-2",
    )


def test_many_arrays_that_live_elsewhere_are_folded(mesh):
    def many(params, scale, x):
        return params["0"]["w"]

    on = [jax.sharding.Mesh(np.asarray(jax.devices()[i : i + 2]), ("rows",)) for i in range(0, 8, 2)]
    params = {str(i): shardc.put({"w": ROWS, "b": ROWS}, m, {"w": {"rows": S(0)}, "b": {}}) for i, m in enumerate(on)}
    assert text_of(ArgumentError, shardc.function(many, mesh=mesh), params, shardc.put(1.0, on[1], {}), ROWS) == lines(
        f"{line(many)}, {MESH}: 9 arrays live on other devices, or on another mesh. Move the arguments to this "
        "mesh with params, scale = shardc.put((params, scale), mesh, {}), which replicates them (instead of {}, "
        "placements as in in_placements may stand there), or to the host with params, scale = "
        "shardc.fetch((params, scale)).",
        "params/*/{b,w}  x8 f32[8]: rows=2 on devices 0, 1; …; rows=2 on devices 6, 7",
        "scale f32[]: rows=2 on devices 2, 3",
    )


def test_a_list_of_numbers(mesh):
    def total(x, params):
        return sum(jnp.asarray(v).sum() for v in jax.tree.leaves((x, params)))

    pins = {"x": {"data": S(0)}, "params": {"data": S(0)}}
    f, x = shardc.function(total, mesh=mesh, in_placements=pins), [[1.0, 2.0, 3.0]] * 20
    says = "a list of numbers, and each is an array of its own: a scalar cannot be split; make one array of it with "
    assert text_of(PlacementError, f, x, {"w": [1, 2], "v": ROWS, "lr": 0.1}) == lines(
        f"{line(total)}, {MESH}:",
        f"in_placements: x: {says}np.asarray.",
        "in_placements: params/lr f32[]: {'data': S(0)}: a scalar cannot be split; write {'data': B}.",
        f"in_placements: params/w: {says}np.asarray.",
    )
    assert float(f(np.asarray(x, np.float32), {"v": ROWS})) == 128
    assert float(shardc.function(total, mesh=mesh)(x, {})) == 120


def test_results_that_are_no_arrays(mesh):
    def named(x):
        return {"loss": x.sum(), "name": "loss", "rest": (x, {1})}

    assert text_of(ArgumentError, shardc.function(named, mesh=mesh), ROWS) == lines(
        f"{line(named)}: results that are no arrays",
        "result name is 'loss', a str; return an array, or leave it out.",
        "result rest/1 is {1}, a set; return an array, or leave it out.",
    )


def test_a_partial_is_called_by_its_function(mesh):
    f = shardc.function(functools.partial(step, PARAMS), mesh=mesh, in_placements={"batch": {"dat": S(0)}})
    assert text_of(PlacementError, f.plan, batch=ROWS) == lines(
        f"{line(step)}, {MESH}:",
        "in_placements: batch f32[8]: {'dat': S(0)}: the mesh has no axis 'dat'. Did you mean {'data': S(0)}?",
    )


def test_put(mesh):
    tree = {"a": ROWS, "b": {"c": ROWS, "d": np.ones((2, 3))}}
    wrong = {"a": {"dta": S(0)}, "b": {"c": shardc.Placement({"data": S(1)}), "e": {}}}
    assert text_of(PlacementError, shardc.put, tree, mesh, wrong) == lines(
        f"shardc.put, {MESH}:",
        "placements: a f32[8]: {'dta': S(0)}: the mesh has no axis 'dta'. Did you mean {'data': S(0)}?",
        "placements: b/c f32[8]: {'data': S(1)}: the value has 1 dimension, numbered from 0; write {'data': S(0)}.",
        "placements: b: the placements name 'e', but the value has c, d.",
    )
    assert text_of(ArgumentError, shardc.put, tree, shardc.make_mesh(topology="v5p", data=4), {}) == (
        "shardc.put needs a mesh with devices; this one only plans (it names a topology)."
    )
    put = shardc.put(tree, mesh, {"a": {"data": S(0)}, "b": rules({"*/d": {"model": S(0)}})})
    assert [x.sharding.spec for x in (put["a"], put["b"]["d"])] == [PartitionSpec("data"), PartitionSpec("model")]
    assert put["b"]["c"] is ROWS
    f = shardc.function(step, mesh=mesh, in_placements={"params": {"w": {"data": S(0)}}})
    params, rows = shardc.put((PARAMS, ROWS), mesh, f.plan(PARAMS, ROWS).in_placements)
    assert f(params, rows).tolist() == step(PARAMS, ROWS).tolist()


# meshes


MESHES = {
    "more than the machine": (
        {"data": 16},
        "The mesh data=16 needs 16 devices, this machine has 8 (cpu). Use a smaller mesh; for fake CPU devices set "
        "XLA_FLAGS=--xla_force_host_platform_device_count=16 and NPROC=32 before Python starts; to plan without "
        'devices name a topology, as in topology="v5p".',
    ),
    "more than the topology": (
        {"topology": "v5e:4x4", "data": 8, "model": 4},
        "The mesh data=8 x model=4 needs 32 devices, topology v5e:4x4 has 16.",
    ),
    "no such topology": (
        {"topology": "h10:8", "data": 8},
        f"There is no topology 'h10'. Did you mean \"h100\"? Known are {', '.join(TOPOLOGIES)}.",
    ),
    "a shape that is none": (
        {"topology": "v5p:2by2", "data": 4},
        "topology='v5p:2by2': the shape after the colon is written 4x4x2.",
    ),
    "no size": (
        {"data": 0, "model": "2"},
        "A mesh needs a positive number of devices for each axis, got data=0, model='2'; write "
        "shardc.make_mesh(data=4, model=2), or data=-1 for all devices that there are.",
    ),
    "no memory": (
        {"topology": "v5p", "data": 4, "hbm": "95 gigs"},
        'hbm=\'95 gigs\' is not an amount of memory; write "95GB", "16GiB" or a number of bytes.',
    ),
}


@pytest.mark.parametrize(("asked", "said"), MESHES.values(), ids=list(MESHES))
def test_meshes(asked, said):
    assert text_of(MeshError, shardc.make_mesh, **asked) == said


def test_no_mesh(tmp_path):
    wants = f"{line(step)}: no mesh is given; write mesh=shardc.make_mesh(data=8), or mesh=None for one device."
    with jax.set_mesh(shardc.make_mesh(data=2)):  # the mesh in context is not taken for it
        assert text_of(MeshError, shardc.function, step, in_placements={"batch": {"data": S(0)}}) == wants
    assert text_of(MeshError, shardc.function(donate_argnames="params"), step) == wants
    assert text_of(MeshError, shardc.function, step, mesh=None, pipeline=shardc.Pipeline()) == (
        f"{line(step)}: mesh=None is one device, and pipeline= is for several; write pipeline=None, or a mesh, as "
        "mesh=shardc.make_mesh(pipe=2, data=4)."
    )
    shardc.function(same, mesh=shardc.make_mesh(data=2)).plan(ROWS).save(tmp_path / "plan.json")
    assert text_of(MeshError, shardc.function, same, mesh=None, plan=tmp_path / "plan.json") == (
        f"{line(same)}: mesh=None is one device, and plan= is for several; write plan=None, or a mesh, as "
        "mesh=shardc.make_mesh(data=8)."
    )


def test_names_are_checked_on_one_device_too(mesh):
    options = {"in_placements": {"batc": {"data": S(0)}}, "donate_argnames": "prams", "static_argnames": "flag"}
    wants = lines(
        f"{line(step)}: names that do not fit",
        "donate_argnames names 'prams', which is no argument of step(params, batch). Did you mean \"params\"?",
        "static_argnames names 'flag', which is no argument of step(params, batch).",
        "in_placements names 'batc', which is no argument of step(params, batch). Did you mean \"batch\"?",
    )
    for at in (mesh, None):
        assert text_of(ArgumentError, shardc.function, step, mesh=at, **options) == wants
    assert shardc.function(step, mesh=None, in_placements={"batch": S(0), "data": B}) is step


def test_a_wrong_mesh():
    assert text_of(MeshError, shardc.function, step, mesh=8) == (
        f"{line(step)}: mesh=8 is no mesh; write mesh=shardc.make_mesh(data=4, model=2)."
    )


def test_running_on_a_mesh_without_devices():
    f = shardc.function(same, mesh=shardc.make_mesh(topology="v5p", data=4))
    assert text_of(MeshError, f, ROWS) == (
        "same is planned for data=4 on v5p, a mesh without devices; make the mesh without `topology=` to run it."
    )


# a failed call leaves every argument as it was


@pytest.fixture
def params(mesh):
    return shardc.put({"w": ROWS}, mesh, shardc.Placement({"data": S(0)}))


def train(params, x):
    return {"w": params["w"] - jnp.log(x).sum()}, x.sum()


@pytest.mark.parametrize("in_placements", [{"x": {"dta": S(0)}}, {"params": {"w": {"data": S(1)}}}])
def test_a_wrong_pin_takes_nothing(mesh, params, in_placements):
    f = shardc.function(train, mesh=mesh, in_placements=in_placements, donate_argnames="params")
    text_of(PlacementError, f, params, ROWS)
    assert params["w"].tolist() == ROWS.tolist()


def test_a_trace_that_fails_takes_nothing_and_is_tried_again(mesh, params):
    ready = []

    def failing(params, x):
        if not ready:
            raise KeyError("not yet")
        return train(params, x)

    f = shardc.function(failing, mesh=mesh, donate_argnames="params")
    for _ in range(2):
        assert text_of(KeyError, f, params, ROWS) == "'not yet'"
        assert params["w"].tolist() == ROWS.tolist()
    ready.append(True)
    new, _ = f(params, ROWS)
    assert new["w"].tolist() == ROWS.tolist() and params["w"].is_deleted()


def test_a_bad_call_takes_nothing(mesh, params):
    f = shardc.function(train, mesh=mesh, donate_argnames="params")
    text_of(ArgumentError, f, params)
    text_of(ArgumentError, f, params, jax.device_put(ROWS, jax.devices()[3]))
    assert params["w"].tolist() == ROWS.tolist()


@pytest.mark.parametrize("rows", [8, 9])
def test_nans(mesh, params, rows):
    """jax_debug_nans finds those of the function, and none in the padding; donated arguments are alive, or named."""
    f = shardc.function(train, mesh=mesh, in_placements={"x": {"data": S(0)}}, donate_argnames="params")
    x = np.ones(rows, np.float32)
    with jax.debug_nans(True):
        params, _ = f(params, x)
        with pytest.raises((FloatingPointError, shardc.StepFailedError), match="nan") as caught:
            f(params, -x)
    gone = isinstance(caught.value, shardc.StepFailedError)
    assert params["w"].is_deleted() == gone
    assert not gone or "lost (donated): params/w" in str(caught.value)


def test_an_ordered_effect(mesh):
    def noisy(x):
        jax.debug.print("{}", x, ordered=True)
        return jax.lax.fori_loop(0, 3, lambda i, c: (jax.debug.callback(print, i, ordered=True), c + i)[1], x)

    says = r"has ordered effects, which several devices cannot keep; write ordered=False"
    with pytest.raises(shardc.TracingError, match=says) as error:
        shardc.function(noisy, mesh=mesh)(np.ones(8, np.float32))
    assert "  debug_print at test_errors.py:" in str(error.value)
    assert "  debug_callback at test_errors.py:" in str(error.value)


# placements that may mean two things, or are of another length than what they are said of


def test_a_list_of_another_length(mesh):
    layers = [{"w": np.ones((4, 4), np.float32)}] * 3

    def f(params, pair):
        return params[0]["w"] + pair[0] + pair[1], params[1]["w"], params[2]["w"]

    pair = (np.float32(1), np.float32(2))
    many = "write one for each, with AUTO for what is to be chosen, or one for all of them."
    short = shardc.function(
        f, mesh=mesh, in_placements={"params": [{"w": {"data": S(0)}}], "pair": [{}]}, out_placements=({}, {})
    )
    assert text_of(PlacementError, short.plan, layers, pair) == lines(
        f"{line(f)}, {MESH}:",
        f"in_placements: params: 1 placement for 3 items; {many}",
        f"in_placements: pair: 1 placement for 2 items; {many}",
        f"out_placements: 2 placements for 3 items; {many}",
    )
    long = shardc.function(f, mesh=mesh, in_placements={"params": [{}] * 4}, out_placements=({}, {}, {}, {}))
    assert text_of(PlacementError, long.plan, layers, pair) == lines(
        f"{line(f)}, {MESH}:",
        f"in_placements: params: 4 placements for 3 items; {many}",
        f"out_placements: 4 placements for 3 items; {many}",
    )
    every = shardc.function(f, mesh=mesh, in_placements={"params": {"data": S(0)}, "pair": [{}, AUTO]})
    assert every.plan(layers, pair).in_placements.params[2]["w"] == shardc.Placement({"data": S(0)})


def test_a_dict_that_may_be_of_axes_or_of_names(mesh):
    def f(data, model):
        return {"data": data + model["model"]}

    x, tree = np.ones(8, np.float32), {"model": np.ones(8, np.float32)}
    says = "{'data': S(0)} can name axes of the mesh or"
    g = shardc.function(f, mesh=mesh, in_placements={"data": S(0)}, out_placements={"data": S(0)})
    assert text_of(PlacementError, g.plan, x, tree) == lines(
        f"{line(f)}, {MESH}:",
        f"in_placements: {says} arguments; write shardc.Placement({{'data': S(0)}}) for the axes, "
        "{'data': {'data': S(0)}} for the arguments.",
        f"out_placements: {says} items; write shardc.Placement({{'data': S(0)}}) for the axes, "
        "{'data': {'data': S(0)}} for the items.",
    )
    g = shardc.function(f, mesh=mesh, in_placements={"data": {}, "model": {"model": AUTO}})
    assert "in_placements: model: {'model': AUTO} can name axes of the mesh or items" in text_of(
        PlacementError, g.plan, x, tree
    )
    axes = shardc.function(f, mesh=mesh, in_placements=shardc.Placement({"data": S(0)}))
    assert set(map(str, axes.plan(x, tree).inputs)) == {"{data: S(0)}"}
    names = shardc.function(f, mesh=mesh, in_placements={"data": {"data": S(0)}, "model": {"model": {}}})
    assert list(map(str, names.plan(x, tree).inputs)) == ["{data: S(0)}", "{}"]
    rest = shardc.function(f, mesh=mesh, in_placements={"data": S(0), ...: AUTO})  # `...` is of axes alone
    assert all(p["data"] == S(0) for p in rest.plan(x, tree).inputs)


@pytest.mark.parametrize(
    "said", [("data",), ("data", None), (None, "model"), (("data", "model"),), ("sum", "data")], ids=str
)
def test_a_partition_spec_by_its_short_name(said):
    code = ", ".join(map(repr, said))
    assert text_of(PlacementError, P, *said) == (
        f"P({code}): a partial value is reduced by sum, max or min. Did you mean jax.sharding.PartitionSpec({code})?"
    )


def test_keywords_of_jit_and_others(mesh):
    assert text_of(
        ArgumentError, shardc.function, same, mesh=mesh, in_shardings=None, out_shardings=None, donate_argname="x"
    ) == lines(
        "shardc.function: keywords that it does not take",
        "in_shardings: write in_placements=, which takes PartitionSpecs and NamedShardings too.",
        "out_shardings: write out_placements=, which takes PartitionSpecs and NamedShardings too.",
        "donate_argname: it takes mesh, in_placements, out_placements, donate_argnames, donate_argnums, "
        "static_argnames, static_argnums, pipeline, plan, replicate, forbid, offload, check, deterministic, imbalance. "
        'Did you mean "donate_argnames"?',
    )


def test_what_is_no_function(mesh):
    wants = "shardc.function wants a function, got"
    fix = "mesh=mesh), or @shardc.function(mesh=mesh) above it."
    assert text_of(ArgumentError, shardc.function, "step") == f"{wants} 'step'; write shardc.function(step, {fix}"
    assert text_of(ArgumentError, shardc.function, mesh, in_placements={}) == (
        f"{wants} {mesh!r}; write shardc.function(step, {fix}"
    )
