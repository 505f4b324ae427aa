"""The trainer's end of a publish: one weight version to all instances."""
