"""Plans fit their models: they name the arguments of the step, and each pattern finds a leaf that can be split so."""

from __future__ import annotations

import ast
import inspect
import runpy
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import jax
import pytest

import shardc
from examples import bert, dlrm, gpt2, llama, mixer, mlp, moe, plans, ppo, resnet, t5, unet, vit, zoo
from shardc.ir.boundary import stage_boundary_p
from shardc.passes.trace.fully_sharded import FullySharded
from shardc.sbp.placement import Placement, S

FOLDER = Path(gpt2.__file__).parent / "plans"
MODELS = {
    "mlp": (mlp, mlp.CONFIGS["test"]),
    "resnet": (resnet, resnet.CONFIGS["test"]),
    "vit": (vit, vit.CONFIGS["test"]),
    "vit scanned": (vit, replace(vit.CONFIGS["test"], scan_layers=True)),
    "mixer": (mixer, mixer.CONFIGS["test"]),
    "gpt2": (gpt2, gpt2.CONFIGS["test"]),
    "gpt2 scanned": (gpt2, replace(gpt2.CONFIGS["test"], scan_layers=True)),
    "llama": (llama, llama.CONFIGS["test"]),
    "llama scanned": (llama, replace(llama.CONFIGS["test"], scan_layers=True)),
    "moe": (moe, moe.CONFIGS["test"]),
    "moe scanned": (moe, replace(moe.CONFIGS["test"], scan_layers=True)),
    "bert": (bert, bert.CONFIGS["test"]),
    "dlrm": (dlrm, dlrm.CONFIGS["test"]),
    "ppo": (ppo, ppo.CONFIGS["test"]),
    "t5": (t5, t5.CONFIGS["test"]),
    "t5 scanned": (t5, replace(t5.CONFIGS["test"], scan_layers=True)),
    "unet": (unet, unet.CONFIGS["test"]),
}


@pytest.fixture
def plans_of(monkeypatch):
    """The plans of a model, with `shardc.rules` left out: rules are then a plain dict from pattern to placement."""
    monkeypatch.setattr(shardc, "S", S, raising=False)
    monkeypatch.setattr(shardc, "rules", dict, raising=False)
    return lambda model: runpy.run_path(str(FOLDER / f"{model}.py"))["PLANS"]


def leaves_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.ndim
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def patterns_of(spec):
    """Pattern -> placement of what a plan says of an argument: rules, one placement for all, or a pytree of them."""
    if isinstance(spec, FullySharded):
        return {}  # it fits what it is said of
    pairs = jax.tree_util.tree_leaves_with_path(spec)
    if any(isinstance(x, Placement) for _, x in pairs):
        paths = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in pairs}
        return {f"{path}*": x for path, x in paths.items() if isinstance(x, Placement)}
    return spec if all(isinstance(placement, dict) for placement in spec.values()) else {"*": spec}


@cache
def state_of(module, cfg):
    return jax.eval_shape(module.make_step(cfg)[0], jax.random.key(0))


def arguments_of(module, cfg):
    """Name -> {path: number of dimensions} for each argument of the step."""
    _, step_fn = module.make_step(cfg)
    batch = next(zoo.MODELS[module.__name__.split(".")[-1]].batches(cfg, 2, 0))
    values = (*state_of(module, cfg), batch)
    return dict(zip(inspect.signature(step_fn).parameters, map(leaves_of, values), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_plans_fit_their_model(model, plans_of):
    arguments = arguments_of(*MODELS[model])
    wrong = []
    for name, plan in plans_of(model.split()[0]).items():
        keywords = plan()
        assert keywords.keys() - {"pipeline"} == {"in_placements", "donate_argnames"}, name
        assert ("pipeline" in keywords) == (name == "pipeline")
        assert keywords["in_placements"].keys() == arguments.keys(), name
        assert set(keywords["donate_argnames"]) == arguments.keys() - {"batch"}, name
        for argument, rules in keywords["in_placements"].items():
            rules = patterns_of(rules)
            decided = {path: next((p for p in rules if fnmatchcase(path, p)), None) for path in arguments[argument]}
            wrong += [f"{name}: {argument}: {p} finds nothing" for p in rules if p not in decided.values()]
            wrong += [
                f"{name}: {argument}: {pattern} splits dimension {sbp.dim} of {path}"
                for path, pattern in decided.items()
                if pattern is not None
                for sbp in rules[pattern].values()
                if not -arguments[argument][path] <= sbp.dim < arguments[argument][path]
            ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["mlp", "resnet", "vit", "gpt2", "llama", "moe", "t5", "unet"])
@pytest.mark.parametrize("config", ["tiny", "test"])
def test_weights_are_split_where_that_is_worth_a_collective(name, config):
    """Most of the numbers, evenly; no norm and no bias."""
    module, _ = MODELS[name]
    params = state_of(module, module.CONFIGS[config])[0]
    spec = getattr(plans, name).PLANS["fsdp"]()["in_placements"]["params"]
    split = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (x, spec.choose(x.shape, Placement(), {"data": 8}))
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    assert all(x.shape[s.dim] % 8 == 0 for x, p in split.values() for s in p.values())
    assert not [path for path, (_, p) in split.items() if p and path.endswith(("bias", "scale"))]
    most = sum(x.size for x, p in split.values() if p) / sum(x.size for x, _ in split.values())
    assert most > {"tiny": 0.9, "test": 0.15}[config]


@pytest.mark.parametrize("module", [mlp, vit, mixer, gpt2, llama, moe, t5, unet])
def test_the_moments_of_a_tensor_parallel_weight_live_where_it_does(module, plans_of):
    arguments = arguments_of(module, module.CONFIGS["test"])
    rules = plans_of(module.__name__.split(".")[-1])["tensor"]()["in_placements"]

    def pinned(argument):
        return {path for path in arguments[argument] if any(fnmatchcase(path, p) for p in rules[argument])}

    assert pinned("opt_state") == {f"1/0/{moment}/{path}" for moment in ("mu", "nu") for path in pinned("params")}


@pytest.mark.sampled(0)
def test_resnet50_is_planned_for_machines_that_are_not_there():
    init_fn, step_fn = resnet.make_step(resnet.CONFIGS["resnet50"])
    mesh = shardc.make_mesh(topology="v5e", data=64)
    step = shardc.function(step_fn, mesh=mesh, **plans.resnet.PLANS["data"]())
    image, label = jax.ShapeDtypeStruct((256, 224, 224, 3), "float32"), jax.ShapeDtypeStruct((256,), "int32")
    batch = {"image": image, "label": label}
    plan = step.plan(*jax.eval_shape(init_fn, jax.random.key(0)), batch)
    assert not plan.gathered
    assert {c.axes for c in plan.collectives} == {("data",)}
    assert plan.bytes_per_device < 2 * 4 * 25_557_032  # the gradients, all-reduced once


@pytest.mark.parametrize("model", zoo.MODELS)
def test_a_plan_is_short(model, plans_of):
    """With the names of its file that it uses, and those that they use."""
    made = {name: node for node in ast.parse((FOLDER / f"{model}.py").read_text()).body for name in names_made(node)}

    def lines_of(name, seen):
        if name not in made or made[name] in seen:
            return 0
        node = made[name]
        seen.add(node)
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return node.end_lineno - node.lineno + 1 + sum(lines_of(n, seen) for n in used)

    lines = {name: lines_of(name, set()) for name in plans_of(model)}
    assert all(3 <= n <= 30 for n in lines.values()), lines


def names_made(node):
    """By a function or an assignment of a module."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)] if isinstance(node, ast.Assign) else []
    return [n.id for n in names if isinstance(n.ctx, ast.Store)]


@pytest.mark.parametrize(
    ("blocks", "stages", "ends"), [(2, 2, [0]), (8, 4, [1, 3, 5]), (7, 3, [2, 4]), (5, 1, []), (3, 3, [0, 1])]
)
def test_stages_have_as_many_blocks_as_each_other_or_one_more(blocks, stages, ends):
    between = plans.stages.between(blocks, stages)
    marked = jax.make_jaxpr(lambda x: [between(i, x + i) for i in range(blocks - 1)])(1.0)
    cuts = [e.invars[0] for e in marked.eqns if e.primitive is stage_boundary_p]
    adds = [e.outvars[0] for e in marked.eqns if e.primitive.name == "add"]
    assert [adds.index(v) for v in cuts] == ends


def test_more_stages_than_blocks_are_an_error():
    with pytest.raises(ValueError, match="4 stages want 4 blocks or more, the model has 2"):
        plans.stages.between(2, 4)
