"""A line on the terminal while a plan is made or a program compiled, if that takes long."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Final, TextIO

AFTER: Final = 2.0
"""Seconds after which the line is shown."""
_LINE: Final = "\r\033[K"
"""To the begin of the line, which is cleared."""
_shown = Lock()


@contextmanager
def line_if_long(what: str) -> Generator[None]:
    """Show `what` and its seconds on the terminal from `AFTER` seconds on; the line is cleared at the end.

    There is one line: what is done inside another one's context, or beside it in another thread, shows none. An empty
    `what` shows none either, for work that has a progress bar.
    """
    if sys.stderr is None or not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield
        return
    ended = Event()
    thread = Thread(target=_show, args=(what, ended, sys.stderr), name="shardc at work", daemon=True)
    try:
        if what:
            thread.start()
        yield
    finally:
        ended.set()
        if what:
            thread.join()
        _shown.release()


def _show(what: str, ended: Event, terminal: TextIO) -> None:
    begin, wait = perf_counter(), AFTER
    while not ended.wait(wait):
        text = f"shardc: {what}, {perf_counter() - begin:.0f} s"
        terminal.write(_LINE + text[: shutil.get_terminal_size().columns - 1])
        terminal.flush()
        wait = 1.0
    if wait != AFTER:
        terminal.write(_LINE)
        terminal.flush()
