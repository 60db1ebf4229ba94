"""Schedules: one file for each method, and the search for better ones."""

from shardc.pipeline.schedules.auto import Found, find_schedule
from shardc.pipeline.schedules.make import make_schedule
from shardc.pipeline.schedules.method import Method
from shardc.pipeline.schedules.table import METHODS

__all__ = ["METHODS", "Found", "Method", "find_schedule", "make_schedule"]
