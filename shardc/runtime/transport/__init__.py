"""Connections between the processes of a run: sockets, TLS, frames, links. Knows no networks of actors."""
