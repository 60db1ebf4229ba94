"""Where rows go."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from shardc.live import writers
from shardc.live.writers import ProgressLine, TensorBoard

ROW = {
    "step": 20, "elapsed_seconds": 3.0, "loss": 3.20139, "norm": 1.5e-7, "images_per_second": 5300.4,
    "step_seconds": 0.0213, "planned_seconds": 0.0189, "tflops": 312.4, "mfu": 0.412, "memory_bytes": 3 * 2**30,
}  # fmt: skip
LINE = (
    "loss 3.2014 | norm 1.5e-07 | 5,300 images/s | 21.3 ms a step, planned 18.9 ms | 312 TFLOP/s, MFU 41.2% | "
    "memory 3.0 GiB | rank 1 waits 43%"
)


@pytest.fixture
def terminal(monkeypatch):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=240, color_system=None, _environ={})
    monkeypatch.setattr(writers, "Console", lambda: console)
    return out


def test_a_line_of_text(capsys):
    screen = ProgressLine(1000, "images")
    screen.write(ROW, "rank 1 waits 43%")
    screen.close()
    assert capsys.readouterr().out == f"step   20/1000 | {LINE}\n"


@pytest.mark.parametrize("total", [1000, None])
def test_a_terminal_shows_one_line_and_warnings_stay(terminal, total):
    screen = ProgressLine(total, "images")
    screen.write(ROW, "rank 1 waits 43%")
    screen.warn("step 13: loss is nan")
    screen.close()
    text = terminal.getvalue()
    assert LINE in text and "*** step 13: loss is nan ***" in text
    assert ("20/1000" in text, "step 20 |" in text) == (total is not None, total is None)


@pytest.mark.parametrize("total", [1000, None])
def test_a_narrow_terminal_keeps_a_loss_that_is_not_the_first_result(terminal, total):
    writers.Console().width = 24
    screen = ProgressLine(total, "images")
    screen.write({"step": 20, "accuracy": 0.5, "norm": 1.5, "loss": 3.2, "images_per_second": 5300})
    screen.close()
    assert "loss 3.2000" in terminal.getvalue() and "accuracy" not in terminal.getvalue()


@pytest.mark.parametrize("total", [1000, None])
@pytest.mark.parametrize("width", [30, 59, 80, 100, 120])
def test_a_narrow_terminal_drops_parts_from_the_right(terminal, width, total):
    writers.Console().width = width
    screen = ProgressLine(total, "images")
    screen.write(ROW, "rank 1 waits 43%")
    screen.close()
    last = next(line for line in reversed(terminal.getvalue().splitlines()) if "loss" in line)
    assert ("20/1000 " if total else "step 20 |") in last and "loss 3.2014" in last and "…" not in last
    assert ("-:--:--" in last) == (total is not None and width >= 60)
    assert ("norm" in last, "5,300 images/s" in last, "rank" in last) == (width >= 59, width >= 59, False)


def test_a_terminal_is_not_drawn_at_each_fast_step(terminal):
    screen = ProgressLine(None, "images")
    drawn = []
    screen._bar.refresh = lambda: drawn.append(1)
    for i in range(200):
        screen.write({"step": i})
    screen.close()
    assert len(drawn) < 20


def test_events_are_written_as_scalars(monkeypatch):
    said = []
    events = SimpleNamespace(add_scalar=lambda *args: said.append(args), close=lambda: said.append("closed"))
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=lambda folder: events))
    board = TensorBoard("runs/a")
    board.write({"step": 20, "loss": 3.2, "mfu": 0.4})
    board.close()
    assert said == [("loss", 3.2, 20), ("mfu", 0.4, 20), "closed"]


def test_events_are_read_back(tmp_path):
    pytest.importorskip("tensorboardX")
    board = TensorBoard(tmp_path)
    board.write({"step": 20, "loss": 3.2})
    board.close()
    assert b"loss" in next(tmp_path.iterdir()).read_bytes()
