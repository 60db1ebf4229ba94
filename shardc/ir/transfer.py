"""The primitives of values that cross from one stage's mesh to another's.

    y = f x          -->   stage a: send[number] y        stage b: y = receive[number]; z = g y
    z = g y

On its own mesh each of them only holds the value at the placement of the other side: `pin`, once it is known. The value
is never partial.
"""

from __future__ import annotations

from typing import Any, Final

from jax.extend.core import Primitive

from shardc.compat import Eqn

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
