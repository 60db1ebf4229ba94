"""The description of a process to start, which can be written as text: its configuration and its setup before the
script."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from shardc.errors import ArgumentError
from shardc.runtime.cluster import RunConfig

_COUNT: Final = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")
_THREADS: Final = 32
"""The least number of threads of XLA:CPU: collectives block in them."""


@dataclass(frozen=True)
class Job:
    """A process to start.

    Attributes:
      config: its configuration in the run.
      start: how often the process has been started so far, this start included.
      cache: directory of compiled programs; empty if there is none.
      visible: numbers of the accelerators that it uses, `0,1`; empty for all.
      private: directory of the run, which the process removes if it outlives its launcher; empty if there is none.
      log: the file of its output, to which it appends its failure; empty if there is none.
    """

    config: RunConfig
    start: int = 1
    cache: str = ""
    visible: str = ""
    private: str = ""
    log: str = ""

    def to_json(self, secret: bool = True) -> str:
        """The job as one line of JSON; without the secret for a reader that has it already."""
        config = replace(self.config, secret=self.config.secret if secret else b"")
        return json.dumps({**asdict(self), "config": {**asdict(config), "secret": config.secret.hex()}})

    @classmethod
    def from_json(cls, text: str, secret: bytes = b"") -> Job:
        data = json.loads(text)
        config = data.pop("config")
        config["secret"] = bytes.fromhex(config["secret"]) or secret
        return cls(RunConfig(**config), **data)


@dataclass(frozen=True)
class Script:
    """The program that every process of a run runs.

    Attributes:
      name: path of a script, or with `module` the name of a module.
      arguments: of the script.
      devices: CPU devices of each process; None leaves the choice of the platform to JAX.
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    devices: int | None = None

    def refuse_missing(self) -> None:
        """Raise ArgumentError if there is no such file; a module is looked for when it is run."""
        if self.module and (self.name.endswith(".py") or "/" in self.name):
            raise ArgumentError(f"-m {self.name}: this is a file, and -m takes the name of a module; leave out -m.")
        if not self.module and not Path(self.name).exists():
            hint = "" if "/" in self.name or "." in self.name else f" Or is it a module: -m {self.name}?"
            raise ArgumentError(f"there is no script {self.name}.{hint}")

    def command(self) -> list[str]:
        return [*(["-m"] if self.module else []), self.name, *self.arguments]

    def environment(self, now: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of the process: XLA reads these before it starts."""
        if self.devices is None:
            return dict(now)
        flags = _COUNT.sub("", now.get("XLA_FLAGS", "")).strip()
        wanted = max(_THREADS, 2 * self.devices)
        threads = {
            name: str(max(wanted, int(value) if (value := now.get(name, "")).isdecimal() else 0))
            for name in ("NPROC", "PJRT_NPROC")
        }
        return {
            **{name: value for name, value in now.items() if name != "JAX_NUM_CPU_DEVICES"},
            **threads,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={self.devices}".strip(),
        }
