"""Bodies and paths of the HTTP protocols: vLLM's RL protocol, and the fleet endpoint's own routes."""
