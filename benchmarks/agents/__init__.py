"""The cost of agents at the gateway: `python -m benchmarks.agents`."""
