"""The primitives of values that cross from one stage's mesh to another's.

    y = f x          -->   stage a: send[number] y        stage b: y = receive[number]; z = g y
    z = g y

On its own mesh each of them only holds the value. Once the placement of the other side is known it is the `pin` of this
one, if both meshes have the same axes; else `far_end` says where the value comes from, or goes to. It is never partial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from jax.extend.core import Primitive

from shardc.compat import Eqn
from shardc.machine.mesh import MeshView
from shardc.machine.topology import DeviceLink
from shardc.sbp.boxing import Shape
from shardc.sbp.placement import Placement, local_shape
from shardc.sbp.way import plan_way

send_p = Primitive("send")
send_p.def_abstract_eval(lambda x, **_: x)
receive_p = Primitive("receive")
receive_p.def_abstract_eval(lambda *, aval, **_: aval)
_TRANSFERS: Final = frozenset((send_p, receive_p))


def is_transfer(eqn: Eqn) -> bool:
    return eqn.primitive in _TRANSFERS


def transfer_number(eqn: Eqn) -> Any:
    """The number that both ends of a transfer share."""
    return eqn.params["number"]


@dataclass(frozen=True)
class FarEnd:
    """The other end of a transfer between meshes that are not cut from one.

    Attributes:
      placement, mesh: of the value there; None: not known yet.
      link: the border.
      sends: whether that end sends the value.
    """

    placement: Placement | None
    mesh: MeshView
    link: DeviceLink
    sends: bool

    def seconds(self, shape: Shape, itemsize: int, placement: Placement, mesh: MeshView) -> float:
        """Seconds of one execution with this placement at the near end."""
        if self.placement is None:
            return math.prod(local_shape(shape, placement, mesh.sizes)) * itemsize / self.link.bandwidth
        far, near = (self.placement, self.mesh), (placement, mesh)
        (given, giver), (taken, taker) = (far, near) if self.sends else (near, far)
        return plan_way(shape, itemsize, given, giver, taken, taker, self.link).seconds


def far_end(eqn: Eqn | None) -> FarEnd | None:
    """The other end of a transfer, if it has one."""
    return eqn.params.get("far_end") if eqn is not None and is_transfer(eqn) else None
