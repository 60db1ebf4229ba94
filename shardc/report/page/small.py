"""Small HTML for notebooks. Nothing where jinja2 is not installed: a notebook shows the repr then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardc.pipeline.plan import PlanView
from shardc.report.explain import totals
from shardc.report.page.page import environment, figures_of, warnings_on
from shardc.report.tables import Section


def plan_html(plan: PlanView) -> str | None:
    """A plan in a notebook: its warnings, its figures, and what moves by axis and kind."""
    return _rendered(
        title=f"{plan.program.name} on {plan.mesh}", warnings=warnings_on(plan), figures=figures_of(plan),
        sections=[found for found in (totals(plan),) if found is not None],
        foot='plan.report("plan.html") writes all of it as a page, print(plan.explain()) as text.',
    )  # fmt: skip


def sections_html(sections: Sequence[Section | None]) -> str | None:
    """Sections in a notebook, tables as tables."""
    return _rendered(title="", warnings=(), figures=(), sections=[s for s in sections if s is not None], foot="")


def _rendered(**values: Any) -> str | None:
    try:
        templates = environment()
    except ImportError:
        return None
    return templates.get_template("small.html").render(**values)
