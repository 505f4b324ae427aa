"""The training loop of async-rl and all that it needs besides Megatron and an inference engine."""

__version__ = "0.1.0"
