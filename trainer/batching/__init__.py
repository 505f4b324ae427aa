"""Finished groups -> micro-batches -> windows, on all ranks of a replica."""
