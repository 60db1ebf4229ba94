"""Pins: the placements that a user writes (rules, prefixes, leaves) --> one pin for each leaf, or errors.

All errors of a call are collected and reported at once.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeGuard

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardc import compat
from shardc.errors import PlacementError, all_offenders, did_you_mean
from shardc.ir.constrain import pin_of
from shardc.ir.program import Program
from shardc.ir.user_shard_map import is_unit, unit_body, wrong_unit
from shardc.ir.walk import all_eqns
from shardc.machine.mesh import MeshView
from shardc.passes.trace.fully_sharded import FullySharded
from shardc.passes.trace.trace import path_text
from shardc.sbp.placement import AUTO, Auto, B, Broadcast, P, Pin, Placement, S, as_sbp


@dataclass(frozen=True)
class Rules:
    """Placements by patterns over leaf paths; the first pattern that matches decides. `optional`: those that may match
    no leaf."""

    patterns: tuple[tuple[str, Any], ...]
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        optional = f", optional={list(self.optional)}" if self.optional else ""
        return "rules({" + ", ".join(f"{p!r}: {leaf_text(s)}" for p, s in self.patterns) + f"}}{optional})"


@compat.api_boundary
def rules(patterns: Mapping[str, Any], *, optional: str | Collection[str] = ()) -> Rules:
    """Placements by pattern over the paths of an argument's leaves.

    A path joins keys, attribute names and indices by `/`, as `layers/0/attn/kernel`. `*` matches any text, `/`
    included. The first pattern that matches decides; leaves that none matches are AUTO; `{}` is B everywhere.

    Args:
      patterns: the placement of each pattern. One that matches no leaf is an error, unless it is optional.
      optional: a pattern, or several, that may match no leaf: for the rules of a family of models.

    Raises:
      PlacementError: `optional` names what is none of the patterns; `patterns` is no dict.

    Examples:
      >>> str(rules({"*/up/kernel": {"model": S(1)}, "*": {}}))
      "rules({'*/up/kernel': {model: S(1)}, '*': {}})"
    """
    if not isinstance(patterns, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlacementError(
            f"shardc.rules wants a dict from pattern to placement, got {patterns!r}; write "
            'shardc.rules({"*/kernel": {"model": S(1)}}).'
        )
    names = (optional,) if isinstance(optional, str) else tuple(optional)
    if wrong := [f"{n!r} is none of the patterns.{did_you_mean(n, patterns)}" for n in names if n not in patterns]:
        raise PlacementError(all_offenders("shardc.rules, optional", wrong))
    return Rules(tuple(patterns.items()), names)


def leaf_text(spec: Any) -> str:
    """A leaf spec as a person would write it."""
    if isinstance(spec, dict) and not spec:
        return "{}"
    if isinstance(spec, Mapping) and not isinstance(spec, Placement):
        return "{" + ", ".join(f"{'...' if a is ... else a}: {s}" for a, s in spec.items()) + "}"
    return str(spec)


_OF_LEAVES: Final = (Auto, Placement, PartitionSpec, NamedSharding, Rules, Pin, FullySharded)


def is_leaf_spec(spec: Any) -> bool:
    """Whether `spec` applies to whole leaves: a placement in any form, AUTO, None or rules."""
    if spec is None or isinstance(spec, _OF_LEAVES):
        return True
    if isinstance(spec, Mapping):
        return all(_is_sbp(s) or isinstance(s, Auto) for s in spec.values())
    return (isinstance(spec, tuple) and len(spec) > 0 and all(map(_is_sbp, spec))) or _is_sbp(spec)


def says_names(spec: Any, names: Collection[str], mesh: MeshView) -> TypeGuard[dict[Any, Any]]:
    """Whether a dict maps names (of arguments, of children) to placements, and not axes to sbps.

    `{"x": AUTO}` could be both: it maps names if it has one of `names`, and no axis.
    """
    if not isinstance(spec, dict) or not spec:
        return False
    keys: list[Any] = list(spec)
    of_axes = any(k is ... or k in mesh.sizes for k in keys)
    return not is_leaf_spec(spec) or (not of_axes and any(str(k) in names for k in keys))


def _has_two_meanings(spec: Any, names: Collection[str], mesh: MeshView) -> TypeGuard[dict[Any, Any]]:
    """Whether a dict could map axes as well as names: each of its keys is both."""
    if not isinstance(spec, dict) or not spec or not is_leaf_spec(spec):
        return False
    keys: list[Any] = list(spec)
    return all(k in mesh.sizes and k in names for k in keys)


def _is_sbp(x: Any) -> bool:
    return isinstance(x, S | Broadcast | P) or x is P


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf as pins see it: its whole path, the path inside its argument, shape and dtype; and, if it is an item of a
    list of numbers, the path of the list."""

    path: str
    inner: str
    shape: tuple[int, ...]
    dtype: Any
    in_list: str = ""

    def __str__(self) -> str:
        return f"{self.path} {compat.short_text(self.shape, self.dtype)}".lstrip()


@dataclass
class Pins:
    """One pin for each leaf of a call or of its results, and the errors.

    Attributes:
      what: `in_placements` or `out_placements`.
      leaves: of the whole tree; None is no array and cannot be pinned.
      pins: one for each leaf; None is AUTO.
      offenders: one line for each error.
      notes: which pattern decides where several match.
    """

    what: str
    leaves: Sequence[Leaf | None]
    mesh: MeshView
    pins: list[Pin | None] = field(init=False)
    offenders: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.pins = [None] * len(self.leaves)

    def spread(self, spec: Any, numbers: Any, at: str = "") -> None:
        """Pins the leaves whose numbers the tree `numbers` holds, by a leaf spec or a pytree prefix of leaf specs."""
        children = _children(numbers)
        if _has_two_meanings(spec, children, self.mesh):
            names = {k: {k: s} for k, s in spec.items()}
            of = "arguments" if self.what == "in_placements" and not at else "items"
            self._wrong(
                at, f"{code_text(spec)} can name axes of the mesh or {of}; write "
                f"shardc.Placement({code_text(spec)}) for the axes, {code_text(names)} for the {of}.",
            )  # fmt: skip
            return
        if isinstance(numbers, int) or (is_leaf_spec(spec) and not says_names(spec, children, self.mesh)):
            self._pin(spec, numbers, at)
            return
        parts = _children(spec)
        if not parts and not children:
            return  # a node without leaves, on both sides
        if not parts:
            self._wrong(at, f"{code_text(spec)} is no placement; {_as_dict(self.mesh)}.")
        if isinstance(spec, list | tuple) and type(numbers) in (list, tuple) and len(parts) != len(children):
            many = f"{_number(len(parts), 'placement')} for {_number(len(children), 'item')}"
            self._wrong(at, f"{many}; write one for each, with AUTO for what is to be chosen, or one for all of them.")
            return
        for key, part in parts.items():
            if key in children:
                self.spread(part, children[key], f"{at}/{key}" if at else key)
            else:
                near = did_you_mean(key, children)
                has = f"has {_some(list(children))}" if children else "is empty"
                self._wrong(at, f"the placements name {key!r}, but the value {has}.{near}")

    def _wrong(self, at: str, text: str) -> None:
        self.offenders.append(": ".join(filter(None, (self.what, at, text))))

    def _pin(self, spec: Any, numbers: Any, at: str) -> None:
        mine = [(i, leaf) for i in jax.tree.leaves(numbers) if (leaf := self.leaves[i]) is not None]
        specs = self._each(spec, at, [leaf for _, leaf in mine])
        wrong: dict[str, dict[str, None]] = {}
        for (i, leaf), (said, one) in zip(mine, specs, strict=True):
            try:
                pin = as_pin(one, leaf.shape, leaf.dtype, self.mesh)
                self.pins[i] = pin and replace(pin, said=f"{self.what}: {said}".removesuffix(": "))
            except PlacementError as error:
                listed = leaf.in_list and _SCALAR in str(error)
                text, what = (_LISTED, leaf.in_list) if listed else (str(error), str(leaf))
                wrong.setdefault(text, {})[what] = None
        for text, at_leaves in wrong.items():
            self._wrong(_some(list(at_leaves)), text)

    def _each(self, spec: Any, at: str, leaves: Sequence[Leaf]) -> list[tuple[str, Any]]:
        """The spec of each leaf under a leaf spec, and where it is written."""
        if isinstance(spec, FullySharded):
            return [(said, replace(spec, beside=beside)) for said, beside in self._each(spec.beside, at, leaves)]
        if not isinstance(spec, Rules):
            return [(at, spec)] * len(leaves)
        for text in _idle_patterns(spec, leaves):
            self._wrong(at, text)
        self.notes += several_matches(spec, leaves)
        return [(f"{at} {p!r}".lstrip(), s) for p, s in _by_rules(spec, leaves)]


def _children(tree: Any) -> dict[str, Any]:
    """The children of a pytree by name, those of a dict in its own order; none if it is a leaf."""
    if isinstance(tree, dict):
        items: Iterable[tuple[Any, Any]] = tree.items()
        return {str(key): child for key, child in items}
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    return {path_text(path): child for path, child in flat if path}


def wrong_constraints(program: Program, mesh: MeshView) -> list[str]:
    """A line for each `shardc.constrain`, JAX sharding constraint and shard_map of a program that cannot be kept."""
    lines: list[str] = []
    for eqn in all_eqns(program.jaxpr):
        if is_unit(eqn) and (text := wrong_unit(eqn, all_eqns(unit_body(eqn)), mesh)):
            lines.append(f"shard_map at {compat.source_line(eqn)}: {text}.")
        pin, aval = pin_of(eqn), eqn.outvars[0].aval if eqn.outvars else None
        if pin is None or aval is None:
            continue
        ours = eqn.primitive.name == "constrain"
        try:
            if not ours:
                _same_axes(eqn.params["sharding"], mesh)
            _fits(pin.placement, tuple(aval.shape), aval.dtype, mesh, border=False)
        except PlacementError as error:
            what = "shardc.constrain" if ours else "jax.lax.with_sharding_constraint"
            value, line = aval.str_short(short_dtypes=True), compat.source_line(eqn)
            if pin.said:
                lines.append(f"{pin.said}, called at {line}, pins {value}: {error}{_missing_axes(pin, mesh)}")
            else:
                lines.append(f"{what} of {value} at {line}: {error}")
    return list(dict.fromkeys(lines))


def _missing_axes(pin: Pin, mesh: MeshView) -> str:
    """The fix for a pin of another shardc function that is called in this one, whose mesh has not all axes."""
    missing = ", ".join(f"{a}=1" for a in pin.placement if a not in mesh.sizes and a != mesh.taken)
    if not missing:
        return ""
    return f" Make this mesh with {missing} too, or leave {'it' if ',' not in missing else 'them'} out of that pin."


def _by_rules(spec: Rules, leaves: Sequence[Leaf]) -> Iterator[tuple[str, Any]]:
    """For each leaf the first pattern that matches, and its spec."""
    matchers = [((p, s), matcher(p)) for p, s in spec.patterns]
    for leaf in leaves:
        yield next(((p, s) for (p, s), m in matchers if m.match(leaf.inner)), ("", AUTO))


def _idle_patterns(spec: Rules, leaves: Sequence[Leaf]) -> Iterator[str]:
    paths = [leaf.inner for leaf in leaves if leaf.inner]
    for pattern, said in spec.patterns:
        if pattern in spec.optional or any(map(matcher(pattern).match, (leaf.inner for leaf in leaves))):
            continue
        help_ = f" Leaves are {_some(paths)}."
        if not leaves:
            help_ = " There is no array."
        elif not paths:
            help_ = f" The argument is one array, whose path is empty: give it {code_text(said)} itself, or use '*'."
        near = did_you_mean(pattern.replace("*", "").strip("/"), paths)
        mend = "" if near else f" If it need not match: rules(..., optional={pattern!r})."
        yield f"the pattern {pattern!r} matches no leaf.{near or help_}{mend if paths else ''}"


def several_matches(spec: Rules, leaves: Sequence[Leaf]) -> list[str]:
    """For each leaf that several patterns match, a line that names the one that decides."""
    matchers = [(p, matcher(p)) for p, _ in spec.patterns]
    lines: list[str] = []
    for leaf in leaves:
        hits = [p for p, m in matchers if m.match(leaf.inner)]
        if len(hits) > 1:
            lines.append(f"{leaf.path}: {hits[0]!r} decides, also matched by {', '.join(map(repr, hits[1:]))}")
    return lines


def matcher(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern: `*` matches any text, all else itself."""
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]").replace("?", "[?]")))


def _some(words: Sequence[str], most: int = 4) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def code_text(spec: Any) -> str:
    """A placement spec as code: `{'data': S(0), ...: AUTO}`."""
    if isinstance(spec, P):
        return f"P({spec.op!r})"
    if spec is P or spec is ...:
        return "P" if spec is P else "..."
    if isinstance(spec, Mapping):
        items: Iterable[tuple[Any, Any]] = spec.items()
        return "{" + ", ".join(f"{code_text(a)}: {code_text(s)}" for a, s in items) + "}"
    if isinstance(spec, tuple) and not isinstance(spec, PartitionSpec):
        return "(" + ", ".join(map(code_text, spec)) + ("," if len(spec) == 1 else "") + ")"
    return repr(spec)


def _as_dict(mesh: MeshView) -> str:
    return f"write a dict from axis to sbp, as {{{mesh.axes[0][0]!r}: S(0)}}, or AUTO"


def as_pin(spec: Any, shape: Sequence[int], dtype: Any, mesh: MeshView) -> Pin | None:
    """The pin of a leaf from any form that a user may write it in; None is AUTO.

    Raises:
      PlacementError: an axis that the mesh does not have, a dimension that the value does not have, P where it cannot
        be partial.
    """
    if spec is None or isinstance(spec, Auto):
        return None
    if isinstance(spec, Pin):
        return spec
    if isinstance(spec, FullySharded):
        return Pin(_fully_sharded(spec, shape, dtype, mesh))
    if isinstance(spec, Mapping) and not isinstance(spec, Placement):
        placement, fixed = _from_axes(dict(spec), mesh)
    else:
        placement, fixed = _from_whole(spec, mesh), None
    return Pin(_fits(placement, shape, dtype, mesh, border=True), fixed)


def _from_whole(spec: Any, mesh: MeshView) -> Placement:
    """The placement of a spec that covers all axes."""
    if isinstance(spec, NamedSharding):
        _same_axes(spec, mesh)
        return Placement.from_sharding(spec)
    if isinstance(spec, PartitionSpec):
        return Placement.from_spec(spec)
    if isinstance(spec, Placement):
        return spec
    if not isinstance(spec, tuple):
        raise PlacementError(f"{code_text(spec)} is no placement; {_as_dict(mesh)}.")
    if any(isinstance(s, Placement) for s in spec):
        names: Sequence[str] = getattr(spec, "names", ())  # of plan.in_placements
        one = f", as .{names[0]}" if names else ""
        raise PlacementError(f"these are placements of {_number(len(spec), 'value')}; give that of this one{one}.")
    if len(spec) != len(mesh.axes):
        fitting = (*spec, *[B] * len(mesh.axes))[: len(mesh.axes)]
        raise PlacementError(
            f"{code_text(spec)} has {_number(len(spec), 'sbp')}, but the mesh has "
            f"{len(mesh.axes)} axes; write one for each, as {code_text(fitting)}."
        )
    return Placement([(a, s) for (a, _), s in zip(mesh.axes, spec, strict=True)])


def _from_axes(said: dict[Any, Any], mesh: MeshView) -> tuple[Placement, frozenset[str] | None]:
    """The placement of a dict by axis, and the axes that it fixes; None: all."""
    rest: object = said.pop(..., B)
    if rest is not B and not isinstance(rest, Auto):
        raise PlacementError(f"`...: {rest}` is not possible; `...: AUTO` leaves the other axes to the compiler.")
    _known_axes(said, mesh)
    open_axes = {a for a, s in said.items() if isinstance(s, Auto)}
    fixed: frozenset[str] | None = None
    if isinstance(rest, Auto):
        fixed = frozenset(set(said) - open_axes)
    elif open_axes:
        fixed = frozenset(set(dict(mesh.axes)) - open_axes)
    return Placement([(a, as_sbp(s)) for a, s in said.items() if a not in open_axes]), fixed


def _fully_sharded(spec: FullySharded, shape: Sequence[int], dtype: Any, mesh: MeshView) -> Placement:
    _known_axes(dict.fromkeys(spec.axes, S(0)), mesh)
    pin = as_pin(spec.beside, shape, dtype, mesh)
    beside = Placement() if pin is None else pin.placement
    both = [a for a in spec.axes if a in beside]
    if both:
        raise PlacementError(f"{spec}: `beside` is for other axes than {', '.join(map(repr, both))}; leave these out.")
    return spec.choose(shape, beside, mesh.sizes)


def _same_axes(sharding: NamedSharding, mesh: MeshView) -> None:
    if tuple(sharding.mesh.shape.items()) != mesh.axes:
        theirs = ", ".join(f"{a}={n}" for a, n in sharding.mesh.shape.items())
        raise PlacementError(
            f"the NamedSharding is over another mesh ({theirs}); {_as_dict(mesh).removesuffix(', or AUTO')}."
        )


def _known_axes(said: Mapping[str, Any], mesh: MeshView) -> None:
    if mesh.taken in said:
        rest = {a: s for a, s in said.items() if a != mesh.taken}
        raise PlacementError(
            f"{code_text(said)}: axis {mesh.taken!r} is the pipeline's and cannot be in a placement: a value is on "
            f"the stages that use it; write {code_text(rest)}."
        )
    unknown = [a for a in said if a not in mesh.sizes]
    if not unknown:
        return
    names = {a: next(iter(difflib.get_close_matches(str(a), mesh.sizes, n=1)), None) for a in unknown}
    fixed = {names.get(a, a): s for a, s in said.items()}
    help_ = f"; its axes are {', '.join(map(repr, mesh.sizes))}."
    if None not in fixed and len(fixed) == len(said):
        help_ = f". Did you mean {code_text(fixed)}?"
    raise PlacementError(f"{code_text(said)}: the mesh has no axis {', '.join(map(repr, unknown))}{help_}")


_SCALAR: Final = "a scalar cannot be split"
_LISTED: Final = f"a list of numbers, and each is an array of its own: {_SCALAR}; make one array of it with np.asarray."


def _fits(placement: Placement, shape: Sequence[int], dtype: Any, mesh: MeshView, *, border: bool) -> Placement:
    """The placement with non-negative dimensions.

    Raises:
      PlacementError: a value of this shape and dtype cannot have it.
    """
    _known_axes(placement, mesh)
    rank = len(shape)
    wrong = [(a, s) for a, s in placement.items() if isinstance(s, S) and not -rank <= s.dim < rank]
    if wrong:
        fixed = {a: (S(rank - 1) if rank else B) if (a, s) in wrong else s for a, s in placement.items()}
        has = f"the value has {_number(rank, 'dimension')}, numbered from 0" if rank else _SCALAR
        raise PlacementError(f"{code_text(placement)}: {has}; write {code_text(fixed)}.")
    if placement.partial_op is not None:
        whole = code_text({a: B if isinstance(s, P) else s for a, s in placement.items()})
        kind = "sum" if placement.partial_op == "sum" else "max or min"
        number = isinstance(dtype, np.dtype) and dtype != np.bool_
        if not number or (kind != "sum" and np.issubdtype(dtype, np.complexfloating)):
            raise PlacementError(f"{code_text(placement)}: {dtype} values cannot be a partial {kind}; write {whole}.")
        if border and kind != "sum":
            raise PlacementError(
                f"{code_text(placement)}: P({placement.partial_op!r}) is allowed only inside a function; write {whole}."
            )
    return placement.resolve(rank)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
