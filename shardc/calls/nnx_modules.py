"""Modules, optimizers, metrics, random streams and variables of flax.nnx, split for a call and written to after it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jax
from flax import nnx
from flax.core import spmd

from shardc.calls.flax_metadata import placements
from shardc.calls.opened import STRUCTURE, OpenedCall, Structure
from shardc.errors import ArgumentError, all_offenders
from shardc.passes.accumulate.microbatches import holds_nnx
from shardc.passes.trace.constants import has_hash, snapshot_of
from shardc.passes.trace.pins import is_leaf_spec
from shardc.passes.trace.trace import Arguments, is_array, is_nnx, is_nnx_state, leaves_by_path, path_text
from shardc.sbp.placement import AUTO, Auto

_TAG: Final = "shardc"
_RESULT: Final = "nnx_result"


@contextmanager
def opened_modules(
    arguments: Arguments, is_whole: Callable[[object], bool], known: dict[Structure, Structure],
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Generator[OpenedCall]:  # fmt: skip
    """A call whose modules are split into arrays. Modules that several arguments share stay one.

    A default with modules is an argument as if it were given.

    Args:
      arguments: the signature of the function.
      is_whole: whether a value in an argument is opened, or left, as a whole.
      known: the structures of calls so far, each by itself.
      args, kwargs: the arguments of the call.
    """
    bound = arguments.by_name(args, kwargs)
    given = set(bound.arguments)
    bound.apply_defaults()
    values = {n: v for n, v in bound.arguments.items() if n not in arguments.static}
    held = {n: v for n, v in values.items() if any(map(is_nnx, jax.tree.leaves(v, is_leaf=is_whole)))}
    pairs, tree = jax.tree_util.tree_flatten_with_path(held, is_leaf=is_whole)
    at = tuple(path_text(path) if is_nnx(x) else None for path, x in pairs)
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            graph, state = context.split({path: x for path, (_, x) in zip(at, pairs, strict=True) if path is not None})
        # a variable of several modules is listed under the first one, so another may have none
        states = [x if path is None else state.get(path, {}) for path, (_, x) in zip(at, pairs, strict=True)]
        structure = known.get(found := _Modules(graph, tree, at))
        if structure is None:
            found.keep_places(states)
            structure = known[found] = found
        pure = tree.unflatten([x if path is None else nnx.as_pure(x) for path, x in zip(at, states, strict=True)])
        for name in [n for n in bound.arguments if n not in given and n not in held]:
            del bound.arguments[name]
        bound.arguments.update(pure)
        arrays = [n for n in held if any(map(is_array, jax.tree.leaves(pure[n])))]
        yield OpenedCall(bound.args, {**bound.kwargs, STRUCTURE: structure}, _close, tuple(arrays))


def _close(made: Any) -> Any:
    """Writes to the modules of the call, and gives its result, in which these are the same modules."""
    states, graph, out = made
    with nnx.merge_context(_TAG, inner=False) as context:
        nodes: Any = context.merge(graph, nnx.State(states))
    return nodes.get(_RESULT, out)


class _Modules:
    """The structure of a call's modules, and where they stand in its arguments.

    Attributes without a hash are compared by their contents at the time of the call.

    Args:
      graph: the structure of the modules by their paths.
      tree: of the arguments that hold modules, with each module as a leaf.
      at: the path of each module, None for other leaves.
    """

    def __init__(self, graph: Any, tree: Any, at: tuple[str | None, ...]) -> None:
        self.graph, self._tree, self._at = graph, tree, at
        self._places: dict[str, Any] = {}
        parts = (*graph.nodes, *graph.attributes)
        if not has_hash(parts):
            parts = tuple(x if has_hash(x) else snapshot_of(x) for x in parts)
        types = tuple(type(getattr(x, "value", None)) for _, x in graph.attributes)  # 2 and 2.0 are equal
        self.key = parts, types, hash(parts), tree, at, tuple(spmd.get_logical_axis_rules())
        self._hash = hash(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Modules) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    def keep_places(self, states: Sequence[Any]) -> None:
        """Reads the placements of the modules' metadata; `states` are the leaves of the arguments that hold them."""
        leaves = [AUTO if path is None else placements(x) for path, x in zip(self._at, states, strict=True)]
        self._places = jax.tree.map(
            lambda x: nnx.to_pure_dict(x, extract_fn=lambda place: place) if is_nnx_state(x) else x,
            self._tree.unflatten(leaves), is_leaf=is_nnx_state,
        )  # fmt: skip

    def placements(self, spec: Any, names: Sequence[str]) -> Any:
        """`in_placements`, completed with the metadata of modules that it does not place."""
        if isinstance(spec, tuple | list) and not is_leaf_spec(spec):
            if len(spec) > len(names):
                return spec  # an error
            spec = dict(zip(names, spec, strict=False))
        elif spec is None or isinstance(spec, Auto):
            spec = {}
        elif not (isinstance(spec, dict) and set(spec) & set(names)):
            return spec  # one for all arguments, or wrong names
        silent = [n for n in self._places if spec.get(n) is None or isinstance(spec[n], Auto)]
        return {**spec, **{n: self._places[n] for n in silent}}

    def run(self, call: Callable[[Mapping[str, Any]], Any], values: Mapping[str, Any]) -> Any:
        """Calls a function with new modules: gives what they hold then, their new structure, and the result."""
        leaves = self._tree.flatten_up_to({n: values[n] for n in self._places})
        states = {path: x for path, x in zip(self._at, leaves, strict=True) if path is not None}
        with nnx.merge_context(_TAG, inner=True) as context:
            nodes: Any = context.merge(self.graph, nnx.State(states))
        whole = [x if path is None else nodes[path] for path, x in zip(self._at, leaves, strict=True)]
        out = call({**values, **self._tree.unflatten(whole)})
        written, out = ({**nodes, _RESULT: out}, None) if holds_nnx(out) else (nodes, out)
        with nnx.split_context(_TAG) as context:
            graph, state = context.split(written)
        return {n: nnx.as_pure(state[n]) for n in written if n in state}, graph, out


class _ModulesOfLoop:
    """The modules among the arguments of a function over microbatches, split into their arrays."""

    def __init__(self, where: str, nodes: dict[str, Any]) -> None:
        self._where, self._nodes = where, nodes
        self._graph, state = nnx.split(nodes)
        leaves, self._tree = jax.tree.flatten(state)
        self.leaves: Sequence[Any] = leaves
        self.paths: Sequence[str] = [path_text(path) for path, _ in leaves_by_path(state)]

    def build(self, leaves: Sequence[Any]) -> dict[str, Any]:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))

    def read(self, built: Mapping[str, Any]) -> Sequence[Any]:
        graph, state = nnx.split(dict(built))
        leaves, tree = jax.tree.flatten(state)
        if (graph, tree) != (self._graph, self._tree):
            raise ArgumentError(self._why_other(state))
        return leaves

    def write(self, leaves: Mapping[int, Any]) -> None:
        every = [leaves.get(i, x) for i, x in enumerate(self.leaves)]
        nnx.update(self._nodes, jax.tree.unflatten(self._tree, every))

    def _why_other(self, state: Any) -> str:
        paths = [path_text(path) for path, _ in leaves_by_path(state)]
        changes = [f"{p} is new; create it before the loop." for p in paths if p not in self.paths]
        changes += [f"{p} is gone; remove it before the loop." for p in self.paths if p not in paths]
        return all_offenders(
            f"accumulate: {self._where} changes the structure of its modules in a microbatch, so the next microbatch "
            "would begin with other modules",
            changes or ["an attribute that is not an array, as .train() and .eval() set: set it before the loop."],
        )


def opened_in_loop(where: str, nodes: Mapping[str, Any]) -> _ModulesOfLoop | None:
    """The modules among the arguments of a function over microbatches; None: there are none."""
    return _ModulesOfLoop(where, dict(nodes)) if holds_nnx(nodes) else None
