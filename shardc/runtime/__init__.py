"""Actors, channels and the threads that run them. Knows no jaxprs: only steps, tasks and values."""
