"""The health of a run: figures while it goes on, and what can be read of it when it has ended."""
