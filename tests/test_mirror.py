"""Tests mirror the sources: a file has a test file of its name, or a line here says which tests cover it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import shardc

SOURCES = Path(shardc.__file__).parent
TESTS = Path(__file__).parent
COVERED: Final[Mapping[str, str]] = {
    # faces: tested as a user calls them
    "__main__.py": "test_command_line.py",
    "api.py": "whole/test_function.py",
    "calls/*.py": "whole/test_function.py",
    "commands/autopsy.py": "launch/health/test_autopsy.py",
    "commands/lists.py": "test_command_line.py",
    "commands/machine.py": "tuning/test_calibrate.py",
    "commands/run.py": "launch/test_options.py",
    "commands/schedule.py": "test_command_line.py",
    "commands/tune.py": "commands/test_plans.py",
    "commands/values.py": "test_command_line.py",
    "compiled.py": "whole/test_function.py",
    "plans.py": "report/test_explain.py",
    # what runs on devices: tested by the numbers of one device
    "dataflow/results.py": "dataflow/test_run.py",
    "execute/agreement.py": "processes/test_agreements.py",
    "execute/check/report.py": "execute/check/test_check.py",
    "execute/executable.py": "whole/test_function.py",
    "execute/remote_*.py": "processes/test_pipelines.py",
    "execute/in_turn.py": "test_gangs.py",
    "execute/name_nan.py": "whole/test_own_errors.py",
    "execute/process_group.py": "processes/test_agreements.py",
    "execute/recording.py": "processes/test_pipelines.py",
    "passes/lower/lower.py": "whole/test_parity.py",
    "passes/lower/lower_borders.py": "execute/check/test_check.py",
    "runtime/status/arrivals.py": "launch/health/test_stragglers.py",
    "runtime/transport/connection.py": "runtime/transport/test_link.py",
    "runtime/worker.py": "runtime/test_executor.py",
    # data that others make and read
    "ir/box.py": "passes/place/test_insert_boxing.py",
    "ir/collective.py": "passes/estimate/test_plan_cost.py",
    "ir/ranges.py": "passes/rewrite/test_compose_windows.py",
    "passes/rewrite/*factors.py": "passes/rewrite/test_sink_merges.py",
    "passes/rewrite/merge_walk.py": "passes/rewrite/test_sink_merges.py",
    "passes/rewrite/windows/*.py": "passes/rewrite/test_compose_windows.py",
    "report/advice/*.py": "report/advice/test_advice.py",
    "report/page/charts.py": "report/page/test_page.py",
    "report/page/course.py": "report/page/test_equations.py",
    "report/page/modules.py": "report/page/test_equations.py",
    "report/page/places.py": "report/page/test_page.py",
    "dataflow/page.py": "report/page/test_page.py",
    "report/drawn.py": "report/test_picture.py",
    "pipelines.py": "report/test_explain_pipeline.py",
    "pipeline/options.py": "pipeline/test_errors.py",
    "ir/eqns.py": "pipeline/cut/test_cut_stages.py",
    "ir/program.py": "passes/test_passes.py",
    "ir/transfer.py": "pipeline/test_transfers.py",
    "plan/plan.py": "report/test_explain.py",
    "plan/request.py": "whole/test_function.py",
    "pipeline/plan.py": "report/test_explain_pipeline.py",
    "pipeline/rank_memory.py": "pipeline/test_memory.py",
    # parts of one thing, tested together
    "passes/audit/hlo_*.py": "passes/audit/test_hlo.py",
    "passes/place/domain.py": "passes/place/test_optimal.py",
    "passes/place/value_tables.py": "passes/place/test_optimal.py",
    "passes/place/memory_prices.py": "passes/place/test_relink.py",
    "passes/recompute/recompute.py": "passes/recompute/test_recompute_values.py",
    "passes/accumulate/microbatches.py": "passes/accumulate/test_accumulate.py",
    "passes/trace/trace.py": "whole/test_function.py",
    "pipeline/cut/split_tasks.py": "pipeline/test_parity.py",
    "pipeline/make.py": "pipeline/test_fit.py",
    "pipeline/place_stages.py": "pipeline/test_transfers.py",
    "pipeline/cut_search/owners.py": "pipeline/cut_search/test_mark_stages.py",
    "pipeline/cut_search/stage_memory.py": "pipeline/cut_search/test_auto_stages.py",
    "pipeline/schedule/bound.py": "pipeline/schedule/methods/test_auto.py",
    "pipeline/schedule/costs.py": "pipeline/schedule/test_schedule.py",
    "pipeline/schedule/message_lifetimes.py": "pipeline/test_memory.py",
    "pipeline/schedule/methods/*.py": "pipeline/schedule/methods/test_methods.py",
    "launch/run.py": "launch/test_options.py",
    "pipeline/schedule/text.py": "pipeline/schedule/test_schedule.py",
    "pipeline/stage_network.py": "pipeline/test_memory.py",
    "pipeline/step_values.py": "pipeline/test_memory.py",
    "plan/borders.py": "whole/test_function.py",
    "plan/verify_signatures.py": "passes/trace/test_find_signatures.py",
    "plan/make.py": "passes/place/test_memory_limit.py",
    "report/find_values.py": "plan/test_counterfactual.py",
    "plan/saved_*.py": "plan/test_replay.py",
    "report/refused/memory_error.py": "passes/place/test_memory_limit.py",
    "report/refused/forbidden_moves.py": "plan/test_forbid.py",
    "report/passes.py": "passes/test_passes.py",
    "sbp/piece.py": "sbp/test_rules.py",
    "sbp/rules/*.py": "sbp/test_rules.py",
    "solver/adjacency.py": "solver/test_repeated_layers.py",
    "solver/assignment_cost.py": "solver/test_moves.py",
    "solver/cost_tables.py": "solver/test_lookup.py",
    "solver/dual.py": "solver/test_kernels.py",
    "solver/eliminate.py": "solver/test_solve.py",
    "solver/graph.py": "solver/test_kernels.py",
    "solver/kernels/*.py": "solver/test_kernels.py",
    "solver/layer_chain.py": "solver/test_repeated_layers.py",
    "solver/reduce.py": "solver/test_minimize.py",
    "solver/search.py": "solver/test_moves.py",
    "tuning/calibration_text.py": "tuning/test_calibrate.py",
    "tuning/choices.py": "tuning/test_tune.py",
    "tuning/tuning.py": "tuning/test_tune.py",
}
"""Source file, or several by a pattern: the test file that covers it best."""


def sources() -> list[str]:
    return [p.relative_to(SOURCES).as_posix() for p in SOURCES.rglob("*.py") if p.name != "__init__.py"]


def own_test(source: str) -> Path:
    path = TESTS / source
    return path.with_name(f"test_{path.name}")


def test_every_source_has_its_test_file_or_a_line():
    without = [s for s in sources() if not own_test(s).exists()]
    assert [s for s in without if not any(fnmatchcase(s, pattern) for pattern in COVERED)] == []


def test_every_line_is_needed_and_names_a_test_file():
    without = [s for s in sources() if not own_test(s).exists()]
    assert [p for p in COVERED if not any(fnmatchcase(s, p) for s in without)] == []
    assert [t for t in COVERED.values() if not (TESTS / t).exists()] == []
