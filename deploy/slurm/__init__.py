"""`async-rl launch slurm`: a run as two Slurm jobs, one that trains and an array of instances."""
