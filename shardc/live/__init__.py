"""The figures of a training loop while it runs, and where they are shown and written."""
