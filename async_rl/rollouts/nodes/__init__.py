"""A user's nodes of the pipeline, between the reward of a group and its training."""
