"""Flax on a mesh: placements from the partitioning metadata of linen and nnx, and functions that write to nnx modules.

Import it explicitly, `import shardc.flax`: shardc itself does not need flax. After the import `shardc.accumulate` takes
modules, and passes the values that a microbatch writes to them on to the next microbatch.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any, Final, Never, TypeAlias

import jax
from flax import linen, nnx
from flax.core import spmd
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardc import api, compat
from shardc.calls.options import UNSAID, Options, Unsaid, decorated, words
from shardc.dataflow.round import traced_round
from shardc.errors import ArgumentError, all_offenders
from shardc.machine.mesh import AnyMesh, view
from shardc.passes.accumulate.microbatches import OPENERS, holds_nnx
from shardc.passes.trace.constants import has_hash, snapshot_of
from shardc.passes.trace.pins import is_leaf_spec
from shardc.passes.trace.trace import is_array, is_nnx, leaves_by_path, path_text, where_of
from shardc.pipeline.options import Pipeline
from shardc.plan.forbid import Forbid
from shardc.plan.saved_plan import SavedPlan
from shardc.sbp.placement import AUTO, Auto, Placement

LogicalRules: TypeAlias = Sequence[tuple[str, str | tuple[str, ...] | None]]
"""Rules in flax's form: the name of a logical axis, and the mesh axis, or several, or None, that it is split over."""


def placements(tree: Any, rules: LogicalRules | None = None) -> Any:
    """Placements from the metadata of flax's variables, for `in_placements`, `out_placements` and `shardc.put`.

    Args:
      tree: for linen, variables or a training state as from `model.init` or `jax.eval_shape` of it, with the boxes of
        `nn.with_partitioning` or `nn.with_logical_partitioning`. For nnx, a module, an optimizer or a state. The state
        of an optimizer that was made from such parameters has their metadata too.
      rules: rules for logical names, as for `nn.logical_axis_rules`; by default those of the box or of that context. As
        in flax, a linen name without a rule splits nothing, and an nnx name without a rule is an axis of the mesh.

    Returns:
      A pytree like `tree` with a Placement for each box or variable, and AUTO for values without metadata. It fits the
      tree with its boxes and also the unboxed tree.

    Raises:
      ArgumentError: one array is split twice over the same axis.

    Examples:
      >>> init = linen.with_logical_partitioning(jax.nn.initializers.zeros, ("embed", "mlp"))
      >>> variables = linen.Dense(8, kernel_init=init).init(jax.random.key(0), jax.numpy.ones((1, 4)))
      >>> str(placements(variables, rules=[("embed", None), ("mlp", "model")])["params"]["kernel"])
      '{model: S(1)}'
    """
    if is_nnx(tree):
        tree = nnx.state(tree) if not isinstance(tree, nnx.Variable | nnx.State) else tree
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree, extract_fn=lambda x: x)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_metadata)
    return jax.tree.unflatten(structure, [_placement(jax.tree_util.keystr(path), x, rules) for path, x in pairs])


def _has_metadata(x: object) -> bool:
    return isinstance(x, linen.meta.AxisMetadata | nnx.Variable)


def _placement(path: str, x: Any, rules: LogicalRules | None) -> Placement | Auto:
    spec = _spec(x, rules)
    if spec is None:
        return AUTO
    axes = [a for entry in spec.partitions for a in ((entry,) if isinstance(entry, str) else entry or ())]
    twice = [a for a in dict.fromkeys(axes) if axes.count(a) > 1]
    if twice:
        raise ArgumentError(
            f"shardc.flax.placements: {path} is split twice over {', '.join(twice)}: {spec}; name each axis once."
        )
    return Placement.from_spec(spec)


def _spec(x: Any, rules: LogicalRules | None) -> PartitionSpec | None:
    """The partition spec of a box or a variable; None if it has none."""
    if isinstance(x, linen.Partitioned):
        own = x.rules if isinstance(x, linen.LogicallyPartitioned) else None
        known = rules if rules is not None else own
        if known is not None or isinstance(x, linen.LogicallyPartitioned):
            return linen.logical_to_mesh_axes(x.names, known if known is None else tuple(known))
        return x.get_partition_spec()
    if isinstance(x, nnx.Variable) and x.get_metadata().get("out_sharding"):
        with spmd.logical_axis_rules(tuple(rules)) if rules is not None else nullcontext():
            return nnx.spmd.get_var_pspec(x)
    return None


class FlaxFunction:
    """A function with nnx modules as arguments, which runs on a mesh and may write to them. Made by `function`."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._options = fn, options
        self._signature = inspect.signature(fn)
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if many := [str(p) for p in self._signature.parameters.values() if p.kind in kinds]:
            raise ArgumentError(
                f"shardc.flax.function: {fn.__name__}{self._signature} takes {' and '.join(many)}; give each argument "
                "a name."
            )
        self._made: dict[Any, api.Function] = {}
        api.function_of(self._of_arrays(()), options)  # refuses wrong names

    def __repr__(self) -> str:
        on = f" on {view(self._options.mesh)}" if isinstance(self._options.mesh, Mesh | AbstractMesh) else ""
        return f"FlaxFunction({where_of(self._fn)}{on})"

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(lambda function, values: function(**values), args, kwargs)

    def __deepcopy__(self, memo: Any) -> FlaxFunction:
        return FlaxFunction(copy.deepcopy(self._fn, memo), self._options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @property
    def latest(self) -> api.AnyExecutable | None:
        """The executable of the modules' structure that was met last; None before the first call."""
        return next(reversed(self._made.values())).latest if self._made else None

    @compat.api_boundary
    def plan(self, *args: Any, **kwargs: Any) -> api.AnyPlan:
        """The plan of a call; nothing runs and nothing is written."""
        with nnx.update_context(_TAG):
            return self._open(lambda function, values: function.plan(**values), args, kwargs)

    @compat.api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> FlaxCompiled:
        """Plan and compile a call without running it."""
        with nnx.update_context(_TAG):
            return FlaxCompiled(self, self._open(lambda function, values: function.compile(**values), args, kwargs))

    def _run(self, use: RunFunction, args: Any, kwargs: Any) -> Any:
        """Run a call, and write the new values back into the modules."""
        with nnx.update_context(_TAG):
            states, graph, out = self._open(use, args, kwargs)
            with nnx.merge_context(_TAG, inner=False) as context:
                nodes: Any = context.merge(graph, nnx.State(states))
        return nodes.get(_RESULT, out)

    def _open(self, use: RunFunction, args: Any, kwargs: Any) -> Any:
        """Call `use` with the function of arrays and its arguments, in which modules are split into arrays."""
        bound = self._signature.bind(*args, **kwargs)
        given = set(bound.arguments)
        bound.apply_defaults()
        values = {n: v for n, v in bound.arguments.items() if n in given or holds_nnx(v)}
        nodes = {n: v for n, v in values.items() if holds_nnx(v)}
        _refuse_lost_modules(where_of(self._fn), nodes)
        with nnx.split_context(_TAG) as context:
            split, state = context.split(nodes)
        graph = _Graph(split)
        # a variable of several arguments is listed under the first one, so another may have none
        states: dict[str, Any] = {n: state.get(n, {}) for n in nodes}
        function = self._function(graph, states)
        return use(function, {**values, **{n: nnx.as_pure(part) for n, part in states.items()}, _GRAPH: graph})

    def _function(self, graph: _Graph, states: Mapping[str, Any]) -> api.Function:
        """The function of arrays for modules with this structure and these annotations."""
        key = (graph, tuple(spmd.get_logical_axis_rules()))
        if key not in self._made:
            options = replace(self._options, in_placements=self._places(states))
            self._made[key] = api.function_of(self._of_arrays(tuple(states)), options)
        return self._made[key]

    def _places(self, states: Mapping[str, Any]) -> Any:
        """`in_placements`, completed with the metadata of modules that it does not place."""
        given, names = self._options.in_placements, list(self._signature.parameters)
        if isinstance(given, tuple | list) and not is_leaf_spec(given):
            if len(given) > len(names):
                raise ArgumentError(f"in_placements: {len(given)} for {len(names)} arguments ({', '.join(names)}).")
            given = dict(zip(names, given, strict=False))
        elif given is None or isinstance(given, Auto):
            given = {}
        elif not (isinstance(given, dict) and set(given) & set(names)):
            return given  # one for all arguments, or wrong names
        silent = [n for n in states if given.get(n) is None or isinstance(given[n], Auto)]
        return {**given, **{n: placements(states[n]) for n in silent}}

    def _of_arrays(self, names: Sequence[str]) -> Callable[..., Any]:
        """The function of arrays. It returns the new values of its modules, their structure, and the result."""
        fn, signature = self._fn, self._signature

        def of_arrays(**values: Any) -> Any:
            with nnx.merge_context(_TAG, inner=True) as context:
                nodes: Any = context.merge(values.pop(_GRAPH).graph, nnx.State({n: values[n] for n in names}))
            bound = signature.bind_partial()
            bound.arguments.update({**values, **nodes})
            out = fn(*bound.args, **bound.kwargs)
            written, out = ({**nodes, _RESULT: out}, None) if holds_nnx(out) else (nodes, out)
            with nnx.split_context(_TAG) as context:
                graph, state = context.split(written)
            return {n: nnx.as_pure(state[n]) for n in written if n in state}, graph, out

        functools.update_wrapper(of_arrays, fn)
        by_name = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
        graph = inspect.Parameter(_GRAPH, inspect.Parameter.KEYWORD_ONLY)
        of_arrays.__signature__ = signature.replace(parameters=[*by_name, graph])  # pyright: ignore[reportFunctionMemberAccess]
        return of_arrays


class _Graph:
    """The structure of nnx modules as a static argument.

    Attributes without a hash are compared by their contents at the time of the call.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        parts = (*graph.nodes, *graph.attributes)
        if not has_hash(parts):
            parts = tuple(x if has_hash(x) else snapshot_of(x) for x in parts)
        types = tuple(type(getattr(x, "value", None)) for _, x in graph.attributes)  # 2 and 2.0 are equal
        self.key, self._hash = (parts, types, hash(parts)), hash(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Graph) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash


RunFunction: TypeAlias = Callable[[Any, dict[str, Any]], Any]
_TAG: Final = "shardc"
_GRAPH: Final = "nnx_graph"
_RESULT: Final = "nnx_result"


def _refuse_lost_modules(name: str, nodes: Mapping[str, Any]) -> None:
    """Raise if a flow's round calls a function with modules that no round hands on: what is written to them is lost.

    Raises:
      ArgumentError: a module holds arrays, and not values of the round.
    """
    round = traced_round()
    if round is None:
        return
    held = [n for n, v in nodes.items() if any(is_array(x) for x in jax.tree.leaves(nnx.state(v)))]
    if held:
        raise ArgumentError(
            f"{round.where}: {name} is called with the module {', '.join(held)}, which is not a part of the state, and "
            "what is written to it would be lost: carry nnx.split(module)[1] in the state, and in the round make the "
            "module of it, with nnx.merge(graphdef, state); return nnx.state(module)."
        )


class FlaxCompiled:
    """The result of `FlaxFunction.compile`: is called like the function, with all methods of `shardc.function`'s."""

    def __init__(self, function: FlaxFunction, compiled: api.AnyCompiled) -> None:
        self._function, self._compiled = function, compiled

    def __repr__(self) -> str:
        return f"Flax{self._compiled!r}"

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function._run(lambda _, values: self._compiled(**values), args, kwargs)  # pyright: ignore[reportPrivateUsage]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


@compat.api_boundary
def function(  # noqa: PLR0913  # a public face
    fn: Callable[..., Any] | None = None,
    *unnamed: Never,
    mesh: AnyMesh | Unsaid | None = UNSAID,
    in_placements: Any = AUTO,
    out_placements: Any = AUTO,
    donate_argnames: str | Sequence[str] = (),
    static_argnames: str | Sequence[str] = (),
    pipeline: Pipeline | None = None,
    plan: str | PathLike[str] | SavedPlan | None = None,
    replicate: str | Sequence[str] = (),
    forbid: Forbid = (),
    offload: str | Sequence[str] = "never",
    **unknown: Any,
) -> Any:
    """`shardc.function` for functions that write to nnx modules, as `nnx.jit` is `jax.jit` for them.

    Modules, optimizers, random streams and variables among the arguments are split into arrays before the call, and the
    values that the function writes to them are written back after it. In a plan, and for `shardc.rules`, a module is
    the tree of its variables: `layers/0/kernel`. Static attributes without a hash (a plain dataclass, a list) are
    compared by their contents, so that a change is seen. `shardc.function` refuses a function that writes to a module
    and does not return it.

    Args:
      fn: the function. Each of its arguments has a name.
      *unnamed: none; all else is given by name.
      mesh: as for `shardc.function`. With None the result is `fn` itself.
      in_placements: as for `shardc.function`. A module that it does not place gets the placements of its variables'
        metadata, as `placements` reads them; variables without metadata are AUTO.
      out_placements: placements of the result. The compiler chooses the placements of values that are written to a
        module; those of a donated module stay.
      donate_argnames, static_argnames, pipeline, plan, replicate, forbid, offload: as for `shardc.function`.

    Returns:
      A `FlaxFunction`: called like `fn`, with `.plan(...)` and `.compile(...)`.

    Raises:
      ArgumentError: `fn` takes `*args` or `**kwargs`, or a name is not one of its arguments.
    """
    options = Options(
        mesh, in_placements, (AUTO, AUTO, out_placements), donate_argnames, (*words(static_argnames), _GRAPH), pipeline,
        plan, replicate, forbid, offload,
    )  # fmt: skip
    return decorated(function, (fn, *unnamed), unknown, options, FlaxFunction)


class _OpenedModules:
    """The nnx modules among the arguments of a function over microbatches, split into their arrays."""

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


def _open_modules(where: str, nodes: Mapping[str, Any]) -> _OpenedModules | None:
    return _OpenedModules(where, dict(nodes)) if holds_nnx(nodes) else None


OPENERS.append(_open_modules)
