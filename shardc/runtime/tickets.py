"""The order of a gang's programs that run in several processes, as process 0 of the run gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime import cluster as clusters
from shardc.runtime.calls import processes_text

_LOOK: Final = 1.0
"""Seconds after which a process that waits for a ticket looks whether process 0 still gives any."""


class Tickets:
    """The tickets of one gang: process 0 sends one for each program, with the name of its client. Each process of the
    run makes its gangs in the same order."""

    def __init__(self) -> None:
        found = clusters.current()
        self._cluster = None if found is None or found.processes == 1 else found
        self._tag = "" if self._cluster is None else f"gang {self._cluster.count('gangs')}"
        self.are_given_here = self._cluster is not None and self._cluster.me == 0

    def check(self, name: str, members: Sequence[int]) -> None:
        """Raise ClusterError if these processes cannot get tickets for programs of this client."""
        where = f"Gang: {name} runs in {processes_text(members)}"
        if self._cluster is None:
            raise ClusterError(
                f"{where}, which this gang has no links to; start them with python -m shardc run --processes "
                f"{len(members)}, and make the gang in the script."
            )
        if 0 not in members:
            raise ClusterError(
                f"{where}. Process 0 decides the order of programs that run in several processes, so it has to run "
                "them too; give the function a mesh with devices of process 0, or call it outside the gang."
            )

    def give(self, name: str, members: Sequence[int]) -> None:
        """Tell the other members that a program of this client is the next one."""
        assert self._cluster is not None
        for p in members:
            if p != self._cluster.me:
                self._cluster.link(p, "to take a ticket").send_tagged(self._tag, (name.encode(), ()))

    def take(self) -> str:
        """Wait for the next ticket, and return the name of its client.

        Raises:
          PeerLostError: a process died.
          ClusterError: the run ends, or the script of process 0 has ended.
        """
        cluster = self._cluster
        assert cluster is not None
        with cluster.waits.during([0], "to give a ticket", self._tag):
            while True:
                try:
                    return cluster.link(0, "to give a ticket").receive_tagged(self._tag, _LOOK)[0].decode()
                except PeerLostError:
                    raise
                except ClusterError:  # nothing has come yet
                    cluster.check()
                    if cluster.has_ended(0):
                        raise ClusterError(
                            f"process 0's script has ended; process {cluster.me} waits for it to give a ticket. Each "
                            "process has to make the same calls of a gang's clients."
                        ) from None
