"""Hugging Face checkpoints and names, read and written."""
