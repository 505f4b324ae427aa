"""The trainer on one GPU: `python -m benchmarks.gpu`."""
