"""Rows that are sorted by group, and exchanged between the devices that hold the groups."""
