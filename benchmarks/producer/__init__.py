"""What rollouts cost beside the engines: `python -m benchmarks.producer`."""
