"""What the threads of a process do, as text."""

import sys
import threading
from pathlib import Path

import jax

from shardc.launch import threads as threads_module
from shardc.launch.child import run_script
from shardc.launch.threads import threads_text


def shown_from(thread_name="teller"):
    """The text, as another thread makes it while this one waits for it here."""
    found = []
    teller = threading.Thread(target=lambda: found.append(threads_text()), name=thread_name)
    teller.start()
    teller.join()
    return found[0]


def test_the_main_thread_comes_first_and_the_teller_is_not_among_them():
    over = threading.Event()
    others = [threading.Thread(target=over.wait, name=f"sleeper {i}") for i in range(2)]
    for thread in others:
        thread.start()
    try:
        text = shown_from()
    finally:
        over.set()
        for thread in others:
            thread.join()
    first, *_ = text.splitlines()
    assert first == "MainThread, most recent call last:"
    assert "in test_the_main_thread_comes_first_and_the_teller_is_not_among_them\n    text = shown_from()\n" in text
    assert "teller, most" not in text
    assert "sleeper 0" in text and "sleeper 1" in text


def test_a_script_is_shown_without_its_launcher(tmp_path, monkeypatch):
    path, shown = tmp_path / "script.py", []
    path.write_text("import told\ntold()\n")
    monkeypatch.setitem(sys.modules, "told", lambda: shown.append(shown_from()))
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_script([str(path)])
    assert f'File "{path}", line 2, in <module>\n    told()\n' in shown[0]
    assert "run_script(words" not in shown[0] and "_run_code" not in shown[0]


def test_a_thread_of_a_connection_takes_one_line(monkeypatch):
    monkeypatch.setattr(threads_module, "_TRANSPORT", __file__)
    over = threading.Event()
    thread = threading.Thread(target=lambda: over.wait(), name="shardc link 0-1 reads")
    thread.start()
    try:
        assert shown_from().splitlines()[-1] == "shardc link 0-1 reads: at its connections"
    finally:
        over.set()
        thread.join()


def frame_in(*files):
    """A frame in the last one of these files, called from the one before, and so on."""
    inner = sys._getframe
    for file in reversed(files):
        found = {"inner": inner}
        exec(compile("def call():\n    return inner()", file, "exec"), found)
        inner = found["call"]
    return inner()


def test_what_a_thread_does_is_said_by_its_frames_below_the_users():
    library = Path(jax.__file__).parents[1]
    package = Path(threads_module.__file__).parents[1]
    compiler, caller = str(library / "jax/_src/compiler.py"), str(library / "jax/_src/pjit.py")
    saves = str(package / "checkpoint" / "checkpoints.py")
    assert threads_module._doing(frame_in("train.py", caller, compiler)) == "is compiling a program"
    assert threads_module._doing(frame_in("train.py", saves, caller)) == "is at a checkpoint"
    assert threads_module._doing(frame_in("train.py", saves, "train.py", threading.__file__)) == ""
    assert threads_module._doing(frame_in("train.py", caller)) == threads_module._doing(None) == ""


def test_the_files_that_say_what_a_thread_does_are_there():
    package = Path(threads_module.__file__).parents[1]
    for part in threads_module._DOINGS:
        root = Path(jax.__file__).parents[1] if part.startswith("/jax/") else package.parent
        assert (root / part.strip("/")).exists(), part
