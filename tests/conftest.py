"""Eight fake CPU devices for the whole session: set before anything imports jax."""

import os

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process of a test would compile all files anew
os.environ.pop("COLUMNS", None)  # workers of pytest have it, and texts would fold
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["NPROC"] = (
    "16"  # threads of XLA:CPU: collectives block in them, and with fewer than 2 for each device they can hang
)
os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import gc
import math
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax._src import compiler

import shardc.machine.mesh
import shardc.machine.topology
import shardc.sbp.rules  # a test finds rules whichever tests are imported beside it
from shardc.machine.topology import Fabric
from tests import compile_cache, turns
from tests.releases import IS_OLDEST, OLDEST
from tests.runtime import watchdog

sys.dont_write_bytecode = False  # as each worker
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as it is in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew instead of comparing")
    parser.addoption("--turn", type=int, help=f"a part of the tests, 1 to {turns.TURNS}; 1 is a sample of all")
    parser.addoption("--part", help="K/N: each Nth of the tests of the turn, from the Kth on")
    parser.addoption("--minutes", type=float, default=math.inf, help="tests that would begin later are skipped")


BEGIN = time.monotonic()
MAPS = Path("/proc/self/maps")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        compile_cache.drop_if_larger()
    if "SEAT" not in os.environ:  # processes of one run must not have one what another has not
        compile_cache.keep()


def pytest_collection_modifyitems(config, items):
    turn = config.getoption("--turn")
    if turn is not None:
        kept = turns.of_turn(items, turn)
        part, of = map(int, (config.getoption("--part") or "1/1").split("/"))
        kept = kept[part - 1 :: of]
        known = set(map(id, kept))
        config.hook.pytest_deselected(items=[i for i in items if id(i) not in known])
        items[:] = kept


def pytest_collection_finish():
    """What the collection made lives as long as the process: the collector of garbage need not look at it. It comes
    seldom, as each module is followed by a collection of everything."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


MAPPINGS = 6_000
"""Mappings of memory, of which a process may have 65,530. Compiled programs have most: these are of about 1.5 GB."""


def pytest_runtest_teardown(item, nextitem):
    """Compiled programs are dropped before those of the whole suite fill gigabytes. Functions stand in cycles with what
    they compiled, so they wait for the collector."""
    if nextitem is not None and nextitem.path != item.path and _mappings() > MAPPINGS:
        jax.clear_caches()
        gc.collect()


def _mappings():
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else math.inf


EMITTERS = "xla_cpu_use_fusion_emitters"


MODULES = shardc.machine.mesh, shardc.machine.topology
USERS = shardc.machine.topology.TOPOLOGIES
EAGER = replace(USERS["cpu"], launch=2e-6, fabrics=(Fabric("switch", 1e9, 2e-7),), combined=())
"""Fake devices whose collectives start for next to nothing: in small examples little would be split or moved, if a
start cost what it does on the users' `cpu`."""


@pytest.fixture(autouse=True, scope="module")
def meshes_as_they_were():
    """JAX has one mesh object for equal meshes, so what `make_mesh(hbm=, calibration=)` and pipelines note of one in a
    file would hold for the mesh that another file made when it was collected."""
    mesh = shardc.machine.mesh
    tables = mesh._hbm_of_mesh, mesh._calibration_of_mesh, mesh._STAGES
    before = [dict(table) for table in tables]
    mesh._STAGES.clear()
    yield
    for table, then in zip(tables, before, strict=True):
        table.clear()
        table.update(then)


@pytest.fixture(autouse=True, scope="module")
def threads_of_other_files():
    watchdog.OTHERS.clear()
    watchdog.OTHERS.update(threading.enumerate())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tests marked `plans_eagerly` plan for `EAGER`, all others, and those of such a file that are marked
    `plans_eagerly(False)`, for the machine that users have."""
    if time.monotonic() - BEGIN > 60 * item.config.getoption("--minutes"):
        pytest.skip("the time is over")
    marker = item.get_closest_marker("plans_eagerly")
    eagerly = marker is not None and marker.args != (False,)
    for module in MODULES:
        module.TOPOLOGIES = {**USERS, "cpu": EAGER} if eagerly else USERS


@functools.cache
def _has_option(name):
    """Whether this release of XLA knows an option: those of its own that it drops are an error."""
    try:
        jax.jit(lambda x: x).lower(0).compile(compiler_options={name: False})
    except jax.errors.JaxRuntimeError:
        return False
    return True


# JAX has no public way to say how what is compiled from now on is compiled.
def _without_emitters(*args, known=compiler.get_compile_options, env_options_overrides=None, **options):
    less = {EMITTERS: False, **(env_options_overrides or {})}
    return known(*args, env_options_overrides=less, **options)


@pytest.fixture
def compiled_fast(monkeypatch):
    """A compiler that hardly optimizes what runs once or twice: it takes a fifth of the time. What is sent and computed
    is decided before; what is left out is how XLA:CPU makes code of it."""
    if _has_option(EMITTERS):
        monkeypatch.setattr(compiler, "get_compile_options", _without_emitters)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def golden(request):
    """`golden(name, text)`: the text is the one in `golden/<name>.txt` beside the test; on the oldest release that in
    `golden/<name>.jax-0.10.txt`, if it is there."""

    def check(name, text):
        folder, text = Path(request.path).parent / "golden", text + "\n"
        file, old = folder / f"{name}.txt", folder / f"{name}.jax-{OLDEST}.txt"
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            if not IS_OLDEST:
                file.write_text(text)
            elif file.read_text() != text:
                old.write_text(text)
            else:
                old.unlink(missing_ok=True)
        assert text == (old if IS_OLDEST and old.exists() else file).read_text()

    return check
