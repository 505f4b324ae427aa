"""Rollout programs: their processes, sessions, turns and rendering."""
