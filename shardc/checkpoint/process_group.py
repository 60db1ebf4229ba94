"""The processes that write one checkpoint together, and what they decide together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import jax

from shardc.checkpoint.manifest import DamagedError
from shardc.errors import CheckpointError, ShardcError
from shardc.execute.process_group import gather_by_jax

T = TypeVar("T")
DAMAGED: Final = "\0"
"""How the text of a DamagedError begins that processes send each other."""


class Islands(Protocol):
    """The part of a `RunConfig` that checkpoints read."""

    @property
    def islands(self) -> int: ...


class ClusterPeers(Protocol):
    """The part of a `Cluster` that checkpoints use."""

    @property
    def me(self) -> int: ...
    @property
    def processes(self) -> int: ...
    @property
    def config(self) -> Islands: ...
    def gather(self, name: str, text: str) -> list[str]: ...
    def rejoin(self) -> None: ...


@dataclass(frozen=True)
class Group:
    """The processes of a run. Each island is an *owner*: it writes the leaves that live in it.

    Attributes:
      me: number of this process.
      processes: how many there are.
      owners: how many islands they form.
      gather: the text of each process, in order; all call it with the same names in the same order.
    """

    me: int
    processes: int
    owners: int
    gather: Callable[[str, str], list[str]]

    @property
    def owner(self) -> int:
        """The island of this process."""
        return self.me // (self.processes // self.owners)

    @property
    def island(self) -> range:
        """The processes of that island."""
        number = self.processes // self.owners
        return range(self.owner * number, (self.owner + 1) * number)

    @property
    def is_leader(self) -> bool:
        """Whether this process is the first of its island: it writes the files of which an owner has one."""
        return self.me == self.island[0]

    def together(self, name: str, work: Callable[[], T]) -> T:
        """The result of `work`, which every process does.

        Raises:
          DamagedError: in every process, if that is what failed the work of one, and nothing else did of another.
          CheckpointError: in every process, if the work of one failed.
        """
        failed: BaseException | None = None
        result: list[T] = []
        try:
            result.append(work())
        except (ShardcError, OSError) as error:
            failed = error
        mark = DAMAGED if isinstance(failed, DamagedError) else ""
        said = self.gather(name, "" if failed is None else f"{mark}{failed}")
        wrong = sorted((text.startswith(DAMAGED), p, text) for p, text in enumerate(said) if text)
        if not wrong:
            return result[0]
        is_damaged, other, text = wrong[0]
        if is_damaged:
            raise DamagedError(text.removeprefix(DAMAGED))
        if isinstance(failed, ShardcError) and not mark:
            raise failed
        if isinstance(failed, OSError):
            raise CheckpointError(f"{name}: {failed}") from failed
        raise CheckpointError(f"process {other}: {text}")

    def from_first(self, name: str, work: Callable[[], str]) -> str:
        """Run `work` in process 0 and return its text in every process.

        Raises:
          CheckpointError: in every process, if `work` failed in process 0.
        """
        made = self.together(name, work if self.me == 0 else str)
        return self.gather(f"{name}: result", made)[0]


def group_of(peers: ClusterPeers | None) -> Group:
    """The group of a cluster; without one, of the processes that share this JAX runtime."""
    if peers is not None:
        return Group(peers.me, peers.processes, peers.config.islands, peers.gather)
    if jax.process_count() > 1:
        return Group(jax.process_index(), jax.process_count(), 1, lambda name, text: gather_by_jax(text))
    return Group(0, 1, 1, lambda name, text: [text])
