"""The trainer's side of a publish: one weight version to all instances."""
