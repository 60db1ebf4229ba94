"""The source of a command: the first call of a function in a script, or a saved plan.

The script runs as `__main__` up to the call. There the command does its work, in the script's own contexts, and the
script ends.
"""

from __future__ import annotations

import ast
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

import click
import jax

from shardc.api import Function
from shardc.calls.watch import WATCHERS, Watcher
from shardc.commands import values
from shardc.errors import ArgumentError, MeshError, ShardcError, causes, did_you_mean
from shardc.flows import Flow
from shardc.launch.child import run_script
from shardc.launch.job import Script
from shardc.machine.mesh import AnyMesh, make_mesh, view
from shardc.machine.topology import parse_topology
from shardc.passes.trace.trace import where_of
from shardc.plan.saved_plan import SavedPlan, load_plan

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """The source of a command, as it stands on the command line.

    Attributes:
      text: a script, `train.py`, with a function, `train.py:step`, or the file of a saved plan.
      module: the script is the name of a module.
      arguments: of the script.
      devices: fake CPU devices that the script gets; None: those that JAX finds.
      axes, topology: of the mesh to plan for; None: as the function has it.
      chooses_mesh: the command chooses the mesh, of so many `devices`.
    """

    text: str
    module: bool = False
    arguments: Sequence[str] = ()
    devices: int | None = None
    axes: Mapping[str, Any] | None = None
    topology: str | None = None
    chooses_mesh: bool = False

    @property
    def saved(self) -> SavedPlan | None:
        """The plan, if this is the file of one."""
        return load_plan(self.text) if self._is_saved else None

    @property
    def _is_saved(self) -> bool:
        return not self.module and self.text.endswith(".json")

    def at_first_call(self, use: Callable[[FirstCall], T]) -> T:
        """Run the script up to the first call of its function, and give what `use` makes of that call.

        Raises:
          ArgumentError: there is no such script, or it ends without such a call.
          Exit: the script fails; its traceback is printed.
          ShardcError: of `use`.
        """
        if self._is_saved:
            Script(self.text).refuse_missing()
            raise ArgumentError(
                f"{self.text} is a saved plan: it says where values live, and this needs the program too; give the "
                "script, as train.py:step."
            )
        script, colon, name = self.text.rpartition(":")
        if not colon or not all(part.isidentifier() for part in name.split(".")):
            script, name = self.text, ""
        program = Script(script, tuple(self.arguments), self.module, self.devices)
        program.refuse_missing()
        if name and not self.module:
            _refuse_unknown(script, name)
        if self.devices is not None:
            os.environ.update(program.environment())
            jax.config.update("jax_platforms", "cpu")  # JAX has read the environment already
        waiting, names = _Waiting(self, script, name, use), dict[str, Any]()
        with _as_python_has_it(waiting):
            try:
                names = run_script(program.command())
            except SystemExit as end:  # that of `called` too
                if end.code and not waiting.found:
                    if end.code == _USAGE:
                        click.echo(f"Options of the script stand after --: {self.text} -- --steps 100", err=True)
                    raise
            except Exception as error:  # noqa: BLE001 - printed as Python prints it
                if not waiting.found:
                    self._print(error)
                    raise click.exceptions.Exit(1) from None
        return waiting.result(names)

    def _print(self, error: Exception) -> None:
        """The traceback of a script's error, as Python prints it."""
        where = error.__traceback__
        while where is not None and where.tb_frame.f_globals.get("__name__") in _RUNNERS:
            where = where.tb_next
        if where is None and isinstance(error, ImportError):  # there is no such module
            raise ArgumentError(f"{error}.") from None
        for each in causes(error):
            each.__notes__ = [n for n in getattr(each, "__notes__", []) if "JAX has removed its internal" not in n]
        traceback.print_exception(error.with_traceback(where))
        need = re.search(r"needs (\d+) devices", str(error))
        if isinstance(error, MeshError) and (need or self.devices is None):
            script = "The script makes its own mesh first;" if self.topology or self.axes else "To look at the plan,"
            count, other = self.devices, self.chooses_mesh and self.devices is not None and self.topology is None
            few = f" To choose a mesh of {count}, add --topology cpu:{count}." if other else ""
            click.echo(f"\n{script} fake CPU devices do: --devices {need[1] if need else 'N'}.{few}", err=True)


_USAGE: Final = 2
"""The exit status of a script that was given other options than it takes, as argparse and click have it."""


def _refuse_unknown(script: str, name: str) -> None:
    """Raise ArgumentError for a name that the text of a script lacks, if nothing that it imports can have it either."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (SyntaxError, ValueError, OSError):  # Python says it when the script runs, or it is a folder
        return
    imports = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    imports += ["." * n.level + (n.module or "") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    last, words = name.rpartition(".")[2], set(re.findall(r"\w+", ast.unparse(tree)))  # without comments
    if last not in words and {i.partition(".")[0] for i in imports} <= _WITHOUT_FUNCTIONS:
        raise ArgumentError(f"{script} has no {name}.{did_you_mean(last, words)}")


_WITHOUT_FUNCTIONS: Final = sys.stdlib_module_names - {"importlib", "runpy"} | {
    "equinox", "flax", "jax", "jaxlib", "numpy", "optax", "shardc",
}  # fmt: skip
"""Modules that make no function of shardc, and import no module of a user."""
_RUNNERS: Final = (__name__, "shardc.launch.child", "runpy")
"""Modules whose frames lead to a script."""


@contextmanager
def _as_python_has_it(watcher: Watcher) -> Generator[None]:
    """A watcher at work; what a script prints goes to standard error, and `sys` is afterwards as it was."""
    argv, path = sys.argv, [*sys.path]
    WATCHERS.append(watcher)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        WATCHERS.remove(watcher)
        sys.argv, sys.path[:] = argv, path


@dataclass(frozen=True)
class FirstCall:
    """The call that was waited for: the function or flow, its `Call` or its state and item, and where it was found."""

    function: Any
    call: tuple[Any, ...]
    source: Source

    def plan(self) -> Any:
        """The plan of the call; on the mesh that the command line names, if it names one."""
        mesh = self._other_mesh()
        return self.function.plan_of(*self.call) if mesh is None else self.function.plan_on(self.call[0], mesh)

    def compiled(self) -> Any:
        """The call compiled; for the mesh that the command line names, if it names one."""
        function, mesh = self.of_one_function("shardc compile"), self._other_mesh()
        return function.compile_of(*self.call) if mesh is None else function.compile_on(self.call[0], mesh)

    def _other_mesh(self) -> AnyMesh | None:
        axes, topology = self.source.axes, self.source.topology
        if axes is None and topology is None:
            return None
        function = self.of_one_function("another mesh")
        machine = topology or view(function.mesh).topology.kind
        mesh = make_mesh(topology=machine, **(axes or dict(function.mesh.shape)))
        there = math.prod(parse_topology(machine).shape)
        if mesh.size < there:
            click.echo(f"The mesh has {mesh.size} of the {there} devices of {machine}.", err=True)
        return mesh

    def of_one_function(self, what: str) -> Function:
        """The function that is called.

        Raises:
          ArgumentError: it is a flow, of which there is no `what`.
        """
        if isinstance(self.function, Flow):
            raise ArgumentError(
                f"{self.function.where} is a flow, of several functions; {what} is for one: name it, as "
                f"{self.source.text.partition(':')[0]}:step."
            )
        return self.function


class _Waiting(Generic[T]):
    """Waits for the first call of a function, and ends the script there.

    Args:
      source: what stands on the command line.
      script, name: the script, and the name of the function; empty: any.
      use: what is done with the call.
    """

    def __init__(self, source: Source, script: str, name: str, use: Callable[[FirstCall], T]) -> None:
        self._source, self._script, self._name, self._use = source, script, name, use
        self._made, self._called = dict[Any, str](), dict[str, None]()
        self._given: list[T] = []
        self._error: ShardcError | None = None
        self._at_work = False

    @property
    def found(self) -> bool:
        return bool(self._given or self._error)

    def made(self, function: Any) -> None:
        if not self._at_work:
            self._made[function] = _own_name(function)

    def called(self, function: Any, *call: Any) -> None:
        if self._at_work:
            return
        names = [_own_name(function), *_names_where_called(function)]
        self._made[function] = name = next((n for n in names if "<" not in n), names[0])
        self._called[name] = None
        if self._name and not any(f".{n}".endswith(f".{self._name}") for n in names):
            return
        if not self.found:
            self._at_work = True
            try:
                self._given.append(self._use(FirstCall(function, call, self._source)))
            except ShardcError as error:  # not for the script, which might go on
                self._error = error
            finally:
                self._at_work = False
        raise SystemExit(0)  # silent in a thread too

    def result(self, names: Mapping[str, Any]) -> T:
        """The result that was made of the call.

        Args:
          names: the globals of the script when it ended.

        Raises:
          ArgumentError: there was no such call.
        """
        if self._error is not None:
            raise self._error
        if self._given:
            return self._given[0]
        if not self._made:
            raise ArgumentError(f"{self._script} ends, and has made no function of shardc.{self._jits(names)}")
        near = did_you_mean(self._name, self._called)
        raise ArgumentError(
            f"{self._script} ends without a call of {self._name or 'a function of shardc'}.{near} It has made "
            f"{', '.join(dict.fromkeys(self._made.values()))}, and called {', '.join(self._called) or 'none of them'}."
            f"{self._jits(names) if self._name else ''}"
        )

    def _jits(self, names: Mapping[str, Any]) -> str:
        """A sentence about the functions of jax.jit among the globals of a script that are meant; empty if none is."""
        found = [n for n, x in names.items() if isinstance(x, jax.stages.Wrapped) and self._name in ("", n)]
        return "" if not found else f" {found[0]} is a jax.jit; shardc.function takes its place."


def _own_name(function: Any) -> str:
    """`step`, or `Trainer.step`; of a lambda where it is, as no name can mean it."""
    fn = getattr(function, "__wrapped__", function)
    fn = getattr(fn, "func", fn)  # a partial's
    name = getattr(function, "__qualname__", getattr(fn, "__qualname__", type(fn).__name__)).rpartition("<locals>.")[2]
    return where_of(fn) if "<" in name else name


def _names_where_called(function: Any) -> Iterator[str]:
    """The names that a function has in its callers: of variables, `step`, and of what these hold, `Trainer.step`.

    A caller's argument is no name of it: `def timed(step)` gets other functions too.
    """
    called, frame = [function], sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while (package := frame.f_globals.get("__name__", "").partition(".")[0]) in _FRAMEWORKS and frame.f_back:
        called.append(frame.f_locals.get("self", function))  # what is made of the function
        frame = frame.f_back
    while frame is not None and package != "runpy":
        names, code = {**frame.f_globals, **frame.f_locals}, frame.f_code
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name, value in names.items() if package not in _FRAMEWORKS else ():
            if name not in taken and any(value is c for c in called):
                yield name
            held = {} if isinstance(value, ModuleType) else getattr(value, "__dict__", {})
            for attribute in [a for a, v in held.items() if any(v is c for c in called)]:
                yield from (f"{name}.{attribute}", f"{type(value).__name__}.{attribute}")
        frame = frame.f_back
        package = "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]


_FRAMEWORKS: Final = ("shardc", "jax", "flax")
"""Packages between the call in a script and its watcher."""


# -- on a command line


class ScriptCommand(click.Command):
    """A command on a script; what stands after `--` is for the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGUMENTS] = args[at + 1 :]
        try:
            return super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()} Options of the script stand after --", ctx) from error

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text(f"ARGUMENTS are for the script: {ctx.command_path} train.py:step -- --steps 100")


_ARGUMENTS: Final = "shardc: arguments of the script"


def script_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of all that look at a script; it takes a `Source` in place of them."""

    @click.argument("script", metavar="SCRIPT[:FUNCTION]")
    @click.option("-m", "module", is_flag=True, help="The script is the name of a module.")
    @click.option(
        "--devices", type=values.positive, metavar="N", help="Give the script N fake CPU devices, for its mesh."
    )
    @click.option("--topology", metavar="NAME", help="Plan for another machine, without its devices: v5p:8x8x8.")
    @wraps(command)
    def with_source(
        script: str, module: bool, devices: int | None, topology: str | None, axes: Any = None, **others: Any
    ) -> Any:
        arguments = click.get_current_context().meta[_ARGUMENTS]
        return command(Source(script, module, arguments, devices, axes, topology), **others)

    return with_source


mesh_option: Final = click.option(
    "--mesh", "axes", type=values.mesh, metavar="AXES", help="Plan for another mesh: data=64,model=8."
)
"""Of commands on a script that do not choose the mesh themselves."""
