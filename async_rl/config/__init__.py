"""The settings of a run: their sections, keys and file."""
