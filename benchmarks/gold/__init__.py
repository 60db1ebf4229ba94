"""Plans that people wrote by hand, as formulas, beside what the planner and jax.jit make of the same programs."""
