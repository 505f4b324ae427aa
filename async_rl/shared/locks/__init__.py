"""Who may use a run's directory: one trainer at a time, on one host and on several."""
