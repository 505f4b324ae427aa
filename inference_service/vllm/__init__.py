"""Runs vLLM's own server as an instance."""
