"""`async-rl doctor`: whether this machine has what a run needs, and the command that mends what is missing."""
