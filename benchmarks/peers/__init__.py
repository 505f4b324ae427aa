"""The same GRPO work with async-rl and with TRL's GRPOTrainer, in turn: `python -m benchmarks.peers --help`."""
