"""The largest costs of a plan in words, each with what would change it."""
