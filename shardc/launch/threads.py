"""The threads of this process as text: asked for when other processes wait for it in vain."""

from __future__ import annotations

import runpy
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Final

_OF_LAUNCHER: Final = (str(Path(__file__).with_name("child.py")), runpy.__file__, "<frozen runpy>")
_NOT_SHOWN: Final = (*_OF_LAUNCHER, threading.__file__)
_TRANSPORT: Final = str(Path(__file__).parents[1] / "runtime" / "transport")
_DOINGS: Final = {
    "/jax/_src/compiler.py": "is compiling a program",
    "/shardc/checkpoint/": "is at a checkpoint",
    "/shardc/plan/": "is planning",
}
"""What a thread does that has a frame in such a file, below its last line of the user's."""
_LIBRARIES: Final = (*sysconfig.get_paths().values(), str(Path(__file__).parents[1]), "<frozen")


def is_of_launcher(file: str) -> bool:
    """Whether a file is one of those that start a script."""
    return file in _OF_LAUNCHER


def threads_text() -> str:
    """The frames of all threads but this one, the main thread first; threads with equal frames stand together."""
    frames = dict(sys._current_frames())  # pyright: ignore[reportPrivateUsage]
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    names = {t.ident: t.name for t in threading.enumerate()}
    found: dict[str, list[str]] = {}
    for ident, frame in sorted(frames.items(), key=lambda pair: pair[0] != main):
        found.setdefault(_text_of(frame), []).append(names.get(ident, f"thread {ident}"))
    head = _doing(frames[main]) if main in frames else ""
    connections = found.pop("", [])
    parts = [f"{', '.join(who)}, most recent call last:\n{text}" for text, who in found.items()]
    parts += [f"{', '.join(connections)}: at its connections"] * bool(connections)
    return "\n".join([f"its main thread {head}"] * bool(head) + parts)


def _text_of(frame: FrameType) -> str:
    """The frames of a thread; empty for those of connections, which only read and write."""
    stack = [f for f in traceback.extract_stack(frame) if f.filename not in _NOT_SHOWN]
    if stack and stack[0].filename.startswith(_TRANSPORT):
        return ""
    return "".join(traceback.format_list(stack)).rstrip("\n")


def _doing(frame: FrameType | None, doings: Mapping[str, str] = _DOINGS) -> str:
    """What a thread does, by the innermost of its frames that says it; empty if none below the user's does."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        file = frame.f_code.co_filename
        for part, doing in doings.items():
            if part in file:
                return doing
        frame = frame.f_back
    return ""
