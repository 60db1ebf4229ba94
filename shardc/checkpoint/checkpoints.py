"""`shardc.checkpoints`: a loop that writes its state beside the run, and goes on from the last state that is there."""

from __future__ import annotations

import json
import logging
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Final

import jax

from shardc import compat
from shardc.arrays.gone import refuse_gone
from shardc.calls.placing import put
from shardc.checkpoint.leaves import blocks_of, check_savable, described, encode, homes_beside, is_remote, named_leaves
from shardc.checkpoint.lock import DirectoryLock, ObjectLock
from shardc.checkpoint.manifest import DamagedError, Manifest, files_of, write_manifest
from shardc.checkpoint.objects import AnyPath, ObjectPath, directory_at, module
from shardc.checkpoint.orbax import OwnersPart, Writer
from shardc.checkpoint.restore import check_fits, restore
from shardc.checkpoint.steps import (
    PARTIAL,
    TOKEN,
    Checkpoint,
    check_files,
    commit,
    folders_in,
    foreign,
    last_complete,
    partial_folder,
    prune,
    read_checkpoint,
    tidy,
)
from shardc.checkpoint.targets import placed_like
from shardc.checkpoint.writing_group import ClusterPeers, Group, group_of
from shardc.errors import (
    ArgumentError,
    CheckpointError,
    PeerLostError,
    PipelineError,
    RunEnds,
    all_offenders,
    is_of_another_process,
)
from shardc.execute.process_group import settle_all
from shardc.runtime import cluster
from shardc.runtime.last_step import LastStep, LastStepAlone
from shardc.versions import VERSION

_log: Final = logging.getLogger("shardc")
_alone: Final = LastStepAlone()

SECONDS: Final = 600.0
"""For writing one checkpoint."""
GRACE: Final = 30.0
"""Seconds for which a loop that failed waits for its last checkpoint."""
HURRY: Final = 3.0
"""Seconds for which a loop that is interrupted, as by Ctrl-C, waits for its last checkpoint."""
APPEARS: Final = 10.0
"""Seconds after which a file that one host has written is expected on the others."""


@compat.api_boundary
def checkpoints(
    directory: str | PathLike[str], *, every: int = 1, keep: int = 2, plan: Any = None, mode: int = 0o700
) -> Checkpoints:
    """Write the state of a loop while it runs, and go on from the last state that is there.

    States are written by orbax in logical form: they are restored onto any other mesh, placement, number of pipeline
    stages or number of processes. All processes of a run use it in the same way; the directory is on a file system that
    all their hosts share, or on an object store. One run at a time writes to a directory; others may read it.

    Args:
      directory: where the checkpoints are, or will be: `<directory>/<step>/`. Text as `s3://bucket/path` or
        `gs://bucket/path` is on an object store.
      every: step `i` is written if `every` divides `i + 1`.
      keep: so many of the newest complete checkpoints are kept; an older one goes when a newer one is complete.
      plan: a plan, or the digest of one as text. It is written down, and `note` says if a checkpoint that is taken was
        written under another plan.
      mode: permissions of the folders that are made, the directory and that of each checkpoint, less what the umask
        takes. Without it their owner alone can read them; `0o750` lets the group read. An object store has its own.

    Returns:
      A context manager. Its body ends when the last checkpoint is complete; an error of the body goes out at once.

    Raises:
      ArgumentError: `directory` is no path, or a URL of no known store, or `plan` no plan; `every` or `keep` is less
        than 1; `mode` is not between 0o700 and 0o777.
      CheckpointError: orbax is not installed (`pip install "shardc[checkpoints]"`). On entry: the directory cannot be
        written, or is not the same one for all processes.

    Examples:
      >>> import tempfile
      >>> with checkpoints(tempfile.mkdtemp(), every=2) as saved:
      ...     state, start = saved.last(or_else={"w": jax.numpy.zeros(3)})
      ...     for i in range(start, 4):
      ...         state = {"w": state["w"] + 1}
      ...         saved.step(i, state)
      ...     saved.last(or_else=state)[1]
      4
    """
    wrong = [f"{name}={n!r}" for name, n in (("every", every), ("keep", keep)) if type(n) is not int or n < 1]
    if wrong:
        raise ArgumentError(f"shardc.checkpoints: {', '.join(wrong)}: a whole number of 1 or more is needed.")
    if type(mode) is not int or not 0o700 <= mode <= 0o777:
        said = oct(mode) if type(mode) is int else repr(mode)
        raise ArgumentError(f"shardc.checkpoints: mode={said}: permissions from 0o700 to 0o777 are needed.")
    if not isinstance(directory, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"shardc.checkpoints: {directory!r} is no path; give the directory of the checkpoints.")
    module("orbax.checkpoint")
    return Checkpoints(directory_at(directory), every, keep, _digest(plan), mode)


def _digest(plan: Any) -> str:
    found = "" if plan is None else plan if isinstance(plan, str) else getattr(plan, "digest", None)
    if not isinstance(found, str):
        raise ArgumentError(f"shardc.checkpoints: plan={plan!r} is no plan; write plan=step.plan(...).")
    return found


class Checkpoints:
    """The checkpoints of a loop; `shardc.checkpoints` makes it.

    Attributes:
      note: what was found when a checkpoint was looked for: which were not taken and why, or that it was written under
        another plan. Empty if there is nothing to say.
    """

    def __init__(self, directory: AnyPath, every: int, keep: int, plan: str, mode: int) -> None:
        self.directory, self.every, self.keep, self.plan, self.mode = directory, every, keep, plan, mode
        self.note = ""
        self._newest = -1
        self._is_tidy = False
        self._took_steps = False  # since the processes met
        self._writer: Writer | None = None
        self._lock = ObjectLock(directory) if isinstance(directory, ObjectPath) else DirectoryLock(directory)
        self._there: set[int] = set()
        """The steps that process 0 has seen in the directory when it last looked for a checkpoint."""

    # -- the loop

    @compat.api_boundary
    def __enter__(self) -> Checkpoints:
        if self._writer is not None:
            raise ArgumentError(f"shardc.checkpoints: {self.directory} is in use: enter it once.")
        writer = Writer(SECONDS)
        self._meet(writer, None)
        peers = _peers()
        alone = _alone if self._group.processes == 1 else LastStep()  # without a launcher nobody asks several processes
        self._last_step = alone if peers is None else peers.last_step
        self._last_step.open(self)
        self._writer = writer
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writer, self._writer = self._open_writer(), None
        try:
            if error is not None:
                writer.dismiss(GRACE if isinstance(error, Exception) else HURRY)
                return
            self._end(writer)
        finally:
            writer.close()
            if writer.wait(0.0):  # else it is freed when this process ends
                self._lock.free()
            self._last_step.close(self, failed=error is not None)

    @compat.api_boundary
    def last(self, or_else: Any, *, mesh: Any = None, placements: Any = None) -> tuple[Any, int]:
        """The state of the last step that all processes have.

        Args:
          or_else: the state to begin with if there is no checkpoint, a pytree; or a function without arguments that
            makes it, which is then called only if there is none. Each leaf is restored as the kind of array that it is
            here, at its placement: a jax.Array at its sharding, a PlacedArray, a NumPy array on the host. Of a
            function's result only shapes and types are known: give `placements`, or have jax.Arrays on the default
            device.
          mesh, placements: as for `shardc.put`, such as `plan.in_placements.params`; the state is put there, whether it
            is restored or new.

        Returns:
          The state, and the number of the step to go on with: the one after the checkpoint's, or 0.

        Raises:
          CheckpointError: the checkpoint is of another program (the error has all differences), or cannot be read: in
            every process. Or all are damaged. Or there is none, and the arrays of `or_else` were donated.
        """
        if (mesh is None) != (placements is None):
            raise ArgumentError("saved.last: give both mesh= and placements=, or neither.")
        self._wait_for_writers()
        damaged: dict[int, str] = {}
        while (step := self._find(damaged)) is not None:
            self._newest, self._is_tidy = step, False
            like = described_by(or_else) if _is_function(or_else) else or_else
            if placements is not None:
                like = placed_like(like, mesh, placements)
            try:
                return self._begun(self._restored(step, like), step + 1)
            except DamagedError as error:
                damaged[step] = str(error)
        self._newest, self._is_tidy = -1, False
        state = or_else() if _is_function(or_else) else or_else
        self._check_alive(state)
        return self._begun(state if placements is None else put(state, mesh, placements), 0)

    def _begun(self, state: Any, start: int) -> tuple[Any, int]:
        """The loop begins with this state, after so many steps."""
        if self._loop is not None:
            self._loop.begin(start)
        return state, start

    @compat.api_boundary
    def step(self, step: int, state: Any, *, loss: Any = None, tokens: float | None = None) -> None:
        """Say that a step is done; its state is written if `every` divides `step + 1`.

        Returns when the state is copied to the host: the next step may take its buffers.

        Args:
          step: its number, larger at each call.
          state: after it, a pytree.
          loss: for the status line of a run, as `tokens`: how many the step has taken. `shardc.progress` in the same
            loop gives them too.

        Raises:
          CheckpointError: this state, or one before, cannot be written; at the first step, another run writes to the
            directory.
          ArgumentError: the number is not larger than the last one, or is none; arrays were donated to a call.
          SystemExit: with code 143, if the run is asked to end (SIGTERM). The state is written.
        """
        writer = self._open_writer()
        try:
            step = operator.index(step)
        except TypeError:
            raise ArgumentError(
                f"saved.step: a step has a number, got a {type(step).__name__}; write saved.step(i, state)."
            ) from None
        writer.check()
        if step <= self._newest:
            raise ArgumentError(
                f"saved.step({step}): step {self._newest} is there already. Begin with `state, start = "
                "saved.last(or_else=...)` and step `start`, or give another directory."
            )
        is_last = self._last_step.begins()
        if self._loop is not None:
            self._loop.step(step + 1, loss, tokens)
        if not self._is_tidy:
            self._tidy()
        self._newest, self._took_steps = step, True
        if is_last or (step + 1) % self.every == 0:
            self._write(writer, step, state)
        if is_last:
            self._end(writer)
            if self._last_step.saved(self):
                raise RunEnds(step)

    @compat.api_boundary
    def run(
        self, one_step: Callable[[int, Any], Any], init: Any, *, steps: int, mesh: Any = None, placements: Any = None
    ) -> Any:
        """Run a loop from its last checkpoint on, and again from the last common one when a peer was lost, or failed,
        and was started again.

        Args:
          one_step: `one_step(i, state)` gives the next state, or that and a loss.
          init: the first state, or a function that makes it; as `or_else` of `last`. If steps are lost before the first
            checkpoint it is needed again: give a function if `one_step` donates.
          steps: of the whole run, those before the checkpoint counted.
          mesh, placements: as for `last`.

        Returns:
          The state after the last step.

        Raises:
          PeerLostError: a peer was lost and is not started again.
        """
        while True:
            try:
                state, start = self.last(init, mesh=mesh, placements=placements)
                for i in range(start, steps):
                    state, loss = _state_and_loss(one_step(i, state), state)
                    self.step(i, state, loss=loss)
                self._end(self._open_writer())  # while a loss can still be mended
                return state
            except (PeerLostError, PipelineError) as error:
                if not is_of_another_process(error):
                    raise
                self._meet(self._open_writer(), error)

    # -- several processes

    def _name(self, what: str) -> str:
        return f"checkpoints in {self.directory.name}: {what}"  # hosts may have it at other paths

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise ArgumentError("shardc.checkpoints: use it inside of `with shardc.checkpoints(...) as saved:`.")
        return self._writer

    def _open(self) -> None:
        """Meet the other processes, and make sure that all can write to one directory."""
        peers = _peers()
        self._group: Group = group_of(peers)
        self._group.agree(self._name("how often"), {"every": str(self.every)})
        self._loop = None if peers is None else peers.loop
        token = self._group.from_first(self._name("begin"), self._leave_token)
        try:
            self._group.together(self._name("see the directory"), lambda: self._see_token(token))
        finally:
            if self._group.me == 0:
                (self.directory / token).unlink(missing_ok=True)
        self._there = set(folders_in(self.directory))
        self._newest, self._is_tidy, self._took_steps = max(self._there, default=-1), False, False

    def _leave_token(self) -> str:
        name = f"{TOKEN}{secrets.token_hex(8)}"
        try:
            self.directory.mkdir(self.mode, parents=True, exist_ok=True)
            (self.directory / name).touch()
            others = foreign(self.directory)
        except OSError as error:
            raise CheckpointError(f"shardc.checkpoints: {self.directory} cannot be written: {error}") from error
        if others:
            (self.directory / name).unlink()
            raise CheckpointError(
                f"shardc.checkpoints: {self.directory} has folders named like steps that are no checkpoints of shardc: "
                f"{', '.join(others)}. Give a directory of its own."
            )
        return name

    def _see_token(self, token: str) -> None:
        if not appears(self.directory / token):
            raise CheckpointError(
                f"shardc.checkpoints: {self.directory} is not the directory that process 0 has. It has to be on a file "
                "system that all hosts share."
            )

    def _wait_for_writers(self) -> None:
        writer = self._open_writer()
        writer.wait()
        self._group.together(self._name("written"), writer.check)
        self._took_steps = False

    def _find(self, damaged: Mapping[int, str]) -> int | None:
        """The step of the newest complete checkpoint. Process 0 reads the directory, and sends it to the others."""
        said = json.loads(self._group.from_first(self._name("look"), lambda: self._look(damaged)))
        self.note = said["note"]
        if self.note and self._group.me == 0:
            _log.warning("%s", self.note)
        return said["step"]

    def _restored(self, step: int, like: Any) -> Any:
        """The state of a checkpoint, all files of which are as they were written.

        Raises:
          DamagedError: one is not; in every process.
        """
        group = self._group

        def fitting() -> Checkpoint:
            found = self._read(step)
            check_fits(found, like)
            return found

        found = group.together(self._name("fits"), fitting)
        group.together(self._name("files"), lambda: check_files(found, group.me, group.processes))
        return group.together(self._name("read"), lambda: restore(found, like))

    def _check_alive(self, state: Any) -> None:
        """Raise CheckpointError if the first state was donated: it is needed again if a peer is lost early."""
        gone = [
            path for path, x in named_leaves(state) if isinstance(x, jax.Array) and not is_remote(x) and x.is_deleted()
        ]
        if gone:
            head = (
                f"There is no checkpoint in {self.directory} yet, and these arrays of the first state were donated. "
                "Give a function that makes the state:"
            )
            raise CheckpointError(all_offenders(head, gone))

    def _look(self, damaged: Mapping[int, str]) -> str:
        self._there = set(folders_in(self.directory))
        found, newer = last_complete(self.directory, damaged)
        if found is None and (lost := [c for c in newer if c.step in self._there and c.folder.suffix != PARTIAL]):
            head = f"shardc.checkpoints: no checkpoint in {self.directory} is as it was written:"
            lines = [f"step {c.step}: {c.missing or c.damage}" for c in lost]
            is_path = not isinstance(self.directory, ObjectPath)
            away = (
                f"move the directory away: mv {self.directory} {self.directory}.damaged"
                if is_path
                else "give another URL"
            )
            raise CheckpointError(
                f"{all_offenders(head, lines)}\nGet these files back from a copy. To begin anew at step 0, {away}"
            )
        taken = "none is taken" if found is None else f"that of step {found.step} is taken"
        notes = [f"The checkpoint of step {c.step} is not complete: {c.missing or c.damage}; {taken}." for c in newer]
        if found is not None and self.plan and found.plan and found.plan != self.plan:
            notes.append(f"The checkpoint of step {found.step} was written under plan {found.plan}, not {self.plan}.")
        if found is not None and not all(file.digest for file in found.files.values()):
            notes.append(f"The checkpoint of step {found.step} has no digests: nobody knows if bits of it flipped.")
        return json.dumps({"step": None if found is None else found.step, "note": "\n".join(notes)})

    def _end(self, writer: Writer) -> None:
        """Wait until the last checkpoint is complete in all processes."""
        writer.wait()
        if self._took_steps:
            self._group.together(self._name("end"), writer.check)
            self._took_steps = False
            if self._group.me == 0:
                self._prune()
        writer.check()

    def _read(self, step: int) -> Checkpoint:
        until = monotonic() + APPEARS
        while not (found := read_checkpoint(self.directory / str(step))).is_complete:
            if monotonic() > until:
                raise CheckpointError(f"{found.folder} is not complete: {found.missing or found.damage}")
            sleep(0.1)
        return found

    def _tidy(self) -> None:
        """Before the first step: keep other runs out, and remove what interrupted ones have left."""
        is_first = self._group.me == 0
        self._group.together(self._name("tidy"), lambda: self._own() if is_first else None)
        self._is_tidy = True

    def _own(self) -> None:
        """Make the directory that of this run. Until then others, such as an evaluation, may only read it.

        Raises:
          CheckpointError: another run writes to it, or has written since this one has looked for a checkpoint.
        """
        if not self._lock.is_held:
            self._lock.take(APPEARS)
            if new := sorted(set(folders_in(self.directory)) - self._there):
                self._lock.free()
                raise CheckpointError(
                    f"shardc.checkpoints: another run has written step {', '.join(map(str, new))} to {self.directory} "
                    "since this one has looked for a checkpoint. Start it again, or give it a directory of its own."
                )
        tidy(self.directory, self._newest)

    def _meet(self, writer: Writer, lost: PeerLostError | PipelineError | None) -> None:
        """Meet the other processes; after the loss of a peer, or if one is lost meanwhile, when it is started again.

        Raises:
          PeerLostError: nobody can start it again.
        """
        while True:
            if lost is not None:
                if (peers := _peers()) is None:
                    raise lost
                writer.dismiss(SECONDS)
                peers.rejoin()
                _log.warning("%s\nThe run goes on from the last common checkpoint.", str(lost).partition("\n")[0])
            try:
                self._open()
                return
            except PeerLostError as error:
                lost = error

    # -- writing

    def _write(self, writer: Writer, step: int, state: Any) -> None:
        settle_all()  # no state is written that comes of values in which the processes differ
        group, pairs = self._group, named_leaves(state)
        homes = homes_beside(pairs, group.island)
        owners, owner_of = group.owners_of(self._name(f"save step {step}"), homes)  # all meet before any collective
        if isinstance(self.directory, ObjectPath):  # nobody waits for others: each process says when it is done
            owners += [(p,) for p in range(group.processes) if all(p != each[0] for each in owners)]
        refuse_gone(f"saved.step({step}): arrays that are gone", pairs)
        check_savable(pairs)
        stored = [blocks_of(number, x) for number, (_, x) in enumerate(pairs)]
        folder, parts = partial_folder(self.directory, step), list[OwnersPart]()
        manifests: list[Manifest] = []
        for owner, processes in enumerate(owners):
            if group.me not in processes:
                continue
            own = [[(b, v) for b, v in blocks if owner_of.get(b.name, group.owner) == owner] for blocks in stored]
            arrays = {block.name: encode(value) for blocks in own for block, value in blocks}
            here = frozenset(p - group.island[0] for p in processes) if owner >= group.owners else None
            parts.append(OwnersPart(folder / str(owner), arrays, here))
            if group.me == processes[0]:
                leaves = [described(p, x, [b for b, _ in of]) for (p, x), of in zip(pairs, own, strict=True)]
                versions = VERSION, jax.__version__
                manifests.append(Manifest(step, owner, len(owners), tuple(leaves), {}, self.plan, *versions))
        if manifests:
            try:
                folder.mkdir(self.mode, parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"The checkpoint of step {step} cannot be written: {error}") from error
        writer.start(step, parts, lambda: self._finish(folder, manifests))

    def _finish(self, folder: AnyPath, manifests: Sequence[Manifest]) -> None:
        """Write the manifests, which complete the parts of their owners, and delete checkpoints beyond `keep`. Runs in
        the thread of the writer after the arrays are written."""
        if self._group.me == 0:
            self._lock.check()
        for manifest in manifests:
            own = folder / str(manifest.owner)
            own.mkdir(exist_ok=True)
            write_manifest(replace(manifest, files=files_of(own)), folder)
            commit(folder, manifest.owners)
        if self._group.me == 0:
            self._prune()

    def _prune(self) -> None:
        """Remove what is superfluous, and report the last complete checkpoint. The run does not end if that fails."""
        try:
            prune(self.directory, self.keep)
            for newest in list(folders_in(self.directory))[:1]:
                if self._loop is not None:
                    self._loop.saved(newest)
        except OSError as error:
            _log.warning("an old checkpoint in %s could not be removed: %s", self.directory, error)


def _peers() -> ClusterPeers | None:
    return cluster.current()


def _is_function(x: Any) -> bool:
    """Whether it is a function that makes a state; a module that can be called is a pytree."""
    return callable(x) and jax.tree_util.all_leaves([x])


def described_by(make: Callable[[], Any]) -> Any:
    """The result of `make()` with a ShapeDtypeStruct in place of each jax.Array that it computes, so that nothing is
    allocated. If JAX cannot trace `make`, it is called, and its own result is returned."""
    leaves: list[Any] = []
    found: list[Any] = []

    def traced() -> list[Any]:
        made, structure = jax.tree.flatten(make())
        leaves[:], found[:] = made, [structure]
        return [x for x in made if isinstance(x, compat.Tracer)]

    try:
        described = iter(jax.eval_shape(traced))
    except Exception:  # noqa: BLE001 - what cannot be traced is called, and raises its error if it is at fault itself
        return make()
    whole = [next(described) if isinstance(x, compat.Tracer) else x for x in leaves]
    return jax.tree.unflatten(found[0], whole)


def _state_and_loss(result: Any, before: Any) -> tuple[Any, Any]:
    """The state and the loss that a step gives: a pair whose first is like the state before, or a state alone."""
    is_pair = type(result) is tuple and len(result) == 2
    if is_pair and jax.tree.structure(result[0]) == jax.tree.structure(before):
        return result
    return result, None


def appears(path: AnyPath, seconds: float = APPEARS) -> bool:
    """Whether a file is there, or comes in time: other hosts see it a little later."""
    until = monotonic() + seconds
    while not path.exists():
        if monotonic() > until:
            return False
        sleep(0.05)
    return True
