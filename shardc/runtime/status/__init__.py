"""The status that a process sends with its signs of life: steps of its training loop, and its waits."""
