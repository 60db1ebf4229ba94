"""`shardc compile`: what a compiled call is, and what is said where its machine cannot be compiled for."""

from shardc import compat
from shardc.__main__ import main
from shardc.machine import ahead
from tests.commands.test_source import MLP, SCRIPTS


def test_it_prints_audit_memory_and_schedule(capsys, tmp_path):
    assert main(["compile", MLP, "--hlo", str(tmp_path / "step.txt")]) == 0
    head, schedule = capsys.readouterr().out.split("\n\n")
    first, audit, memory = head.splitlines()
    assert first == "step compiled for data=4, model=2 on cpu"
    assert audit.strip().startswith("audit: planned = found")
    assert memory.strip().startswith("peak memory of a device: ") and memory.endswith(" compiled")
    title, names, _, *rows = schedule.splitlines()
    assert title == "Collectives as the compiler schedules them, in one call"
    assert names.split() == ["kind", "beside", "executions", "sent", "per", "device", "of", "the", "kind"]
    assert rows and all(row.split()[1] == "nothing" for row in rows)  # XLA:CPU waits for each
    assert "ENTRY" in (tmp_path / "step.txt").read_text()


def test_of_a_pipeline_all_tasks_are_compiled(capsys):
    assert main(["compile", str(SCRIPTS / "pipeline.py")]) == 0
    out = capsys.readouterr().out
    assert "(of the fullest rank; of the compiler its temporary memory in each task)" in out
    assert "in one execution of each task" in out


def test_another_machine_needs_its_plugin(capsys, monkeypatch):
    monkeypatch.setattr(compat, "has_plugin", lambda platform: False)
    ahead._compile_only.cache_clear()
    assert main(["compile", MLP, "--topology", "v5p:2x2x2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].endswith("pip install 'shardc[tpu]'. To plan for it needs no plugin.")


def test_a_flow_is_not_compiled(capsys):
    assert main(["compile", str(SCRIPTS / "flow.py")]) == 2
    assert "shardc compile is for one: name it" in capsys.readouterr().err
