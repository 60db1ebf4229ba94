"""Every name of a value that a page, a report, a table of memory, a warning or an error prints is known to
`plan.explain(why=)`."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import shardc
from benchmarks.record import schedules, zoo
from shardc import S
from shardc.dataflow.chart import flow_chart
from shardc.dataflow.page import flow_page
from shardc.dataflow.plan import functions_of
from shardc.pipeline.rank_memory import too_large
from shardc.plan.borders import problem_of
from shardc.report.find_values import find_values, values_of
from shardc.report.page.page import page_of
from tests.dataflow.test_plan import STATE, flow_of
from tests.report import pipelines
from tests.report.page import plans

LINE = re.compile(r"[^\s,]+\.py:\d+ \([^()]*\)")
COLUMNS = "path", "made by", "what lives there"
"""Of the tables of explain(), those with names."""
MOVED = re.compile(
    r"(?:a copy of )?(?:what )?(.*?)(?: makes is| leaves it| is) at .*; (?:it leaves .*|(\S+) reads it) at .*"
)
"""Why something moves, as the page says it."""

LAST = {name.split("/")[0]: (name, make) for name, make in zoo()}
ZOO = dict([*LAST.values(), *((name, make) for name, make in zoo() if name.startswith("moe/expert"))])
PROGRAMS = ZOO | {"host memory": plans.offloaded, "loops": plans.with_loops, "names": plans.spmd}
PIPELINES = dict([*list(schedules())[1::8], ("four ranks", plans.pipeline)])


def two_plans():
    twice = shardc.function(lambda x: (x * 2).sum(0), mesh=shardc.make_mesh(topology="v5p", data=4))
    return shardc.flow(lambda s: (s, (twice(s[0]), twice(s[1])))).plan((plans.f32(8, 4), plans.f32(4, 8)))


def pipeline_in_a_flow():
    mesh = shardc.make_mesh(topology="v5p:4x2x2", pipe=4, data=2, model=2)
    step = shardc.function(pipelines.deep_step, mesh=mesh, pipeline=shardc.Pipeline(), donate_argnames="params")
    layers = [{"up": plans.f32(16, 64), "down": plans.f32(64, 16)} for _ in range(4)]
    return shardc.flow(step).plan({"layers": layers}, {"x": plans.f32(96, 16), "y": plans.f32(96, 16)})


FLOWS = {
    "a server": lambda: flow_of().plan(STATE, 0), "a worker": lambda: flow_of(workers=1, delay=2).plan(STATE, 0),
    "two plans": two_plans, "a pipeline": pipeline_in_a_flow,
}  # fmt: skip


def printed(page):
    """The names on a page, and in the text of `explain()`, which is on it."""
    data = page.data["program"]
    texts = data["texts"]
    paths = [""]
    for name, above in data["nodes"][1:]:
        paths.append(f"{paths[above]}/{texts[name]}".lstrip("/"))
    yield from (paths[line[0]] for line in data["lines"])
    yield from (texts[line[1]] for line in data["lines"])
    for move in data["moves"]:
        if found := MOVED.fullmatch(texts[move[6]]):
            yield from (name for name in found.groups() if name)
    for where in page.data.get("course", {"where": ()})["where"]:
        yield from LINE.findall(where)
        yield LINE.sub("", where).strip()
    for table in (page.data[key] for key in ("course", "ranks") if key in page.data):
        yield from (row[0] for row in table.get("filled", {"rows": ()})["rows"] if "more row" not in row[0])
    yield from (row["path"] for arrays in page.data["arrays"] for row in arrays["rows"])
    for section in page.sections:
        for i in (i for i, column in enumerate(section.columns) if column in COLUMNS):
            for row in section.rows:
                yield from row[i].split(", ") if LINE.search(row[i]) else [row[i]]
    for text in (*page.warnings, *page.notes):
        yield from re.findall(rf"\S+ at (?:{LINE.pattern})", text)


def unknown(parts, names):
    """The names that `explain(why=)` of a plan with these parts does not know."""
    values = [v for _, p in parts for v in values_of(p.program, problem_of(p.request, p.ties), p.all_on_device)]
    texts = {text for v in values for text in (*v.name.spellings, str(v.name), v.name.line)} | {"", "a constant"}
    return [name for name in dict.fromkeys(names) if name not in texts and not _is_found(values, name)]


def _is_found(values, name):
    try:
        return find_values(values, name) != []
    except shardc.ArgumentError:
        return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_programs(name):
    plan = PROGRAMS[name]()
    names = set(printed(page_of(plan)))
    assert len(names) > 10 and unknown(plan.parts, names) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PIPELINES)
def test_of_pipelines_and_of_the_error_of_one_that_does_not_fit(name):
    plan = PIPELINES[name]()
    names = {re.sub(r"^stage \d+/?", "", name) for name in printed(page_of(plan))}
    full = replace(plan.memory, ranks=[replace(rank, capacity=1) for rank in plan.memory.ranks])
    held = re.findall(
        rf"iB  \w+: (.*) \w+\[.*?\].*? \(stage \d+\)(?:, made at ({LINE.pattern}))?$", too_large(full), re.M
    )
    assert len(held) >= len(full.ranks) and len(names) > 10
    assert unknown(plan.parts, names.union(*held)) == []


@pytest.mark.parametrize("name", FLOWS)
def test_of_flows(name):
    plan = FLOWS[name]()
    page = flow_page(plan, flow_chart(plan, 2))
    page = replace(page, sections=(), warnings=(), data={**page.data, "arrays": ()})  # of nodes
    above = "|".join(re.escape(function) for function, *_ in functions_of(plan))
    names = {re.sub(rf"^(?:{above})(?:/|$)(?:stage \d+/?)?", "", name) for name in printed(page)}
    parts = [part for _, work, _ in functions_of(plan) for part in work.plan.parts]
    assert len(names) > 1 and unknown(parts, names) == []


def test_a_flow_explains_a_value_of_its_functions():
    plan = FLOWS["a pipeline"]()
    assert plan.explain(why="result 1").splitlines()[0].startswith("deep_step, Stage 3: time and bytes")
    text = FLOWS["a worker"]().explain(why="tanh")
    assert text.startswith("grad: one call\n\ngrad/tanh: f32[64,8] at ")
    with pytest.raises(shardc.ArgumentError, match="no value of the plan has that name"):
        plan.explain(why="nothing")


def test_of_a_program_that_does_not_fit():
    def layer(w, x):
        return jnp.einsum("bi,io->bo", x, w)

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(layer(w, x))
        return (x**2).mean()

    mesh = shardc.make_mesh(topology="v5p", data=4, hbm="1MB")
    step = shardc.function(jax.grad(loss), mesh=mesh, in_placements={"x": {"data": S(0)}})
    with pytest.raises(shardc.MemoryLimitError) as raised:
        step.plan([plans.f32(512, 512)] * 3, plans.f32(256, 512))
    held = re.findall(r"iB  (.*): \w+\[.*?\] at [^,]*(?:, made at (.*))?$", str(raised.value), re.M)
    assert ("loss/tanh  x2", "") not in held and len(held) > 4
    plan = raised.value.plan
    assert unknown(plan.parts, {*printed(page_of(plan))}.union(*held)) == []
    known = [v for _, p in plan.parts for v in values_of(p.program, problem_of(p.request, p.ties), p.boxed)]
    assert {str(v.name) for v in find_values(known, "bi,io->bo/dot_general")} == {"layer/dot_general"}
