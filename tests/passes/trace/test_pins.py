"""Placement specs as pins: every form that a user may write, and the patterns that decide."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import shardc
from shardc import AUTO, B, P, Placement, S
from shardc.machine.mesh import make_mesh, view
from shardc.passes.trace.pins import Leaf, as_pin, code_text, is_leaf_spec, matcher, says_names, several_matches

MESH = make_mesh(topology="cpu", data=4, model=2)
VIEW = view(MESH)
ROWS = Placement({"data": S(0)})


@pytest.mark.parametrize(
    ("spec", "placement", "fixed"),
    [
        ({"data": S(0)}, ROWS, None),
        ({"data": S(-2)}, ROWS, None),
        (ROWS, ROWS, None),
        ((S(0), B), ROWS, None),
        (PartitionSpec("data"), ROWS, None),
        ({}, Placement(), None),
        ({"data": P}, Placement({"data": P()}), None),
        ({"data": S(0), ...: AUTO}, ROWS, {"data"}),
        ({"data": S(0), "model": AUTO}, ROWS, {"data"}),
    ],
)
def test_every_form_is_a_pin(spec, placement, fixed):
    pin = as_pin(spec, (8, 6), np.dtype(np.float32), VIEW)
    assert pin is not None and pin.placement == placement
    assert pin.fixed == (None if fixed is None else frozenset(fixed))


def test_a_named_sharding_is_a_pin_on_its_own_mesh_alone():
    assert as_pin(NamedSharding(MESH, PartitionSpec("data")), (8,), np.dtype(np.float32), VIEW).placement == ROWS
    other = NamedSharding(AbstractMesh((8,), ("data",)), PartitionSpec("data"))
    with pytest.raises(shardc.PlacementError, match=r"over another mesh \(data=8\)"):
        as_pin(other, (8,), np.dtype(np.float32), VIEW)


@pytest.mark.parametrize("spec", [None, AUTO])
def test_auto_is_no_pin(spec):
    assert as_pin(spec, (8,), np.dtype(np.float32), VIEW) is None


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ((S(0),), "has 1 sbp, but the mesh has 2 axes"),
        ({"dta": S(0)}, "Did you mean"),
        ({"data": S(1)}, "has 1 dimension"),
        ({"data": S(0), ...: S(0)}, "is not possible"),
        ("data", "is no placement"),
    ],
)
def test_what_is_wrong_is_said(spec, says):
    with pytest.raises(shardc.PlacementError, match=says):
        as_pin(spec, (8,), np.dtype(np.float32), VIEW)


def test_a_dict_of_names_is_told_from_a_dict_of_axes():
    assert says_names({"params": {"data": S(0)}}, ["params"], VIEW)
    assert not says_names({"data": S(0)}, ["params"], VIEW)
    assert says_names({"x": AUTO}, ["x"], VIEW) and not says_names({"x": AUTO}, ["y"], VIEW)
    assert is_leaf_spec({"x": AUTO}) and not is_leaf_spec({"x": {"data": S(0)}})


def test_the_first_pattern_decides_and_the_others_are_noted():
    leaves = [Leaf(f"p/{n}", n, (8,), np.dtype(np.float32)) for n in ("up/kernel", "up/bias")]
    rules = shardc.rules({"*kernel": {"data": S(0)}, "up/*": {}})
    assert several_matches(rules, leaves) == ["p/up/kernel: '*kernel' decides, also matched by 'up/*'"]
    assert matcher("a[0]/*").match("a[0]/b/c") and not matcher("a[0]/*").match("a0/b")


def test_a_spec_prints_as_code():
    assert code_text({"data": S(0), ...: AUTO}) == "{'data': S(0), ...: AUTO}"
    assert code_text((S(0), P("max"))) == "(S(0), P('max'))"
    assert code_text(P) == "P"


def test_optional_patterns_may_match_nothing():
    family = {"*/up": {"model": S(1)}, "*/gate": {"model": S(0)}, "*": {}}
    spec = shardc.rules(family, optional="*/gate")
    assert str(spec) == "rules({'*/up': {model: S(1)}, '*/gate': {model: S(0)}, '*': {}}, optional=['*/gate'])"
    f = shardc.function(lambda p: sum(jax.tree.leaves(p)), mesh=shardc.make_mesh(model=2), in_placements=(spec,))
    w = np.ones((4, 4), np.float32)
    assert str(f.plan({"a": {"up": w}}).in_placements.p["a"]["up"]) == "{model: S(1)}"
    assert str(f.plan({"a": {"up": w, "gate": w}}).in_placements.p["a"]["gate"]) == "{model: S(0)}"
    with pytest.raises(shardc.PlacementError, match=r"'\*/up' matches no leaf. .* rules\(..., optional='\*/up'\)"):
        f.plan({"a": {"low": w, "gate": w}})
    with pytest.raises(shardc.PlacementError, match=r"'\*/gat' is none of the patterns. Did you mean \"\*/gate\"\?"):
        shardc.rules(family, optional=["*/up", "*/gat"])
