"""A process of a run: how it runs its script, and what it says of an error."""

import sys
import threading

import pytest

import shardc
from shardc import compat
from shardc.errors import ArgumentError, DisagreementError, PeerLostError, StepFailedError
from shardc.launch.child import cause_of, error_text, report_of, run_script, where_main_is


@pytest.fixture(autouse=True)
def as_python_starts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["child", "3", "script.py"])
    monkeypatch.setattr(sys, "path", ["here", *sys.path])


def raised(error):
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - given back
        return caught


def test_a_script_sees_what_python_gives_it(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("name = 'beside'")
    path = tmp_path / "script.py"
    path.write_text("import sys, beside\nprint(__name__, __file__, sys.argv, sys.path[0], beside.name)")
    run_script([str(path), "--a", "1"])
    assert capsys.readouterr().out == f"__main__ {path} ['{path}', '--a', '1'] {tmp_path} beside\n"


def test_a_module(tmp_path, capsys, monkeypatch):
    (tmp_path / "some_module.py").write_text("import sys\nprint(__name__, sys.argv)")
    monkeypatch.syspath_prepend(tmp_path)
    run_script(["-m", "some_module", "x"])
    assert capsys.readouterr().out == f"__main__ ['{tmp_path}/some_module.py', 'x']\n"


def test_a_traceback_has_the_frames_of_the_script_only(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("def f():\n    1 / 0\nf()")
    with pytest.raises(ZeroDivisionError) as caught:
        run_script([str(path)])
    error = caught.value.with_traceback(caught.tb.tb_next)  # without the frame of this test
    text, code = error_text(error)
    lines = text.splitlines()
    assert (code, lines[0], lines[1]) == (
        1,
        "Traceback (most recent call last):",
        f'  File "{path}", line 3, in <module>',
    )
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_script_that_does_not_compile(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("1 +")
    with pytest.raises(SyntaxError) as caught:
        run_script([str(path)])
    text, _ = error_text(caught.value.with_traceback(caught.tb.tb_next))
    assert text.startswith(f'  File "{path}", line 1\n')


def test_the_users_own_hook_writes_the_error(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: sys.stderr.write(f"hook: {error}\n"))
    assert error_text(raised(ValueError("x"))) == ("hook: x\n", 1)


def test_what_jax_notes_about_its_frames_is_left_out_of_errors_of_shardc():
    with pytest.raises(ArgumentError) as caught:
        shardc.checkpoints(3)  # pyright: ignore[reportArgumentType]
    assert any("removed its internal frames" in note for note in caught.value.__notes__)
    caught.value.add_note("a note of the script")
    text, _ = error_text(raised(caught.value))
    assert text.endswith("give the directory of the checkpoints.\na note of the script\n")
    outer = raised(ValueError("x"))
    outer.add_note(compat.FRAMES_NOTE)  # an error that is not shardc's keeps it: it says how to see the frames
    assert error_text(outer)[0].endswith(f"{compat.FRAMES_NOTE}\n")


def test_exit_codes():
    assert error_text(raised(SystemExit(7))) == ("", 7)
    assert error_text(raised(SystemExit(-1))) == ("", 255)
    assert error_text(raised(SystemExit("no data"))) == ("no data\n", 1)
    assert error_text(raised(KeyboardInterrupt()))[1] == 130


class Disagrees:
    """A cluster that knows of a call that differs."""

    def error_within(self, seconds):
        return DisagreementError("the call differs")


def test_a_collective_that_fails_has_a_cause_in_words():
    found = cause_of(Disagrees(), raised(StepFailedError("Gloo: connection closed by peer")))
    assert str(found) == "the call differs" and "in raised\n    raise error" in error_text(found)[0]
    for error in (ValueError("x"), PeerLostError("lost", 1), SystemExit(3)):
        assert cause_of(Disagrees(), error) is error


def test_an_error_of_another_thread_shows_where_the_script_is():
    found = []
    thread = threading.Thread(target=lambda: found.append(where_main_is()))
    thread.start()
    thread.join()
    lines = error_text(DisagreementError("x").with_traceback(found[0]))[0].splitlines()
    assert any("in test_an_error_of_another_thread_shows_where_the_script_is" in line for line in lines)
    assert lines[-1] == "shardc.errors.DisagreementError: x"


def test_reports():
    def told(error):
        report = report_of(error, "", 1)
        return report["why"], report["follows"], report["final"]

    assert told(ValueError("a\nb")) == ("ValueError: a", False, False)
    assert told(KeyError()) == ("KeyError", False, False)
    assert told(SystemExit(1)) == ("ended with exit code 1", False, True)
    assert told(DisagreementError("x")) == ("DisagreementError: x", False, True)
    assert told(PeerLostError("lost", 1)) == ("PeerLostError: lost", True, False)
    try:
        try:
            raise PeerLostError("lost", 1)
        except PeerLostError as error:
            raise ValueError("a step failed") from error
    except ValueError as error:
        assert told(error) == ("ValueError: a step failed", True, False)
