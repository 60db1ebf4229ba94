"""Pipelines: schedules, their checks, credits, memory and simulation, all on tables of numbers. No devices here."""
