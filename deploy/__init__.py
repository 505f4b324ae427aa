"""From one config to running processes: what to start, with which arguments, on which cores."""
