"""Published training runs beside the plans of the same runs. benchmarks/published.md has the method and the results."""
