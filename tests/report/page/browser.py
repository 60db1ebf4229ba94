"""Chromium without a window, spoken to over its debugging pipe: a page as it is written, and a script in it."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SECONDS = 120
WORDS = """
const soon = () => new Promise(resolve => setTimeout(resolve, 20));
const wait = async of => { for (let i = 0; i < 2000 && !of(); i++) await soon(); };
const $ = of => document.querySelector(of), all = of => [...document.querySelectorAll(of)];
const type = (input, text) => { input.value = text; input.dispatchEvent(new Event("input")); };
const found = {};
"""
ERRORS = "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"


def browse(page: Path, script: str, width: int = 1280) -> dict[str, Any]:
    """Opens a page, tall enough to be seen whole, and runs a script in it. Gives what that puts into `found`.

    The browser may have nothing to say of the page: no exception, no line on its console, nothing refused.
    """
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    ours, theirs = os.pipe(), os.pipe()
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
        f"--user-data-dir={page.parent / 'profile'}",
    ]  # fmt: skip
    redirected = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
    process = subprocess.Popen(
        ["bash", "-c", redirected, "bash", *command], pass_fds=(ours[0], theirs[1]), stderr=subprocess.DEVNULL
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        talk = _Talk(ours[1], theirs[0])
        target = talk.ask("Target.createTarget", url="about:blank")
        talk.session = talk.ask("Target.attachToTarget", flatten=True, **target)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            talk.ask(f"{domain}.enable")
        size = {"width": width, "height": 6000, "deviceScaleFactor": 1, "mobile": False}
        talk.ask("Emulation.setDeviceMetricsOverride", **size)
        talk.ask("Page.navigate", url=page.as_uri())
        talk.until(lambda m: m.get("method") == "Page.loadEventFired")
        code = f"(async () => {{ {WORDS} {script}; return found; }})()"
        done = talk.ask("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        assert talk.errors == []
        return done["result"]["value"]
    finally:
        process.kill()
        process.wait()
        os.close(ours[1])
        os.close(theirs[0])


class _Talk:
    """Questions and answers: JSON, each ended by a zero byte."""

    def __init__(self, out: int, into: int) -> None:
        self.out, self.into, self.rest, self.count = out, into, b"", 0
        self.session, self.errors = "", []
        self.end = time.monotonic() + SECONDS

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        number = self.count
        question = {"id": number, "method": method, "params": params}
        os.write(
            self.out, json.dumps(question | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        answer = self.until(lambda m: m.get("id") == number)
        assert "error" not in answer, answer
        return answer["result"]

    def until(self, wanted: Any) -> dict[str, Any]:
        """The first message that is wanted; keeps errors on the way."""
        while True:
            while b"\0" not in self.rest:
                ready, _, _ = select.select([self.into], [], [], max(0.0, self.end - time.monotonic()))
                more = os.read(self.into, 1 << 16) if ready else b""
                assert more, "the browser is silent"
                self.rest += more
            line, _, self.rest = self.rest.partition(b"\0")
            message = json.loads(line)
            if message.get("method") in ERRORS:
                self.errors.append(message["params"])
            if wanted(message):
                return message
