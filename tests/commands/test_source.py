"""Commands on a script: which call is taken, how the script ends, and what is said where there is no such call."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardc.__main__ import main
from shardc.calls.watch import WATCHERS
from shardc.launch.job import Script

SCRIPTS = Path(__file__).parent / "scripts"
MLP = f"{SCRIPTS / 'mlp.py'}:step"


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([*map(str, words)])
        assert not WATCHERS
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def script(tmp_path):
    def write(*lines):
        path = tmp_path / "script.py"
        path.write_text("import jax.numpy as jnp, shardc\nmesh = shardc.make_mesh(data=8)\n" + "\n".join(lines))
        return path

    return write


def test_the_script_ends_at_the_call(run, tmp_path):
    """Its own handlers do not see an error, its files are closed, what it prints goes to standard error."""
    argv, path = sys.argv, [*sys.path]
    code, out, err = run("plan", MLP, "--", 128, tmp_path / "log")
    assert (code, err) == (0, "a line of the script\n")
    assert out.startswith("step on data=4 x model=2: 8 cpu devices\n")
    assert (tmp_path / "log").read_text() == "closed"
    assert (sys.argv, sys.path) == (argv, path)


@pytest.mark.parametrize(
    ("source", "planned"),
    [
        ("mlp.py", "<lambda> on data=4 x model=2"),
        ("pipeline.py", "scaled on pipe=2 x data=2"),
        ("pipeline.py:Trainer.step", "scaled on pipe=2 x data=2"),
        ("flow.py", "Flow train (flow.py:"),
        ("flow.py:train", "Flow train (flow.py:"),
        ("flow.py:grad", "grad on data=4"),
        ("flow.py:Learner.update", "update on data=4"),
        ("modules.py", "apply on data=4"),
        ("modules.py:step", "step on data=4"),
    ],
)
def test_the_call_that_is_taken(run, source, planned):
    code, out, _ = run("plan", SCRIPTS / source)
    assert (code, out[: len(planned)]) == (0, planned)


@pytest.mark.parametrize(
    "call", ["f(x)", "f.plan(x)", "f.compile(x)", "f.plan(shardc.put(x, mesh, {'data': shardc.S(0)}))"]
)
def test_every_kind_of_call(run, script, call):
    path = script("x = jnp.ones(8)", "f = shardc.function(lambda x: 2 * x, mesh=mesh)", call, "raise ValueError")
    assert run("plan", path)[0] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_in_a_thread_and_a_handler_of_everything(run, script):
    path = script(
        "import threading",
        "f = shardc.function(lambda x: 2 * x, mesh=mesh)",
        "thread = threading.Thread(target=f, args=[jnp.ones(8)])",
        "thread.start()",
        "thread.join()",
        "try:",
        "    f(jnp.ones(8))",
        "except BaseException:",
        "    raise ValueError('a handler of everything')",
    )
    code, out, err = run("plan", path)
    assert (code, out[:9], err) == (0, "<lambda> ", "")


def test_a_module(run, monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    assert run("plan", "-m", "flow:grad")[1].startswith("grad on data=4")


def test_a_module_by_the_console_command():
    """Its own folder stands first in the path, and the working directory nowhere."""
    ask = "import sys; sys.path[0] = '/bin'; sys.path[:] = [p for p in sys.path if p]; sys.argv[0] = 'shardc'; "
    ask += f"sys.path.insert(1, {str(Path(__file__).parents[2])!r}); from shardc.__main__ import main; "
    ask += "sys.exit(main(['plan', '-m', 'flow:grad', '--devices', '4']))"
    done = subprocess.run([sys.executable, "-c", ask], cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:14]) == (0, "grad on data=4"), done.stderr


def test_another_machine(run):
    code, out, _ = run("plan", MLP, "--mesh", "data=64,model=8", "--topology", "v5p:8x8x8")
    assert (code, out[:51]) == (0, "step on data=64 x model=8: 512 v5p devices (8x8x8)\n")
    assert run("plan", MLP, "--topology", "h100")[1].startswith("step on data=4 x model=2: 8 h100 devices\n")
    pipeline = run("plan", SCRIPTS / "pipeline.py", "--mesh", "pipe=2,data=8")
    assert pipeline[1].startswith("scaled on pipe=2 x data=8: 16 cpu devices\n2 stages on 2 ranks; 1f1b")


def test_errors_of_the_plan_are_one_line_whatever_the_script_handles(run, script):
    code, out, err = run("plan", MLP, "--mesh", "rows=4")
    assert (code, out) == (2, "")
    assert "python -m shardc plan: step (mlp.py:" in err and "the mesh has no axis 'data'" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "nowhere.py"], "plan: there is no script nowhere.py."),
        (["plan", "nowhere"], "plan: there is no script nowhere. Or is it a module: -m nowhere?"),
        (["plan", "-m", "nowhere:step"], "plan: No module named nowhere."),
        (["plan", "-m", "train.py:step"], "plan: -m train.py: this is a file, and -m takes the name"),
        (["explain", "nowhere.json"], "explain: there is no script nowhere.json."),
        (["plan", MLP, "--mesh", "data"], "'--mesh': \"data\" is not a mesh; write data=4,model=2 (see"),
        (["plan", MLP, "--mesh", "data=4,data=2"], "'--mesh': \"data=4,data=2\" has axis data twice (see"),
        (["plan", MLP, "--topology", "v9"], "There is no topology 'v9'."),
        (["plan", MLP, "--steps", "3"], "Options of the script stand after -- (see python -m shardc plan --help)"),
        (["plan", f"{SCRIPTS / 'flow.py'}", "--mesh", "data=2"], "flow.py:"),
        (["plan", f"{SCRIPTS / 'flow.py'}:grab"], "flow.py has no grab. Did you mean"),
        (["plan", f"{SCRIPTS / 'layers.py'}"], "layers.py ends without a call of a function of shardc. It has made"),
        (["plan", __file__], "test_source.py ends, and has made no function of shardc."),
    ],
)
def test_one_line_for_what_cannot_be(run, words, says):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("bound", "inner"), ("local", "inner"), ("Trainer.train", "inner"), ("trainer.train", "inner"),
        ("train", "inner"), ("doubled", "<lambda>"), ("part", "summed"), ("summed", "summed"), ("wrapped", "module"),
        ("timed_step", "last"),
    ],
)  # fmt: skip
def test_a_name_that_the_script_has_for_a_function(run, script, name, planned):
    path = script(
        "import functools, shardc.equinox",
        "def inner(x): return 2 * x",
        "def summed(x, n): return x.sum() + n",
        "def module(x): return 2 * x",
        "def last(x): return 3 * x",
        "part = shardc.function(functools.partial(summed, n=1), mesh=mesh)",
        "doubled = shardc.function(lambda x: 2 * x, mesh=mesh)",
        "wrapped = shardc.equinox.function(module, mesh=mesh)",
        "timed_step = shardc.function(last, mesh=mesh)",
        "class Trainer:",
        "    def __init__(self): self.train = shardc.function(inner, mesh=mesh)",
        "    def run(self): self.train(jnp.ones(8))",
        "def timed(timed_step): timed_step(jnp.ones(8))",
        "def main():",
        "    local = shardc.function(inner, mesh=mesh)",
        "    local(jnp.ones(8))",
        "x = jnp.ones(8)",
        "timed(doubled), part(x), wrapped(x), timed(timed_step)",
        "trainer = Trainer()",
        "trainer.run()",
        "main()",
        "bound = shardc.function(inner, mesh=mesh)",
        "bound(x)",
    )
    code, out, err = run("plan", f"{path}:{name}")
    assert (code, out.partition(" on ")[0]) == (0, planned), err


def test_a_name_that_no_function_can_have_is_refused_before_the_script_runs(run, script, tmp_path):
    path = script("print('runs')", "f = shardc.function(lambda x: x, mesh=mesh)", "f(jnp.ones(8))", "# zigzag")
    code, _, err = run("plan", f"{path}:zigzag")
    assert (code, err.splitlines()) == (2, [f"python -m shardc plan: {path} has no zigzag."])
    assert run("plan", f"{path}:jnp")[2].endswith("It has made f, and called f.\n")
    path.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport of_a_user\nof_a_user.fit()")
    (tmp_path / "of_a_user.py").write_text(
        "import jax.numpy as jnp, shardc\n@shardc.function(mesh=shardc.make_mesh(data=8))\n"
        "def step(x): return x\ndef fit(): step(jnp.ones(8))"
    )
    assert run("plan", f"{path}:step")[1].startswith("step on data=8")


def test_functions_that_were_made_and_called_are_named(run):
    _, _, err = run("plan", SCRIPTS / "flow.py:learner")
    assert err.endswith("It has made grad, Learner.update, train, and called train, grad, Learner.update.\n")


def test_a_script_that_fails(run, script):
    path = script("def bad(x):", "    return x.nothing", "bad(mesh)")
    code, out, err = run("plan", path)
    assert (code, out) == (1, "")
    assert [line for line in err.splitlines() if set(line) - set(" ~^")] == [  # releases of Python mark other parts
        "Traceback (most recent call last):",
        f'  File "{path}", line 5, in <module>',
        "    bad(mesh)",
        f'  File "{path}", line 4, in bad',
        "    return x.nothing",
        "AttributeError: 'Mesh' object has no attribute 'nothing'",
    ]
    path.write_text("a b")
    code, out, err = run("plan", path)
    assert (code, out, err.count("Traceback")) == (1, "", 0)
    assert "SyntaxError: invalid syntax" in err


def test_a_script_that_ends_itself(run, script):
    with pytest.raises(SystemExit) as end:
        run("plan", script("raise SystemExit('no data')"))
    assert end.value.code == "no data"


def test_a_script_that_wants_options_says_where_they_stand(script, capsys):
    path = script("import argparse", "p = argparse.ArgumentParser()", "p.add_argument('--steps', required=True)",
                  "p.parse_args()")  # fmt: skip
    with pytest.raises(SystemExit):
        main(["plan", str(path)])
    assert capsys.readouterr().err.endswith(f"\nOptions of the script stand after --: {path} -- --steps 100\n")


def test_a_script_of_jax_alone(run, tmp_path):
    path = tmp_path / "jitonly.py"
    path.write_text("import jax\ndef f(x): return x\nstep = jax.jit(f)\nstep(1.0)\n")
    ends = f"python -m shardc plan: {path} ends, and has made no function of shardc."
    jit = " step is a jax.jit; shardc.function takes its place."
    assert run("plan", f"{path}:step")[2] == f"{ends}{jit}\n" == run("plan", path)[2]
    assert run("plan", f"{path}:f")[2] == f"{ends}\n"


def test_a_jit_beside_functions_of_shardc(run, script):
    path = script("import jax", "f = shardc.function(lambda x: x, mesh=mesh)", "step = jax.jit(lambda x: x)", "f(1.0)")
    assert run("plan", f"{path}:step")[2].endswith("called f. step is a jax.jit; shardc.function takes its place.\n")


def test_a_mesh_of_fewer_devices_than_the_machine_has(run):
    code, out, err = run("plan", MLP, "--mesh", "data=5", "--topology", "v5p:2x2x2")
    assert (code, out[:36]) == (0, "step on data=5: 5 v5p devices (2x2x2")
    assert err.endswith("\nThe mesh has 5 of the 8 devices of v5p:2x2x2.\n")
    assert "The mesh has" not in run("plan", MLP, "--mesh", "data=8", "--topology", "v5p:2x2x2")[2]
    assert "The mesh has" not in run("plan", MLP, "--mesh", "data=8")[2]


def test_an_error_of_a_script_has_no_line_about_frames_of_jax(run, script):
    path = script("def bad(x): return x.nothing", "shardc.function(bad, mesh=mesh)(1.0)")
    code, _, err = run("plan", path)
    assert code == 1 and "JAX has removed" not in err and err.splitlines()[-1].startswith("AttributeError: ")
    err = run("plan", script("try: shardc.make_mesh(data=64)", "except Exception as e: raise ValueError('no') from e"))[
        2
    ]
    assert "MeshError" in err and "ValueError: no" in err and "JAX has removed" not in err


def test_too_few_devices(run, script, monkeypatch):
    path = script("shardc.make_mesh(data=64)")
    code, _, err = run("plan", path)
    assert code == 1 and err.endswith("\nTo look at the plan, fake CPU devices do: --devices 64.\n")
    err = run("plan", path, "--topology", "v5p:2x2x2")[2]
    assert err.endswith("\nThe script makes its own mesh first; fake CPU devices do: --devices 64.\n")
    monkeypatch.setattr(Script, "environment", lambda self: {})
    assert run("plan", path, "--devices", 8)[2].endswith("fake CPU devices do: --devices 64.\n")
    assert run("tune", path, "--devices", 7)[2].endswith(
        "\nTo look at the plan, fake CPU devices do: --devices 64. To choose a mesh of 7, add --topology cpu:7.\n"
    )
    assert run("tune", path)[2].endswith("fake CPU devices do: --devices 64.\n")
    path.write_text("import shardc\nshardc.make_mesh(data=-1, model=5)")
    assert run("plan", path)[2].endswith("\nTo look at the plan, fake CPU devices do: --devices N.\n")


def test_a_process_of_its_own_with_fake_devices(tmp_path):
    """`--devices` gives a script more devices than this process has; a reader that ends early sees no traceback."""
    ask = [sys.executable, "-m", "shardc", "plan", MLP, "--devices", "16", "--json", "--save", tmp_path / "p.json"]
    done = subprocess.run(ask, capture_output=True, text=True, check=True)
    assert done.stderr == "a line of the script\n"
    assert done.stdout.startswith('{"function": "step", "mesh": {"data": 4, "model": 2}, "topology": "cpu"')
    assert (tmp_path / "p.json").exists()
