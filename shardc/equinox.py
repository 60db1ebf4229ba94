"""Functions of equinox modules on a mesh, as `equinox.filter_jit` makes them for one device.

Import it explicitly, `import shardc.equinox`. Neither shardc nor this module needs equinox: it works for every pytree
with leaves that are not arrays.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Never, TypeVar

import jax

from shardc import api, compat
from shardc.calls.options import UNSAID, Options, Unsaid, decorated
from shardc.dataflow.round import traced_round
from shardc.dataflow.value import RoundValue
from shardc.machine.mesh import AnyMesh
from shardc.passes.trace.constants import key_of, key_of_static
from shardc.passes.trace.trace import held_by_nnx, is_array, is_number, refuse_lost_writes, where_of
from shardc.pipeline.options import Pipeline
from shardc.plan.forbid import Forbid
from shardc.plan.plan import copied
from shardc.plan.saved_plan import SavedPlan
from shardc.plans import Plan
from shardc.sbp.placement import AUTO

if TYPE_CHECKING:
    from shardc.pipelines import PipelinePlan

AnyPlanT = TypeVar("AnyPlanT", bound="Plan | PipelinePlan")


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Fixed:
    """A leaf that is not an array, as a part of a pytree's structure: another value is another structure."""

    value: Any
    key: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fixed) and bool(self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key[0])


def _is_fixed(x: object) -> bool:
    return isinstance(x, _Fixed)


def _is_traced(x: object) -> bool:
    """Whether a leaf is traced. As in `filter_jit`, arrays of JAX and NumPy are, Python's numbers are not."""
    return isinstance(x, RoundValue) or (is_array(x) and not is_number(x))


def _close(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if _is_traced(x) else _Fixed(x, (key_of_static(x), key_of(x))), tree)


def _open(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.value if _is_fixed(x) else x, tree, is_leaf=_is_fixed)


class EquinoxFunction:
    """A function of equinox modules that runs on a mesh. Made by `function`."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fn)

        @functools.wraps(fn, updated=())
        def of_arrays(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _open((args, kwargs))
            before = held_by_nnx((args, kwargs))
            out = fn(*args, **kwargs)
            refuse_lost_writes(where_of(fn), before, held_by_nnx((args, kwargs)), jax.tree.leaves(out))
            return _close(out)

        self._fn, self._options = fn, options
        self._function: api.Function = api.function_of(of_arrays, options)

    def __repr__(self) -> str:
        return f"Equinox{self._function!r}"

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._closed(args, kwargs)
        return _open(self._function(*args, **kwargs))

    def __deepcopy__(self, memo: Any) -> EquinoxFunction:
        return EquinoxFunction(copy.deepcopy(self._fn, memo), self._options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @property
    def latest(self) -> api.AnyExecutable | None:
        return self._function.latest

    @compat.api_boundary
    def plan(self, *args: Any, **kwargs: Any) -> api.AnyPlan:
        """The plan of a call. Takes modules of arrays or of `jax.ShapeDtypeStruct`s."""
        args, kwargs = self._closed(args, kwargs)
        return _without_constants(self._function.plan(*args, **kwargs))

    @compat.api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> EquinoxCompiled:
        """Plan and compile a call without running it."""
        args, kwargs = self._closed(args, kwargs)
        return EquinoxCompiled(self, self._function.compile(*args, **kwargs))

    def _closed(self, args: Any, kwargs: Any) -> Any:
        if traced_round() is None:
            self._function.refuse_changing(args, kwargs)
        return _close((args, kwargs))


class EquinoxCompiled:
    """The result of `EquinoxFunction.compile`: is called like the function, with all methods of `shardc.function`'s."""

    def __init__(self, function: EquinoxFunction, compiled: api.AnyCompiled) -> None:
        self._function, self._compiled = function, compiled

    def __repr__(self) -> str:
        return f"Equinox{self._compiled!r}"

    @compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._function._closed(args, kwargs)  # pyright: ignore[reportPrivateUsage]
        return _open(self._compiled(*args, **kwargs))

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
    """`shardc.function` for functions of equinox modules, as `equinox.filter_jit` is `jax.jit` for them.

    Arrays of JAX and NumPy are traced. All other leaves of arguments (activations, names, Python's numbers and flags)
    are constants: another value needs another plan. Results may have such leaves too. In a plan, and for
    `shardc.rules`, a module is the tree of its fields: `layers/0/weight`. `shardc.accumulate` takes modules;
    `equinox.nn.State` passes between microbatches with `reduce="carry:state"`.

    Args:
      fn: the function.
      *unnamed: none; all else is given by name.
      mesh: as for `shardc.function`. With None the result is `fn` itself.
      in_placements, out_placements, donate_argnames, static_argnames, pipeline, plan, replicate, forbid, offload:
        as for `shardc.function`.

    Returns:
      A `EquinoxFunction`: called like `fn`, with `.plan(...)` and `.compile(...)`.

    Raises:
      ArgumentError: a name is not an argument of `fn`; in a call, a leaf that is not an array is not hashable.
    """
    options = Options(
        mesh, in_placements, out_placements, donate_argnames, static_argnames, pipeline, plan, replicate, forbid,
        offload,
    )  # fmt: skip
    return decorated(function, (fn, *unnamed), unknown, options, EquinoxFunction)


def _without_constants(plan: AnyPlanT) -> AnyPlanT:
    """The plan without placements for leaves that are not arrays."""
    tree = plan.request.tree
    assert tree is not None
    shown = replace(tree, shown=lambda x: jax.tree.map(lambda y: None if _is_fixed(y) else y, x, is_leaf=_is_fixed))
    return copied(plan, type(plan), request=replace(plan.request, tree=shown))
