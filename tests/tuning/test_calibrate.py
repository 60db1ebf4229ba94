"""`python -m shardc calibrate`: fits find what made the times; what it writes reads back. No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh

from shardc.__main__ import main
from shardc.errors import MeshError
from shardc.machine.mesh import make_mesh, view
from shardc.machine.topology import topology_from_json
from shardc.sbp.cost import COLLECTIVES, CollectiveKind, group_of
from shardc.tuning.calibrate import Sample, Watch, calibrate, fit_collectives, measure_collective

SIZES = (256, 1024)


def real(**axes: int) -> Mesh:
    mesh = make_mesh(**axes)
    assert isinstance(mesh, Mesh)
    return mesh


def test_a_fit_finds_what_made_the_times() -> None:
    start, latency = 1e-5, {"data": 2e-6, "model": 5e-7}
    rate: dict[tuple[str, CollectiveKind], float] = {
        (a, k): 1e9 * (1 + i + 3 * (a == "model")) for a in latency for i, k in enumerate(COLLECTIVES)
    }
    hops = {"all_reduce": 6, "permute": 1}
    samples = [
        Sample(a, k, sent, sent, start + hops.get(k, 3) * latency[a] + sent / rate[a, k])
        for a, k in rate
        for sent in (10**4, 10**6, 10**8)
    ]
    launch, fits = fit_collectives(samples, {"data": 4, "model": 4})
    assert launch == pytest.approx(start, rel=1e-6)
    for fit in fits:
        assert fit.latency == pytest.approx(latency[fit.axis], rel=1e-6)
        assert fit.rate == pytest.approx(rate[fit.axis, fit.kind], rel=1e-6)
        assert fit.error < 1e-6


def test_nothing_is_negative_where_more_bytes_take_no_longer() -> None:
    samples = [Sample("a", "all_gather", n, n, 1e-3 - 1e-10 * n) for n in (10**3, 10**6)]
    launch, fits = fit_collectives(samples, {"a": 2})
    assert launch >= 0
    assert fits[0].latency >= 0
    assert 0 < fits[0].rate < float("inf")
    assert 0 < fits[0].error < 1


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_each_collective_is_measured_with_the_bytes_that_the_model_counts(kind: CollectiveKind) -> None:
    mesh = real(data=4, model=2)
    sample = measure_collective(mesh, "data", kind, 1024, Watch(mesh, 1))
    sent = {"all_reduce": 2 * 3 * 256, "permute": 1024}.get(kind, 3 * 256)
    assert (sample.axis, sample.kind, sample.held, sample.sent) == ("data", kind, 1024, sent)
    assert sample.seconds > 0


def test_what_is_measured_reads_back(tmp_path: Path) -> None:
    found = calibrate(real(data=4, model=2), sizes=SIZES, turns=1, width=16)
    machine = found.topology
    assert (machine.kind, machine.shape) == ("cpu-measured", (2, 4))
    assert topology_from_json(machine.to_json()) == machine
    assert {(f.axis, f.kind) for f in found.fits} == {(a, k) for a in ("data", "model") for k in COLLECTIVES}
    assert len(found.samples) == 2 * 2 * len(COLLECTIVES)
    file = tmp_path / "here.json"
    file.write_text(machine.to_json())
    for mesh in (make_mesh(topology=str(file), data=4, model=2), make_mesh(calibration=str(file), data=4, model=2)):
        for fit in found.fits:
            group = group_of(view(mesh), (fit.axis,))
            n = group.n if fit.kind != "permute" else 2
            of_piece = (2 if fit.kind == "all_reduce" else 1) * (n - 1) / fit.rate * 1e15
            assert group.wire[fit.kind] == pytest.approx(of_piece, rel=1e-2, abs=2)


@pytest.mark.parametrize(
    ("axes", "sizes", "message"),
    [
        ({"one": 1}, SIZES, "needs a mesh with an axis of at least two devices"),
        ({"a": 8}, (1024,), "needs at least two sizes, each of at least 32 bytes"),
        ({"a": 8}, (16, 1024), "needs at least two sizes, each of at least 32 bytes"),
    ],
)
def test_what_cannot_be_measured(axes: dict[str, int], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        calibrate(real(**axes), sizes=sizes)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    ask = ["calibrate", "--mesh", "model=2", "--sizes", "256,1024", "--turns", "1", "--save", str(file)]
    assert main(ask) == 0
    out = capsys.readouterr().out
    assert out.startswith("cpu-measured: each device multiplies matrices at ")
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("  model")] == [
        ["model", kind] for kind in COLLECTIVES
    ]
    assert topology_from_json(file.read_text()).shape == (2,)
    assert main([*ask, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "cpu-measured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "model"], "calibrate: Invalid value for '--mesh': \"model\" is not a mesh; write data=4,model=2"),
        (["--mesh", "a=0"], '"a=0" is not a mesh'),
        (["--mesh", "a=2", "--sizes", "1,x"], '"x" is not a whole number of 1 or more'),
        ([], "Missing option '--mesh'"),
    ],
)
def test_options_that_cannot_be(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "a=1"], "python -m shardc calibrate: calibrate needs a mesh with an axis of at least two devices"),
        (["--mesh", "a=64"], "The mesh a=64 needs 64 devices, this machine has 8 (cpu)"),
    ],
)
def test_meshes_that_cannot_be(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_idle_time_is_not_counted_twice() -> None:
    watch = Watch(real(a=2), 1)
    assert watch.idle > 0
    assert np.isfinite(watch.idle)
