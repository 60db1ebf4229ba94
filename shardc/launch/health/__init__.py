"""What the launcher knows of a run while it goes on, and what can be read of it when it has ended."""
