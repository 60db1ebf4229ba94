"""shardc on one GPU: one command, `python -m benchmarks.gpu`, and a process of its own for each measurement."""
