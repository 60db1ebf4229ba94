"""Directories in a bucket of an object store, with the part of `pathlib.Path` that checkpoints use; by tensorstore.

A store has objects alone: there are no folders, and nothing can be renamed. So a folder of a directory, such as
`<step>.partial`, is a *link*: an object of that name whose text is the prefix of what the folder contains,
`data/<step>-<random>/`. To rename a folder is to write a link of the new name and to remove the old one. Each object is
written whole or not at all, and links are never in two states: a checkpoint is complete as soon as its link is there.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from shardc.errors import ArgumentError, CheckpointError, did_you_mean

SECONDS: Final = 60.0
"""For one request of a small object: tensorstore repeats it as long as nobody answers."""
DATA: Final = "data/"
"""The prefix of the keys of the contents of all folders."""
_DRIVERS: Final = {"s3": "s3", "gs": "gcs", "memory": "memory"}
"""The drivers of tensorstore by the scheme of a URL. `memory` is that of this process, for tests."""

_CREDENTIALS: Final = (
    " Credentials are looked for where the tools of the store do: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "~/.aws/credentials or the role of the machine; for gs:// GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth "
    "application-default login` or the service account of the machine."
)


def module(name: str) -> Any:
    """A module that comes with orbax.

    Raises:
      CheckpointError: orbax is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f'shardc.checkpoints needs orbax: pip install "shardc[checkpoints]" ({error}).'
        ) from error


@cache
def context() -> Any:
    """The connections and caches that all reading and writing shares."""
    return module("tensorstore").Context()


@dataclass(frozen=True)
class ObjectPath:
    """A directory in a bucket, a folder or file in it, or a file in a folder.

    Attributes:
      url: of the directory; members of tensorstore's driver, as `endpoint`, may follow behind `?`.
      entry: the name in the directory; empty for the directory itself.
      inner: the path in the folder; empty for an entry.
    """

    url: str
    entry: str = ""
    inner: str = ""

    def __truediv__(self, name: str) -> ObjectPath:
        if not self.entry:
            return ObjectPath(self.url, name)
        made = ObjectPath(self.url, self.entry, f"{self.inner}/{name}" if self.inner else name)
        if "contents" in self.__dict__:
            made.__dict__["contents"] = self.contents
        return made

    def __str__(self) -> str:
        base = self.url.partition("?")[0].rstrip("/")
        return "/".join(part for part in (base, self.entry, self.inner) if part)

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        outer, _, _ = self.inner.rpartition("/")
        return ObjectPath(self.url, self.entry if self.inner else "", outer)

    def with_suffix(self, suffix: str) -> ObjectPath:
        return self.parent / f"{self.stem}{suffix}"

    # -- objects

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of tensorstore for the store of all keys below this path."""
        scheme, _, rest = self.url.partition("://")
        place, _, members = rest.partition("?")
        bucket, _, path = place.strip("/").partition("/")
        base = "/".join(p for p in (path, self._key) if p)
        if scheme == "memory":
            return {"driver": scheme, "path": f"{bucket}/{base}/"}
        more = dict(parse_qsl(members))
        return {"driver": _DRIVERS[scheme], "bucket": bucket, "path": f"{base}/" if base else "", **more}

    @cached_property
    def contents(self) -> str:
        """The prefix of what this folder contains.

        Raises:
          FileNotFoundError: there is no such folder.
        """
        text = (ObjectPath(self.url) / self.entry).read_text()
        if not text.startswith(DATA):
            raise FileNotFoundError(f"{self} is no folder of checkpoints")
        return text

    @property
    def _key(self) -> str:
        return f"{self.contents}{self.inner}" if self.inner else self.entry

    @cached_property
    def _store(self) -> Any:
        return _opened(self.url)

    def _read(self) -> Any:
        with _as_os_errors(self):
            return self._store.read(self._key).result(timeout=SECONDS)

    def _keys(self, low: str, high: str) -> list[str]:
        """The keys of the directory from `low` to below `high`, also of a store that does not know ranges."""
        with _as_os_errors(self):
            found = self._store.list(module("tensorstore").KvStore.KeyRange(low, high)).result(timeout=SECONDS)
        return sorted(k for k in map(bytes.decode, found) if low <= k and (not high or k < high))

    def exists(self) -> bool:
        try:
            return self._read().state == "value"
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether it is a folder; what stands in one has none."""
        return not self.inner and self.exists() and self.read_text().startswith(DATA)

    def is_symlink(self) -> bool:
        return False

    def read_text(self, *how: str) -> str:
        del how
        found = self._read()
        if found.state != "value":
            raise FileNotFoundError(f"{self} does not exist")
        return found.value.decode("utf-8", "replace")

    def write_text(self, text: str) -> None:
        """Write an object, whole or not at all."""
        with _as_os_errors(self):
            self._store.write(self._key, text.encode()).result(timeout=SECONDS)

    def touch(self) -> None:
        self.write_text("here")

    def unlink(self, missing_ok: bool = False) -> None:
        del missing_ok
        with _as_os_errors(self):
            self._store.write(self._key, None).result(timeout=SECONDS)

    # -- folders

    def mkdir(self, mode: int = 0, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a folder; of several processes the first makes it. Its own folders need not be made."""
        del mode, parents, exist_ok
        if not self.entry or self.inner:
            return
        found = self._read()
        if found.state != "value":
            text = f"{DATA}{self.stem}-{secrets.token_hex(4)}/"
            with _as_os_errors(self):
                self._store.write(self._key, text, if_equal=found.stamp.generation).result(timeout=SECONDS)

    def iterdir(self) -> Iterator[ObjectPath]:
        """The entries of the directory."""
        keys = [*self._keys("", DATA), *self._keys(f"{DATA[:-1]}0", "")]
        return (self / key for key in keys if "/" not in key)

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """The entries of the directory, or the files of a folder, that have such names."""
        if not self.entry:
            return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))
        start = self.contents
        names = (key.removeprefix(start) for key in self._keys(start, f"{start[:-1]}0"))
        return (self / name for name in names if "/" not in name and fnmatchcase(name, pattern))

    def rename(self, to: ObjectPath) -> None:
        """Rename a folder. Between the two writes it has both names."""
        to.write_text(self.contents)
        self.unlink()

    def rmtree(self) -> None:
        """Remove a folder; if it has another name, this name alone."""
        here = self.contents
        others = [path for path in self.parent.iterdir() if path.entry != self.entry and path.exists()]
        if all(path.read_text() != here for path in others):
            with _as_os_errors(self):
                for gone in [self._store.write(key, None) for key in self._keys(here, f"{here[:-1]}0")]:
                    gone.result(timeout=SECONDS)
        self.unlink()


AnyPath: TypeAlias = Path | ObjectPath
"""A path of the file system, or in a bucket."""


@cache
def _opened(url: str) -> Any:
    return module("tensorstore").KvStore.open(ObjectPath(url).spec, context=context()).result(timeout=SECONDS)


@contextmanager
def _as_os_errors(path: ObjectPath) -> Generator[None]:
    """Raise OSError where tensorstore has another error: the store does not answer, or refuses."""
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{path}: the store has not answered for {SECONDS:g} s.{_CREDENTIALS}") from error
    except (ValueError, RuntimeError, PermissionError) as error:
        refused = any(word in str(error) for word in ("PERMISSION_DENIED", "UNAUTHENTICATED"))
        raise OSError(f"{path}: {error}.{_CREDENTIALS if refused else ''}") from error


def directory_at(directory: str | os.PathLike[str]) -> AnyPath:
    """The directory of a path, or of a URL.

    Raises:
      ArgumentError: it is the URL of no store that is known, or has no bucket.
    """
    text = os.fspath(directory)
    scheme, found, rest = text.partition("://")
    if lost := re.match(r"(s3|gs|file|memory):/[^/]", text):
        raise ArgumentError(f"shardc.checkpoints: {text!r} has lost a slash; give the text {lost[1]}://..., no Path.")
    if not found:
        return Path(text).absolute()
    if scheme == "file" and rest.startswith("/"):
        return Path(rest)
    if scheme not in _DRIVERS:
        known = ["file", *_DRIVERS]
        raise ArgumentError(
            f"shardc.checkpoints: {text!r}: checkpoints are in a path of the file system, or at "
            f"{', '.join(f'{s}://' for s in known)}.{did_you_mean(scheme, known)}"
        )
    try:
        module("tensorstore").KvStore.Spec(ObjectPath(text).spec)
    except ValueError as error:
        raise ArgumentError(f"shardc.checkpoints: {text!r}: {error}; write {scheme}://BUCKET/PATH.") from error
    return ObjectPath(text)
