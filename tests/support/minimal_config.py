"""A config with the keys that have no default, and no other keys."""

MINIMAL = """
[run]
dir = "runs/x"
[model]
path = "some/model"
[prompts]
source = "rows.jsonl"
prompts_per_batch = 4
[reward]
name = "math"
[train]
iterations = 3
"""
