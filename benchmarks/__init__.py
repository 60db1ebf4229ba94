"""What is claimed is measured here, side by side with jax.jit in the same run."""
