"""JAX's own cases, and some of ours in the same form, at random placements against one device."""
