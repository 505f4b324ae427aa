"""The settings of a run: their sections, their keys, their file."""
