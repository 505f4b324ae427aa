"""The cost of rollouts outside the engines: `python -m benchmarks.producer`."""
