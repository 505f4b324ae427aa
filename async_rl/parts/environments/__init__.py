"""Clients of other projects' environments, for rollout programs."""
