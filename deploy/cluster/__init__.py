"""What the launchers for clusters share: the plan of a run, its restarts and its status."""
