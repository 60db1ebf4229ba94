"""Runs test files of JAX, and what they call by `jax.jit` also as a shardc function: the same values, or an error where
jit raises one.

    python -m tests.harnesses.beside_jit ../jax/tests/pjit_test.py --only ShardingInTypesTest

Each call runs twice: with its arguments as they lie, and with pins in place of that. What the tests themselves assert
is of jit. Ends with 1 if a call differed. JAX's test files are in its repository, not in what pip installs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("NPROC", "16")  # threads of XLA:CPU: two for each device, or collectives can hang
os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import traceback
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import shardc
from shardc.compat import inside_trace

JIT = jax.jit
COUNTS: Counter[str] = Counter()
WRONG: list[str] = []
_TEST = [""]
_RUNNING: list[Beside] = []
"""The function that is compared: what it calls, and what shardc jits, is not."""


class Beside:
    """What `jax.jit` gives, and the shardc function beside it."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._jitted = fn, JIT(fn, **options)
        self._static = {k: v for k, v in options.items() if k.startswith("static_") and v is not None}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        mesh = _mesh_of(leaves)
        if mesh is None or _RUNNING or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._jitted(*args, **kwargs)
        there = jax.tree.map(lambda x: x + 0 if isinstance(x, jax.Array) and _is_plain(x) else x, (args, kwargs))
        _RUNNING.append(self)
        try:
            want = self._jitted(*args, **kwargs)
        except Exception:
            self._compare(mesh, *there, None)
            raise
        else:
            self._compare(mesh, *there, want)
        finally:
            _RUNNING.clear()
        return want

    def _compare(self, mesh: Mesh, args: Any, kwargs: Any, want: Any) -> None:
        """Counts what comes of a call; `want` is None if jit raised."""
        for how in ("placed", "pinned"):
            pins, given = None, args
            if how == "pinned":
                if kwargs or self._static or not all(map(_is_plain, jax.tree.leaves(args))):
                    continue
                pins = tuple(jax.tree.map(lambda x: x.sharding.spec, a) for a in args)
                given = jax.tree.map(np.asarray, args)
            try:
                f = shardc.function(self._fn, mesh=mesh, in_placements=pins, **self._static)
                text = _difference(f(*given, **kwargs), want)
            except Exception as error:  # noqa: BLE001  # told with its traceback, and the run fails
                text = "" if want is None else traceback.format_exc(limit=-4)
                kind = "errors, as jit" if want is None else f"{type(error).__name__}"
            else:
                kind = "values where jit raises" if want is None else "the same" if not text else "different"
            COUNTS[f"{how}: {kind}"] += 1
            if text and want is not None:
                WRONG.append(f"{_TEST[0]}, {how}: {text}")
                say(WRONG[-1])


def _is_plain(x: Any) -> bool:
    """Whether an argument is an array that pins can stand for."""
    return (
        isinstance(x, jax.Array)
        and isinstance(x.sharding, NamedSharding)
        and x.is_fully_addressable
        and not (x.sharding.spec.unreduced or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended))
    )


def _mesh_of(leaves: list[Any]) -> Mesh | None:
    """The mesh in context, or that of an argument."""
    there = None if inside_trace() else jax.sharding.get_mesh()
    shardings = [x.sharding for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    meshes = [there, *(s.mesh for s in shardings if isinstance(s, NamedSharding))]
    return next((m for m in meshes if isinstance(m, Mesh) and not m.empty), None)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.spec.unreduced:
        with jax.set_mesh(x.sharding.mesh):
            x = JIT(lambda x: jax.sharding.reshard(x, jax.P()))(x)
    return np.asarray(shardc.fetch(x) if isinstance(x, shardc.PlacedArray) else x)


def _difference(got: Any, want: Any) -> str:
    if want is None:
        return ""
    ours = jax.tree.leaves(got, is_leaf=lambda x: isinstance(x, shardc.PlacedArray))
    theirs = jax.tree.leaves(want)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for a, b in zip(map(_on_host, ours), map(_on_host, theirs), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        if not np.allclose(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(np.max(np.abs(b), initial=0))), equal_nan=True):
            return f"values differ: {a.ravel()[:4]}, not {b.ravel()[:4]}"
    return ""


def _jit(fn: Any = None, **options: Any) -> Any:
    return functools.partial(_jit, **options) if fn is None else Beside(fn, **options)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Result(unittest.TextTestResult):
    def startTest(self, test: unittest.TestCase) -> None:
        _TEST[0] = test.id()
        say(f"{sum(COUNTS.values()):6} {test.id()}")
        super().startTest(test)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--limit", type=int, help="at most so many tests")
    options = parser.parse_args()
    sys.argv[1:] = []
    jax.config.update("jax_disable_most_optimizations", True)  # what runs once need not run fast
    jax.jit = _jit
    for path in options.files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        tests = [t for t in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)) if options.only in t.id()]
        unittest.TextTestRunner(resultclass=_Result, verbosity=0).run(unittest.TestSuite(tests[: options.limit]))
    for kind, n in sorted(COUNTS.items()):
        say(f"{n:6} {kind}")
    return bool(WRONG)


def _flat(suite: Any) -> list[unittest.TestCase]:
    return [t for s in suite for t in _flat(s)] if isinstance(suite, unittest.TestSuite) else [suite]


if __name__ == "__main__":
    sys.exit(main())
