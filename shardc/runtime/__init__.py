"""What runs: arrays on a mesh. Knows tasks and arrays, no jaxprs."""
