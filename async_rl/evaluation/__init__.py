"""Evaluates a policy on held-out prompts: during training while the pool is idle, or as a program of its own."""
