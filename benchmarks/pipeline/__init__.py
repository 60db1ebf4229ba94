"""Pipelines measured: beside their peers in one run, against the simulator, and by what an action costs."""
