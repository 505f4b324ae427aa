"""What each part of the method gains, one after the other: `python -m benchmarks.system --help`."""
