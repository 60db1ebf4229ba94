"""The code that XLA made of a plan, as `Compiled.save` writes it: loaded where program and machine are as they were."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from shardc.errors import ArgumentError, all_offenders, number_text
from shardc.execute.process_group import environment
from shardc.machine.devices import processes_of
from shardc.plan.saved_plan import MachineCode, SavedPlan

_VARIABLES: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NOT_CODE: Final = re.compile(r"--xla_(force_host_platform_device_count|dump_\w+)(=\S*)?")
"""Flags of XLA that change nothing in what it compiles."""


@contextmanager
def cache_hits() -> Generator[list[str]]:
    """A context whose list says afterwards whether JAX's compilation cache gave a program."""
    found = list[str]()

    def listen(event: str, **_: Any) -> None:
        if event.endswith("/cache_hits"):
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(listen)


def code_of(compiled: Any, facts: Mapping[str, str], options: Mapping[str, str], name: str) -> MachineCode:
    """The code of JAX's compiled object.

    Args:
      compiled: JAX's compiled object.
      facts: what has to be equal where it is loaded (`facts_of`).
      options: those of XLA that it was compiled with.
      name: the function's.

    Raises:
      ArgumentError: JAX or the backend cannot write it.
    """
    try:
        binary, _, _ = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise ArgumentError(
            f"{name}: the compiled program cannot be written: {error}. compiled.plan.save(path) writes the plan, from "
            "which it is compiled anew."
        ) from error
    return MachineCode(facts, options, binary)


def loaded(saved: SavedPlan, code: MachineCode, facts: Mapping[str, str], mesh: Mesh, counts: tuple[int, int]) -> Any:
    """JAX's compiled object.

    Args:
      saved, code: what was saved.
      facts: those of the program as it is here.
      mesh: its devices.
      counts: the number of arrays that it takes, and that it gives.

    Raises:
      ArgumentError: a fact differs from what was saved, or XLA refuses the code.
    """
    refuse_unlike(saved, facts)
    devices = list(mesh.devices.flat)
    into, out = (jax.tree.structure(x) for x in ((tuple(range(counts[0])), {}), list(range(counts[1]))))
    try:
        return serialize_executable.deserialize_and_load(
            code.binary, into, out, backend=devices[0].client, execution_devices=devices
        )
    except jax.errors.JaxRuntimeError as error:
        raise ArgumentError(f"{saved.name} cannot be loaded: {error}; {_FIX}.") from error


_FIX: Final = "compile anew without plan=, and write that with compiled.save(path)"


def refuse_unlike(saved: SavedPlan, facts: Mapping[str, str]) -> None:
    """Raises ArgumentError if code was saved with other facts than those that are known here."""
    then = {} if saved.code is None else saved.code.facts
    wrong = [f"{n}: {then[n]} when it was saved, {now} here." for n, now in facts.items() if then.get(n, now) != now]
    if wrong:
        raise ArgumentError(
            all_offenders(f"{saved.name} has {saved.function} compiled for something else; {_FIX}:", wrong)
        )


def facts_of(program: str, options: Mapping[str, str], mesh: Mesh) -> dict[str, str]:
    """The facts that have to be equal for code to be the same: by name, as texts.

    Args:
      program: the text of the program that XLA compiles.
      options: those of XLA that its plan wants.
      mesh: its devices.
    """
    devices = list(mesh.devices.flat)
    kinds = sorted({d.device_kind if d.platform != "cpu" else _processor() for d in devices})
    flags = {n: " ".join(sorted(_NOT_CODE.sub("", os.environ.get(n, "")).split())) for n in _VARIABLES}
    return {
        **environment(),
        **flags,
        "the program and its plan": f"digest {hashlib.sha256(program.encode()).hexdigest()[:16]}",
        "XLA's options": ", ".join(map("=".join, options.items())),
        "the machine": f"{number_text(len(devices), 'device')} of {', '.join(kinds)}",
        "the devices": f"{_ranges([d.id for d in devices])}, in {number_text(len(processes_of(devices)), 'process')}",
    }


@lru_cache(maxsize=1)
def _processor() -> str:
    """The kind of the processor, and a digest of its instructions: code for a CPU is for these."""
    about = Path("/proc/cpuinfo")
    if not about.exists():
        return f"{platform.machine()} {platform.processor()}"
    lines = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", about.read_text("utf-8"), re.MULTILINE))
    can = sorted(lines.get("flags", lines.get("Features", "")).split())
    digest = hashlib.sha256(repr(can).encode()).hexdigest()[:8]
    return f"{lines.get('model name', platform.machine())}, instructions {digest}"


def _ranges(numbers: list[int]) -> str:
    """`0 to 7, 12`: numbers in their order, with those that follow each other as one."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
