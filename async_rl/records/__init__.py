"""The records that a run writes, and their files."""
