"""A run with faults injected into its pool, compared with a run without: `python -m benchmarks.chaos`."""
