"""The agreement of processes on one executable: they run the same program, on equal values where these are whole.

first call     function, arguments, values, machine, releases, settings and plan are compared before it runs
later calls    checksums of values that are given whole go to the others, and are compared when the next call begins
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from shardc.arrays.placed import is_placed
from shardc.execute.peers import Peers, environment, given_whole, peers_of, type_text, value_facts
from shardc.plan.digest import digest_of
from shardc.plan.plan import PlacedProgram


class Agreement:
    """The agreement of the processes of a mesh on a plan that they run.

    Args:
      plan: the plan.
      mesh: a mesh with devices of several processes.
    """

    def __init__(self, plan: PlacedProgram, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self._agreed: Peers | None = None
        self._calls = 0

    def check(self, arrays: Sequence[Any]) -> None:
        """Check a call before it is made.

        Args:
          arrays: its flat arguments that are arrays.

        Raises:
          DisagreementError: the processes differ, in this first call, or in values of the call before this one.
        """
        peers, paths, name = peers_of(self.mesh), self.plan.program.in_paths, self.plan.program.name
        if peers is None:
            return
        self._calls += 1
        if self._agreed is not peers:
            peers.agree(f"{name}, first call", self._facts(arrays))
            self._agreed = peers
        elif facts := _value_facts(paths, arrays):
            peers.compare(f"{name}, call {self._calls}", facts)

    def _facts(self, arrays: Sequence[Any]) -> dict[str, str]:
        paths = self.plan.program.in_paths
        types = {f"argument {p}": _argument_text(x) for p, x in zip(paths, arrays, strict=False)}
        machine = hashlib.sha256(repr(self.plan.mesh).encode()).hexdigest()[:8]
        return {
            **types,
            **_value_facts(paths, arrays),
            **environment(),
            "the mesh": ", ".join(f"{a}={n}" for a, n in self.plan.mesh.axes),
            "the machine (topology or calibration)": f"{self.plan.mesh.topology.kind}, digest {machine}",
            "the plan": f"digest {digest_of([self.plan])}",
        }


def check_call(executable: object, arrays: Sequence[Any]) -> None:
    """`Agreement.check` for an executable that runs in several processes; nothing for others."""
    agreement: Agreement | None = getattr(executable, "agreement", None)
    if agreement is not None:
        agreement.check(arrays)


def _value_facts(paths: Sequence[str], arrays: Sequence[Any]) -> dict[str, str]:
    """A checksum of each value that is given whole. No program of several processes takes an array that is committed to
    devices of one: such a call is not made."""
    taken = [(p, x) for p, x in zip(paths, arrays, strict=False) if not getattr(x, "committed", False)]
    return value_facts([p for p, _ in taken], [x for _, x in taken])


def _argument_text(x: Any) -> str:
    if given_whole(x):
        return f"{type_text(x)}, given whole"
    return f"{type_text(x)}, placed {x.placement if is_placed(x) else x.sharding.spec}"
