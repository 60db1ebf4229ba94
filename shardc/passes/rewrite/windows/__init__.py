"""The pass that composes windows."""
