"""A config on this machine: planned, started, shown, ended."""
