"""Checkpoints of a run: written beside it, restored onto any mesh, placement and number of stages or processes."""
