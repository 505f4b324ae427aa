"""A run's state on disk: saved, found, checked, loaded."""
