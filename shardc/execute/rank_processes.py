"""The processes that run the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from jax.sharding import Mesh

from shardc.errors import MeshError, all_offenders
from shardc.execute.executable import other_runtimes_text
from shardc.machine.ahead import is_absent
from shardc.machine.devices import me, processes_of, runtimes_of
from shardc.runtime.calls import processes_text


@dataclass(frozen=True)
class RankProcesses:
    """Which process runs which rank. A rank on a mesh of several processes is run by each of them.

    Attributes:
      of_rank: for each rank its processes, in ascending order.
      me: this process.
    """

    of_rank: tuple[tuple[int, ...], ...]
    me: int

    @classmethod
    def of(cls, meshes: Sequence[Any], where: str) -> RankProcesses:
        """The processes of the ranks on these meshes. This one compiles all ranks of a machine that is not there.

        Raises:
          MeshError: a rank's mesh has devices of several JAX runtimes; or two ranks share some processes and not all,
            or their devices lie differently in these; or one other process has all ranks.
        """
        for rank, mesh in enumerate(meshes):
            if len(runtimes_of(mesh.devices.flat)) > 1:
                raise MeshError(f"{where}: the mesh of rank {rank} {other_runtimes_text(mesh)}")
        refuse_apart(meshes, where)
        found = tuple(tuple(processes_of(m.devices.flat)) for m in meshes)
        if is_absent(meshes[0]):
            return cls(((me(),),) * len(meshes), me())
        made = cls(found, me())
        if not made.are_several and made.me not in made.all:
            raise MeshError(
                f"{where}: all ranks run in process {made.all[0]}, and process {made.me} would have nothing to do; "
                "give ranks to two processes or more, or start the run with one."
            )
        return made

    @property
    def are_several(self) -> bool:
        """Whether more than one process runs ranks."""
        return len(self.all) > 1

    @property
    def all(self) -> tuple[int, ...]:
        """The processes that run a rank."""
        return tuple(sorted({p for ps in self.of_rank for p in ps}))

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files: the only one, or process 0."""
        return not self.are_several or self.me == 0

    def is_here(self, rank: int) -> bool:
        """Whether this process runs a rank."""
        return self.is_of(rank, self.me)

    def is_of(self, rank: int, process: int) -> bool:
        """Whether a process runs a rank."""
        return process in self.of_rank[rank]

    def are_apart(self, a: int, b: int) -> bool:
        """Whether other processes run one rank than the other."""
        return self.of_rank[a] != self.of_rank[b]

    def speaks_for(self, rank: int) -> bool:
        """Whether this process is the first one that runs a rank: it sends what each of them could."""
        return self.me == self.of_rank[rank][0]

    def text(self, rank: int) -> str:
        """The processes of a rank: `process 1` or `processes 2, 3`."""
        return processes_text(self.of_rank[rank])


def refuse_apart(meshes: Sequence[Mesh], where: str) -> None:
    """Raise MeshError if two ranks on these meshes share some processes and not all, or their devices lie differently
    in these."""
    found = [processes_of(m.devices.flat) for m in meshes]
    wrong = [
        f"rank {a} is in processes {_text(found[a])}, rank {b} in {_text(found[b])}"
        for a, b in combinations(range(len(found)), 2)
        if set(found[a]) & set(found[b])
        and max(len(found[a]), len(found[b])) > 1
        and _layout(meshes[a]) != _layout(meshes[b])
    ]
    if wrong:
        head = (
            f"{where}: two ranks of a pipeline are either in other processes, or in the same ones with as many devices "
            "in each; make the pipeline's axis the first one of the mesh, and of a size that divides the number of "
            "processes or is divided by it:"
        )
        raise MeshError(all_offenders(head, wrong))


def _text(processes: Sequence[int]) -> str:
    return ", ".join(map(str, processes))


def _layout(mesh: Mesh) -> tuple[int, ...]:
    """The process of each device, in the order of the mesh."""
    return tuple(p for d in mesh.devices.flat for p in processes_of([d]))
