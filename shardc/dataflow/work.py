"""The work of the nodes of a round: a function on a mesh, or Python on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from shardc.arrays.frozen import frozen
from shardc.arrays.place import Place, StagesPlace
from shardc.calls.constant_leaves import array_leaves
from shardc.errors import FlowError, all_offenders
from shardc.execute.pipeline_executable import FlowOfPipeline
from shardc.machine.devices import processes_of
from shardc.machine.mesh import AnyMesh, view
from shardc.passes.trace.trace import Arguments, is_array, path_text
from shardc.pipeline.cut_search.split_scans import Piece
from shardc.pipeline.schedule.turns import PartlyHeld
from shardc.plan.borders import Border
from shardc.sbp.signature import is_extended


class Work(Protocol):
    """The work of a node.

    Attributes:
      meshes: the meshes whose devices it uses; empty on the host.
      takes: where each argument leaf is taken.
      gives: where each result leaf is given.
      donated: the argument leaves whose buffers results may take.
      seconds: of one run, as planned; None if nobody knows.
      peak: bytes that a device needs while it runs, without its arguments.
      credits: registers of its channels beyond those of delays; None: as the flow says.
      actor: the name of the actor that it shares with other nodes; None: it shares one with those of its devices.
      waits: nodes that it waits for, and the rounds by which they may be behind.
      changes: whether it changes something that outlives the run.
      process: the process of the run that runs it; None: that of its devices, or of what reads its results.
      where: what runs a host function of the user: "thread", "process", "ray"; None: it is none.
      apart: the rounds by which it lets actors be apart that no value joins; None: any.
    """

    @property
    def meshes(self) -> tuple[AnyMesh, ...]: ...
    @property
    def takes(self) -> Sequence[Place]: ...
    @property
    def gives(self) -> Sequence[Place]: ...
    @property
    def donated(self) -> frozenset[int]: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def peak(self) -> int: ...
    @property
    def credits(self) -> int | None: ...
    @property
    def actor(self) -> object | None: ...
    @property
    def waits(self) -> Sequence[tuple[int, int]]: ...
    @property
    def changes(self) -> bool: ...
    @property
    def process(self) -> int | None: ...
    @property
    def apart(self) -> int | None: ...
    @property
    def where(self) -> str | None: ...

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        """The result leaves."""
        ...

    def begin(self) -> None:
        """Ready the work for a run."""
        ...

    def end(self) -> None:
        """Free what a run held."""
        ...


class Callee(Protocol):
    """The part of a `shardc.function` that a node uses."""

    mesh: AnyMesh

    @property
    def arguments(self) -> Arguments: ...
    @property
    def donates(self) -> tuple[str, ...]: ...
    @property
    def meshes(self) -> tuple[AnyMesh, ...]: ...
    def plan(self, *args: Any, **kwargs: Any) -> Any: ...
    def compile(self, *args: Any, **kwargs: Any) -> Any: ...
    def compile_in_flow(self, flow: FlowOfPipeline, *args: Any, **kwargs: Any) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class _LeafSlot:
    """A placeholder for a leaf."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class FunctionWork:
    """A `shardc.function`, or a pipeline, as a node.

    Args:
      function: the function.
      leaves, tree: its arguments, flat: arrays, shapes and dtypes with the sharding that is known, constants.
    """

    credits: int | None = None
    actor: object | None = None
    waits: Sequence[tuple[int, int]] = ()
    changes = False
    process: int | None = None
    apart: int | None = 0
    where: str | None = None

    def __init__(self, function: Callee, leaves: Sequence[Any], tree: Any) -> None:
        self._function, self._tree, self.meshes = function, tree, function.meshes
        self._callee: Any = function
        self._processes: Sequence[int] = _processes(function.meshes) if len(function.meshes) > 1 else []
        self.flow: FlowOfPipeline | None = None
        """Of a pipeline in several processes, the flow that runs it."""
        self.make_plan(leaves)

    def make_plan(self, leaves: Sequence[Any]) -> None:
        """Plan the function for arguments that lie where these leaves say."""
        function, tree, self._leaves = self._function, self._tree, list(leaves)
        args, kwargs = tree.unflatten(leaves)
        self.plan = function.plan(*args, **kwargs)
        mesh = function.mesh if len(self.meshes) == 1 else None
        slots, named = tree.unflatten([_LeafSlot(i) for i in range(len(leaves))])
        call = function.arguments.flatten(slots, named)
        takes = [Place(None)] * len(leaves)
        donated: set[int] = set()
        known = function.arguments.flatten(args, kwargs).leaves
        arrays = [(name, x) for name, x, given in zip(call.names, call.leaves, known, strict=True) if is_array(given)]
        program = self.plan.program
        if mesh is not None:
            taken = [Place(_known(a), mesh, p) for a, p in zip(program.in_avals, self.plan.whole_inputs, strict=True)]
            given = zip(program.out_avals, self.plan.whole_outputs, strict=True)
            self.gives = [Place(_known(a), mesh, p) for a, p in given]
        else:
            taken = self._on_stages(program.in_avals, self.plan.pieces.inputs, self.plan.in_borders, True)
            self.gives = self._on_stages(program.out_avals, self.plan.pieces.outputs, self.plan.out_borders, False)
        for (name, x), place in zip(arrays, taken, strict=False):  # captured arrays follow
            if isinstance(x, _LeafSlot):
                takes[x.index] = place
                if name in function.donates:
                    donated.add(x.index)
        self.takes, self.donated = takes, frozenset(donated)
        self.out_tree = program.out_tree
        self._arrays = array_leaves(self.out_tree)
        self.results = [g.aval for g in self.gives]
        self.seconds = max(self.plan.seconds, view(self.meshes[0]).topology.dispatch)
        memory = self.plan.memory
        self.peak = max(0, memory.peak - memory.arguments) if mesh is not None else 0

    def _on_stages(
        self, avals: Sequence[Any], pieces: Sequence[Piece], borders: Sequence[Border], is_taken: bool
    ) -> list[Place]:
        """The places of a pipeline's arguments, or results. In several processes a leaf in one piece is on the mesh of
        its stage; one in several pieces is taken whole by all of them, and given by the first one."""
        found: dict[int, list[Place]] = {}
        for piece, b in zip(pieces, borders, strict=True):
            place = Place(_known(b.aval), self.meshes[self.plan.stages[b.stage].rank], b.placement)
            found.setdefault(piece.number, []).append(place)
        places: list[Place] = []
        for number, aval in enumerate(avals):
            parts = tuple(found.get(number, ()))
            if self.is_wide and len(parts) == 1:
                places.append(parts[0])
                continue
            first = self._processes[0] if self.is_wide else None
            others = tuple(self._processes[1:]) if is_taken else ()
            places.append(StagesPlace(_known(aval), self.meshes[0], None, first, parts, others))
        return places

    @property
    def is_wide(self) -> bool:
        """Whether this is a pipeline in several processes."""
        return len(self._processes) > 1

    def settle(self, at: Mapping[int, Any]) -> bool:
        """Plan the function again if arguments lie elsewhere on its mesh than where it takes them: what that moves is a
        part of its plan then.

        Args:
          at: for arguments their type, with the sharding at which they are there in all rounds but the first ones.

        Returns:
          whether it was planned again.
        """
        leaves = [at.get(i, x) for i, x in enumerate(self._leaves)]
        new = [
            i for i, x in at.items()
            if getattr(self._leaves[i], "sharding", None) != x.sharding and self.takes[i].plain_sharding != x.sharding
        ]  # fmt: skip
        if new:
            self.make_plan([leaves[i] if i in new else x for i, x in enumerate(self._leaves)])
        return bool(new)

    def begin(self) -> None:
        """Compile, in the thread that runs the flow: JAX's settings are per thread."""
        if not all(isinstance(m, Mesh) for m in self.meshes):
            return
        args, kwargs = self._tree.unflatten(self._leaves)
        if self.flow is None:
            self._function.compile(*args, **kwargs)
        elif self._callee is self._function:
            self._callee = self._function.compile_in_flow(self.flow, *args, **kwargs)
        else:
            _ = self._callee.executable.compiled  # opens its network again

    def end(self) -> None:
        """End the threads of a pipeline in several processes."""
        if self._callee is not self._function:
            self._callee.executable.close()

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        del round
        args, kwargs = self._tree.unflatten(given)
        leaves = jax.tree.leaves(self._callee(*args, **kwargs))
        return [leaves[i] for i in self._arrays]


def _known(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _processes(meshes: Sequence[AnyMesh]) -> Sequence[int]:
    """The processes of meshes with devices."""
    return processes_of(d for m in meshes if isinstance(m, Mesh) for d in m.devices.flat)


class HostWork:
    """Plain Python as a node. It is given NumPy arrays that it cannot write to, and keeps what it returns: others get
    the value.

    Args:
      call: the function.
      tree: the structure of its arguments.
      takes: shape and dtype of each argument leaf; None: of one that is no array, or that is known from the start.
      gives: pytree of the shapes and dtypes of its result.
      name: for errors.
    """

    meshes: tuple[AnyMesh, ...] = ()
    donated: frozenset[int] = frozenset()
    peak = 0
    actor: object | None = None
    waits: Sequence[tuple[int, int]] = ()
    changes = False
    apart: int | None = 0

    def __init__(  # noqa: PLR0913  # what a call of a host function is
        self, call: Callable[..., Any], tree: Any, takes: Sequence[Any], gives: Any, name: str, *,
        credits: int | None = None, seconds: float | None = None, process: int | None = None, where: str | None = None,
    ) -> None:  # fmt: skip
        self._call, self._tree, self.name, self._is_mute = call, tree, name, gives is None
        pairs, self.out_tree = jax.tree_util.tree_flatten_with_path(gives)
        self.results = [x for _, x in pairs]
        self._paths = [path_text(path) for path, _ in pairs]
        self.takes, self.gives = [Place(a) for a in takes], [Place(a) for a in self.results]
        self.credits, self.seconds, self.process, self.where = credits, seconds, process, where

    def begin(self) -> None:
        """Nothing to ready."""

    def end(self) -> None:
        """Nothing is held."""

    def run(self, given: list[Any], round: int) -> Sequence[Any]:
        args, kwargs = self._tree.unflatten(given)
        return self.checked(self._call(*args, **kwargs), round)

    def checked(self, made: Any, round: int) -> list[Any]:
        """The leaves of a result, frozen, which are as declared.

        Raises:
          FlowError: they are not.
        """
        if self._is_mute:  # what a log returns is for nobody
            return []
        leaves, tree = jax.tree.flatten(made)
        if tree != self.out_tree:
            raise FlowError(
                f"{self.name} returned another structure than gives= says, in round {round}:\n"
                f"  says    {self.out_tree}\n  returns {tree}"
            )
        arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for x in leaves]
        wrong = [
            f"{path or 'the result'}: {want.dtype.name}{list(want.shape)} is declared, "
            f"{x.dtype.name}{list(x.shape)} came."
            for path, x, want in zip(self._paths, arrays, self.results, strict=True)
            if not is_like(x, want)
        ]
        if wrong:
            raise FlowError(all_offenders(f"{self.name} did not return what gives= says, in round {round}:", wrong))
        return [_kept(x, w.dtype) for x, w in zip(arrays, self.results, strict=True)]


def _kept(x: Any, dtype: Any) -> Any:
    """An array in another dtype, whose value stays."""
    if not isinstance(x, jax.Array):
        return frozen(x, dtype)
    return x if x.dtype == dtype else x.astype(dtype)


def seconds_of_call(seconds: float | tuple[float, float]) -> float:
    """The seconds of a call; of a pair, of these those in Python, the call holds Python's interpreter for those."""
    return PartlyHeld(*seconds) if isinstance(seconds, tuple) else seconds


def is_like(x: Any, want: Any) -> bool:
    """Whether an array has the declared shape and dtype, as far as JAX would tell: Python's and NumPy's 64 bits become
    32."""
    return x.shape == want.shape and (x.dtype == want.dtype or _as_jax(x.dtype) == _as_jax(want.dtype))


def _as_jax(dtype: Any) -> Any:
    is_own = is_extended(dtype)  # random keys
    return dtype if is_own else jax.dtypes.canonicalize_dtype(dtype)


def stacked_gives(gives: Any, count: int) -> tuple[Any, ...]:
    """The leaves of `count` results, each stacked along a new first dimension."""
    return tuple(jax.ShapeDtypeStruct((count, *a.shape), a.dtype) for a in jax.tree.leaves(gives))
