"""Scripts that make parts of the repository's own files."""
