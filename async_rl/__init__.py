"""The training loop of async-rl and its parts, except those that depend on Megatron or an inference engine."""

__version__ = "0.1.0"
