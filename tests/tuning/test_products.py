"""Plans that split their products alike, whatever the axes are called: `tune` says so."""

from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

import shardc
from benchmarks.published import decoder, machines, runs
from shardc import S
from shardc.tuning.products import pieces_of, split_alike
from tests.tuning.test_tune import f32


@pytest.fixture
def tuned(tmp_path):
    """GPT 3.6B on 64 A100 as vTrain ran it, on the first meshes. Megatron's layout is pinned."""
    (run,) = (run for run in runs.read() if run.name == "vtrain-multi-1")
    run = replace(run, data=32, tensor=2, microbatches=1)
    (file := tmp_path / "a100.json").write_text(machines.topology(run).to_json())

    def tune():
        step, arguments, pins = decoder.step_of(run)
        return shardc.tune(step, *arguments, devices=64, topology=str(file), axes=("data", "model"), tries=4, **pins)

    return tune


def test_weights_pinned_over_an_axis_are_no_tensor_parallelism(tuned, monkeypatch):
    """The weights are gathered, and rows split over `model` too."""
    monkeypatch.setattr(decoder, "pinned", lambda x, at, back=None: x)
    found = tuned()
    meshes = {(c.axes["data"], c.axes["model"]) for c in found.candidates}
    assert len(meshes) == 4
    assert max(model for _, model in meshes) >= 8
    assert split_alike([pieces_of(c.plan) for c in found.candidates]) == [[0, 1, 2, 3]]
    notes = str(found).split("Notes\n")[1]
    up = "dot_general of bf16[8,2048,3072], bf16[3072,12288] to bf16[8,2048,12288]"
    assert "1, 2, 3 and 4 split the work alike, under other names of axes." in notes
    assert f"Heaviest on each device: {up}." in notes
    assert "pin what a product makes, not the weight alone" in notes


def test_pinned_activations_are(tuned):
    found = tuned()
    assert split_alike([pieces_of(c.plan) for c in found.candidates]) == []
    assert "alike" not in str(found)
    for c in found.candidates:
        rows, width = 512 // c.axes["data"], 12288 // c.axes["model"]
        up = f"dot_general of bf16[{rows},2048,3072], bf16[3072,{width}] to bf16[{rows},2048,{width}]"
        assert up in pieces_of(c.plan)


def test_pieces_count_each_execution():
    def run(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]

    mesh = shardc.make_mesh(topology="v5p", data=2, model=2)
    pins = {"in_placements": {"x": {"data": S(0)}, "w": {}}, "out_placements": {"data": S(0)}}
    plan = shardc.function(run, mesh=mesh, **pins).plan(f32(64, 32), f32(32, 32))
    (piece,) = pieces_of(plan).items()
    assert piece == ("dot_general of bf16[32,32], bf16[32,32] to f32[32,32]", 3 * 2 * 64 * 32 * 32)


def test_a_light_product_may_be_split_otherwise():
    plans = [{"a": 96, "b": 4}, {"c": 100}, {"a": 96, "d": 4}, {"a": 90, "d": 10}, {"c": 100, "a": 4}, {}]
    assert split_alike([Counter(p) for p in plans]) == [[0, 2], [1, 4]]


def test_without_products_nothing_is_alike():
    found = shardc.tune(lambda x: x + 1, np.ones((8, 8), np.float32), devices=8)
    assert "alike" not in str(found)
