"""Generates the groups of a batch while the trainer trains."""
