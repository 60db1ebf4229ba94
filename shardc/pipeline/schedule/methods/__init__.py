"""Schedules: one file for each method, and the search for better ones."""

from shardc.pipeline.schedule.methods.auto import FoundSchedule, SearchLimits, find_schedule
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.read import make_schedule
from shardc.pipeline.schedule.methods.table import METHODS

__all__ = ["METHODS", "FoundSchedule", "Method", "SearchLimits", "find_schedule", "make_schedule"]
