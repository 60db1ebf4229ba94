"""The meshes of a pipeline's ranks."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardc.errors import MeshError
from shardc.machine.mesh import AnyMesh, auto_mesh, meshes_along
from shardc.pipeline.options import Pipeline


def meshes_of(pipeline: Pipeline, mesh: AnyMesh, where: str) -> list[AnyMesh]:
    """The mesh of each rank."""
    if pipeline.meshes is None:
        return meshes_along(mesh, pipeline.axis)
    given = list(pipeline.meshes)
    strange = [f"meshes[{r}] is {m!r}" for r, m in enumerate(given) if not isinstance(m, Mesh | AbstractMesh)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if strange or not given:
        raise MeshError(
            f"{where}: Pipeline(meshes=...) wants a mesh for each rank, {'; '.join(strange) or 'got none'}; write "
            "meshes=[jax.sharding.Mesh(devices[:4], ('data',)), jax.sharding.Mesh(devices[4:6], ('data',))]."
        )
    axes = [", ".join(map(str, m.axis_names)) for m in given]
    if len(set(axes)) > 1:
        raise MeshError(
            f"{where}: the meshes of a pipeline's ranks have the same axes, of whatever size, as one placement is for "
            f"all of them; these have {'; '.join(axes)}. Add axes of size 1."
        )
    for a, b in combinations(range(len(given)), 2):
        both = _devices(given[a]) & _devices(given[b])
        if both and given[a].size + given[b].size > 2:
            raise MeshError(
                f"{where}: ranks {a} and {b} of the pipeline share {', '.join(sorted(map(str, both)))}; collectives "
                "of two ranks on one device can wait for each other for ever; give each rank devices of its own."
            )
    return [auto_mesh(m) for m in given]


def _devices(mesh: AnyMesh) -> set[Any]:
    return set(mesh.devices.flat) if isinstance(mesh, Mesh) else set()
