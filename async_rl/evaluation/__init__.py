"""How well a policy does on held-out prompts: beside training while the pool is idle, or as a program of its own."""
