"""Rows of a data set -> batch(iteration)."""
