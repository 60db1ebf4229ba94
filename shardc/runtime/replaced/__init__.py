"""Processes that are replaced while the others go on: what these keep, and how a new one joins them."""
