"""Which steps are measured: the models of the zoo, large enough that a step takes 10 to 200 ms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.recurrent import RECURRENT
from examples.zoo import MODELS, Model

ALL = {**MODELS, **RECURRENT}
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "mlp": ({"blocks": 4, "hidden": 2048, "classes": 16}, 512),
    "resnet": ({"width": 32, "classes": 16}, 64),
    "gpt2": ({}, 16),
}
"""Changes to each model's config "tiny", and rows in a batch. 16 classes, for jit cannot split 10 over 8 devices."""

MESHES = ({"data": 8}, {"model": 8}, {"data": 4, "model": 2})


@dataclass(frozen=True)
class Case:
    """One row of the tables; prints and parses as `gpt2/fsdp/data=8`."""

    model: str
    plan: str
    mesh: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.model}/{self.plan}/{self.mesh_text}"

    @property
    def mesh_text(self) -> str:
        return ",".join(f"{a}={n}" for a, n in self.mesh)

    @classmethod
    def parse(cls, text: str) -> Case:
        model, plan, mesh = text.split("/")
        pairs = (part.split("=") for part in mesh.split(","))
        return cls(model, plan, tuple((a, int(n)) for a, n in pairs))

    @property
    def zoo(self) -> Model:
        return ALL[self.model]

    @property
    def config(self) -> Any:
        return replace(self.zoo.configs["tiny"], **SIZES[self.model][0])

    @property
    def rows(self) -> int:
        return SIZES[self.model][1]

    @property
    def options(self) -> dict[str, Any]:
        """The plan: keyword arguments of shardc.function."""
        return self.zoo.plans[self.plan]()


def all_cases(models: Iterable[str] = tuple(SIZES)) -> Iterator[Case]:
    """Each plan on each mesh that has the axes it names and, of one axis, on no other; but for pipelines."""
    for model in models:
        for plan, make in ALL[model].plans.items():
            if plan == "pipeline":
                continue
            named = _axes_of(make()["in_placements"])
            for mesh in MESHES:
                if named <= set(mesh) and (len(mesh) > 1 or set(mesh) == named):
                    yield Case(model, plan, tuple(mesh.items()))


def _axes_of(spec: Any) -> set[str]:
    """The mesh axes that a plan names: the keys of its innermost dicts."""
    text = repr(spec)
    return {axis for axis in ("data", "model") if re.search(rf"\b{axis}'?: ", text)}
