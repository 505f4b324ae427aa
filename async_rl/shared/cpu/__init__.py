"""What a trainer and an embedded engine do alike on a CPU."""
