"""The bodies and paths of the wire: vLLM's RL protocol, and the fleet endpoint's own routes."""
