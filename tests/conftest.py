"""Eight fake CPU devices for the whole session: set before anything imports jax."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["NPROC"] = (
    "16"  # threads of XLA:CPU: collectives block in them, and with fewer than 2 for each device they can hang
)
os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import gc
import signal
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax._src import compiler

import shardc.machine.mesh
import shardc.machine.topology
from shardc.machine.topology import Fabric
from tests.releases import IS_OLDEST, OLDEST

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as it is in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


SAMPLE = 24
"""Of so many tests of a file that follow each other, `--sample` runs one."""


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew instead of comparing")
    parser.addoption("--every-case", action="store_true", help="all cases of parity and of slow tests, not a sample")
    parser.addoption("--sample", action="store_true", help="a part of the tests of every file, for one more release")
    parser.addoption("--stride", type=int, default=SAMPLE, help="of so many tests of a file --sample runs one")


CASES = 3
"""Of so many slow cases of a test that follow each other, one runs without `--every-case`."""
RELEASE = "test_find_signatures.py", "test_compat.py", "test_primitives.py", "test_versions.py"
"""Files of which it runs all that is not slow: what depends on the release."""
MODELS = "test_parity.py", "test_zoo_parity.py"
"""Files of which it runs a case of each model."""


def _model_of(item):
    """The name of the model that a parity test is of: its parameter's first word."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    case = params.get("case", params.get("model", ""))
    return str(case[0] if isinstance(case, tuple | list) else case).partition(" ")[0]


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--every-case"):
        slow = {}
        for item in items:
            if item.get_closest_marker("slow"):
                slow.setdefault((item.path, item.originalname), []).append(item)
        _keep(config, items, {id(i) for i in items if not i.get_closest_marker("slow")}.union(
            id(i) for cases in slow.values() for i in cases[::CASES]
        ))  # fmt: skip
    if config.getoption("--sample"):
        _keep(config, items, _sample(items, config.getoption("--stride")))


def _keep(config, items, kept):
    config.hook.pytest_deselected(items=[i for i in items if id(i) not in kept])
    items[:] = [i for i in items if id(i) in kept]


def _sample(items, stride):
    by_file = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    kept = set()
    for path, mine in by_file.items():
        fast = [i for i in mine if not i.get_closest_marker("slow")]
        if path.name in MODELS:
            some = list({_model_of(i): i for i in reversed([*fast, *mine])}.values())
        else:
            some = fast if path.name in RELEASE else (fast or mine)[::stride]
        kept.update(map(id, some))
    return kept


def pytest_runtest_teardown(item, nextitem):
    """Compiled programs are dropped with their module: those of the whole suite would fill gigabytes, and tens of
    thousands of mappings of memory, of which a process may have 65,530. Functions stand in cycles with what they
    compiled, so they wait for the collector."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
        gc.collect()


EMITTERS = "xla_cpu_use_fusion_emitters"


MODULES = shardc.machine.mesh, shardc.machine.topology
USERS = shardc.machine.topology.TOPOLOGIES
EAGER = replace(USERS["cpu"], launch=2e-6, fabrics=(Fabric("switch", 1e9, 2e-7),), combined=())
"""Fake devices whose collectives start for next to nothing. Tests plan for them: they look at what is split and moved,
and in small examples little would be, if a start cost what it does. `as_users_plan` is the machine that users have."""
for module in MODULES:
    module.TOPOLOGIES = {**USERS, "cpu": EAGER}


@pytest.fixture(autouse=True, scope="module")
def meshes_as_they_were():
    """JAX has one mesh object for equal meshes, so what `make_mesh(hbm=, calibration=)` says in one file would hold for
    the mesh that another file made when it was collected."""
    tables = shardc.machine.mesh._hbm_of_mesh, shardc.machine.mesh._calibration_of_mesh
    before = [dict(table) for table in tables]
    yield
    for table, then in zip(tables, before, strict=True):
        table.clear()
        table.update(then)


@pytest.fixture
def as_users_plan(monkeypatch):
    for module in MODULES:
        monkeypatch.setattr(module, "TOPOLOGIES", USERS)


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
def slow_compiled_fast(request):
    """The same for tests that are marked slow; the others are compiled as a user's programs are."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("compiled_fast")


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
