"""The processes that write one checkpoint together, and what they decide together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax

from shardc.checkpoint.manifest import DamagedError
from shardc.errors import CheckpointError, ShardcError
from shardc.execute.process_group import gather_by_jax
from shardc.runtime.calls import refuse_unlike
from shardc.runtime.last_step import LastStep
from shardc.runtime.status.loop import LoopStatus

T = TypeVar("T")


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
    @property
    def loop(self) -> LoopStatus: ...
    def gather(self, name: str, text: str) -> list[str]: ...
    @property
    def last_step(self) -> LastStep: ...
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
    def islands(self) -> list[tuple[int, ...]]:
        """The processes of each island."""
        number = self.processes // self.owners
        return [tuple(range(i * number, (i + 1) * number)) for i in range(self.owners)]

    def owners_of(self, name: str, homes: Mapping[str, Sequence[int]]) -> tuple[list[tuple[int, ...]], dict[str, int]]:
        """The owners of a checkpoint, as the processes of each: the islands, and behind them those processes of an
        island that alone have some arrays. All processes call this together.

        Args:
          name: of the call.
          homes: of arrays that are not in this process, but in others of its island, the processes that have them.

        Returns:
          the owners, and the number of that of each array that not all processes of an island have.
        """
        said = [json.loads(text) for text in self.gather(name, json.dumps({k: list(v) for k, v in homes.items()}))]
        known = {array: tuple(home) for each in said for array, home in each.items()}
        owners = [*self.islands, *sorted(set(known.values()))]
        return owners, {array: owners.index(home, self.owners) for array, home in known.items()}

    def together(self, name: str, work: Callable[[], T]) -> T:
        """The result of `work`, which every process does.

        Raises:
          DamagedError: in every process, if that is what failed the work of one, and nothing else did of another.
          CheckpointError: in every process, if the work of one failed.
        """
        return self._all_do(name, work, lambda _: "")[0]

    def from_first(self, name: str, work: Callable[[], str]) -> str:
        """Run `work` in process 0 and return its text in every process.

        Raises:
          CheckpointError: in every process, if `work` failed in process 0.
        """
        return self._all_do(name, work if self.me == 0 else str, str)[1]

    def agree(self, name: str, facts: Mapping[str, str]) -> None:
        """Make sure that all processes make the same call with the same facts. Waits for them.

        Raises:
          DisagreementError: in every process, with all facts that differ.
        """
        refuse_unlike(name, range(self.processes), [json.loads(each) for each in self.gather(name, json.dumps(facts))])

    def _all_do(self, name: str, work: Callable[[], T], text: Callable[[T], str]) -> tuple[T, str]:
        """The result of `work`, which every process does, and the text of that of process 0."""
        failed: BaseException | None = None
        result: list[T] = []
        try:
            result.append(work())
        except (ShardcError, OSError) as error:
            failed = error
        damaged = isinstance(failed, DamagedError)
        here = {"made": text(result[0])} if failed is None else {"failed": str(failed), "damaged": damaged}
        said = [json.loads(each) for each in self.gather(name, json.dumps(here))]
        wrong = sorted((each["damaged"], p) for p, each in enumerate(said) if "failed" in each)
        if not wrong:
            return result[0], said[0]["made"]
        is_damaged, other = wrong[0]
        if is_damaged:
            raise DamagedError(said[other]["failed"])
        if isinstance(failed, ShardcError) and not damaged:
            raise failed
        if isinstance(failed, OSError):
            raise CheckpointError(f"{name}: {failed}") from failed
        raise CheckpointError(f"process {other}: {said[other]['failed']}")


def group_of(peers: ClusterPeers | None) -> Group:
    """The group of a cluster; without one, of the processes that share this JAX runtime."""
    if peers is not None:
        return Group(peers.me, peers.processes, peers.config.islands, peers.gather)
    if jax.process_count() > 1:
        return Group(jax.process_index(), jax.process_count(), 1, lambda name, text: gather_by_jax(text))
    return Group(0, 1, 1, lambda name, text: [text])
