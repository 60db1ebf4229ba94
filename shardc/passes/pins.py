"""What a user says of arguments and results: rules, prefixes and leaves --> one pin for each leaf, or errors.

All offenders of a call are collected and reported at once.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardc import compat
from shardc.errors import PlacementError, did_you_mean
from shardc.mesh import MeshView
from shardc.passes.constrain import pin_of
from shardc.sbp.placement import AUTO, Auto, B, Broadcast, P, Pin, Placement, S, as_sbp


@dataclass(frozen=True)
class Rules:
    """Placements by patterns over leaf paths; the first pattern that matches decides."""

    patterns: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "rules({" + ", ".join(f"{p!r}: {leaf_text(s)}" for p, s in self.patterns) + "})"


def rules(patterns: Mapping[str, Any]) -> Rules:
    """Placements by pattern over the paths of an argument's leaves.

    A path joins keys, attribute names and indices by `/`, as `layers/0/attn/kernel`. `*` matches any text, `/`
    included. The first pattern that matches decides; leaves that none matches are AUTO; `{}` is B everywhere.

    Example:
      >>> str(rules({"*/up/kernel": {"model": S(1)}, "*": {}}))
      "rules({'*/up/kernel': {model: S(1)}, '*': {}})"
    """
    return Rules(tuple(patterns.items()))


def leaf_text(spec: Any) -> str:
    """A leaf as a person would write it."""
    if isinstance(spec, dict) and not spec:
        return "{}"
    if isinstance(spec, Mapping) and not isinstance(spec, Placement):
        return "{" + ", ".join(f"{'...' if a is ... else a}: {s}" for a, s in spec.items()) + "}"
    return str(spec)


def is_leaf_spec(spec: Any) -> bool:
    """Whether `spec` is said of whole leaves: a placement in any form, AUTO, None or rules."""
    if spec is None or isinstance(spec, Auto | Placement | PartitionSpec | NamedSharding | Rules | Pin):
        return True
    if isinstance(spec, Mapping):
        return all(_is_sbp(s) or isinstance(s, Auto) for s in spec.values())
    return isinstance(spec, tuple) and len(spec) > 0 and all(map(_is_sbp, spec)) or _is_sbp(spec)


def _is_sbp(x: Any) -> bool:
    return isinstance(x, S | Broadcast | P) or x is P


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf as pins see it: its whole path, the path inside its argument, shape and dtype."""

    path: str
    inner: str
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{self.path} {jax.ShapeDtypeStruct(self.shape, self.dtype).dtype}{list(self.shape)}"


def pins_of(spec: Any, leaves: Sequence[Leaf], mesh: MeshView, offenders: list[str]) -> list[Pin | None]:
    """One pin for each leaf of one argument, by a leaf spec or rules; None is AUTO. Adds what is wrong to `offenders`."""
    if isinstance(spec, Rules):
        return list(_by_rules(spec, leaves, mesh, offenders))
    return [_checked(spec, leaf, mesh, offenders) for leaf in leaves]


def _by_rules(
    spec: Rules, leaves: Sequence[Leaf], mesh: MeshView, offenders: list[str]
) -> Iterator[Pin | None]:
    matchers = [(re.compile(fnmatch.translate(_literal_brackets(p))), p, s) for p, s in spec.patterns]
    for matcher, pattern, _ in matchers:
        if not any(matcher.match(leaf.inner) for leaf in leaves):
            paths = [leaf.inner for leaf in leaves]
            near = did_you_mean(pattern.replace("*", ""), paths) or (f" Leaves are {_some(paths)}." if paths else "")
            offenders.append(f"the pattern {pattern!r} matches no leaf.{near}")
    for leaf in leaves:
        hit = next((s for matcher, _, s in matchers if matcher.match(leaf.inner)), AUTO)
        yield _checked(hit, leaf, mesh, offenders)


def several_matches(spec: Any, leaves: Sequence[Leaf]) -> list[str]:
    """For each leaf that several patterns match, a line saying which one decides."""
    if not isinstance(spec, Rules):
        return []
    lines: list[str] = []
    for leaf in leaves:
        hits = [p for p, _ in spec.patterns if re.match(fnmatch.translate(_literal_brackets(p)), leaf.inner)]
        if len(hits) > 1:
            lines.append(f"{leaf.path}: {hits[0]!r} decides, also matched by {', '.join(map(repr, hits[1:]))}")
    return lines


def _literal_brackets(pattern: str) -> str:
    """Only `*` is special in a pattern."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def _some(words: Sequence[str], most: int = 4) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _checked(spec: Any, leaf: Leaf, mesh: MeshView, offenders: list[str]) -> Pin | None:
    try:
        return as_pin(spec, leaf.shape, leaf.dtype, mesh)
    except PlacementError as error:
        offenders.append(f"{leaf}: {error}")
        return None


def as_pin(spec: Any, shape: Sequence[int], dtype: Any, mesh: MeshView) -> Pin | None:
    """A leaf's pin from any form that a user may write it in; None is AUTO.

    Raises:
      PlacementError: an axis that the mesh has not, a dimension that the value has not, P where it cannot be partial.
    """
    if spec is None or isinstance(spec, Auto):
        return None
    if isinstance(spec, Pin):
        return spec
    fixed: frozenset[str] | None = None
    if isinstance(spec, NamedSharding):
        _same_axes(spec, mesh)
        placement = Placement.from_sharding(spec)
    elif isinstance(spec, PartitionSpec):
        placement = Placement.from_spec(spec)
    elif isinstance(spec, Placement):
        placement = spec
    elif isinstance(spec, tuple):
        if len(spec) != len(mesh.axes):
            raise PlacementError(
                f"{spec} has {len(spec)} sbps, the mesh has {len(mesh.axes)} axes ({mesh}); write one for each axis, "
                "or a dict from axis to sbp."
            )
        placement = Placement([(a, s) for (a, _), s in zip(mesh.axes, spec, strict=True)])
    elif isinstance(spec, Mapping):
        said: dict[Any, Any] = dict(spec)
        rest: object = said.pop(..., B)
        open_axes = {a for a, s in said.items() if isinstance(s, Auto)}
        if rest is not B and not isinstance(rest, Auto):
            raise PlacementError(f"`...: {rest}` is not possible; `...: AUTO` leaves the other axes to the compiler.")
        if isinstance(rest, Auto) or open_axes:
            named = set(said) - open_axes
            fixed = frozenset(named if isinstance(rest, Auto) else (set(dict(mesh.axes)) - open_axes))
        placement = Placement([(a, as_sbp(s)) for a, s in said.items() if a not in open_axes])
    else:
        raise PlacementError(
            f"{spec!r} is no placement; write a dict from axis to sbp, as {{{mesh.axes[0][0]!r}: S(0)}}, a Placement, a "
            "PartitionSpec, or AUTO."
        )
    return Pin(_fits(placement, shape, dtype, mesh), fixed)


def wrong_constraints(jaxpr: compat.Jaxpr, mesh: MeshView) -> list[str]:
    """A line for each constraint in a program that the mesh or the value cannot keep."""
    offenders: list[str] = []
    for eqn in compat.all_eqns(jaxpr):
        pin = pin_of(eqn)
        if pin is not None:
            aval = eqn.outvars[0].aval
            try:
                _fits(pin.placement, tuple(aval.shape), aval.dtype, mesh)
            except PlacementError as error:
                offenders.append(f"{aval.str_short()} at {compat.source_line(eqn)}: {error}")
    return offenders


def _same_axes(sharding: NamedSharding, mesh: MeshView) -> None:
    if tuple(sharding.mesh.shape.items()) != mesh.axes:
        raise PlacementError(f"the sharding is over the mesh {dict(sharding.mesh.shape)}, the function's is {mesh}.")


def _fits(placement: Placement, shape: Sequence[int], dtype: Any, mesh: MeshView) -> Placement:
    for axis in placement:
        if axis not in mesh.sizes:
            raise PlacementError(
                f"there is no axis {axis!r} in the mesh ({mesh}).{did_you_mean(str(axis), mesh.sizes)}"
            )
    placement = placement.resolve(len(shape))
    if placement.partial_axes:
        if placement.partial_op != "sum":
            raise PlacementError(f"{placement}: P({placement.partial_op}) lives only inside a function; use B or S.")
        if not isinstance(dtype, np.dtype) or dtype == np.bool_:
            raise PlacementError(f"{placement}: a value of type {dtype} cannot be a partial sum; use B or S.")
    return placement
