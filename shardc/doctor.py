"""The check-up that `shardc doctor` prints: versions, devices and environment; what is wrong, and how to mend it."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import jax
import jaxlib
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from shardc.errors import MeshError, number_text
from shardc.machine.topology import Topology, read_topology, topology_of
from shardc.versions import NEWEST, OLDEST, PYTHONS, VERSION, version_numbers

_PROBE: Final = """\
import json, jax
found = jax.devices()
print(json.dumps([found[0].platform, found[0].device_kind, len(found)]))
"""
_NEEDED: Final = re.compile(r"(?P<name>[\w.-]+)>=(?P<least>[\d.]+)(?:; extra == '(?P<extra>\w+)')?")
_NOT_FOR_USERS: Final = ("dev", "docs", "peers")
_PLUGINS: Final = {"jax-cuda13-plugin": "cuda", "jax-cuda12-plugin": "cuda", "libtpu": "tpu"}
_VARIABLES: Final = re.compile(r"(JAX|XLA|TPU|LIBTPU|PJRT|CUDA)_\w+|NPROC")
_SAID: Final = {
    "Unknown flag": "Take this flag out of XLA_FLAGS: the installed XLA does not know it.",
    "jaxlib is not installed": "To use the GPU: pip install 'shardc[cuda]'. To stay with the CPU: JAX_PLATFORMS=cpu.",
    "not compatible with the installed jaxlib": "Install a plugin of jaxlib's version: pip install -U 'shardc[cuda]'.",
    "already in use": "End the process that has the device, or use the CPU: JAX_PLATFORMS=cpu.",
    "did not start": "Another process may have the device, or its driver hangs. JAX_PLATFORMS=cpu shardc doctor tells "
    "whether the CPU works; --wait gives more time.",
}
"""Words of JAX or XLA for something that is wrong, and what helps."""
_FELL_BACK: Final = re.compile("initialize backend|plugin configuration error")
"""JAX says so when it goes on with other devices."""


@dataclass(frozen=True)
class Finding:
    """A problem, or a note: something that is good to know. `mend` says what to do about it."""

    what: str
    mend: str
    is_note: bool = False


@dataclass(frozen=True)
class Library:
    """A library that is installed or could be.

    Attributes:
      name, version: the version is empty if it is not installed.
      least: the oldest version that shardc takes.
      extras: those that bring it; none for what shardc always needs.
    """

    name: str
    version: str
    least: str = ""
    extras: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        if not self.version and self.extras:
            return f"pip install 'shardc[{self.extras[0]}]'"
        return f"extra {', '.join(self.extras)}" if self.extras else ""


@dataclass(frozen=True)
class Devices:
    """The devices that JAX finds in a process of its own.

    Attributes:
      platform, kind, count: of its default devices; no platform if the backend does not start.
      said: what JAX and XLA wrote to standard error.
    """

    platform: str = ""
    kind: str = ""
    count: int = 0
    said: str = ""


def examine(calibration: str | None = None, wait: float = 60.0) -> tuple[str, int]:
    """Examine this installation: the check-up as text, as wide as the terminal, and the number of problems.

    Args:
      calibration: a file of `shardc calibrate`, which is checked too.
      wait: seconds that JAX has to start its backend.
    """
    libraries, devices = list(find_libraries()), find_devices(wait)
    findings = [*check_versions(libraries, devices), *check_devices(devices), *check_environment(devices)]
    if calibration is not None:
        findings += check_calibration(calibration, devices)
    problems = sum(not f.is_note for f in findings)
    console = Console(color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as text:
        for title, rows in (
            ("Versions", _version_rows(libraries)),
            ("Devices", _device_rows(devices)),
            ("Environment", [(n, v) for n, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(n)]),
        ):
            console.print(title)
            console.print(Padding(_grid(rows or [("no variable of JAX or XLA is set",)]), (0, 0, 1, 2)))
        for finding in findings:
            console.print("Note" if finding.is_note else "Problem")
            console.print(Padding(f"{finding.what}\n{finding.mend}\n", (0, 0, 0, 2)))
        console.print(f"{number_text(problems, 'problem')}." if problems else "No problems.")
    return "\n".join(line.rstrip() for line in text.get().splitlines()), problems


def _grid(rows: Sequence[Sequence[str]]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for _ in rows[0]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _version_rows(libraries: Iterable[Library]) -> Sequence[Sequence[str]]:
    return [
        ("python", platform.python_version(), f"tested: {', '.join(PYTHONS)}"),
        ("shardc", VERSION, f"in {Path(__file__).parent}"),
        ("jax", jax.__version__, f"tested: {OLDEST}.2 to {NEWEST}"),
        ("jaxlib", jaxlib.__version__, ""),
        *((one.name, one.version or "not installed", one.remark) for one in libraries),
    ]


def _device_rows(devices: Devices) -> Sequence[Sequence[str]]:
    if not devices.platform:
        return [("found", "none")]
    found = f"{number_text(devices.count, f'{devices.kind} device')}, platform {devices.platform}"
    return [("found", found), ("planned as", topology_of(devices.kind) or "h100")]


def find_libraries() -> Iterator[Library]:
    """The libraries that the installed shardc names, and the plugins of JAX that are there."""
    try:
        lines = metadata.requires("shardc") or []
    except metadata.PackageNotFoundError:  # imported from a folder of sources
        lines = []
    needed = [m for line in lines if (m := _NEEDED.fullmatch(line)) and m["name"] not in ("jax", "jaxlib")]
    extras: dict[tuple[str, str], list[str]] = {}
    for m in sorted(needed, key=lambda m: m["extra"] is not None):
        if m["extra"] not in _NOT_FOR_USERS:
            extras.setdefault((m["name"], m["least"]), []).extend(filter(None, [m["extra"]]))
    for (name, least), of in extras.items():
        yield Library(name, _installed(name), least, tuple(of))
    for name, extra in _PLUGINS.items():
        if version := _installed(name):
            yield Library(name, version, extras=(extra,))


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def find_devices(wait: float) -> Devices:
    """Start JAX's backend in a process of its own, which may fail, end in a crash, or hang."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, errors="replace", timeout=wait, check=False
        )
    except subprocess.TimeoutExpired:
        return Devices(said=f"it did not start within {wait:g} seconds.")
    if done.returncode:
        return Devices(said=done.stderr.strip() or f"it ended with exit code {done.returncode}")
    return Devices(*json.loads(done.stdout.splitlines()[-1]), said=done.stderr.strip())


def check_versions(libraries: Iterable[Library], devices: Devices) -> Iterator[Finding]:
    """Libraries that are too old, untested versions, and known faults of the versions found."""
    for one in libraries:
        if one.version and version_numbers(one.version) < version_numbers(one.least):
            mend = f"pip install '{one.name}>={one.least}'"
            yield Finding(f"{one.name} {one.version} is older than {one.least}.", mend)
    python = platform.python_version()
    if ".".join(python.split(".")[:2]) not in PYTHONS:
        yield Finding(f"shardc is not tested with Python {python}.", f"Tested: {', '.join(PYTHONS)}.", is_note=True)
    if version_numbers(jax.__version__) > version_numbers(NEWEST):
        what = f"jax {jax.__version__} is newer than the releases that shardc is tested with."
        yield Finding(what, f'If something fails: pip install "jax=={NEWEST}"', is_note=True)
    if version_numbers(jaxlib.__version__) == (0, 10, 2) and devices.platform in ("", "cpu"):
        what = "XLA:CPU of jaxlib 0.10.2 miscompiles some updates of an array by parts of itself (jax issue 39103)."
        yield Finding(what, "Newer releases of JAX need Python 3.12 or newer.", is_note=True)


def check_devices(devices: Devices) -> Iterator[Finding]:
    """A backend that does not start, what JAX warns of, and devices whose speed shardc does not know."""
    mend = next((mend for words, mend in _SAID.items() if words in devices.said), "")
    if not devices.platform:
        yield Finding(f"JAX's backend does not start: {_last_line(devices.said)}", mend or _mend_backend(os.environ))
    elif devices.said:
        is_note = not mend and not _FELL_BACK.search(devices.said)
        mend = mend or "The devices above were found all the same."
        yield Finding(f"JAX says: {_last_line(devices.said)}", mend, is_note)
    if devices.platform and topology_of(devices.kind) is None:
        what = f"shardc has no figures for {devices.kind} devices, and plans with those of an h100."
        yield Finding(what, "Measure them: shardc calibrate --mesh data=8 --save here.json", is_note=True)


def _last_line(said: str) -> str:
    """The line that tells most: that of a known fault, else the last one."""
    lines = said.splitlines()
    return next((line for line in lines if any(words in line for words in _SAID)), lines[-1])


def _mend_backend(environment: Mapping[str, str]) -> str:
    if wanted := environment.get("JAX_PLATFORMS"):
        return (
            f"JAX_PLATFORMS={wanted} allows no other platform. Unset it to use what there is; for a GPU or TPU install "
            "its plugin: pip install 'shardc[cuda]' or 'shardc[tpu]'."
        )
    return "If the CPU works (JAX_PLATFORMS=cpu shardc doctor), the fault is in the accelerator's driver or plugin."


def check_environment(devices: Devices, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Fake CPU devices that are not there, or have too few threads."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
    if devices.platform and flag and (devices.platform, devices.count) != ("cpu", int(flag[1])):
        yield Finding(
            f"XLA_FLAGS asks for {flag[1]} CPU devices, and JAX has {devices.count} of platform {devices.platform}.",
            "JAX_PLATFORMS=cpu takes the CPU. JAX_NUM_CPU_DEVICES, if it is set, counts in place of XLA_FLAGS.",
        )
    name = "PJRT_NPROC" if environment.get("PJRT_NPROC", "").isdecimal() else "NPROC"  # XLA reads them in this order
    threads = int(n) if (n := environment.get(name, "")).isdecimal() else os.cpu_count() or 1
    if devices.platform == "cpu" and devices.count > 1 and threads < 2 * devices.count:
        yield Finding(
            f"{devices.count} fake CPU devices need {2 * devices.count} threads of XLA, and it has {threads}: "
            "collectives block threads, so a program can hang.",
            f"Set {name}={2 * devices.count} before Python starts. shardc run --devices sets it by itself.",
        )


def check_calibration(path: str, devices: Devices) -> Iterator[Finding]:
    """A calibration that cannot be read, or was measured on other devices."""
    again = f"Measure these devices: shardc calibrate --mesh data={devices.count or 8} --save {path}"
    try:
        machine: Topology = read_topology(path)
    except MeshError as error:
        yield Finding(str(error), again)
        return
    kind, count = machine.kind.removesuffix("-measured"), math.prod(machine.shape)
    if devices.platform and kind != topology_of(devices.kind):
        yield Finding(f"{path} has figures of {kind} devices, and these are {devices.kind} devices.", again)
    elif devices.platform and count > devices.count:
        yield Finding(f"{path} was measured on {count} devices, and here are {devices.count}.", again)
