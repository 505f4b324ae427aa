"""The group of one prompt: sampled, scored, finished."""
