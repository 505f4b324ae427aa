"""Batch in, finished groups out, while the trainer trains."""
