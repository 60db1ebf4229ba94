"""Dataflows: rounds of functions and host code, run by actors with credits."""
