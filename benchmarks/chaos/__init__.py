"""A run whose inference pool goes to pieces, against one on sound instances: `python -m benchmarks.chaos`."""
